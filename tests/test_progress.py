"""The limit on progress: what is slow is waited for, what hangs is not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from benchmarks._progress import NoProgress, Progress, finish, join, run

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="progress is told by /proc")

WORKS = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\nprint('done')"
SAYS = "import time\nfor i in range(5):\n    print(i, flush=True)\n    time.sleep(0.3)"
A_CHILD_WORKS = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORKS!r}])"
HANGS = "import time\nprint('here', flush=True)\nwhile True: time.sleep(0.05)"


@pytest.mark.parametrize("code", [WORKS, SAYS, A_CHILD_WORKS], ids=["works", "says", "its child works"])
def test_what_goes_on_is_waited_for_longer_than_the_patience(code: str) -> None:
    done = run([sys.executable, "-c", code], patience=1.0)
    assert done.returncode == 0 and done.stdout.split()[-1:] in (["done"], ["4"])


def test_what_hangs_is_ended_with_what_it_has_said() -> None:
    with pytest.raises(NoProgress, match="no progress for 1 s\n.*here"):
        run([sys.executable, "-c", HANGS], patience=1.0)
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    with pytest.raises(NoProgress):
        finish(process, patience=1.0)
    assert process.poll() is not None
    stopped = threading.Event()
    thread = threading.Thread(target=stopped.wait)
    thread.start()
    with pytest.raises(NoProgress, match="thread"):
        join(thread, patience=0.5)
    stopped.set()
    join(thread)


def test_a_process_that_ended_makes_no_progress() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    progress = Progress([process.pid, os.getpid()], "it", patience=0.2)
    with pytest.raises(NoProgress, match="it has made no progress"):
        while True:
            time.sleep(0.1)
            progress.check()
