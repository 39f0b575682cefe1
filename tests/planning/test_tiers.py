"""Sizes in words, budgets, and the ledger's promise: used is the sum of what is held, and never passes the budget."""

import gc
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._progress import PATIENCE
from gemini.errors import BudgetExceeded, human_bytes, parse_bytes
from gemini.ledger import NEEDED, WELCOME, Ledger, Turn, Want
from gemini.planning import document
from gemini.planning.hardware import FIGURES
from gemini.planning.timeline import TRACKS
from gemini.planning.traffic import path
from gemini.tiers import BOUNDARIES, MemoryBudget, Tier
from gemini.waiting import begin_work
from tests.invariants import check_ledger


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("20GiB", 20 * 2**30), ("20 gib", 20 * 2**30), ("400GB", 400 * 10**9), ("0.5TiB", 2**39), ("1e3 kB", 10**6),
        ("64", 64), ("64B", 64), (" 1 MiB ", 2**20), (".5 KiB", 512), ("2TB", 2 * 10**12), ("3m", 3 * 10**6),
        (4096, 4096), (1.9, 1), (0, 0), ("0", 0),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str | int | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("20 XB", "cannot read"), ("GiB", "cannot read"), ("", "cannot read"), ("1,5 GiB", "cannot read"),
        ("1 2 GiB", "cannot read"), ("-1GiB", "negative"), (-1, "negative"), (float("nan"), "finite"),
        (float("inf"), "finite"), ("nan", "cannot read"), ("1KiBit", "cannot read"),
    ],
)  # fmt: skip
def test_sizes_that_make_no_sense_are_refused_by_name(text: str | float, says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        parse_bytes(text, what="MemoryBudget(cpu=)")
    assert "MemoryBudget(cpu=)" in str(error.value)


@pytest.mark.parametrize("size", [None, True, [1], b"1GiB"])
def test_sizes_of_other_types_are_refused(size: object) -> None:
    with pytest.raises(TypeError, match="'20GiB'"):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (-1536, "-1.5 KiB"), (2**30, "1 GiB"),
        (5 * 2**40, "5 TiB"), (2**52, "4096 TiB"),
    ],
)  # fmt: skip
def test_bytes_in_words(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


@given(st.integers(0, 2**50))
def test_words_are_within_a_thousandth_of_the_bytes(num_bytes: int) -> None:
    assert abs(parse_bytes(human_bytes(num_bytes)) - num_bytes) <= num_bytes / 1000 + 1


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_budget_knows_what_was_declared() -> None:
    budget = MemoryBudget(gpu="1GiB", cpu=4096, nvme_path="/scratch")
    assert budget.bytes_of(Tier.GPU) == 2**30
    assert budget.bytes_of(Tier.CPU) == 4096
    assert budget.bytes_of(Tier.NVME) is None
    assert MemoryBudget(nvme=0).bytes_of(Tier.NVME) == 0


def test_budget_is_checked_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"MemoryBudget\(gpu=\).*cannot read"):
        MemoryBudget(gpu="1 lot")
    with pytest.raises(ValueError, match=r"MemoryBudget\(cpu=\).*negative"):
        MemoryBudget(cpu=-5)
    with pytest.raises(TypeError, match=r"MemoryBudget\(cpu=\)"):
        MemoryBudget(cpu=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nvme_path="):
        MemoryBudget(nvme="1GiB")
    MemoryBudget(nvme="1GiB", nvme_path=Path("/scratch"))


# ---- the ledger ------------------------------------------------------------------------------------------------------


def make_ledger() -> Ledger:
    return Ledger({Tier.CPU: 100, Tier.NVME: 1000})


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    ledger = make_ledger()
    ledger.reserve(Tier.CPU, 99, "weights")
    with pytest.raises(BudgetExceeded) as error:
        ledger.reserve(Tier.CPU, 2, "staging")
    for part in ("staging", "2 B", "cpu", "99 B", "100 B", "1 B"):
        assert part in str(error.value)
    assert (ledger.used(Tier.CPU), ledger.peak(Tier.CPU), ledger.holders(Tier.CPU)) == (99, 99, {"weights": 99})
    check_ledger(ledger)


def test_a_tier_that_does_not_exist_holds_nothing() -> None:
    with pytest.raises(BudgetExceeded, match="no budget"):
        make_ledger().reserve(Tier.GPU, 1, "weights")
    assert make_ledger().tiers == (Tier.CPU, Tier.NVME)


def test_nobody_gives_back_what_they_do_not_hold() -> None:
    ledger = make_ledger()
    ledger.reserve(Tier.CPU, 10, "weights")
    for num_bytes, holder in ((11, "weights"), (1, "grad"), (-1, "weights")):
        with pytest.raises(AssertionError):
            ledger.release(Tier.CPU, num_bytes, holder)
    assert ledger.used(Tier.CPU) == 10


def test_reserving_gives_back_after_an_exception() -> None:
    ledger = make_ledger()
    with pytest.raises(KeyError), ledger.reserving(Tier.CPU, 30, "staging"):
        assert ledger.used(Tier.CPU) == 30
        raise KeyError
    assert ledger.used(Tier.CPU) == 0 and ledger.peak(Tier.CPU) == 30
    with pytest.raises(BudgetExceeded), ledger.reserving(Tier.CPU, 101, "staging"):
        raise AssertionError("the block must not run")
    assert ledger.used(Tier.CPU) == 0
    with ledger.reserving(Tier.CPU, 30, "staging"):
        pass
    assert ledger.used(Tier.CPU) == 30, "what was allocated is there until somebody ends it"


actions = st.tuples(
    st.booleans(), st.sampled_from([Tier.CPU, Tier.NVME]), st.integers(0, 120), st.sampled_from(["a", "b", "c"])
)


@given(st.lists(actions))
def test_the_books_always_balance(steps: list[tuple[bool, Tier, int, str]]) -> None:
    ledger = make_ledger()
    held: dict[tuple[Tier, str], int] = {}
    peak = dict.fromkeys(ledger.tiers, 0)
    for reserve, tier, num_bytes, holder in steps:
        used = sum(n for (at, _), n in held.items() if at is tier)
        if reserve:
            try:
                ledger.reserve(tier, num_bytes, holder)
            except BudgetExceeded:
                assert used + num_bytes > ledger.budget(tier)
                continue
            assert used + num_bytes <= ledger.budget(tier)
            held[tier, holder] = held.get((tier, holder), 0) + num_bytes
            peak[tier] = max(peak[tier], used + num_bytes)
        elif held.get((tier, holder), 0) >= num_bytes:
            ledger.release(tier, num_bytes, holder)
            held[tier, holder] = held.get((tier, holder), 0) - num_bytes
        check_ledger(ledger)
        for t in ledger.tiers:
            assert ledger.used(t) == sum(n for (at, _), n in held.items() if at is t)
            assert ledger.peak(t) == peak[t] <= ledger.budget(t)


def test_check_invariants_sees_a_false_book() -> None:
    ledger = make_ledger()
    ledger.reserve(Tier.CPU, 10, "weights")
    ledger._accounts[Tier.CPU].used = 9
    with pytest.raises(AssertionError, match="holders hold 10"):
        check_ledger(ledger)


def test_threads_never_pass_the_budget_together() -> None:
    ledger = make_ledger()
    num_refused = []

    def take() -> None:
        for _ in range(200):
            try:
                with ledger.reserving(Tier.CPU, 60, "staging"):
                    assert ledger.used(Tier.CPU) <= 100
                ledger.release(Tier.CPU, 60, "staging")
            except BudgetExceeded:
                num_refused.append(1)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_ledger(ledger)
    assert ledger.used(Tier.CPU) == 0 and ledger.peak(Tier.CPU) == 60


# ---- who gives way ---------------------------------------------------------------------------------------------------


class Holder:
    """Holds bytes in pieces, and gives one of them back at a time."""

    def __init__(self, ledger: Ledger, turn: Turn, asked: list[Turn], *pieces: int):
        self.ledger, self.turn, self.asked, self.pieces = ledger, turn, asked, list(pieces)
        ledger.reserve(Tier.CPU, sum(pieces), turn.name)
        ledger.register(turn, self.reclaim, Tier.CPU)

    def reclaim(self, want: Want) -> bool:
        self.asked.append(self.turn)
        if self.pieces:
            self.ledger.release(Tier.CPU, self.pieces.pop(), self.turn.name)
            return True
        return False

    def explain(self, want: Want) -> BudgetExceeded:
        return BudgetExceeded(f"{want.what}: {self.turn.name} has all")


def test_a_model_may_end_in_the_collector_while_its_books_change() -> None:
    """A worker tells of a change, which allocates, and the garbage collector gives back what a model held."""

    class Model:
        def __init__(self) -> None:
            self.itself = self
            ledger.reserve(Tier.CPU, 100, "windows")

        def __del__(self) -> None:
            ledger.release(Tier.CPU, 100, "windows")

    ledger = Ledger({Tier.CPU: 1000})
    Model()
    ledger.on_change = lambda tier, holders: gc.collect() and None
    worker = threading.Thread(target=ledger.take, args=(Tier.CPU, 10, "staging"), daemon=True)
    worker.start()
    worker.join(PATIENCE)
    assert not worker.is_alive() and ledger.holders(Tier.CPU) == {"staging": 10}
    check_ledger(ledger)


def test_who_gives_way_is_asked_in_the_written_order_until_it_fits() -> None:
    ledger, asked = make_ledger(), list[Turn]()
    holders = [Holder(ledger, turn, asked, 20, 10) for turn in (Turn.KEPT, Turn.LANDINGS, Turn.UNKEPT)]
    ledger.reserve(Tier.CPU, 45, "weights")
    assert asked == [Turn.UNKEPT, Turn.UNKEPT, Turn.UNKEPT, Turn.LANDINGS]
    assert [sum(holder.pieces) for holder in holders] == [30, 20, 0]
    asked.clear()
    assert not ledger.reserve_if_room(Tier.CPU, 40, "activations", WELCOME) and asked == [Turn.UNKEPT]
    with pytest.raises(BudgetExceeded, match="sums asked for 56 B"):
        ledger.reserve(Tier.CPU, 56, "sums")
    assert ledger.free(Tier.CPU) == 55, "what moves beside computing gave way one after another, in vain"
    check_ledger(ledger)


def test_who_may_look_into_garbage_is_asked_once() -> None:
    ledger, asked = make_ledger(), list[Turn]()
    holder = Holder(ledger, Turn.GARBAGE, asked, 30, 30, 30)
    assert not ledger.make_room(Tier.CPU, 60) and asked == [Turn.GARBAGE] and len(holder.pieces) == 2


def test_a_worker_asks_nobody_and_a_part_that_is_gone_is_not_asked() -> None:
    ledger, asked = make_ledger(), list[Turn]()
    holder = Holder(ledger, Turn.KEPT, asked, 60)
    had_room = list[bool]()

    def work() -> None:
        begin_work()
        had_room.extend(ledger.reserve_if_room(Tier.CPU, num_bytes, "staging", NEEDED) for num_bytes in (40, 1))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert had_room == [True, False] and not asked
    assert ledger.make_room(Tier.CPU, 10) and asked == [Turn.KEPT]
    del holder
    assert not ledger.make_room(Tier.CPU, 100) and asked == [Turn.KEPT]


def test_where_windows_have_memory_of_their_own_they_are_not_asked_for_anything_else() -> None:
    ledger, asked = make_ledger(), list[Turn]()
    windows = Holder(ledger, Turn.UNKEPT, asked, 100)
    ledger.register_windows(Tier.CPU, windows.explain, apart=True)
    with pytest.raises(BudgetExceeded, match="a sum: UNKEPT has all"):
        ledger.reserve(Tier.CPU, 1, "sums", what="a sum")
    assert not asked


# ---- what is known of a tier -----------------------------------------------------------------------------------------


def test_every_tier_is_described_where_others_look_it_up() -> None:
    for tier in Tier:
        assert tier.spec.title and set(tier.spec.figures) <= set(FIGURES)
        assert (tier.spec.through is None) == (tier is Tier.CPU) == (not tier.spec.ways)
        assert {way.figure for way in tier.spec.ways} <= set(FIGURES)
    assert set(TRACKS) == set(BOUNDARIES) and len(set(TRACKS.values())) == len(BOUNDARIES)


def test_bytes_go_through_host_memory() -> None:
    down, up = path(Tier.GPU, Tier.NVME), path(Tier.NVME, Tier.GPU)
    assert [str(boundary) for boundary in (*down, *up)] == ["gpu->cpu", "cpu->nvme", "nvme->cpu", "cpu->gpu"]
    assert [boundary.way.figure for boundary in (*down, *up)] == ["d2h", "nvme_write", "nvme_read", "h2d"]
    assert not path(Tier.CPU, Tier.CPU) and {boundary.outer for boundary in down} == {Tier.GPU, Tier.NVME}


def test_a_tier_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="'remote'"):
        document.read({"cpu": 1, "remote": 2}, dict[Tier, int])
    with pytest.raises(TypeError, match="remote"):
        MemoryBudget(remote="1GiB")  # type: ignore[call-arg]
