"""Ranks that disagree about a step or about what is loaded: noticed on all of them, before any weight changes."""

import time
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gemini
from gemini.train.params.by_name import read_range
from tests import scaling
from tests.ranks.pool import Pools
from tests.world import world_of


class Squares(nn.Sequential):
    """Computes its loss itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).float().square().sum()


def small(**how: Any) -> Any:
    torch.manual_seed(0)
    model = Squares(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 16), nn.Tanh(), nn.Linear(16, 4))
    mesh = how.pop("mesh", None)
    settings = {"precision": "fp32", "device": "cpu", "max_chunk": 5000, **how}
    return gemini.GeminiDDP(model, gemini.GeminiConfig(memory=gemini.MemoryBudget(cpu="16MiB"), **settings), mesh=mesh)


def backward(model: Any, seed: int = 0) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(world_of(model).config.precision, torch.float32)
    scaling.backward(model, model(x.to(dtype)))


def groups_of(model: Any, *, leave_out: str = "", last: tuple[str, ...] = ("4.bias",)) -> list[dict[str, Any]]:
    """Two param groups, of which the second has a learning rate of its own."""
    named = {name: param for name, param in model.named_parameters() if name != leave_out}
    return [
        {"params": [param for name, param in named.items() if name not in last]},
        {"params": [param for name, param in named.items() if name in last], "lr": 0.01},
    ]


def bits(model: Any) -> int:
    """Of what this rank keeps of the masters and states."""
    found = 0
    assert any(handle.part.numel for handle in world_of(model).handles), "each rank has a part"
    for handle in world_of(model).handles:
        world_of(model).wait_for_update(handle.chunk)
        for kind, plane in handle.chunk.planes.items():
            if kind in ("weights", "residual", "exp_avg", "exp_avg_sq"):
                part = read_range(world_of(model).mover, plane, handle)
                found = zlib.crc32(part.view(torch.uint8).numpy().tobytes(), found)
    return found


def disagree(how: str, settings: dict[str, Any], odd: int) -> tuple[str, bool]:
    """Two steps alike, then rank ``odd`` does something else in the third: the error, and whether a weight changed."""
    mesh = init_device_mesh("cpu", settings["mesh"]) if "mesh" in settings else None
    model = small(**{**settings, "mesh": mesh})
    other = dist.get_rank() == odd
    transient = settings.get("gradients") == "transient"
    scaler = scaling.new_scaler(model, 1024.0)
    groups = groups_of(model)
    if how == "left out" and other:
        groups = groups_of(model, leave_out="2.weight")
    if how == "other group" and other:
        groups = groups_of(model, last=("4.bias", "4.weight"))
    optimizer = gemini.HybridAdam(groups, lr=0.1, step_in_backward=transient)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if how == "left out" or how == "other group":
        before = bits(model)
    else:
        for seed in range(2):
            backward(model, seed)
            if not transient:
                scaling.clip_grads(model, optimizer, 0.1)
            scaling.make_step(model, optimizer)
            optimizer.zero_grad()
        before = bits(model)
    group = optimizer.param_groups[0]
    if other:
        if how in ("lr", "eps", "weight_decay"):
            group[how] = group[how] * 1.0000001
        elif how == "lr is nan":
            group["lr"] = float("nan")
        elif how == "lr is a word":
            group["lr"] = "fast"
        elif how == "lr is gone":
            del group["lr"]
        elif how == "betas":
            group["betas"] = (0.9, 0.99)
        elif how == "scheduler":
            scheduler.step()
        elif how == "frozen":
            model[2].weight.requires_grad_(False)
        elif how == "step count":
            next(h for h in world_of(model).handles if h.name == "2.weight").num_steps += 1
        elif how == "loss scale":
            scaler.update(scaler.get_scale() / 2)
    try:
        backward(model, 2)
        if how == "one backward more" and dist.get_rank() >= dist.get_world_size() // 2:
            backward(model, 3)
        if other and how == "zero_grad first":
            optimizer.zero_grad()
        if how == "zero_grad between":
            if other:
                model.zero_grad()
            backward(model, 3)
        if not transient and how != "clip on one":
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.3 if other and how == "max_norm" else 1e6 if other and how == "no effect" else 0.2)
        if how == "no effect":
            model.clip_grad_norm_(1e5)
        if other and how == "clip on one":
            model.clip_grad_norm_(0.2)
        if other and how == "clip some":
            model.clip_grad_norm_(0.01, params=[model[0].weight])
        if other and how == "zero_grad":
            optimizer.zero_grad()
        scaling.make_step(model, optimizer)
    except gemini.RankMismatch as e:
        world_of(model).forget_interrupted()
        return str(e), bits(model) != before
    return "nobody noticed", bits(model) != before


DISAGREEMENTS = [
    ("lr", "lr of param group 0: 0.1 on rank 0, 0.10000001000000001 on rank 1"),
    ("lr is nan", "lr of param group 0: 0.1 on rank 0, nan on rank 1"),
    ("lr is a word", "lr of param group 0: 0.1 on rank 0, 'fast' on rank 1"),
    ("lr is gone", "lr of param group 0: 0.1 on rank 0, 'not given' on rank 1"),
    ("betas", "betas of param group 0: (0.9, 0.999) on rank 0, (0.9, 0.99) on rank 1"),
    ("eps", "eps of param group 0: 1e-08 on rank 0"),
    ("weight_decay", "weight_decay of param group 0: 0.01 on rank 0"),
    ("scheduler", "lr of param group 0: 0.1 on rank 0, 0.05 on rank 1"),
    ("max_norm", "clip_grad_norm_: max_norm 0.2 on rank 0, max_norm 0.3 on rank 1"),
    ("no effect", "max_norm 0.2, max_norm 100000.0 on rank 0, max_norm 1000000.0, max_norm 100000.0 on rank 1"),
    ("clip on one", "clip_grad_norm_: not called on rank 0, max_norm 0.2 on rank 1"),
    ("clip some", "max_norm 0.2 on rank 0, max_norm 0.2, max_norm 0.01 of '0.weight' alone on rank 1"),
    ("left out", "the param group of '2.weight': 0 on rank 0, none on rank 1"),
    ("other group", "the param group of '4.weight': 0 on rank 0, 1 on rank 1"),
    ("zero_grad", "the gradient of '0.weight': there on rank 0, none on rank 1"),
    ("zero_grad first", "the gradient of '0.weight': there on rank 0, none on rank 1"),
    ("zero_grad between", "how often zero_grad() dropped gradients since the last step: 0 on rank 0, 1 on rank 1"),
    ("frozen", "requires_grad of '2.weight': True on rank 0, False on rank 1"),
    ("step count", "the number of updates of '2.weight': 2 on rank 0, 3 on rank 1"),
]


TRANSIENT = {"gradients": "transient"}
ELSEWHERE: list[tuple[str, dict[str, Any], int, str]] = [
    ("loss scale", {"precision": "fp16"}, 1, "the losses of this step were scaled by 1024, 512 on the ranks"),
    ("zero_grad", {"precision": "fp16"}, 0, "the gradient of '0.weight': none on rank 0, there on rank 1"),
    ("zero_grad between", {"precision": "bf16", "gradients": "accumulate"}, 0, "since the last step: 1 on rank 0, 0"),
    ("lr", {"precision": "bf16"}, 0, "lr of param group 0: 0.10000001000000001 on rank 0, 0.1 on rank 1"),
    ("lr", TRANSIENT, 1, "inside backward: the ranks disagree about lr of param group 0: 0.1 on rank 0"),
    ("scheduler", TRANSIENT, 0, "lr of param group 0: 0.05 on rank 0, 0.1 on rank 1"),
    ("frozen", TRANSIENT, 1, "requires_grad of '2.weight': True on rank 0, False on rank 1"),
    ("other group", TRANSIENT, 1, "the param group of '4.weight': 0 on rank 0, 1 on rank 1"),
    ("step count", TRANSIENT, 1, "the number of updates of '2.weight': 2 on rank 0, 3 on rank 1"),
]
REPLICAS = [
    ("lr", "lr of param group 0"),
    ("clip on one", "clip_grad_norm_: "),
    ("frozen", "requires_grad of '2.weight'"),
    ("zero_grad first", "gradient"),
    ("one backward more", "the number of backwards since the last step: 1 on rank 0, 2 on rank 2"),
    ("zero_grad", "the gradient of '0.weight'"),
]


OF_TWO = [*((how, {}, 1, said) for how, said in DISAGREEMENTS), *ELSEWHERE]
OF_REPLICAS = [((2, 2), *case) for case in REPLICAS] + [((4, 1), *case) for case in REPLICAS[-2:]]


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(
    ("ranks", "how", "settings", "odd", "said"),
    [
        *((2, *case) for case in OF_TWO),
        *((4, how, {"mesh": mesh, "gradients": "accumulate"}, 2, said) for mesh, how, said in OF_REPLICAS),
    ],
)
def test_ranks_that_disagree_about_a_step_are_told_so_before_it(
    ranks: int, how: str, settings: dict[str, Any], odd: int, said: str, pool_of: Pools
) -> None:
    for text, changed in pool_of(ranks).run(disagree, how, settings, odd):
        assert said in text and not changed and ("on rank 2" in text or ranks == 2), text


# ---- values that are loaded or written -------------------------------------------------------------------------------


def load(what: str, mesh: tuple[int, int] | None) -> tuple[str, bool]:
    """Every rank loads, the last one something else: the error, and whether anything changed."""
    model = small(mesh=None if mesh is None else init_device_mesh("cpu", mesh))
    optimizer = gemini.HybridAdam(groups_of(model), lr=0.1)
    backward(model)
    optimizer.step()
    other = dist.get_rank() == dist.get_world_size() - 1
    state, moments = model.state_dict(), optimizer.state_dict()
    before = bits(model)
    if other:
        state["2.weight"][0, 0] += 1
        moments["state"][2]["exp_avg_sq"] = moments["state"][2]["exp_avg_sq"] * 2
    try:
        if what == "model":
            model.load_state_dict(state)
        elif what == "part":
            model[2].load_state_dict({name[2:]: value for name, value in state.items() if name[0] == "2"})
        elif what == "names":
            model.load_state_dict({n: v for n, v in state.items() if n != "2.weight" or not other}, strict=False)
        elif what == "refused":
            state["0.bias"] = state["0.bias"][: 5 if other else None]
            model.load_state_dict(state)
        elif what == "copy_":
            with torch.no_grad():
                model[2].weight.copy_(state["2.weight"])
        elif what == "mul_":
            model[2].weight.data.mul_(2 if other else 1)
        elif what == "copy_ of others":
            with torch.no_grad():
                (model[0] if other else model[4]).bias.copy_(state["0.bias" if other else "4.bias"])
        elif what == "gathered":
            with model.gathered([model[0].weight, model[2].weight], write=True), torch.no_grad():
                model[2].weight.copy_(state["2.weight"])
        elif what == "groups":
            moments = optimizer.state_dict()
            moments["param_groups"][1]["lr"] = 0.5 if other else 0.01
            optimizer.load_state_dict(moments)
        elif what == "refused by the optimizer":
            moments = optimizer.state_dict()
            if other:
                moments["param_groups"] = moments["param_groups"][:1]
            optimizer.load_state_dict(moments)
        else:
            optimizer.load_state_dict(moments)
    except (gemini.GeminiError, RuntimeError, ValueError) as e:
        return f"{type(e).__name__}: {e}", bits(model) != before
    return "nobody noticed", bits(model) != before


LOADS = [
    ("model", "load_state_dict: the ranks disagree about the values of '2.weight': checksum "),
    ("part", "writing '2.weight': the ranks disagree about the values of '2.weight': checksum "),
    ("names", "the values of '2.weight': checksum "),
    ("copy_", "writing '2.weight': the ranks disagree about the values of '2.weight': checksum "),
    ("mul_", "writing '2.weight': the ranks disagree about the values of '2.weight': checksum "),
    ("copy_ of others", "the ranks disagree about the values of '4.bias': checksum"),
    ("gathered", "gathered(write=True): the ranks disagree about the values of '2.weight': checksum "),
    ("optimizer", "optimizer.load_state_dict: the ranks disagree about exp_avg_sq of '2.weight': checksum "),
    ("groups", "optimizer.load_state_dict: the ranks disagree about lr of param group 1: 0.01 on rank 0, 0.5 on rank"),
]


OF_REPLICAS_TOO = [(what, (2, 2), "on rank 3") for what in ("model", "optimizer", "copy_", "gathered")]


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize(("what", "mesh", "said"), [*((what, None, said) for what, said in LOADS), *OF_REPLICAS_TOO])
def test_what_is_loaded_must_be_the_same_on_every_rank(
    what: str, mesh: tuple[int, int] | None, said: str, pool_of: Pools
) -> None:
    for text, changed in pool_of(2 if mesh is None else 4).run(load, what, mesh):
        kind = "RuntimeError" if what == "part" else "RankMismatch"  # torch collects what a param's copy raises
        assert text.startswith(kind) and said in text and not changed, text


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("refused", "RuntimeError", "size mismatch for 0.bias"),
        ("refused by the optimizer", "ValueError", "the loaded state has groups of"),
    ],
)
def test_what_one_rank_refuses_to_load_no_rank_loads(what: str, kind: str, said: str, pool_of: Pools) -> None:
    first, second = pool_of(2).run(load, what, None)
    assert first[0].startswith("RankMismatch: rank 1 refused") and said in first[0] and not first[1], first
    assert second[0].startswith(kind) and said in second[0] and not second[1], second


# ---- what stays allowed ----------------------------------------------------------------------------------------------


def allowed() -> bool:
    """What ranks may do differently: evaluate, look at the norm or a gradient, load buffers of their own."""
    rank = dist.get_rank()
    bits_of = []
    for alone in (True, False):
        model = small()
        model.register_buffer("seen", torch.zeros(3))
        own = nn.Parameter(torch.ones(3))  # not of the model: each rank's own
        groups = [{"params": [p for n, p in model.named_parameters() if n[0] != "4"]}, {"params": [own], "lr": rank}]
        first = gemini.HybridAdam(groups, lr=torch.tensor(0.1))
        second = gemini.HybridAdam(list(model[4].parameters()), lr=0.1)
        for seed in range(3):
            backward(model, seed)
            if alone and rank == 0:
                model.clip_grad_norm_(float("inf"))
                assert model.full_grad("0.weight") is not None
            model.clip_grad_norm_(0.2, params=list(model[4].parameters()))
            if alone and rank == 1:
                with torch.no_grad():
                    model(torch.ones(1, 16))  # between clipping and the step: the others have not changed a weight yet
            first.step()
            second.step()
            model.zero_grad()
        model.load_state_dict({**model.state_dict(), "seen": torch.full((3,), float(rank))})
        assert model.seen[0] == rank
        second.load_state_dict(second.state_dict())
        bits_of.append(bits(model))
    return bits_of[0] == bits_of[1]


def test_what_ranks_may_do_differently_stays_allowed(pool_of: Pools) -> None:
    assert pool_of(2).run(allowed) == [True, True]


def go_on(how: str) -> list[int]:
    """A disagreement is set right, and the same step (inside backward: the same backward) made again."""
    found = []
    transient, guesses = how == "transient", how == "guesses"
    for mistaken in (True, False):
        model = small(gradients="transient" if transient else "retain", update_threads=1)
        optimizer = gemini.HybridAdam(
            model.parameters(), lr=0.1, step_in_backward=transient or guesses, speculate=guesses
        )

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            backward(model)
            if not transient:
                model.clip_grad_norm_(1e6 if guesses else 0.2)
            optimizer.step()

        if mistaken:
            optimizer.param_groups[0]["lr"] = 0.1 + dist.get_rank()
            with pytest.raises(gemini.RankMismatch):
                step()
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.zero_grad() if transient else optimizer.step()
        if transient or not mistaken:
            step()
        world_of(model).check()
        assert any(model.memory_report()["speculation"].values()) == guesses
        found.append(bits(model))
    return found


@pytest.mark.parametrize("how", ["retain", "transient", "guesses"])
def test_a_disagreement_that_is_set_right_has_left_no_trace(how: str, pool_of: Pools) -> None:
    for with_it, without in pool_of(2).run(go_on, how):
        assert with_it == without


def norms_of_parts() -> list[float]:
    """A norm, a backward that reaches only some params, the norm again; and the same by one look at the end."""
    found = []
    for look in (True, False):
        model = small(gradients="accumulate")
        backward(model)
        if look:
            model.clip_grad_norm_(float("inf"))
        for param in model[:4].parameters():
            param.requires_grad_(False)
        backward(model, 1)
        found.append(float(model.clip_grad_norm_(float("inf"))))
    return found


def test_a_backward_after_a_norm_counts_what_was_there_once(pool_of: Pools) -> None:
    for looked, not_looked in pool_of(2).run(norms_of_parts):
        assert looked == not_looked


def read_between() -> bool:
    """Rank 1 reads between clipping and its step, while rank 0 is in its own: no weight has changed yet."""
    model = small()
    optimizer = gemini.HybridAdam(model.parameters(), lr=0.1)
    before = model.full_param("0.weight")
    backward(model)
    model.clip_grad_norm_(0.2)
    same = True
    if dist.get_rank() == 1:
        time.sleep(0.3)
        same = torch.equal(model.full_param("0.weight"), before)
    optimizer.step()
    model.full_param("4.bias")  # rank 0 would serve from here
    return same


def test_no_rank_updates_before_all_of_them_do(pool_of: Pools) -> None:
    assert pool_of(2).run(read_between) == [True, True]


def replicas_in_other_places() -> None:
    """The first replica wants to save when the other one steps."""
    model = small(mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = gemini.HybridAdam(model.parameters(), lr=0.1)
    if dist.get_rank() >= 2:
        backward(model)
        optimizer.step()
    gemini.save_checkpoint("/nowhere/at/all", model, optimizer)


def a_replica_that_disagrees() -> None:
    """Rank 3 alone saves: its replica tells the other one."""
    model = small(mesh=init_device_mesh("cpu", (2, 2)))
    optimizer = gemini.HybridAdam(model.parameters(), lr=0.1)
    if dist.get_rank() == 3:
        gemini.save_checkpoint("/nowhere/at/all", model, optimizer)
    backward(model)
    optimizer.step()


def test_replicas_that_go_different_ways_are_told_so(pool_of: Pools) -> None:
    for outcome in pool_of(4).outcomes(replicas_in_other_places):
        assert outcome.kind == "RankMismatch", outcome
        assert "replica 0 is at save_checkpoint; replica 1 is at clip_grad_norm_ or optimizer.step()" in outcome.text
    first, second, third, fourth = pool_of(4).outcomes(a_replica_that_disagrees)
    for outcome in (first, second):
        assert outcome.kind == "RankMismatch" and "the ranks of replica 1 disagree" in outcome.text, outcome
    for outcome in (third, fourth):
        assert outcome.kind == "RankMismatch" and "rank 3 is at save_checkpoint after 0 steps" in outcome.text, outcome


class TakingTurns(nn.Sequential):
    """Computes with one of its layers alone."""

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self[which](x).square().sum()  # type: ignore[no-any-return]


def zeros(odd: int | None) -> tuple[str, dict[str, int], list[torch.Tensor], list[torch.Tensor]]:
    """Layers in turn, with gradients of zeros in between, on all ranks but perhaps one: an error; steps; masters,
    managed and of a plain loop over the batches of all ranks.
    """

    def make() -> TakingTurns:
        torch.manual_seed(0)
        return TakingTurns(nn.Linear(16, 64), nn.Linear(16, 32))

    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))

    plain, ranks = make(), dist.get_world_size()
    model: Any = gemini.GeminiDDP(make(), gemini.GeminiConfig(precision="fp32", device="cpu", max_chunk=1000))
    optimizers = gemini.HybridAdam(plain.parameters(), lr=0.1), gemini.HybridAdam(model.parameters(), lr=0.1)
    error = ""
    try:
        for step, which in enumerate((0, 1, 1, 0)):
            model(batch(step, dist.get_rank()), which).backward()
            (sum(plain(batch(step, rank), which) for rank in range(ranks)) / ranks).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=optimizer is optimizers[1] and odd == dist.get_rank())
    except gemini.RankMismatch as e:
        error = str(e)
    world = world_of(model)
    steps = {handle.name: handle.num_steps for handle in world.handles}
    if error:
        return error, steps, [], []
    return error, steps, [model.full_param(name) for name in steps], [param.detach() for param in plain.parameters()]


def test_gradients_of_zeros(pool_of: Pools) -> None:
    for error, steps, managed, plain in pool_of(2).run(zeros, None):
        assert not error and steps == {"0.weight": 4, "0.bias": 4, "1.weight": 3, "1.bias": 3}
        for ours, theirs in zip(managed, plain, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    for error, steps, *_ in pool_of(2).run(zeros, 1):
        assert "what zero_grad(set_to_none=False) left of '0.weight': zeros on rank 0, nothing on rank 1" in error
        assert steps == {"0.weight": 1, "0.bias": 1, "1.weight": 0, "1.bias": 0}


def guess_over_replicas() -> None:
    model = small(mesh=init_device_mesh("cpu", (2, 1)))
    optimizer = gemini.HybridAdam(model.parameters(), step_in_backward=True, speculate=True)
    backward(model)
    optimizer.step()


def test_replicas_do_not_guess(pool_of: Pools) -> None:
    for failure in pool_of(2).outcomes(guess_over_replicas):
        assert "speculate=True with replicas" in failure.text
