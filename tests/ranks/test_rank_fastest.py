"""The quickest step on two ranks: both keep as many blocks, from the first step on and after the second look."""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gemini.ranks.agree import checksum_of
from gemini.train import second_look
from tests.train.test_step_fastest import SLOW_LINK, machine, made, steps, wrap
from tests.world import world_of


def run(path: str, step: str, told: dict[str, float], found: dict[str, float]) -> Any:
    """Losses, kept blocks by step, a checksum of the masters, and how many steps followed a script."""
    warnings.filterwarnings("ignore", "step=.fastest.")
    second_look.corrected_by = lambda *_: machine(**found)  # type: ignore[assignment]
    how: dict[str, Any] = {"hardware": machine(**told), "offload_activations": "cpu", "step": step}
    if step == "given":
        how |= {"kept_blocks": None, "trace": None}
    model = wrap(made(), Path(path, str(dist.get_rank())), gpu="2500KiB", nvme=None, **how)
    losses, numbers, masters = steps(model)
    return losses, numbers, [checksum_of(value) for value in masters.values()], world_of(model).shards.num_scripted


def test_both_ranks_change_at_the_same_step(pool_of: Any, tmp_path: Path) -> None:
    plain = pool_of(2).run(run, str(tmp_path), "given", {}, {})
    for told, found in ((SLOW_LINK, {}), ({}, SLOW_LINK)):
        both = pool_of(2).run(run, str(tmp_path), "fastest", told, found)
        for own, other in zip(plain, both, strict=True):
            assert other[0] == own[0] and other[2] == own[2]
            assert other[1] == both[0][1] and {*other[1][:3]} != {*other[1][3:]}
