"""Pages that are touched by many threads."""

from __future__ import annotations

import ctypes
import errno

import pytest

from gemini.memory.devices import pages
from gemini.memory.devices.pages import PAGE, Pages


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
