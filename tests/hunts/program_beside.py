"""Plain torch and PEFT beside a managed model: small functions that no managed model is part of, run again while and
after others are managed in the same process. Nothing that Gemini patches may be seen by them.

What each gives where nothing was ever managed is kept by :func:`before`, which a process calls first.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn


def _net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def _trained(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 8).view(2, 4) if x is None else x
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def trained() -> Any:
    net = _net()
    return _trained(net, torch.optim.AdamW(net.parameters(), lr=0.01))


def clipped() -> Any:
    net = _net()
    net(torch.ones(2, 4)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    nn.utils.clip_grad_value_(net.parameters(), 0.001)
    return [norm, *(p.grad for p in net.parameters())]


def scaled() -> Any:
    net, scaler = _net(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.scale(net(torch.ones(2, 4)).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [*net.parameters(), torch.tensor(scaler.get_scale())]


def data_assigned() -> Any:
    net = _net()
    for p in net.parameters():
        p.data = p.data * 0.5
        p.data.add_(0.1)
        with torch.no_grad():
            p.lerp_(torch.zeros_like(p), 0.1)
    return list(net.parameters())


def replaced() -> Any:
    net = _net()
    net[0].weight = nn.Parameter(torch.ones(8, 4))
    net.register_parameter("more", nn.Parameter(torch.ones(2)))
    net.add_module("last", nn.Linear(4, 4, bias=False))
    nn.utils.parametrizations.weight_norm(net[2])
    nn.utils.prune.l1_unstructured(net[0], "weight", amount=0.5)
    return [sorted(name for name, _ in net.named_parameters()), net(torch.ones(2, 4))]


def copied() -> Any:
    net = _net()
    again = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    file = io.BytesIO()
    torch.save(again.state_dict(), file)
    file.seek(0)
    net.load_state_dict(torch.load(file), assign=True)
    return list(net.parameters())


def functional() -> Any:
    net, x = _net(), torch.ones(2, 4)
    params = dict(net.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(net, values, (x,)).square().mean()

    return [*torch.func.grad(loss)({n: p.detach() for n, p in params.items()}).values(), torch.func.vmap(net)(x)]


def differentiated() -> Any:
    net = _net()
    out = net(torch.ones(2, 4)).square().mean()
    grads = torch.autograd.grad(out, list(net.parameters()), create_graph=True)
    return [*grads, *torch.autograd.grad(sum(g.sum() for g in grads), list(net.parameters()), allow_unused=True)]


def checkpointed() -> Any:
    net, x = _net(), torch.ones(2, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        net(x).sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def hooked() -> Any:
    net, seen = _net(), []
    for p in net.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    net.register_full_backward_hook(lambda m, gi, go: seen.append(go[0]))
    net(torch.ones(2, 4)).sum().backward()
    return seen


def averaged() -> Any:
    net = _net()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        _trained(net, torch.optim.SGD(net.parameters(), lr=0.1))
        average.update_parameters(net)
    return list(average.parameters())


def attention() -> Any:
    torch.manual_seed(5)
    net = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.linspace(-1, 1, 16).view(1, 4, 4)
    inner = net.eval()(x).detach()
    return [inner, F.linear(x, net.train().linear1.weight), *_trained_last(net, x)]


def _trained_last(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return _trained(net, torch.optim.Adam(net.parameters(), lr=0.01, foreach=True), x)


def recurrent() -> Any:
    torch.manual_seed(5)
    net = nn.GRU(4, 4, batch_first=True)
    out, _ = net(torch.ones(2, 3, 4))
    out.sum().backward()
    net.flatten_parameters()
    return [out, *(p.grad for p in net.parameters())]


def scheduled() -> Any:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    optimizer.register_step_pre_hook(lambda *_: None)
    _trained(net, optimizer)
    scheduler.step()
    return [torch.tensor(scheduler.get_last_lr()), *net.parameters()]


class _WithMha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mha, self.fc = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.mha(x, x, x)[0])


def lora_on_attention() -> Any:
    import peft

    net = peft.get_peft_model(_WithMha(), peft.LoraConfig(r=2, target_modules=["mha", "fc"], init_lora_weights=False))
    x = torch.linspace(-1, 1, 16).view(1, 4, 4)
    values = _trained(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01), x)
    net.merge_adapter()
    merged = net.eval()(x)
    with net.disable_adapter():
        bare = net(x)
    return [*values, merged, bare, net.merge_and_unload()(x)]


def other_adapters() -> Any:
    import peft

    found: list[torch.Tensor] = []
    for config in (
        peft.IA3Config(target_modules=["fc"], feedforward_modules=[], init_ia3_weights=False),
        peft.OFTConfig(target_modules=["fc"], oft_block_size=2, coft=True, init_weights=False),
        peft.LoraConfig(r=2, target_modules=["fc"], use_dora=True, init_lora_weights=False),
        peft.LoHaConfig(r=2, target_modules=["fc"], init_weights=False),
    ):
        net = peft.get_peft_model(_WithMha(), config)
        found += _trained(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1),
                          torch.ones(1, 2, 4))  # fmt: skip
        net.add_adapter("other", config)
        net.set_adapter("other")
        net.delete_adapter("default")
    return found


def of_transformers() -> Any:
    import transformers

    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=4, n_layer=1, n_head=1)
    net = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(6).view(1, 6)
    net.resize_token_embeddings(18, mean_resizing=False)
    net.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [
        net.eval().generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0),
        net.transformer.wte.weight.grad,
    ]


BESIDE: dict[str, Callable[[], Any]] = {
    function.__name__: function
    for function in (
        trained, clipped, scaled, data_assigned, replaced, copied, functional, differentiated, checkpointed, hooked,
        averaged, attention, recurrent, scheduled, lora_on_attention, other_adapters, of_transformers,
    )
}  # fmt: skip

_before: dict[str, Any] = {}


def run(name: str) -> Any:
    """What a function gives now; the random numbers go on as if it had not been called."""
    state = torch.get_rng_state()
    try:
        return copy.deepcopy([t.detach() if torch.is_tensor(t) else t for t in BESIDE[name]()])
    finally:
        torch.set_rng_state(state)


def before(name: str) -> Any:
    """What it gave when it was asked for first, in a process that had managed nothing then."""
    if name not in _before:
        _before[name] = run(name)
    return _before[name]


def prepare() -> None:
    """Ask for all of them: to be called before anything is managed."""
    for name in BESIDE:
        before(name)
