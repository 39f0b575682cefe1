"""Kinds of blocks that keep something in a way of their own: how params lie in memory, what else is state and how it is
saved, parts that stay in fp32, parametrizations and masks.

The ordinary kinds are in ``program_kinds``, which defines what a kind is.
"""

from tests.hunts.program_parts import Kind
from tests.hunts.program_parts import linear_kind as _linear
from tests.hunts.program_parts import make_kind as _kind
from tests.hunts.program_parts import tanh_kind as _tanh
from tests.hunts.program_parts import weight_kind as _weight


def layout(expression: str) -> Kind:
    """A block with one param of shape (D, D) that lies as ``expression`` does."""
    return _kind(f"self.w = nn.Parameter({expression})", "y = torch.tanh(x @ self.w)", "self.w")


LAYOUTS: dict[str, Kind] = {
    "gapped": layout("(torch.randn(D, 2 * D) / D)[:, ::2]"),
    "rows_of_more": layout("(torch.randn(2 * D, D) / D)[::2]"),
    "columns_of_fused": layout("(torch.randn(D, 3 * D) / D)[:, D : 2 * D]"),
    "transposed": layout("(torch.randn(D, D) / D).t()"),
    "permuted": _kind(
        "self.w = nn.Parameter((torch.randn(2, D, D) / D).permute(2, 0, 1))",
        "y = torch.tanh(x @ self.w[:, 0] + x @ self.w[:, 1])",
        "self.w[:, 0]",
    ),
    "with_offset": layout("(torch.randn(D * D + 3) / D)[3:].view(D, D)"),
    "from_numpy": layout("torch.from_numpy((torch.randn(D, D) / D).numpy())"),
    "zero_dim": _linear("y = torch.tanh(self.fc(x)) * self.gain", init="self.gain = nn.Parameter(torch.tensor(1.5))"),
    "one_element": _linear("y = torch.tanh(self.fc(x)) * self.gain", init="self.gain = nn.Parameter(torch.ones(1, 1))"),
    "channels_last": _kind(
        "self.conv = nn.Conv2d(D, D, 3, padding=1).to(memory_format=torch.channels_last)",
        "y = torch.tanh(self.conv(x.mT.unsqueeze(-1))).squeeze(-1).mT",
        "self.conv.weight[:, :, 1, 1]",
    ),
    "fused_then_cut": _kind(
        """
        fused = torch.randn(2 * D, D) / D
        self.a, self.b = nn.Parameter(fused[:D]), nn.Parameter(fused[D:])
        """,
        "y = torch.tanh(x @ self.a) @ self.b",
        "self.b",
    ),
    "shared_memory": _kind(
        "self.a = nn.Parameter(torch.randn(D, D) / D)\nself.b = nn.Parameter(self.a.detach())",
        "y = torch.tanh(x @ self.a) @ self.b",
        "self.a",
    ),
    "own_kind_of_param": _kind(
        "self.w = Told(torch.randn(D, D) / D)",
        'y = torch.tanh(x @ self.w) * (1.0 if self.w.told == "so" else 0.0)',
        "self.w",
        """
        class Told(nn.Parameter):
            told = "so"
        """,
    ),
    "attributes_of_params": _weight("y = torch.tanh(x @ self.w) * self.w.lr_scale", init="self.w.lr_scale = 0.5"),
    "late_device_move": _tanh("self.fc = nn.Linear(D, D).double().float().requires_grad_(True)"),
    "skip_init": _tanh(
        "self.fc = nn.utils.skip_init(nn.Linear, D, D)\nnn.init.xavier_uniform_(self.fc.weight)\n"
        "nn.init.zeros_(self.fc.bias)"
    ),
}
"""Params that do not lie as torch would lay them, or are more than params."""

RUNNING = """
if self.training:
    self.top = max(self.top, float(x.detach().abs().max()))
y = torch.tanh(self.fc(x / self.top))
"""

KEPT: dict[str, Kind] = {
    "extra_state": _kind(
        "self.fc, self.top = nn.Linear(D, D), 1.0",
        RUNNING,
        "self.fc.weight",
        "",
        """
        def get_extra_state(self):
            return torch.tensor([self.top])

        def set_extra_state(self, state):
            self.top = float(state)
        """,
    ),
    "extra_dict": _kind(
        "self.fc, self.top = nn.Linear(D, D), 1.0",
        RUNNING,
        "self.fc.weight",
        "",
        """
        def get_extra_state(self):
            return {"top": self.top, "why": "a running maximum"}

        def set_extra_state(self, state):
            self.top = state["top"]
        """,
    ),
    "own_saving": _kind(
        "self.fc, self.top = nn.Linear(D, D), 1.0",
        RUNNING,
        "self.fc.weight",
        "",
        """
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "top"] = torch.tensor(self.top)

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.top = float(state_dict.pop(prefix + "top", self.top))
            super()._load_from_state_dict(state_dict, prefix, *args)
        """,
    ),
    "saving_hooks": _kind(
        """
        self.fc, self.top = nn.Linear(D, D), 1.0
        self.register_state_dict_post_hook({Block}.keep)
        self.register_load_state_dict_pre_hook({Block}.take)
        """,
        RUNNING,
        "self.fc.weight",
        "",
        """
        @staticmethod
        def keep(module, state_dict, prefix, local_metadata):
            state_dict[prefix + "top"] = torch.tensor(module.top)

        @staticmethod
        def take(module, state_dict, prefix, *args):
            module.top = float(state_dict.pop(prefix + "top", module.top))
        """,
    ),
    "renamed_on_load": _linear(
        init="self.register_load_state_dict_pre_hook({Block}.rename)",
        methods="""
        @staticmethod
        def rename(module, state_dict, prefix, *args):
            for name in [name for name in state_dict if name.startswith(prefix + "old.")]:
                state_dict[prefix + "fc." + name.removeprefix(prefix + "old.")] = state_dict.pop(name)
        """,
    ),
    "growing_buffer": _linear(
        """
        if self.training:
            self.seen = torch.cat([self.seen, x.detach().float().mean((0, 1))[None]])
        y = torch.tanh(self.fc(x + self.seen.sum(0).to(x.dtype)))
        """,
        init='self.register_buffer("seen", torch.zeros(0, D))',
        methods="""
        def _load_from_state_dict(self, state_dict, prefix, *args):
            if prefix + "seen" in state_dict:
                self.seen = torch.empty_like(state_dict[prefix + "seen"])
            super()._load_from_state_dict(state_dict, prefix, *args)
        """,
    ),
    "late_buffer": _linear(
        """
        if self.mean is None:
            self.mean = torch.zeros(D)
        if self.training:
            self.mean = 0.5 * self.mean + x.detach().float().mean((0, 1))
        y = torch.tanh(self.fc(x - self.mean.to(x.dtype)))
        """,
        init='self.register_buffer("mean", None)',
        methods="""
        def _load_from_state_dict(self, state_dict, prefix, *args):
            if prefix + "mean" in state_dict:
                self.mean = torch.zeros(D)
            super()._load_from_state_dict(state_dict, prefix, *args)
        """,
    ),
    "unsaved_buffer": _linear(
        "y = torch.tanh(self.fc(x * self.scale.to(x.dtype)))",
        init='self.register_buffer("scale", torch.full((D,), 0.5), persistent=False)',
    ),
    "replaced_buffer": _linear(
        """
        y = torch.tanh(self.fc(x + 0.1 * self.last.to(x.dtype)))
        if self.training:
            self.last = y.detach().float().mean((0, 1))
        """,
        init='self.register_buffer("last", torch.zeros(D))',
    ),
    "counting_in_python": _kind(
        "self.fc, self.calls = nn.Linear(D, D), 0",
        "self.calls += self.training\ny = torch.tanh(self.fc(x)) / self.calls if self.calls else self.fc(x)",
        "self.fc.weight",
        "",
        """
        def get_extra_state(self):
            return self.calls

        def set_extra_state(self, state):
            self.calls = state
        """,
    ),
}
"""State beside params and fixed buffers, and how it is saved and loaded."""


def normed(norm: str) -> Kind:
    """A block with a linear layer and a norm of ``torch.nn`` over its features, which are its channels."""
    return _linear("y = torch.tanh(self.norm(self.fc(x).mT).mT)", init=f"self.norm = nn.{norm}")


IN_FP32: dict[str, Kind] = {
    "batch_norm_1d": normed("BatchNorm1d(D)"),
    "batch_norm_2d": _kind(
        "self.conv = nn.Conv2d(D, D, 1)\nself.norm = nn.BatchNorm2d(D, momentum=None)",
        "y = torch.tanh(self.norm(self.conv(x.mT.unsqueeze(-1))).squeeze(-1).mT)",
        "self.conv.weight[:, :, 0, 0]",
    ),
    "batch_norm_frozen": normed("BatchNorm1d(D).requires_grad_(False)"),
    "batch_norm_bare": normed("BatchNorm1d(D, affine=False)"),
    "instance_norm": normed("InstanceNorm1d(D, affine=True, track_running_stats=True)"),
    "group_norm": normed("GroupNorm(2, D)"),
    "head_in_fp32": _linear(
        "y = self.head32(torch.tanh(self.fc(x)).float()).to(x.dtype)", init="self.head32 = nn.Linear(D, D)"
    ),
    "norm_in_fp32": _kind(
        "self.norm32 = nn.LayerNorm(D)\nself.fc = nn.Linear(D, D)",
        "y = torch.tanh(self.fc(self.norm32(x.float()).to(x.dtype)))",
        "self.fc.weight",
    ),
    "gate_in_fp32": _linear(
        "y = (self.fc(x).float() * self.gate32).to(x.dtype)", init="self.gate32 = nn.Parameter(torch.ones(D))"
    ),
}
"""Parts that are computed in fp32 in a model of another precision: what is called ``...32`` the model declares."""

REWRITTEN: dict[str, Kind] = {
    "old_spectral_norm": _tanh("self.fc = nn.utils.spectral_norm(nn.Linear(D, D))", own=""),
    "orthogonal": _kind(
        'self.fc = nn.utils.parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="cayley")',
        "y = torch.tanh(F.linear(x.float(), self.fc.weight.float()).to(x.dtype))",
    ),
    "cached_parametrization": _kind(
        "self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
        "with nn.utils.parametrize.cached():\n    y = torch.tanh(self.fc(torch.tanh(self.fc(x))))",
    ),
    "parametrization_removed": _tanh("""
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        nn.utils.parametrize.remove_parametrizations(self.fc, "weight")
        """),
    "weight_norm_removed": _tanh("self.fc = nn.utils.remove_weight_norm(nn.utils.weight_norm(nn.Linear(D, D)))"),
    "spectral_norm_removed": _tanh("self.fc = nn.utils.remove_spectral_norm(nn.utils.spectral_norm(nn.Linear(D, D)))"),
    "pruned": _tanh('self.fc = nn.Linear(D, D)\nnn.utils.prune.l1_unstructured(self.fc, "weight", amount=0.5)', own=""),
    "pruned_for_good": _linear(
        init="""
        nn.utils.prune.ln_structured(self.fc, "weight", amount=0.5, n=2, dim=0)
        nn.utils.prune.remove(self.fc, "weight")
        """
    ),
    "from_vector": _linear(
        init="""
        vector = nn.utils.parameters_to_vector(self.fc.parameters())
        nn.utils.vector_to_parameters(0.5 * vector, self.fc.parameters())
        """
    ),
    "copied": _kind(
        "self.a = nn.Linear(D, D)\nself.b = copy.deepcopy(self.a)",
        "y = torch.tanh(self.a(x)) + self.b(x)",
        "self.b.weight",
    ),
    "assigned": _linear(init="self.fc.load_state_dict(nn.Linear(D, D).state_dict(), assign=True)"),
    "lazy": _tanh("self.fc = nn.LazyLinear(D)\nself.fc(torch.zeros(1, D))"),
    "scripted_part": _linear("y = self.act(self.fc(x))", init="self.act = torch.jit.script(nn.Hardtanh())"),
}
"""Weights that are computed from others, masked, or written before the model is wrapped."""


MODULES = LAYOUTS | KEPT | IN_FP32 | REWRITTEN
