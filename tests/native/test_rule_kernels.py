"""The kernels of all rules, exact and compact: the bits of their torch lines, on every instruction set and in the text
that the CUDA kernels are compiled from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from rule_cases import (
    CASES,
    COMPACT,
    EXACT,
    WAYS,
    Case,
    arrays,
    assert_alike,
    copied,
    flat,
    renewed,
    updated,
    whole,
)
from torch import Tensor

from gemini import kernels
from gemini.kernels.cuda import _MOST_SEGMENTS
from gemini.rules import Arrays, Segment, Where, kernel_scalars
from tests.native.emulated_cuda import emulate
from tests.native.native_cases import GRAD_DTYPES, LENGTHS, NATIVE_ISAS, any_bits

needs_native = pytest.mark.skipif(not NATIVE_ISAS, reason="the native library is not built")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

N = 9000
_EDGES = [0, 1, 8, 15, 64, 64, 4100, 4101, *range(4200, 4400, 2), 6000, 8999]  # more than one launch holds
BOUNDS = [*zip(_EDGES, _EDGES[1:], strict=False)]
del BOUNDS[3]
OF_BLOCKS = ((0, 1), (64, 130), (192, 256), (256, 1000), (1024, 3001))


def segments_of(case: Case) -> list[Segment]:
    """Parts that begin and end anywhere (compact ones where a block does), touch or leave gaps, of several params."""
    first, second = case.scalars(), case.scalars(grad_scale=0.5)
    return [
        Segment(begin, end, (first, second)[number % 2], Where(f"p{number}", 4096 * number))
        for number, (begin, end) in enumerate(OF_BLOCKS if case.is_compact else BOUNDS)
    ]


def shifted(given: Arrays, by: int) -> Arrays:
    """The same ``by`` elements off an aligned address."""

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + by + 64, dtype=tensor.dtype)
        skip = -room.data_ptr() // room.element_size() % 16 + by  # torch aligns to 64 bytes; do not count on it
        return room[skip : skip + tensor.numel()].copy_(tensor)

    return renewed(given, {name: moved(tensor) for name, tensor in flat(given).items()})


@pytest.mark.sweep(every=1)
@needs_native
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize(("which", "is_split"), WAYS)
def test_every_isa_gives_the_bits_of_the_torch_lines(which: str, is_split: bool, dtype: torch.dtype) -> None:
    case = CASES[which]
    for n in LENGTHS if which in ("adamw", "adam") else (0, 1, 7, 63, 64, 65, 511, 512, 513, 100_003):
        given = arrays(case.rule, n, is_split, dtype)
        expected = updated("reference", case, given, whole(case, n))
        for isa in NATIVE_ISAS:
            assert_alike(updated(isa, case, given, whole(case, n)), expected, f"{isa}, n = {n}")


@pytest.mark.slow  # a compiler runs; the next test shows the same of Adam's
@pytest.mark.sweep(every=1)
@needs_compiler
@pytest.mark.parametrize("shift", [0, 1, 8], ids=["aligned", "not aligned", "some aligned"])
@pytest.mark.parametrize("dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize(("which", "is_split"), WAYS)
def test_the_text_of_the_cuda_kernels_gives_them(
    which: str, is_split: bool, dtype: torch.dtype, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of several params in a launch, of more than one launch holds, and of a launch that is stopped."""
    case = CASES[which]
    given, segments = shifted(arrays(case.rule, N, is_split, dtype), shift), segments_of(case)
    expected = updated("reference", case, given, segments)
    emulated = emulate(monkeypatch)
    into = shifted(given, shift)  # a copy would be aligned
    case.rule.run(into, segments)
    assert_alike(into, expected, which)
    assert_alike(updated("scalar", case, given, segments, torch.ones(1, dtype=torch.int32)), given, "stopped")
    # Of one rule: as many together as a launch holds, once to update and once to be stopped.
    launches = -(-sum(segment.end > segment.begin for segment in segments) // _MOST_SEGMENTS)
    assert emulated.module.launches["update_compact" if case.is_compact else "update"] == 2 * launches


@pytest.mark.parametrize("where", ["emulated", "native", "reference"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "fp32"])
def test_scale_and_stop_are_read_where_they_lie(where: str, is_split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each rule in turn, and none waits."""
    if where == "emulated" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    case, given = EXACT["adamw"], arrays(EXACT["adamw"].rule, 9100, is_split, torch.bfloat16)
    bounds = [(3, 8, "adamw"), (8, 8, "adam"), (64, 4101, "adam"), (5000, 9000, "adamw")]
    segments, quarter = (
        [Segment(begin, end, EXACT[kind].scalars(scale)) for begin, end, kind in bounds] for scale in (0.37, 0.25)
    )
    expected = updated("reference", case, given, quarter)
    emulated = emulate(monkeypatch) if where == "emulated" else None
    scale, stop = torch.tensor([0.25]), torch.zeros(1, dtype=torch.int32)
    isa = "reference" if where == "reference" else kernels.capabilities().isa
    assert_alike(updated(isa, case, given, segments, stop.fill_(1), scale), given, "stopped")
    assert_alike(updated(isa, case, given, segments, stop.fill_(0), scale), expected, where)
    if emulated is not None:
        # Segments of one rule in a row go together; what is empty goes with nothing.
        assert emulated.module.segments == [1, 1, 1] * 2 and emulated.num_fetches == 0


@needs_native
@pytest.mark.parametrize("which", EXACT)
def test_segments_go_each_their_own_way_and_leave_what_is_between(which: str) -> None:
    case = EXACT[which]
    given, segments = arrays(case.rule, N, True, torch.bfloat16), segments_of(case)
    expected = copied(given)
    for begin, end, scalars, _ in segments:
        part = slice(begin, end)
        weights, residual, states, grad = expected
        assert residual is not None
        master = torch.empty(end - begin)
        kernels.join_master(weights[part], residual[part], master)
        case.rule.update(master, grad[part], {kind: state[part] for kind, state in states.items()}, scalars, None)
        kernels.split_master(master, weights[part], residual[part])
    for isa in ("reference", *NATIVE_ISAS):
        assert_alike(updated(isa, case, given, segments), expected, isa)
        flag = torch.ones(1, dtype=torch.int32)
        assert_alike(updated(isa, case, given, segments, flag), given, f"{isa}, stopped")


@needs_native
@pytest.mark.parametrize("which", COMPACT)
def test_parts_of_a_param_have_the_bits_of_the_whole(which: str) -> None:
    """The dither and the blocks depend on the place in the param alone; what is between segments is left."""
    case = COMPACT[which]
    given, scalars = arrays(case.rule, 5000, True, torch.bfloat16), case.scalars()
    at_once = updated("scalar", case, given, [Segment(0, 5000, scalars, Where("w", 4096))])
    cuts = (0, 64, 1024, 4992, 5000)
    parts = [Segment(a, b, scalars, Where("w", 4096 + a)) for a, b in zip(cuts, cuts[1:], strict=False)]
    for isa in ("reference", *NATIVE_ISAS):
        assert_alike(updated(isa, case, given, parts), at_once, isa)
        few, before = flat(updated(isa, case, given, parts[1:2])), flat(given)
        assert torch.equal(few["weights"][1024:].view(torch.int16), before["weights"][1024:].view(torch.int16))
        assert all(torch.equal(few[k][16:], before[k][16:]) for k in before if k.endswith("_scale"))
    other = updated("scalar", case, given, [Segment(0, 5000, scalars, Where("x", 4096))])
    changed = [kind for kind, state in other.states.items() if not torch.equal(state, at_once.states[kind])]
    assert ("exp_avg_sq" in at_once.states) == bool(changed)


def on_lion(**changes: Tensor) -> Callable[[], None]:
    """An update of 64 elements by Lion with other arrays."""

    def run() -> None:
        case, made = EXACT["lion"], {name: any_bits(64, 1).clone() for name in ("weights", "exp_avg", "grad")} | changes
        case.rule.run(Arrays(made["weights"], None, made, made["grad"]), whole(case, 64))

    return run


def in_segments(name: str, bounds: list[tuple[int, int]], **how: Tensor) -> Callable[[], None]:
    def run() -> None:
        case = CASES[name]
        given = arrays(case.rule, 256, True, torch.float32)
        segments = [Segment(begin, end, case.scalars(), Where("w", 0)) for begin, end in bounds]
        case.rule.run(given, segments, **how)

    return run


def compact_with(**changes: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    def run() -> None:
        case = COMPACT["adamw, compact"]
        given = arrays(case.rule, 256, True, torch.float32)
        made = flat(given)
        case.rule.run(renewed(given, made | {name: do(made[name]) for name, do in changes.items()}), whole(case, 256))

    return run


def by_another(scalars: tuple[object, ...], name: str = "lion") -> Callable[[], None]:
    def run() -> None:
        case = CASES[name]
        given = arrays(case.rule, 256, case.is_compact, torch.float32)
        kernels.update(given, case.rule.spec, [Segment(0, 256, scalars, Where("w", 0))])

    return run


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "a state in bf16": (on_lion(exp_avg=torch.ones(64).bfloat16()), "exp_avg: bfloat16 .*accepted: float32"),
    "behind the end": (in_segments("lion", [(0, 257)]), "segments ascend inside the 256 elements"),
    "before one": (in_segments("adamw", [(0, 5), (4, 8)]), r"\[4, 8\) was given behind element 5"),
    "descending": (in_segments("adamw", [(5, 8), (0, 5)]), r"\[0, 5\) was given behind element 8"),
    "backwards": (in_segments("adamw", [(4, 2)]), r"\[4, 2\)"),
    "negative": (in_segments("adamw", [(-1, 2)]), r"\[-1, 2\)"),
    "scale": (
        in_segments("adamw", [], grad_scale=torch.ones(1, dtype=torch.float64)),
        r"grad_scale: float64 .*accepted: float32; 1-D, contiguous, 1 elements on cpu",
    ),
    "stop": (
        in_segments("adamw", [], stop=torch.zeros(2, dtype=torch.int32)),
        r"stop: int32 of shape \(2,\) .*accepted: int32; 1-D, contiguous, 1 elements",
    ),
    "inside a block": (in_segments("adamw, compact", [(32, 256)]), "begin at multiples of 64"),
    "exact residual": (compact_with(residual=Tensor.short), r"residual: int16 of shape .*accepted: int8"),
    "few scales": (
        compact_with(exp_avg_scale=lambda scales: scales[:3]),
        "exp_avg_scale: .*accepted: uint8; .* 4 elements",
    ),
}
BY_ANOTHER: dict[str, tuple[Callable[[], None], str]] = {
    "states": (by_another(EXACT["adamw"].scalars()), "states of another rule"),
    "scalars": (by_another((1.0, "lion")), "scalars of another rule"),
    "no rule": (by_another((1.0, "tiger")), "no rule is called tiger"),
    "no compact form": (
        by_another(kernel_scalars("average", **dict.fromkeys("abc", 0.0)), "lion, compact"),
        "a rule without a compact form",
    ),
}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        *(pytest.param(*case, id=name) for name, case in REFUSED.items()),
        *(pytest.param(*case, id=f"another rule, {name}", marks=needs_native) for name, case in BY_ANOTHER.items()),
    ],
)
def test_what_is_no_update_is_refused(run: Callable[[], None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run()
