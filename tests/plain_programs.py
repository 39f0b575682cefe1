"""Programs of torch and PEFT without a managed model, each of which says what came out: the same before and after a
process has wrapped one. ``python -m tests.plain_programs fresh|wrapped NAME ...`` prints a line for each; the program
hunt runs those of :data:`BESIDE` in the middle of managed training, and compares with :func:`before`.
"""

import copy
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, stateless

PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def trained(model: nn.Module, x: torch.Tensor, kind: Any = torch.optim.SGD, **hypers: Any) -> Iterator[Any]:
    """What three steps leave: the loss of each, and all weights."""
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **hypers)
    for _ in range(3):
        optimizer.zero_grad()

        def closure() -> torch.Tensor:
            out = model(x)
            loss = (out[0] if isinstance(out, tuple) else out).float().square().mean()
            loss.backward()
            return loss

        yield optimizer.step(closure)
    yield from model.parameters()


@program
def parametrized() -> Any:
    for around in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        model = around(nn.Linear(4, 4))
        yield from trained(model, torch.ones(2, 4))
        parametrize.remove_parametrizations(model, "weight")
        yield from model.parameters()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from trained(torch.nn.utils.spectral_norm(nn.Linear(4, 4)), torch.ones(2, 4))


@program
def attention() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    yield from trained(layer, torch.ones(2, 3, 8))
    with torch.no_grad():
        yield layer.eval()(torch.ones(2, 3, 8))  # torch's own fused path
        mha = nn.MultiheadAttention(8, 2)
        yield mha(*[torch.ones(2, 3, 8)] * 3)[0]


@program
def copies() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    yield from trained(copy.deepcopy(model), torch.randn(4, 4))
    yield from pickle.loads(pickle.dumps(model)).parameters()
    for how in ({}, {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)}):
        average = torch.optim.swa_utils.AveragedModel(model, **how)
        for _ in range(2):
            yield from trained(model, torch.randn(4, 4))
            average.update_parameters(model)
        yield from average.parameters()
    yield from copy.deepcopy(list(model.parameters()))
    again = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file), assign=True)
    yield from again.share_memory().parameters()


@program
def optimizers() -> Any:
    for name in "SGD Adam AdamW Adagrad RMSprop LBFGS Adafactor NAdam".split():
        yield from trained(nn.Linear(4, 4), torch.ones(2, 4), getattr(torch.optim, name))
    for how in ("foreach", "fused"):
        yield from trained(nn.Linear(4, 4), torch.ones(2, 4), torch.optim.AdamW, **{how: True})


@program
def content() -> Any:
    """``param.data`` in all its uses."""
    param = nn.Parameter(torch.arange(6.0).view(2, 3))
    data, version = param.data, param._version
    data.mul_(2)
    yield param
    yield param._version == version, data.data_ptr() == param.data_ptr(), type(data).__name__, data.requires_grad
    param.data = torch.ones(3)
    yield param
    param.data[0] = 5
    with torch.no_grad():
        param.lerp_(torch.zeros_like(param), 0.1)
    yield param, param.data.dtype, nn.Parameter(param).data
    model = nn.Linear(2, 2).double().to(torch.bfloat16)
    yield from model.parameters()
    yield nn.Parameter.data.__doc__ == torch.Tensor.data.__doc__, isinstance(vars(param).get("data"), type(None))


@program
def functions() -> Any:
    model = nn.Linear(3, 3)
    params, x = dict(model.named_parameters()), torch.ones(2, 3)

    def loss(params: Any, x: Any) -> Any:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    yield from torch.func.grad(loss)(params, x).values()
    yield from torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x).values()
    yield from torch.func.jacrev(loss)(params, x).values()
    yield torch.func.hessian(lambda w: functional.linear(x, w).square().sum())(params["weight"])
    yield torch.autograd.functional.jacobian(lambda w: functional.linear(x, w), params["weight"])
    with stateless._reparametrize_module(model, {"weight": torch.zeros(3, 3)}):
        yield model(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        try:
            torch.func.grad(loss)(params, x)
        except RuntimeError as e:
            yield str(e)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
        except RuntimeError as e:
            yield str(e)


@program
def utilities() -> Any:
    model = nn.Linear(4, 4)
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
    prune.l1_unstructured(model, "weight", amount=0.5)
    yield from trained(model, torch.ones(2, 4))
    prune.remove(model, "weight")
    model(torch.ones(2, 4)).sum().backward()
    yield torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)
    yield from (p.grad for p in model.parameters())
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    yield from trained(lazy.train(), torch.randn(5, 4)) if lazy(torch.randn(5, 4)) is not None else ()
    yield torch.nn.utils.skip_init(nn.Linear, 2, 2).weight.shape
    other = torch.nn.utils.fuse_linear_bn_eval(nn.Linear(3, 3).eval(), nn.BatchNorm1d(3).eval())
    yield from other.parameters()


@program
def compiled() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.jit.script(model)(x)
        yield torch.jit.trace(model, x)(x)
    yield torch.fx.symbolic_trace(model)(x)
    yield torch.export.export(model, (x,)).module()(x)

    def content_of(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, model[0].weight.data)

    yield torch.compile(content_of, backend="eager", fullgraph=True)(x)
    yield from trained(torch.compile(model, backend="eager", fullgraph=True), x, torch.optim.AdamW)


class _Late(nn.Module):
    """What PEFT does: a child is there before what its methods need."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = self.first

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.inner.weight  # noqa: B018
        return super().named_modules(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Any:
        raise RuntimeError("nobody asked for them")


@dataclass(eq=True)
class _Unhashable(nn.Module):
    size: int

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(self.size))
        self.child = nn.Identity()


@program
def modules() -> Any:
    late = _Late()
    late.__class__.__module__ = "peft.of_ours"
    late.second = nn.Sequential(late.first)
    yield list(late._modules)
    yield _Unhashable(3).weight
    kept: list[Any] = []
    thread = threading.Thread(target=lambda: kept.extend(nn.Linear(2, 2).state_dict()))
    thread.start()
    thread.join()
    yield kept
    layers = nn.ModuleDict({"a": nn.ParameterList([torch.ones(2)]), "b": nn.Module()})
    layers["b"].register_module("none", None)
    layers["b"].register_parameter("no_param", None)
    layers.add_module("c", layers["a"])
    del layers["c"]
    yield from layers.parameters()
    net = nn.Sequential(nn.Linear(4, 8))
    net[0].weight = nn.Parameter(torch.ones(8, 4))
    net.register_parameter("more", nn.Parameter(torch.ones(2)))
    net.add_module("last", nn.Linear(8, 4, bias=False))
    yield sorted(name for name, _ in net.named_parameters()), net(torch.ones(2, 4))


@program
def adapters() -> Any:
    import peft
    import transformers

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 6)
            self.linear = nn.Linear(6, 6)
            self.conv1d, self.conv2d, self.conv3d = nn.Conv1d(6, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv3d(6, 6, 1)
            self.mha = nn.MultiheadAttention(6, 2)
            self.of_gpt2 = transformers.pytorch_utils.Conv1D(6, 6)
            self.head = nn.Linear(6, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.linear(self.embedding(ids)).transpose(1, 2)
            x = self.conv1d(x).unsqueeze(-1)
            x = self.conv3d(self.conv2d(x).unsqueeze(-1))[..., 0, 0].transpose(1, 2)
            return self.head(self.of_gpt2(self.mha(x, x, x)[0]))

    ids = torch.arange(6).view(2, 3)
    layers = ["embedding", "linear", "conv1d", "conv2d", "conv3d", "mha", "of_gpt2"]
    for config in (
        *(peft.LoraConfig(target_modules=[layer], init_lora_weights=False) for layer in layers),
        peft.LoraConfig(target_modules=layers, modules_to_save=["head"]),
        peft.LoraConfig(target_modules=["linear", "conv2d", "embedding"], use_dora=True),
        peft.LoHaConfig(target_modules=["linear", "conv2d"]),
        peft.LoKrConfig(target_modules=["linear", "conv2d"]),
        peft.IA3Config(target_modules=["linear", "conv2d"], feedforward_modules=[]),
        peft.OFTConfig(target_modules=["linear"], oft_block_size=3),
        peft.BOFTConfig(target_modules=["linear"], boft_block_size=3),
        peft.VeraConfig(target_modules=["linear"]),
        peft.LNTuningConfig(target_modules=["linear"]),
    ):
        model: Any = peft.get_peft_model(Net(), config)
        yield from trained(model, ids, torch.optim.AdamW)
        with model.disable_adapter():
            yield model(ids)
        if "conv3d" not in config.target_modules and not isinstance(config, peft.LNTuningConfig):  # PEFT merges none
            model.merge_adapter()
            yield model(ids)
            with model.disable_adapter():
                yield model(ids)
            yield from model.merge_and_unload().parameters()


@program
def other_adapters() -> Any:
    import peft

    for config in (
        peft.IA3Config(target_modules=["0"], feedforward_modules=[], init_ia3_weights=False),
        peft.OFTConfig(target_modules=["0"], oft_block_size=2, coft=True, init_weights=False),
        peft.LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False),
        peft.LoHaConfig(r=2, target_modules=["0"], init_weights=False),
    ):
        model: Any = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
        yield from trained(model, torch.ones(1, 2, 4))
        model.add_adapter("other", config)
        model.set_adapter("other")
        model.delete_adapter("default")


@program
def scaled() -> Any:
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    yield from model.parameters()
    yield scaler.get_scale()


@program
def differentiated() -> Any:
    """Gradients of gradients, hooks, checkpoints, and what is saved elsewhere."""
    model, seen, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), [], torch.ones(2, 4, requires_grad=True)
    grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
    yield grads, torch.autograd.grad(sum(g.sum() for g in grads), list(model.parameters()), allow_unused=True)
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    model.register_full_backward_hook(lambda m, given, gives: seen.append(gives[0]))
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()
    yield seen, x.grad, *(p.grad for p in model.parameters())


@program
def recurrent() -> Any:
    model = nn.GRU(4, 4, batch_first=True)
    yield from trained(model, torch.ones(2, 3, 4))
    model.flatten_parameters()


@program
def scheduled() -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    optimizer.register_step_pre_hook(lambda *_: None)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    yield scheduler.get_last_lr(), *model.parameters()


@program
def of_transformers() -> Any:
    import transformers

    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(6).view(1, 6)
    model.resize_token_embeddings(18, mean_resizing=False)
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    yield model.eval().generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
    yield model.transformer.wte.weight.grad


BESIDE = [name for name in PROGRAMS if name != "compiled"]
"""Those that take no time to speak of."""


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.dtype} {value.detach().double().flatten().tolist()}"
    return ", ".join(map(described, value)) if isinstance(value, (tuple, list)) else str(value)


def run(name: str) -> list[str]:
    """What a program gives now; the random numbers go on as if it had not been called."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        return [described(value) for value in PROGRAMS[name]()]
    finally:
        torch.set_rng_state(state)


before = cache(run)
"""What it gave when it was asked for first, in a process that had managed nothing then."""


def prepare() -> None:
    """Ask for all of them: to be called before anything is managed."""
    for name in BESIDE:
        before(name)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    how, *names = sys.argv[1:]
    kept = wrap_one() if how == "wrapped" else None
    for name in names:
        try:
            print(name, *run(name), sep="; ")
        except Exception as e:
            print(name, type(e).__name__, e, sep="; ")
    del kept


def wrap_one() -> Any:
    """A managed model that has made a step, and lives on."""
    import gemini

    model: Any = gemini.GeminiDDP(nn.Linear(2, 2), gemini.GeminiConfig(device="cpu", precision="fp32"))
    optimizer = gemini.HybridAdam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


if __name__ == "__main__":
    main()
