"""Update rules, from outside and of ``gemini.optim``, on a model that ranks share: the bits of one process, saved by
one number of ranks and loaded by another.

Every rank sees the same batches, so that the mean of their gradients is the gradient of one process to the bit.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gemini
from gemini.planning import rules as spec_rules
from tests.ranks.pool import Pools
from tests.train import test_compact
from tests.train import test_update_rules as rules
from tests.world import world_of


def run(which: str, folder: Path, name: str, load: str | None) -> dict[str, Any]:
    """Train, save to ``folder / name``, train on: losses and states. ``load``: where the first half is, if it is."""
    rule = rules.EVERY[which]
    memory = gemini.MemoryBudget(cpu="64MiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = gemini.GeminiConfig(
        precision="bf16", memory=memory, placement=placement, device="cpu", optimizer=rule, max_chunk=6000
    )
    model = gemini.GeminiDDP(rules.make_model(), config)
    optimizer = rules.make_optimizer(model, rule)
    losses = []
    if load is None:
        losses = rules.train(model, optimizer, range(2), None)
        gemini.save_checkpoint(folder / name, model, optimizer)
    else:
        gemini.load_checkpoint(folder / load, model, optimizer)
    losses += rules.train(model, optimizer, range(2, 4), None)
    states = {name: optimizer.full_state(name) for name, _ in model.named_parameters()}
    return {"losses": losses, "weights": model.state_dict(), "states": states, "bytes": model.memory_report()}


@pytest.mark.sweep(every=6)
@pytest.mark.parametrize("which", [which for which, rule in rules.EVERY.items() if not rule.spec.whole])
def test_two_ranks_do_what_one_process_does(which: str, pool_of: Pools, tmp_path: Path) -> None:
    alone = run(which, tmp_path, "alone", None)
    for found in pool_of(2).run(run, which, tmp_path, "together", None):
        assert found["losses"] == alone["losses"]
        for name, value in alone["weights"].items():
            assert torch.equal(found["weights"][name], value), name
        for name, state in alone["states"].items():
            assert all(torch.equal(found["states"][name][kind], value) for kind, value in state.items()), name
        padding = 4096 * 4 * 20  # chunks and planes of one page on either rank
        assert abs(found["bytes"]["bytes_per_param"] - alone["bytes"]["bytes_per_param"]) * 20_000 < padding
    again = run(which, tmp_path, "", "together")
    assert again["losses"] == alone["losses"][2:]
    for found in pool_of(2).run(run, which, tmp_path, "", "alone"):
        assert found["losses"] == alone["losses"][2:]


def run_compact(which: str, folder: Path, name: str, load: str | None, states: str = "compact") -> dict[str, Any]:
    """The same with compact states: also the codes, as they stand in planes."""
    spec_rules.SMALLEST = 600
    try:
        model = gemini.GeminiDDP(rules.make_model(), test_compact.config_for(which, states=states))
        optimizer = test_compact.make_optimizer(model, which)
        losses = []
        if load is None:
            losses = rules.train(model, optimizer, range(2), None)
            gemini.save_checkpoint(folder / name, model, optimizer)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of what exact states lose
                gemini.load_checkpoint(folder / load, model, optimizer)
        losses += rules.train(model, optimizer, range(2, 4), None)
        by_names = world_of(model).by_names
        planes = {
            f"{name}.{kind}": by_names.read_plane(by_names[name], kind)
            for name, _ in model.named_parameters()
            for kind in ("residual", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
            if kind in by_names[name].chunk.planes
        }
        return {"losses": losses, "weights": model.state_dict(), "planes": planes}
    finally:
        spec_rules.SMALLEST = 65536


@pytest.mark.sweep(every=2)
@pytest.mark.parametrize("which", ["adam", "lion"])
def test_ranks_divide_compact_states_between_blocks(which: str, pool_of: Pools, tmp_path: Path) -> None:
    """No scale is of two ranks' elements, whoever saves, loads or converts."""

    def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
        assert found["losses"] == wanted["losses"]
        for what in ("weights", "planes"):
            assert found[what].keys() == wanted[what].keys()
            for name, value in wanted[what].items():
                assert torch.equal(found[what][name], value), name

    alone = run_compact(which, tmp_path, "alone", None)
    assert sum(v.dtype is torch.int8 for v in alone["planes"].values()) > 10
    for found in pool_of(2).run(run_compact, which, tmp_path, "together", None):
        assert_alike(found, alone)
    wanted = {**alone, "losses": alone["losses"][2:]}
    assert_alike(run_compact(which, tmp_path, "", "together"), wanted)
    for found in pool_of(2).run(run_compact, which, tmp_path, "", "alone"):
        assert_alike(found, wanted)
    run_compact(which, tmp_path, "exact", None, "exact")
    converted = run_compact(which, tmp_path, "", "exact")
    for found in pool_of(2).run(run_compact, which, tmp_path, "", "exact"):
        assert_alike(found, converted)


def refused(which: str, folder: Path) -> str:
    with pytest.raises(ValueError, match="updates whole params") as raised:
        run(which, folder, "never", None)
    return str(raised.value)


def test_a_rule_of_whole_params_is_refused_where_ranks_divide_one(pool_of: Pools, tmp_path: Path) -> None:
    for words in pool_of(2).run(refused, "normed", tmp_path):
        assert "would be divided among 2 ranks" in words and "gemini.optim" in words


def run_sums(folder: Path, mesh: tuple[int, ...] | None) -> tuple[list[float], dict[str, Any]]:
    spec_rules.SMALLEST = 600
    memory = gemini.MemoryBudget(cpu="1GiB", nvme="64MiB", nvme_path=folder)
    placement = gemini.StaticPlacement(weights_on_nvme=1, optimizer_on_nvme=1)
    config = test_compact.config_for("adam", gradients="accumulate_bf16", memory=memory, placement=placement)
    how = {"mesh": torch.distributed.init_device_mesh("cpu", mesh)} if mesh else {}
    model = gemini.GeminiDDP(rules.make_model(), config, **how)
    losses = test_compact.train_summed(model, test_compact.make_optimizer(model, "adam"), range(3))
    return losses, {name: model.full_param(name, torch.float32) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("mesh", [None, (2, 1)], ids=["shards", "replicas"])
def test_two_ranks_sum_up_in_bf16_as_one_process(
    mesh: tuple[int, ...] | None, pool_of: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_rules, "SMALLEST", 600)
    plain = test_compact.plain_loop("adam", range(3), test_compact.CLIP, micro=3)
    for losses, weights in pool_of(2).run(run_sums, tmp_path, mesh):
        assert losses == plain["losses"]
        for name, master in plain["masters"].items():
            assert torch.equal(rules.bits(weights[name]), rules.bits(master)), name


def convert_with_a_past(kind: str, precision: str, differs: bool = False) -> Any:
    """A torch optimizer that has made two steps goes on as one of Gemini's: what came out, or what was refused."""
    from gemini.integrations.rules import to_hybrid

    rule = None if kind == "AdamW" else gemini.optim.adopt(getattr(torch.optim, kind))
    model: Any = rules.make_model()
    optimizer: Any = getattr(torch.optim, kind)(model.parameters(), lr=1e-2)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    rules.train(model, optimizer, range(2), None)
    if differs and torch.distributed.get_rank() == 1:
        next(iter(optimizer.state.values()))["exp_avg"].add_(1)
    gemini.GeminiDDP(model, gemini.GeminiConfig(precision=precision, device="cpu", max_chunk=6000, optimizer=rule))
    try:
        to_hybrid(optimizer)
    except gemini.GeminiError as e:
        return str(e), type(optimizer) is getattr(torch.optim, kind), bool(optimizer.state)
    losses = rules.train(model, optimizer, range(2, 4), None)
    states = {name: optimizer.full_state(name) for name, _ in model.named_parameters()}
    return losses, {name: model.full_param(name, torch.float32) for name in states}, states, len(stepped)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_two_ranks_convert_an_optimizer_as_one_process_does(kind: str, precision: str, pool_of: Pools) -> None:
    losses, weights, states, stepped = convert_with_a_past(kind, precision)
    for found in pool_of(2).run(convert_with_a_past, kind, precision):
        assert (found[0], found[3]) == (losses, stepped) and stepped == 4
        for name, value in weights.items():
            assert torch.equal(found[1][name], value), name
            assert all(torch.equal(found[2][name][kind], state) for kind, state in states[name].items()), name


def test_states_that_differ_between_ranks_leave_the_optimizer_as_it_was(pool_of: Pools) -> None:
    for text, is_torchs, has_states in pool_of(2).run(convert_with_a_past, "AdamW", "fp32", True):
        assert "exp_avg of" in text and is_torchs and has_states
