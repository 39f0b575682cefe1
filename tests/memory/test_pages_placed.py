"""Pages that are touched by many threads, and come from the NUMA nodes that they are wanted from."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

import pytest

from gemini.memory import system
from gemini.memory.devices import pages
from gemini.memory.devices.cuda import CudaDevice
from gemini.memory.devices.pages import HUGE_PAGE, PAGE, Pages, host_bytes

SIZE = 4 * HUGE_PAGE


def said_of(made: Pages | int) -> dict[str, str]:
    """What the system says of the mapping that a range begins."""
    address = made if isinstance(made, int) else made.address
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy, *rest = line.split()
        if int(start, 16) == address:
            return {"policy": policy, **dict(part.split("=") for part in rest if "=" in part)}
    return {}


def present(made: Pages) -> int:
    """Bytes of a range that have a page."""
    _mincore = ctypes.CDLL(None, use_errno=True).mincore
    states = (ctypes.c_ubyte * (made.num_bytes // PAGE))()
    assert _mincore(ctypes.c_void_p(made.address), ctypes.c_size_t(made.num_bytes), states) == 0
    return PAGE * sum(state & 1 for state in states)


def test_all_pages_are_present_after_a_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_TOUCHED_AT_ONCE", 3 * PAGE)
    made = Pages(10 * PAGE)
    made.touch()
    assert present(made) == 10 * PAGE and int(made.tensor().count_nonzero()) == 0


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM])
def test_a_system_that_cannot_populate_is_touched_byte_by_byte(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def madvise(self, address: int, num_bytes: int, advice: int) -> int:
            ctypes.set_errno(error)
            return -1

    made = Pages(10 * PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(pages, "_libc", Old())
        if error == errno.EINVAL:
            made.touch()
        else:
            with pytest.raises(MemoryError, match="no memory for 40960 bytes of pages"):
                made.touch()
    assert present(made) == (10 * PAGE if error == errno.EINVAL else 0)


def can_bind() -> bool:
    return bool(system.memory_nodes()) and Pages(PAGE).come_from(system.memory_nodes()[:1])


needs_numa = pytest.mark.skipif(not can_bind(), reason="this system does not say where pages come from")


@needs_numa
def test_the_system_notes_where_pages_are_to_come_from() -> None:
    node, *_ = nodes = system.memory_nodes()
    near, spread = Pages(SIZE), Pages(SIZE)
    assert near.come_from((node,)) and spread.come_from(nodes * 2)  # several, where the machine has one
    near.touch(), spread.touch()
    listed = ",".join(map(str, nodes)) if len(nodes) < 3 else f"{nodes[0]}-{nodes[-1]}"
    assert said_of(near)["policy"].startswith(("prefer:", "prefer")) and str(node) in said_of(near)["policy"]
    assert said_of(spread)["policy"] == f"interleave:{listed}"
    assert f"N{node}" in said_of(near), "the pages that are there"


@needs_numa
def test_weights_are_near_the_card_and_states_everywhere(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of which the second is not there: only the calls tell."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(Pages, "come_from", lambda made, nodes: asked.append(tuple(nodes)))
    monkeypatch.setattr("gemini.memory.devices.cuda.memory_nodes", lambda: (0, 1))
    monkeypatch.setattr("gemini.memory.devices.cuda._node_of", lambda device: 1)
    device = CudaDevice(__import__("torch").device("cuda", 1))
    device.make_host_buffer(PAGE)
    device.make_kept_buffer(PAGE)
    assert asked == [(1,), (0, 1)]
    device.close()
    del asked[:]
    host_bytes(PAGE, (0,))
    assert not asked, "with one node there is nothing to choose"


def test_nodes_are_read_from_what_the_system_says(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t0-2,5\n")
    assert system.memory_nodes(status) == (0, 1, 2, 5) and system.memory_nodes(tmp_path / "none") == ()
    for address, said in {"0000:41:00.0": "1\n", "0000:42:00.0": "-1\n"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(said)
    assert [system.node_of_pci(f"0000:4{n}:00.0", tmp_path) for n in (1, 2, 3)] == [1, None, None]
