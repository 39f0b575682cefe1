"""Writes to params between steps, and reads of what was detached from them, as programs write and read them.

Ways of writing (in place, by ``foreach``, through views, averages, target networks, new starts) are habits of drawn
programs: ``test_programs.py``.
"""

import copy
import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gemini
from gemini.train.params.guard import Weights
from tests.train.helpers import Blocks, Plain, adam, llama, noise, same_bits, squares, step_on, train, train_plain, wrap

NAME = "layers.1.weight"


def test_gathered_write_needs_no_more(where: str, tmp_path: Path) -> None:
    """Autograd is off inside, and as it was afterwards."""
    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    weight = model.get_parameter(NAME)
    with model.gathered([weight], write=True):
        assert not torch.is_grad_enabled()
        weight.mul_(2)
        nn.init.zeros_(weight[0])
    assert torch.is_grad_enabled()
    expected = 2 * Blocks().get_parameter(NAME).detach().bfloat16()
    expected[0] = 0
    assert same_bits(model.full_param(NAME), expected)
    with pytest.raises(KeyError), model.gathered([weight], write=True):
        raise KeyError
    assert torch.is_grad_enabled()
    with model.gathered([weight]):
        assert torch.is_grad_enabled()


def test_a_gathered_param_is_an_ordinary_one_whatever_is_copied_into_it(where: str, tmp_path: Path) -> None:
    """A param of another model, or a state: it is seen inside, undone by an error, and refused where nobody writes."""
    model, teacher = (wrap(Blocks(), where, tmp_path, slack=2**17) for _ in range(2))
    optimizer, weight = adam(model), model.get_parameter(NAME)
    train(model, optimizer, [0], squares)
    for source in (teacher.get_parameter(NAME), optimizer.state[weight]["exp_avg"]):
        before = model.full_param(NAME)
        with pytest.raises(KeyError), model.gathered([weight], write=True):
            weight.copy_(source)
            assert same_bits(weight.cpu(), source.cpu().bfloat16())
            raise KeyError
        with pytest.raises(gemini.ParamAccessError, match="write=True"), torch.no_grad(), model.gathered([weight]):
            weight.copy_(source)
        if where == "ram":  # weights that stay are their own plane: what was refused is told, and not taken back
            before = source.cpu().bfloat16()
        assert same_bits(model.full_param(NAME), before)


def test_lists_of_a_class_of_ones_own(where: str, tmp_path: Path) -> None:
    class Own(list[Any]):
        pass

    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    weight = model.get_parameter(NAME)
    with torch.no_grad():
        assert same_bits(torch.stack(Own([weight, weight]))[1].cpu(), model.full_param(NAME))


def test_a_graph_from_before_a_write_is_refused(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    loss = squares(model, 0)
    model.get_parameter(NAME).data.mul_(2)
    with pytest.raises(RuntimeError, match="inplace|in place|written|changed"):
        loss.backward()


def test_an_operation_that_fails_writes_nothing(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    before = model.full_param(NAME, torch.float32)
    weight = model.get_parameter(NAME)
    with torch.no_grad():
        for write in (lambda: weight.add_(torch.ones(3)), lambda: weight.data.copy_(torch.ones(5))):
            with pytest.raises(RuntimeError):
                write()
        with pytest.raises(gemini.ParamAccessError, match=r"share the memory.*copy_"):
            weight.data = torch.zeros(32, 32, dtype=torch.bfloat16)
    assert same_bits(model.full_param(NAME, torch.float32), before)


# ``param.detach()`` and ``param.data`` outside of forward: what loggers and averages read, as it is at that moment.


Q = "model.layers.1.self_attn.q_proj.weight"


def rows_of(weights: torch.Tensor) -> torch.Tensor:
    """Views, one beside another."""
    return torch.stack([row.float() + weights.T[0] for row in weights])


def saved(weights: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(weights, file)
    file.seek(0)
    return torch.load(file)


def scaled(weights: torch.Tensor) -> torch.Tensor:
    """Beside something that wants a gradient."""
    x = torch.ones(32, requires_grad=True)
    (weights * x).sum().backward()
    assert x.grad is not None
    return x.grad


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.float().norm(),
    "largest": lambda w: w.abs().max(),
    "scaled": scaled,
    "averaged": lambda w: torch.zeros(32, 32).lerp_(w.float(), 0.1),
    "copied": lambda w: torch.zeros(32, 32).copy_(w),
    "all at once": lambda w: torch._foreach_norm([w, w])[1],
    "numpy": lambda w: torch.tensor(w.float().cpu().numpy()),
    "array": lambda w: torch.tensor(numpy.asarray(w.float())),
    "histogram": lambda w: torch.histc(w.float(), 8),
    "saved": saved,
    "deep copy": copy.deepcopy,
    "in inference mode": lambda w: torch.inference_mode()(lambda: w.float().sum())(),
    "mapped": lambda w: torch.vmap(lambda row: row.float().sum())(w),
    "a row": lambda w: w[1],
    "flat": lambda w: w.flatten()[:5],
    "turned": lambda w: w.T.contiguous(),
    "rows": rows_of,
    "a vector of both": lambda w: nn.utils.parameters_to_vector([w, w[0]]),
    "parts": lambda w: torch.cat([part.detach().data.flatten() for part in w.split(5)[1:]]),
    "every other": lambda w: w[1::2, ::3].view(torch.int16).clone(),
    "bits": lambda w: torch.tensor(w.view(torch.uint8).cpu().numpy()),
    "a diagonal": lambda w: copy.deepcopy(w.diagonal()),
    "a part saved": lambda w: saved(w[3:5]),
    "a part described": lambda w: torch.tensor([*w[2:, 1].shape, *w[2:, 1].stride(), w[2:, 1].storage_offset()]),
    "a row mapped": lambda w: torch.vmap(lambda row: row[1:].float().sum())(w),
    "a row differentiated": lambda w: torch.func.grad(lambda v: v[0].float().square().sum())(w),
    "differentiated": lambda w: torch.func.grad(lambda v: v.float().square().sum())(w),
    "read where nobody is asked": torch.tensor,
    "described": lambda w: torch.tensor([*w.shape, *w.stride(), w.requires_grad, w.dtype == torch.bfloat16, len(w)]),
}

ASKS_NOBODY = ("mapped", "differentiated", "nobody is asked")
"""Of a param itself torch tells nobody of these: what it reads is the weights or NaN."""


@pytest.mark.parametrize("how", ["detach", "data"])
def test_reads_are_those_of_torch_now_and_later(how: str, where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)
    param = model.get_parameter(Q)
    kept = param.detach() if how == "detach" else param.data
    views = kept[1], kept.T[2:]
    for step in range(2):
        assert train(model, optimizer, [step]) == train_plain(plain, [step])
        now = plain.model.get_parameter(Q).detach()  # the plain loop gives its weights new memory in each step
        for name, read in READS.items():
            assert same_bits(read(kept).detach(), read(now).detach()), name
            with torch.no_grad():
                if name not in ("saved", "described", "scaled") and not name.endswith(ASKS_NOBODY):
                    assert same_bits(read(param).detach(), read(now).detach()), f"{name}, of the param"
        assert repr(kept) == repr(now) and repr(kept[1]) == repr(now[1])
        assert same_bits(views[0].clone(), now[1]) and same_bits(views[1].clone(), now.T[2:]), "a view that was kept"


def test_what_shares_their_memory_is_refused(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    optimizer = adam(model)
    assert train(model, optimizer, [0]) == train_plain(plain, [0])
    weights = model.get_parameter(Q).data
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    for name, use in {
        "what torch.func maps": lambda: torch.vmap(lambda row: row.mul_(2))(weights),
        "what torch.func takes for a function": lambda: torch.func.functionalize(lambda w: w.mul_(2))(weights),
        "shared with processes": lambda: weights.view(-1).share_memory_(),
        "a gradient": lambda: weights.requires_grad_(),
        "a param": lambda: nn.Parameter(weights), "replaced": lambda: setattr(weights, "data", ones),
        "shared": lambda: torch.from_dlpack(weights.detach()), "turned in place": lambda: weights.t_(),
        "resized": lambda: weights.resize_(3), "set": lambda: weights.set_(ones),
    }.items():  # fmt: skip
        with pytest.raises(gemini.ParamAccessError, match="gathered"):
            use()
            pytest.fail(name)
    # C++ that asks nobody finds no memory. In torch: a capsule of it.
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(weights)
    assert train(model, optimizer, [1]) == train_plain(plain, [1])


def test_several_are_written_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's ``_foreach_add_``, one call of C++ in torch, Ctrl-C in the middle leaves no half."""
    model = wrap(Blocks(), "disk", tmp_path)
    names = ("layers.0.weight", "layers.1.weight")
    before, write = [model.full_param(name) for name in names], Weights.write

    def interrupted(of: Weights, value: torch.Tensor) -> None:
        signal.raise_signal(signal.SIGINT)
        write(of, value)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), torch.no_grad():
        patch.setattr(Weights, "write", interrupted)
        torch._foreach_add_([model.get_parameter(name).data for name in names], 1.0)
    assert not any(same_bits(model.full_param(name), old) for name, old in zip(names, before, strict=True))


def test_a_refusal_names_the_param_that_would_change_its_shape(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first, second = (model.get_parameter(f"layers.{number}.weight").data for number in (0, 1))
    with pytest.raises(gemini.ParamAccessError, match=r"layers\.1\.weight"), torch.no_grad():
        torch.add(first, torch.ones(5, *first.shape), out=second)


def test_an_array_of_them_is_read_only(where: str, tmp_path: Path) -> None:
    """It holds the values of now: what is written to it would be lost."""
    model = wrap(nn.Linear(4, 4), where, tmp_path, precision="fp32")
    array = model.weight.detach().cpu().numpy() if where == "standin" else model.weight.detach().numpy()
    assert same_bits(torch.tensor(array), model.full_param("weight"))
    with pytest.raises(ValueError, match="read-only"):
        model.weight.data.numpy()[0] = 1


def test_weights_are_written_as_safetensors(where: str, tmp_path: Path) -> None:
    """Which reads memory by its address."""
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), where, tmp_path, precision="fp32")
    for read in (torch.Tensor.detach, torch.Tensor.clone, lambda p: p.data.cpu().contiguous(), lambda p: p):
        with torch.no_grad():
            given = {name: read(param) for name, param in model.named_parameters()}
        if type(given["0.weight"]) is not torch.Tensor:
            with pytest.raises(gemini.ParamAccessError, match="state_dict"):
                save_file(given, tmp_path / "weights")
            continue
        save_file(given, tmp_path / "weights")
        assert all(same_bits(value, model.full_param(name)) for name, value in load_file(tmp_path / "weights").items())


class Regularized(nn.Module):
    """Reads in forward what was detached before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.anchor: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return x.float().square().mean() + (self.anchor.float() * x.float().mean(0)).sum().abs()


def test_they_may_be_read_inside_of_forward(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    raw = Regularized()
    plain, model = copy.deepcopy(raw), wrap(raw, where, tmp_path, precision="fp32", slack=2**17)
    x = noise(4, 32, dtype=torch.float32)
    losses = []
    for net in (plain, model):
        optimizer = adam(net)
        net.anchor = net.first.weight.detach()
        losses.append([])
        for _ in range(3):
            loss = net(x)
            step_on(loss, optimizer)
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def test_a_number_may_be_copied_into_one(where: str, tmp_path: Path) -> None:
    """As torch takes it; what no tensor can be made of is refused as torch refuses it."""
    model = wrap(Blocks(), where, tmp_path, slack=2**17)
    param = model.get_parameter(NAME)
    with torch.no_grad():
        for written, number in ((param, 3.0), (param.data, 5)):
            written.copy_(number)
            assert same_bits(model.full_param(NAME), torch.full(param.shape, number, dtype=torch.bfloat16))
        with pytest.raises(TypeError, match="copy_"):
            param.copy_("3")
