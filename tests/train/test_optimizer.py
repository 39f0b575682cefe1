"""``HybridAdam``: the update itself, on plain and managed params, closures, groups and schedulers.

Alone on a plain model it must give the bits of the reference and agree with torch's own Adam and AdamW. Then its
state: torch's form in and out.
"""

import collections
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from tests.plain import adam_update
from tests.train.helpers import (
    DTYPES,
    Blocks,
    Plain,
    adam,
    assert_same_snapshot,
    assert_same_state,
    assert_trains_alike,
    llama,
    noise,
    on_batch,
    same_bits,
    snapshot,
    squares,
    step_on,
    train,
    train_plain,
    trainable,
    wrap,
)
from tests.world import world_of

Q = "model.layers.1.self_attn.q_proj.weight"


def params(dtype: torch.dtype) -> list[nn.Parameter]:
    """Of odd sizes, one of them a transposed view, one a scalar."""
    given = [noise(33, 7, seed=1), noise(5000, seed=2), noise(8, 12, seed=3).t(), noise(seed=4), noise(1, 1, 3, seed=5)]
    return [nn.Parameter(value.to(dtype)) for value in given]


def give_gradients(to: list[nn.Parameter], seed: int) -> None:
    for i, param in enumerate(to):
        param.grad = noise(*param.shape, seed=100 * seed + i).to(param.dtype)


# ---- alone -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_plain_params_have_the_bits_of_the_reference(precision: str, decoupled: bool) -> None:
    ours = params(DTYPES[precision])
    optimizer = gemini.HybridAdam(ours, lr=1e-2, weight_decay=0.1, eps=1e-6, decoupled=decoupled)
    states = []
    for param in ours:
        master = param.detach().float().contiguous().view(-1).clone()
        residual = torch.zeros_like(master, dtype=torch.int16) if precision == "bf16" else None
        weights = master.bfloat16() if precision == "bf16" else master
        states.append((weights, residual, torch.zeros_like(master), torch.zeros_like(master)))
    for step in range(1, 5):
        give_gradients(ours, step)
        if step == 3:
            ours[1].grad = None
        optimizer.step()
        for i, (param, state) in enumerate(zip(ours, states, strict=True)):
            if param.grad is not None:
                own = step - 1 if i == 1 and step > 3 else step
                how = {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.1, "decoupled": decoupled}
                adam_update(*state, param.grad.contiguous().view(-1), own, **how)
            assert same_bits(param.detach().contiguous().view(-1), state[0].to(param.dtype)), (step, i)
            assert same_bits(optimizer.state[param]["exp_avg"].view(-1), state[2])


def test_closure_and_complex_uses() -> None:
    ours = params(torch.float32)
    optimizer = gemini.HybridAdam(ours, lr=1e-2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.square().sum() for p in ours)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    sparse = nn.Embedding(8, 4, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(gemini.GeminiError, match="sparse=False"):
        gemini.HybridAdam(sparse.parameters()).step()


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["lr", "weight_decay"])
def test_groups_that_begin_alike_and_part(changed: str, where: str, tmp_path: Path) -> None:
    """Neighbours in one chunk have equal values at first; what one group is given later is not the other's."""
    model, plain = wrap(Blocks(), where, tmp_path), Plain(Blocks())
    names = [n for n, _ in model.named_parameters()]
    groups = [{"params": [p for n, p in model.named_parameters() if n in part]} for part in (names[::2], names[1::2])]
    optimizer = gemini.HybridAdam(groups, lr=1e-2, weight_decay=0.1)
    assert any(len(handles) > 1 for handles in world_of(model).by_chunk.values())
    assert_trains_alike(model, optimizer, plain, range(2), squares)
    optimizer.param_groups[1][changed] = 0.0
    plain.of = {name: {changed: 0.0} for name in names[1::2]}
    assert_trains_alike(model, optimizer, plain, range(2, 4), squares)


def test_what_no_optimizer_owns_stays_clipped(where: str, tmp_path: Path) -> None:
    """Its gradient waits after the step, and is read as torch's would be, until more is added to it."""
    model = wrap(Blocks(), where, tmp_path)
    names = [name for name, _ in model.named_parameters()]
    left_out = names[0]
    optimizer = gemini.HybridAdam([p for n, p in model.named_parameters() if n != left_out], lr=1e-2)
    model(noise(3, 32)).square().sum().backward()
    before = model.full_grad(left_out)
    assert before is not None
    norm = float(model.clip_grad_norm_(0.5))
    assert same_bits(model.full_grad(left_out), before)
    optimizer.step()
    optimizer.zero_grad()
    clipped = model.full_grad(left_out)
    assert clipped is not None
    assert same_bits(clipped, before.float() * (0.5 / (norm + 1e-6)))
    model.clip_grad_norm_(0.25, params=model.get_parameter(left_out))
    optimizer.step()
    again = model.full_grad(left_out)
    assert again is not None
    assert float(again.float().norm()) == pytest.approx(0.25, rel=1e-3)


def told_of_no_optimizer(run: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in told if "no optimizer" in str(one.message)]


def test_gradients_without_an_optimizer_warn_once(where: str, tmp_path: Path) -> None:
    model = wrap(Blocks(), where, tmp_path)
    first, *others = model.parameters()
    optimizer = gemini.HybridAdam(others, lr=1e-2)
    (said,) = told_of_no_optimizer(lambda: train(model, optimizer, range(2), squares))
    assert said.startswith(f"1 of {len(others) + 1} params, for example 'layers.0.weight', have a gradient and no")


@pytest.mark.parametrize("how", ["all", "frozen", "frozen later", "two optimizers", "not used"])
def test_no_false_alarm_of_gradients_without_an_optimizer(how: str, tmp_path: Path) -> None:
    raw = Blocks()
    if how == "frozen":
        raw.layers[0].requires_grad_(False)
    if how == "not used":
        raw.spare = nn.Linear(8, 8)
    model = wrap(raw, "ram", tmp_path)
    if how == "frozen later":
        model.layers[0].requires_grad_(False)
    ours = [p for n, p in model.named_parameters() if p.requires_grad and "spare" not in n]
    half = len(ours) // 2 if how == "two optimizers" else len(ours)
    optimizers = [gemini.HybridAdam(part, lr=1e-2) for part in (ours[:half], ours[half:]) if part]

    def run() -> None:
        for seed in range(2):
            squares(model, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    assert told_of_no_optimizer(run) == []


def test_two_optimizers_on_one_model(where: str, tmp_path: Path) -> None:
    model, plain = wrap(llama(), where, tmp_path), Plain(llama())
    named = list(model.named_parameters())
    first = gemini.HybridAdam([p for n, p in named if "layers" in n], lr=1e-2, weight_decay=0.1)
    second = gemini.HybridAdam([p for n, p in named if "layers" not in n], lr=3e-3, weight_decay=0.1)
    plain.of = {n: {"lr": 3e-3} for n, _ in named if "layers" not in n}
    for seed in range(3):
        loss, theirs = on_batch(model, seed), on_batch(plain.model, seed)
        loss.backward()
        plain.backward(theirs)
        model.clip_grad_norm_(0.5)
        plain.clip(0.5)
        first.step()
        second.step()  # clipped as well
        first.zero_grad()
        second.zero_grad()
        plain.step()
        assert loss.item() == theirs.item()
    assert_same_state(model, plain)


# ---- the state: torch's form in and out, by name, copied, looked at and forgotten ------------------------------------


@pytest.mark.parametrize("managed", [False, True])
def test_what_a_program_keeps_in_the_state_is_saved_and_loaded(managed: bool, tmp_path: Path) -> None:
    """Under keys that are no params, as torch's own optimizers give it back."""

    def begun() -> gemini.HybridAdam:
        model: Any = wrap(Blocks(), "cpu", tmp_path) if managed else nn.Linear(4, 4)
        made.append(model)
        return gemini.HybridAdam(model.parameters())

    made: list[Any] = []
    optimizer, other = begun(), begun()
    optimizer.state["epoch"], optimizer.state["seen"] = 3, {"tokens": 5}
    saved = optimizer.state_dict()
    assert saved["state"] == {"epoch": 3, "seen": {"tokens": 5}}
    other.load_state_dict(saved)
    assert other.state_dict()["state"] == saved["state"]


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_state_dict_has_torchs_form_and_keeps_fp32(precision: str, where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(llama(tied=True), where, tmp_path, precision=precision)
    assert optimizer.state_dict()["state"] == {}
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    stock = torch.optim.AdamW(llama(tied=True).parameters())
    assert state.keys() == stock.state_dict().keys()
    assert state["param_groups"][0]["params"] == stock.state_dict()["param_groups"][0]["params"]
    for index, param in enumerate(model.parameters()):
        entry = state["state"][index]
        assert entry["step"].item() == 2 and {"step", "exp_avg", "exp_avg_sq"} <= entry.keys()
        for kind in ("exp_avg", "exp_avg_sq"):
            assert entry[kind].dtype is torch.float32 and entry[kind].shape == param.shape
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    fresh = wrap(llama(tied=True), where, tmp_path, precision=precision)
    fresh.load_state_dict(model.state_dict(dtype=torch.float32))
    other = adam(fresh, lr=0.5)
    other.load_state_dict(loaded)
    assert_same_snapshot(snapshot(model), snapshot(fresh))
    assert train(model, optimizer, [2, 3]) == train(fresh, other, [2, 3])
    assert_same_snapshot(snapshot(model), snapshot(fresh))


def test_a_state_of_other_groups_is_refused(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(llama(), where, tmp_path)
    train(model, optimizer, [0])
    before, good = snapshot(model), optimizer.state_dict()
    every = list(model.parameters())
    others = [nn.Parameter(torch.zeros_like(param)) for param in every]
    with pytest.raises(ValueError, match="groups"):
        gemini.HybridAdam([{"params": others[:3]}, {"params": others[3:]}]).load_state_dict(good)
    with pytest.raises(ValueError, match="groups"):
        gemini.HybridAdam(others[:-1]).load_state_dict(good)
    wrong = optimizer.state_dict()
    wrong["state"][3]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_state_dict(wrong)
    assert_same_snapshot(before, snapshot(model))


def test_full_state_by_name(where: str, tmp_path: Path) -> None:
    model, optimizer = trainable(llama(tied=True), where, tmp_path)
    train(model, optimizer, range(2))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        state = optimizer.full_state(name)
        assert same_bits(state["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
        assert float(state["step"]) == 2
    with pytest.raises(KeyError):
        optimizer.full_state("no.such.param")


def test_a_plain_model_is_pickled_and_copied_with_its_optimizer(tmp_path: Path) -> None:
    """As with torch's own; the copy is as good as the first one, managed too."""
    raw = Blocks()
    optimizer = gemini.HybridAdam(raw.parameters(), lr=1e-2)
    noise_of = noise(2, 5, 32, dtype=torch.float32)
    step_on(raw(noise_of).square().mean(), optimizer)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        model, twin = copied((raw, optimizer))
        assert twin.step_in_backward is False and twin.state.keys() == set(model.parameters())
        model = wrap(model, "ram", tmp_path, precision="fp32")
        assert twin.full_state("layers.0.weight")["step"] == 1
        model(noise_of).square().mean().backward()
        twin.step()
    torch.save(raw, tmp_path / "raw.pt")
    shallow = copy.copy(optimizer)
    raw(noise_of).square().mean().backward()
    optimizer.step()
    assert shallow.state_dict()["state"][0]["step"] == 2
    assert all(same_bits(p.detach(), model.full_param(name)) for name, p in raw.named_parameters())


def test_states_are_there_to_be_looked_at(where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer, param = adam(model), model.get_parameter(Q)
    assert not optimizer.state[param]["exp_avg"].any() and param not in optimizer.state
    train(model, optimizer, [0])
    state = optimizer.state[param]
    assert set(state) == {"step", "residual", "residual_of", "exp_avg", "exp_avg_sq"} and state["step"] == 1
    assert all(same_bits(state[kind], snapshot(model)[Q][kind]) for kind in ("exp_avg", "exp_avg_sq"))
    assert param in optimizer.state and "momentum_buffer" not in state


def write_to_states(optimizer: Any, params: list[nn.Parameter]) -> torch.Tensor:
    """What is kept of a state, as programs write to it: in place, through views, and by name."""
    state = optimizer.state[params[0]]
    kept, row, again = state["exp_avg"], state["exp_avg"].data[0], state["exp_avg"]
    kept.mul_(0.5)
    row.zero_()
    kept.view(-1)[5:8] += 1e-3
    assert torch.equal(again, kept)
    state["exp_avg_sq"] = state["exp_avg_sq"] + 1e-6
    torch._foreach_mul_([optimizer.state[param]["exp_avg"] for param in params], 0.9)
    for param in params:  # of a run that is resumed
        for name, value in optimizer.state[param].items():
            optimizer.state[param][name] = value.to("cpu")
    return kept


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_writes_to_states_are_those_of_torch(precision: str, where: str, tmp_path: Path) -> None:
    plain = llama().to(torch.bfloat16 if precision == "bf16" else torch.float32)
    model = wrap(copy.deepcopy(plain), where, tmp_path, precision=precision)
    names, both = [Q, "model.norm.weight"], [(plain, adam(plain)), (model, adam(model))]
    seen: list[list[torch.Tensor]] = []
    for each, optimizer in both:
        params = [each.get_parameter(name) for name in names]

        def go(seed: int, each: Any = each, optimizer: Any = optimizer) -> None:
            ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(seed))
            each(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        go(0)
        kept = write_to_states(optimizer, params)
        go(1)
        values = [kept.clone()]  # of now
        kept.mul_(0.25)
        go(2)
        states = [optimizer.state[param][kind] for param in params for kind in ("exp_avg", "exp_avg_sq")]
        (weight := torch.ones(params[0].shape, requires_grad=True)).mul(states[1]).sum().backward()  # a penalty
        seen.append([*values, *(copy.deepcopy(value) for value in states), weight.grad, *(p.detach() for p in params)])  # type: ignore[list-item]
    assert all(same_bits(one.cpu(), other.cpu()) for one, other in zip(*seen, strict=True))
    for name, value in {"step": torch.tensor(7.0), "other": torch.ones(2), "exp_avg": torch.ones(2)}.items():
        with pytest.raises(gemini.GeminiError, match=r"load_state_dict"):
            both[1][1].state[model.get_parameter(Q)][name] = value


FORGET: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "assign": lambda o, p: setattr(o, "state", collections.defaultdict(dict)),
    "clear": lambda o, p: o.state.clear(),
    "pop": lambda o, p: o.state.pop(p)["exp_avg"].shape == p.shape or pytest.fail("not its state"),
    "del": lambda o, p: o.state.__delitem__(p),
    "set": lambda o, p: o.state.__setitem__(p, {}),
}


@pytest.mark.parametrize("way", FORGET)
def test_states_are_forgotten_as_in_torch(way: str, where: str, tmp_path: Path) -> None:
    model = wrap(llama(), where, tmp_path)
    optimizer, param = adam(model), model.get_parameter(Q)
    train(model, optimizer, [0])
    before = snapshot(model)
    FORGET[way](optimizer, param)
    left = optimizer.state_dict()["state"]
    assert len(left) == (0 if way in ("assign", "clear") else len(before) - 1)
    assert optimizer.full_state(Q)["step"] == 0 and not optimizer.full_state(Q)["exp_avg"].any()
    assert same_bits(snapshot(model)[Q]["weights"], before[Q]["weights"])
    with pytest.raises(gemini.GeminiError, match="load_state_dict"):
        optimizer.state[param] = {"step": torch.tensor(1.0)}
    with pytest.raises(gemini.GeminiError, match="load_state_dict"):
        optimizer.state = collections.defaultdict(dict, {param: {"step": torch.tensor(1.0)}})
    train(model, optimizer, [1])


def test_loaded_groups_are_the_optimizers_own(where: str, tmp_path: Path) -> None:
    """A scheduler fills a learning rate that is a tensor: not that of the optimizer the state came from."""
    model = wrap(llama(), where, tmp_path)
    first = gemini.HybridAdam([{"params": list(model.parameters()), "lr": torch.tensor(0.5), "tags": ["a"]}])
    state = first.state_dict()
    first.load_state_dict(state)
    first.param_groups[0]["lr"].fill_(9.0)
    first.param_groups[0]["tags"].append("b")
    assert state["param_groups"][0]["lr"] == 0.5 and state["param_groups"][0]["tags"] == ["a"]


# ---- a new optimizer on params that had one before -------------------------------------------------------------------

# It starts anew, as in torch; the one before says what it has lost.


def forget(plain: Plain) -> None:
    """What a new optimizer is to the plain loop: masters stay."""
    for state in plain.states.values():
        state["step"] = 0
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_new_optimizer_has_the_bits_of_a_loop_with_a_new_one(where: str, precision: str, tmp_path: Path) -> None:
    plain = Plain(llama(), precision, scale=2.0**16 if precision == "fp16" else None)
    model = wrap(llama(), where, tmp_path, precision=precision)
    for first in (0, 2):  # each with updates in flight that the one before has handed over
        optimizer = adam(model)
        assert optimizer.state_dict()["state"] == {}
        forget(plain)
        assert train(model, optimizer, [first, first + 1]) == train_plain(plain, [first, first + 1])
    assert_same_state(model, plain)
    del optimizer
    forget(plain)  # nobody has them any more, and they are there all the same
    optimizer = adam(model)
    assert_same_state(model, plain)
    assert_trains_alike(model, optimizer, plain, [4])


@pytest.mark.parametrize("gradients", ["retain", "transient"])
def test_a_new_one_that_steps_in_backward(gradients: str, tmp_path: Path) -> None:
    model, plain = wrap(Blocks(), "disk", tmp_path, gradients=gradients), Plain(Blocks())
    for seed in range(3):
        optimizer = adam(model, step_in_backward=True)
        forget(plain)
        train(model, optimizer, [seed], squares, clip=None)
        train_plain(plain, [seed], squares, clip=None)
    assert_same_state(model, plain)


def test_some_params_change_hands(tmp_path: Path) -> None:
    """A second training phase over a part: the rest goes on where it was."""
    model, plain = wrap(Blocks(), "disk", tmp_path), Plain(Blocks())
    named = dict(model.named_parameters())
    part = [name for name in named if "layers.1" in name]
    first = gemini.HybridAdam([p for n, p in named.items() if n not in part], lr=1e-2, weight_decay=0.1)
    first.add_param_group({"params": [named[name] for name in part]})
    train(model, first, [0, 1], squares, clip=None)
    train_plain(plain, [0, 1], squares, clip=None)
    before = snapshot(model)
    second = gemini.HybridAdam([named[name] for name in part], lr=1e-2, weight_decay=0.1)
    after = snapshot(model)
    for name in named:
        for kind, value in before[name].items():
            if name in part and kind in ("exp_avg", "exp_avg_sq", "step"):
                assert not after[name][kind].any(), (name, kind)
            else:
                assert same_bits(value, after[name][kind]), (name, kind)
    squares(model, 2).backward()
    world = snapshot(model)
    calls: list[Any] = [
        first.step, first.state_dict, lambda: first.load_state_dict({"state": {}, "param_groups": []}), first.owner,
        lambda: first.full_state(part[0]), lambda: first.state[named[part[0]]],
        lambda: gemini.save_checkpoint(tmp_path / "c", model, first),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(gemini.GeminiError, match="'layers.1.(weight|bias)'.* given to another HybridAdam"):
            call()
    assert_same_snapshot(world, snapshot(model))
    assert first.full_state("layers.0.weight")["step"] == 2  # this one is still its own
    second.step()
    assert second.full_state(part[0])["step"] == 1
    first.zero_grad()


def test_add_param_group_takes_over_too(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    params = list(model.parameters())
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    second = gemini.HybridAdam(params[:2])
    assert first.full_state("layers.2.weight")["step"] == 1
    second.add_param_group({"params": params[2:]})
    assert not snapshot(model)["layers.2.weight"]["exp_avg"].any()
    train(model, second, [1], squares, clip=None)
    assert second.full_state("layers.2.weight")["step"] == 1


def test_a_refused_one_takes_nothing_over(tmp_path: Path) -> None:
    model, other = wrap(Blocks(), "ram", tmp_path), wrap(Blocks(), "ram", tmp_path)
    optimizer = adam(model)
    train(model, optimizer, [0], squares, clip=None)
    before = snapshot(model)
    params = list(model.parameters())
    for wrong in (
        [{"params": params[:3]}, {"params": params[2:]}],
        [{"params": params}, {"params": other.parameters()}],
        [{"params": params}, {"params": [3]}],
    ):
        with pytest.raises((ValueError, TypeError)):
            gemini.HybridAdam(wrong)
    assert_same_snapshot(before, snapshot(model))
    squares(model, 1).backward()
    optimizer.step()


def test_a_checkpoint_goes_to_the_newest(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0, 1], squares, clip=None)
    gemini.save_checkpoint(tmp_path / "c", model, first)
    before = snapshot(model)
    second = adam(model, lr=0.5)
    train(model, second, [2], squares, clip=None)
    gemini.load_checkpoint(tmp_path / "c", model, second)
    assert_same_snapshot(before, snapshot(model))
    with pytest.raises(gemini.GeminiError, match="given to another"):
        gemini.load_checkpoint(tmp_path / "c", model, first)
    assert_same_snapshot(before, snapshot(model))


def test_after_an_update_broke_off_a_new_one_is_made_and_a_checkpoint_loaded(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    gemini.save_checkpoint(tmp_path / "c", model, first)
    before = snapshot(model)
    world_of(model).state.mark_corrupted(OSError("the disk"))
    second = adam(model)
    gemini.load_checkpoint(tmp_path / "c", model, second)
    assert_same_snapshot(before, snapshot(model))


def test_states_of_steps_before_the_wrap_are_adopted_from_the_last_owner(tmp_path: Path) -> None:
    raw = Blocks()
    first, second = gemini.HybridAdam(raw.parameters()), gemini.HybridAdam(raw.parameters())
    for optimizer in (first, second, second):
        step_on(squares(raw.bfloat16(), 0), optimizer)
    model = wrap(raw, "ram", tmp_path)
    assert second.full_state("layers.0.weight")["step"] == 2
    with pytest.raises(gemini.GeminiError, match="given to another"):
        first.step()
    train(model, second, [1], squares, clip=None)


def test_a_wrap_that_cannot_take_states_over_leaves_them_and_the_model(tmp_path: Path) -> None:
    """The second param's state is refused when the first one's is in its planes."""
    raw = Blocks().bfloat16()
    optimizer = gemini.HybridAdam(raw.parameters())
    step_on(squares(raw, 0), optimizer)
    kinds, bad = type(raw), raw.layers[1].weight
    before = {name: param.detach().clone() for name, param in raw.named_parameters()}
    moment, optimizer.state[bad]["exp_avg"] = optimizer.state[bad]["exp_avg"], torch.zeros(3)
    with pytest.raises((ValueError, RuntimeError, gemini.GeminiError)):
        wrap(raw, "ram", tmp_path)
    assert type(raw) is kinds and not isinstance(raw, gemini.GeminiDDP)
    assert all(torch.equal(param, before[name]) for name, param in raw.named_parameters())
    assert len(optimizer.state) == len(before)
    optimizer.state[bad]["exp_avg"] = moment
    step_on(squares(raw, 1), optimizer)
    model = wrap(raw, "ram", tmp_path)
    assert not len(optimizer.state) and optimizer.full_state("layers.1.weight")["step"] == 2
    train(model, optimizer, [2], squares, clip=None)


def test_start_anew_takes_back(tmp_path: Path) -> None:
    model = wrap(Blocks(), "disk", tmp_path)
    first = adam(model)
    train(model, first, [0], squares, clip=None)
    second = adam(model)
    train(model, second, [1], squares, clip=None)
    for touch in (lambda s, p: s.pop(p), lambda s, p: s.__setitem__(p, {}), lambda s, p: s.__delitem__(p)):
        with pytest.raises(gemini.GeminiError, match="given to another"):
            touch(first.state, model.layers[0].weight)
    first.state.clear()  # of what is its own, nothing
    assert second.full_state("layers.0.weight")["step"] == 1
    first.start_anew()
    assert first.state_dict()["state"] == {}
    train(model, first, [2], squares, clip=None)
    with pytest.raises(gemini.GeminiError, match="given to another"):
        second.step()
