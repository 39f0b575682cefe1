"""How much memory of its own this process takes at the peak of something."""

import threading
import time
from collections.abc import Callable
from typing import Any


def anonymous_bytes() -> int:
    """Mapped pages of files do not count: the system takes them back at will."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def rise_over(call: Callable[[], Any]) -> tuple[int, Any]:
    """How much more anonymous memory this process had at any moment of a call, and what that gave."""
    before, peak, done = anonymous_bytes(), 0, False

    def watch() -> None:
        nonlocal peak
        while not done:
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = call()
    finally:
        done = True
        thread.join()
    return peak - before, result
