"""Kinds of blocks of drawn programs: what a block computes, ``y`` from ``x`` (both of shape (B, T, D)), as source text.

A program takes most of its blocks from the ordinary kinds, so that what is odd in it stands alone and can be named.
"""

from tests.hunts.program_modules import MODULES
from tests.hunts.program_parts import OWN, Kind
from tests.hunts.program_parts import linear_kind as _linear
from tests.hunts.program_parts import make_kind as _kind
from tests.hunts.program_parts import tanh_kind as _tanh
from tests.hunts.program_parts import weight_kind as _weight

ORDINARY: dict[str, Kind] = {
    "linear": _linear(),
    "own": _weight("y = torch.tanh(x @ self.w + self.b)", init="self.b = nn.Parameter(torch.zeros(D))"),
    "norm": _kind(
        "self.norm = nn.LayerNorm(D)\nself.fc = nn.Linear(D, D)", "y = self.fc(self.norm(x))", "self.fc.weight"
    ),
    "mlp": _kind(
        "self.up = nn.Linear(D, 2 * D)\nself.down = nn.Linear(2 * D, D)",
        "y = self.down(F.gelu(self.up(x)))",
        "self.up.weight[:D]",
    ),
    "attention": _kind(
        "self.qkv = nn.Linear(D, 3 * D)\nself.out = nn.Linear(D, D)",
        """
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y = self.out(torch.softmax(q @ k.mT / D**0.5, dim=-1) @ v)
        """,
        "self.out.weight",
    ),
}

ODD: dict[str, Kind] = {
    "sdpa": _kind(
        "self.qkv = nn.Linear(D, 3 * D)",
        "q, k, v = self.qkv(x).chunk(3, dim=-1)\ny = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "self.qkv.weight[D : 2 * D]",
    ),
    "mha": _kind(
        "self.mha = nn.MultiheadAttention(D, 2, batch_first=True)",
        "y, _ = self.mha(x, x, x, need_weights=False)",
        "self.mha.out_proj.weight",
    ),
    "encoder": _kind(
        """
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        """,
        "pad = (torch.arange(T) >= T - 1).expand(x.shape[0], T)\ny = self.encoder(x, src_key_padding_mask=pad)",
        "self.encoder.layers[1].linear1.weight[:D]",
    ),
    "conv": _kind("self.conv = nn.Conv1d(D, D, 3, padding=1)", "y = self.conv(x.mT).mT", "self.conv.weight[:, :, 1]"),
    "gru": _kind("self.gru = nn.GRU(D, D, batch_first=True)", "y, _ = self.gru(x)", "self.gru.weight_hh_l0[:D]"),
    "cell": _kind(
        "self.cell = nn.RNNCell(D, D)",
        """
        state = torch.zeros(x.shape[0], D, dtype=x.dtype)
        states = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state)
        y = torch.stack(states, dim=1)
        """,
        "self.cell.weight_hh",
    ),
    "function_saves": _weight(
        "y = torch.tanh(Saves.apply(x, self.w))",
        extra="""
        class Saves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.save_for_backward(x, w)
                return x @ w

            @staticmethod
            def backward(ctx, grad):
                x, w = ctx.saved_tensors
                return grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)
        """,
    ),
    "function_keeps": _weight(
        "y = torch.tanh(Keeps.apply(x, self.w))",
        extra="""
        class Keeps(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.x, ctx.w, ctx.wt = x, w, w.detach().t()
                return x @ w

            @staticmethod
            def backward(ctx, grad):
                return grad @ ctx.wt, ctx.x.flatten(0, -2).t() @ grad.flatten(0, -2) + 0 * ctx.w
        """,
    ),
    "function_frozen": _kind(
        "self.w = nn.Parameter(torch.randn(D, D) / D, requires_grad=False)\nself.g = nn.Parameter(torch.ones(D))",
        "y = torch.tanh(KeepsView.apply(x, self.w)) * self.g",
        "self.w",
        """
        class KeepsView(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                ctx.wt = w.t()
                return x @ w

            @staticmethod
            def backward(ctx, grad):
                return grad @ ctx.wt, None
        """,
    ),
    "weight_norm": _tanh("self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", own=""),
    "old_weight_norm": _tanh("self.fc = torch.nn.utils.weight_norm(nn.Linear(D, D))"),
    "spectral_norm": _tanh("self.fc = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))", own=""),
    "parametrized": _tanh(
        """
        self.fc = nn.Linear(D, D)
        nn.utils.parametrize.register_parametrization(self.fc, "weight", Symmetric())
        """,
        own="",
        extra="""
        class Symmetric(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift = nn.Parameter(torch.zeros(D, D))

            def forward(self, w):
                return w.triu() + w.triu(1).mT + self.shift
        """,
    ),
    "parameter_list": _kind(
        "self.ws = nn.ParameterList([torch.randn(D, D) / D for _ in range(2)])",
        "y = x\nfor w in self.ws:\n    y = torch.tanh(y @ w)",
        "self.ws[0]",
    ),
    "parameter_dict": _kind(
        'self.ws = nn.ParameterDict({"a": torch.randn(D, D) / D, "b": torch.zeros(D)})',
        'y = torch.tanh(x @ self.ws["a"] + self.ws["b"])',
        'self.ws["a"]',
    ),
    "moe": _kind(
        "self.router = nn.Linear(D, 2)\nself.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        """
        p = torch.softmax(self.router(x), dim=-1)
        top = p.argmax(dim=-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            chosen = (top == e).unsqueeze(-1)
            if bool(chosen.any()):
                y = y + torch.where(chosen, expert(x), 0) * p[..., e : e + 1]
        """,
        "self.experts[0].weight",
    ),
    "own_moe": _kind(
        "self.w = nn.Parameter(torch.randn(2, D, D) / D)\nself.route = nn.Parameter(torch.randn(D, 2) / D)",
        """
        p = torch.softmax(x @ self.route, dim=-1)
        y = torch.einsum("btd,edf,bte->btf", x, self.w, p)
        """,
        "self.w[1]",
    ),
    "hyper": _kind(
        "self.make = nn.Linear(D, D * D)\nself.code = nn.Parameter(torch.randn(D))",
        "y = torch.tanh(F.linear(x, self.make(self.code).view(D, D)))",
        "self.make.weight[:D]",
    ),
    "lora": _kind(
        """
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(D, 2) / D)
        self.b = nn.Parameter(torch.randn(2, D) / D)
        """,
        "y = self.base(x) + x @ self.a @ self.b",
        "self.base.weight",
    ),
    "counting": _linear(
        """
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.lerp_(x.float().mean((0, 1)), 0.1)
        y = torch.tanh(self.fc(x - self.mean.to(x.dtype)))
        """,
        init="""
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        """,
    ),
    "positions": _kind("self.pos = nn.Embedding(T, D)", "y = x * self.pos(torch.arange(x.shape[1]))", ""),
    "own_table": _kind(
        "self.table = nn.Parameter(torch.randn(16, D))", "y = x * self.table[torch.arange(x.shape[1]) % 16]", ""
    ),
    "dropout": _linear("y = self.drop(self.fc(x))", init="self.drop = nn.Dropout(0.2)"),
    "drop_weight": _weight("y = x @ F.dropout(self.w, 0.2, self.training)"),
    "in_place": _kind(
        "self.fc = nn.Linear(D, D)\n" + OWN, "y = self.fc(x).mul_(0.5)\ny += x @ self.w\ny.relu_()", "self.w"
    ),
    "views": _kind(
        OWN,
        "a, b = self.w.t().chunk(2, dim=1)\ny = torch.cat([x @ a, x @ b], dim=-1) + self.w.view(-1)[:D]",
        "self.w.t()",
    ),
    "raw_ops": _linear("""
        flat = torch.ops.aten.view(x, [-1, D])
        y = torch.ops.aten.addmm(self.fc.bias, flat, torch.ops.aten.t(self.fc.weight)).view(x.shape)
        """),
    "child_weight": _kind(
        "self.a = nn.Linear(D, D)\nself.b = nn.Linear(D, D)",
        "y = F.linear(torch.tanh(self.a(x)), self.a.weight.t()) + F.linear(x, self.b.weight, self.b.bias)",
        "self.a.weight",
    ),
    "tied": _kind(
        "self.a = nn.Linear(D, D)\nself.b = nn.Linear(D, D)\nself.b.weight = self.a.weight",
        "y = self.b(torch.tanh(self.a(x)))",
        "self.a.weight",
    ),
    "twice": _linear("y = self.fc(torch.tanh(self.fc(x)))"),
    "functional_call": _linear('y = torch.func.functional_call(self.fc, {"weight": self.fc.weight * 2}, (x,))'),
    "vmap": _kind("self.fc = nn.Linear(D, D)", "y = torch.func.vmap(lambda row: torch.tanh(self.fc(row)))(x)", ""),
    "vmap_own": _weight("y = torch.func.vmap(lambda row: torch.tanh(row @ self.w))(x)"),
    "func_grad": _kind(
        "self.energy = nn.Linear(D, 1)", "y = torch.func.grad(lambda z: torch.tanh(self.energy(z)).sum())(x)", ""
    ),
    "jacrev": _weight("j = torch.func.jacrev(lambda z: torch.tanh(z @ self.w))(x[0, 0])\ny = x @ j"),
    "jvp": _weight("y, t = torch.func.jvp(lambda z: torch.tanh(z @ self.w), (x,), (x,))\ny = y + t"),
    "forces": _linear(
        """
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            e = self.energy(torch.tanh(self.fc(z))).sum()
            y = -torch.autograd.grad(e, z, create_graph=self.training)[0]
        """,
        init="self.energy = nn.Linear(D, 1)",
    ),
    "inner_loop": _weight("""
        with torch.enable_grad():
            loss = torch.tanh(x.detach() @ self.w).square().mean()
            y = x @ (self.w - 0.1 * torch.autograd.grad(loss, self.w, create_graph=True)[0])
        """),
    "saves_on_cpu": _kind(
        "self.fc = nn.Linear(D, D)\n" + OWN,
        "with torch.autograd.graph.save_on_cpu():\n    y = torch.tanh(self.fc(x)) @ self.w",
        "self.w",
    ),
    "saved_hooks": _weight("""
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = torch.tanh(x @ self.w)
        """),
    "no_grad_part": _linear(
        "with torch.no_grad():\n    t = self.teacher(x)\ny = torch.tanh(self.fc(x)) + t",
        init="self.teacher = nn.Linear(D, D)",
    ),
    "inference_part": _linear(
        "with torch.inference_mode():\n    t = self.teacher(x)\ny = torch.tanh(self.fc(x)) + t.clone()",
        init="self.teacher = nn.Linear(D, D)",
    ),
    "detached": _kind(
        "self.fc = nn.Linear(D, D)\n" + OWN,
        "y = x + (torch.tanh(self.fc(x)) - x).detach() + x @ self.w.detach()",
        "self.w",
    ),
    "gradient_hook": _weight("y = torch.tanh(x @ self.w)\nif y.requires_grad:\n    y.register_hook(lambda g: g * 0.5)"),
    "hook_reads": _weight("""
        y = torch.tanh(x @ self.w)
        if y.requires_grad:
            y.register_hook(lambda g: g + 0.01 * self.w.detach().sum())
        """),
    "inner_checkpoint": _kind(
        "self.fc = nn.Linear(D, D)\n" + OWN,
        "y = checkpoint(lambda z: torch.tanh(self.fc(z) @ self.w), x, use_reentrant=False)",
        "self.w",
    ),
    "reentrant_checkpoint": _kind(
        "self.fc = nn.Linear(D, D)\n" + OWN,
        "y = checkpoint(lambda z: torch.tanh(self.fc(z) @ self.w), x, use_reentrant=True)",
        "self.w",
    ),
    "nested_checkpoint": _kind(
        "self.a = nn.Linear(D, D)\nself.b = nn.Linear(D, D)",
        """
        def inner(z):
            return torch.tanh(self.b(z))

        def outer(z):
            return checkpoint(inner, torch.tanh(self.a(z)), use_reentrant=False) + F.linear(z, self.b.weight)

        y = checkpoint(outer, x, use_reentrant=False)
        """,
        "self.b.weight",
    ),
    "two_threads": _kind(
        "self.a = nn.Linear(D, D)\nself.b = nn.Linear(D, D)",
        """
        grad = torch.is_grad_enabled()

        def branch(part, z):
            with torch.set_grad_enabled(grad):
                return torch.tanh(part(z))

        # One node gives x its gradient: between two threads autograd has no order to add in. Each branch has a thread
        # of its own, as nodes are numbered by thread: one that ran both, now and then, would change torch's own bits.
        both = torch.stack([x, x]).unbind()
        first, second = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        with first, second:
            a, b = first.submit(branch, self.a, both[0]), second.submit(branch, self.b, both[1])
        y = a.result() + b.result()
        """,
        "self.a.weight",
    ),
    "kept_copy": _weight(
        'if not hasattr(self, "cache"):\n    self.cache = self.w.detach().clone()\ny = x @ self.w + x @ self.cache'
    ),
    "kept_view": _kind(
        OWN, 'if not hasattr(self, "wt"):\n    self.wt = self.w.detach().t()\ny = torch.tanh(x @ self.wt @ self.w)', ""
    ),
    "returns_weight": _kind(
        "self.gain = Gain()\nself.fc = nn.Linear(D, D)",
        "y = torch.tanh(self.fc(x)) * self.gain()",
        "self.fc.weight",
        """
        class Gain(nn.Module):
            def __init__(self):
                super().__init__()
                self.g = nn.Parameter(torch.ones(2, D))

            def forward(self):
                return self.g[0]
        """,
    ),
    "bilinear": _kind("self.bi = nn.Bilinear(D, D, D)", "y = self.bi(x.contiguous(), x.contiguous())", ""),
    "scan": _weight(
        """
        state = torch.zeros(x.shape[0], D, dtype=x.dtype)
        y = torch.empty_like(x)
        for t in range(x.shape[1]):
            state = state * self.decay + x[:, t] @ self.w
            y[:, t] = state
        """,
        init="self.decay = nn.Parameter(torch.rand(D))",
    ),
    "sometimes": _kind(
        "self.a = nn.Linear(D, D)\nself.b = nn.Linear(D, D)",
        "y = torch.tanh(self.a(x)) if float(torch.rand(())) < 0.5 else torch.tanh(self.b(x))",
        "self.a.weight",
    ),
    "unused": _linear("y = self.fc(x)", init="self.idle = nn.Linear(D, D)"),
    "half_frozen": _linear(init="self.fc.weight.requires_grad_(False)"),
    "exotic_write": _weight(
        "if self.training:\n    with torch.no_grad():\n        self.w.clamp_(-1, 1)\ny = torch.tanh(x @ self.w)"
    ),
    "max_norm": _kind("self.pos = nn.Embedding(T, D, max_norm=1.0)", "y = x * self.pos(torch.arange(T))", ""),
    "sparse": _kind("self.pos = nn.Embedding(T, D, sparse=True)", "y = x * self.pos(torch.arange(T))", ""),
    **MODULES,
}

KINDS = ORDINARY | ODD

FROZEN = ("linear", "own", "mlp", "attention", "function_keeps", "views", "conv", "child_weight", "saves_on_cpu")
"""Kinds that a program may freeze as a whole."""
