"""``GeminiConfig(eviction=)``: a policy decides what moves and never what comes out, and has to make sense."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.errors import GeminiError
from gemini.planning.policy import Candidate, NextUse
from tests.train.helpers import make_config, same_bits
from tests.world import world_of

WIDTH, LAYERS = 128, 6
WINDOW = 36 * 2**10  # of one layer: 128 * 129 weights in bf16, in whole pages


class SoonestFirst:
    """A user's own, and not a good one: what is needed next goes first."""

    def __init__(self) -> None:
        self.times_asked = 0

    def choose(self, candidates: Sequence[Candidate], missing: int) -> tuple[int, ...] | None:
        self.times_asked += 1
        victims: list[int] = []
        for candidate in sorted(candidates, key=lambda each: each.next_use or 0):
            if missing > 0:
                victims.append(candidate.chunk)
                missing -= candidate.num_bytes
        return tuple(victims) if missing <= 0 else None


class Answers:
    """The same answer whenever something has to go."""

    def __init__(self, answer: Any):
        self._answer = answer

    def choose(self, candidates: Sequence[Candidate], missing: int) -> Any:
        return self._answer if candidates and missing > 0 else None if missing > 0 else ()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def wrap(folder: Path, **how: Any) -> Any:
    """Six equal layers on NVMe, of which three fit into memory."""
    roomy = make_config(layers(), "disk", folder, slack=2**20)
    needed = world_of(gemini.GeminiDDP(layers(), replace(roomy, overlap=how.get("overlap", True)))).problem.spoken_for()
    memory = replace(roomy.memory, cpu=needed[gemini.Tier.CPU] + 2 * WINDOW)
    return gemini.GeminiDDP(layers(), replace(roomy, memory=memory, **how))


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(folder: Path, **how: Any) -> tuple[dict[str, torch.Tensor], int]:
    """The weights after four steps, and how often some were gathered."""
    model = wrap(folder, **how)
    optimizer = gemini.HybridAdam(model.parameters(), lr=1e-2)
    for seed in range(4):
        step(model, optimizer, seed)
    world_of(model).check()
    return {**model.state_dict()}, world_of(model).num_gathers


@pytest.mark.parametrize("overlap", (False, True))
def test_policies_move_other_bytes_and_train_to_the_same_ones(overlap: bool, tmp_path: Path) -> None:
    expected, fewest = trained(tmp_path, overlap=overlap)
    gathered = {}
    own = SoonestFirst()
    for name, policy in {"next_use": NextUse(), "own": own}.items():
        weights, gathered[name] = trained(tmp_path, overlap=overlap, eviction=policy)
        assert all(same_bits(weights[key], value) for key, value in expected.items()), name
    assert own.times_asked > 0
    # With overlap a fetch ahead takes no window that is read before its own, whoever chooses.
    assert gathered["next_use"] == fewest and (overlap or gathered["own"] > fewest), gathered


def test_a_policy_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for wrong in ("random", SoonestFirst, 3):  # the class in place of an object of it
        with pytest.raises(TypeError, match=r'eviction= is "auto" or an object with choose\(candidates'):
            gemini.GeminiConfig(eviction=wrong)  # type: ignore[arg-type]


def test_a_plan_says_itself_what_is_evicted(tmp_path: Path) -> None:
    plan = world_of(wrap(tmp_path, placement="auto")).plan
    with pytest.raises(ValueError, match="eviction= has no effect with placement=plan"):
        gemini.GeminiConfig(placement=plan, eviction=NextUse())


NONSENSE = {
    "no chunk of those": ((99,), "answered .*99.*: a policy returns a tuple of some of them, each once"),
    "one chunk twice": ((0, 0), "a policy returns a tuple of some of them, each once"),
    "a list": ([0], "a policy returns a tuple of some of them, each once"),
    "nobody": ((), "these free 0 B, and a policy names enough of them or none"),
    "giving up too soon": (None, "all of them have .*, and None is for too little"),
}


@pytest.mark.parametrize("answer, message", NONSENSE.values(), ids=NONSENSE)
def test_an_answer_without_sense_is_an_error_that_says_so(answer: Any, message: str, tmp_path: Path) -> None:
    model = wrap(tmp_path, eviction=Answers(answer))
    with pytest.raises(GeminiError, match="the eviction policy Answers was asked for .* of chunks .*" + message):
        step(model, gemini.HybridAdam(model.parameters(), lr=1e-2))
    world_of(model).check_ledger()
