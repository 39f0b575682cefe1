"""What all tests share: no network, one torch thread, an order, and lines that tests want to see at the end of the run.

torch's own products change bits between one thread and two on some shapes, so a comparison of bits needs a fixed count.
The product never sets one; the tests do, here. A test that counts what it saw (``summary("180 placements ...")``) is
reported after the run, because a property test that never met its hard cases proves nothing.

What is quick and what is slow is decided here too: of a test that runs for every combination of its parameters, the
quick suite keeps a choice in which every value occurs (``tests/sweeps.py``), and ``make test-slow`` runs what lets
every two values meet in some test of a file.

Whole files are given to several processes (pytest-xdist, ``--dist loadfile``), and all of ``tests/ranks`` to one of
them, of the slow ones to two: its pools of processes take longer to start than most tests on them. What takes longest
comes first, so that none of it is left for the end, when the other processes have nothing more to do.
"""

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Before transformers is imported: no test may look for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Of the processes that tests start, too: what they compute is compared with what is computed here.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402

import tests.standin_device  # noqa: E402, F401 - "standin" is a device then
from tests import sweeps  # noqa: E402

torch.set_num_threads(1)  # collection computes a little, too

LONGEST = """
test_train_job test_pipeline test_rank_exactness test_rank_behaviour test_sharding test_checkpoints test_train
test_fastest test_plan_command test_exactness test_compiled test_memory test_lightning_ranks test_doc_blocks
test_program_hunt test_launchers test_patches
test_faults test_native_process test_quantized_base test_hf_saving test_behaviour test_checkpoint
test_durable test_streamed test_plan_runs test_spill_file test_peft_training test_progress test_update_rules
test_activation_overlap test_races test_wrong_uses test_access test_model_zoo test_moves test_mesh test_loading
test_docs_pages test_export test_max_norm test_optimizer test_device_kernels test_pictures
test_door
""".split()
"""Files by the seconds they take, quick or slow, the longest first (ranks before all, being one); the others follow."""

CUT_MODELS = (
    "test_pipeline", "test_tensor_parallel", "test_expert", "test_slice", "test_meshes", "test_context_parallel",
)  # fmt: skip
"""Of the ranks' files those that take half of the time of the slow ones."""

NO_POOL = ("test_launchers", "test_train_step")
"""Those that start processes of their own, or none: files like others."""

_LINES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):  # else pytest-xdist puts the files with most tests first
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    in_two = config.getoption("markexpr").startswith("slow")

    class FewForAllRanks(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder, _, name = nodeid.partition("::")[0].rpartition("/")
            if folder != "tests/ranks" or name.startswith(NO_POOL):
                return str(super()._split_scope(nodeid))
            is_second = in_two and name.startswith(CUT_MODELS)
            return "tests/ranks, cut models" if is_second else "tests/ranks"

    return FewForAllRanks(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks to leave out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sweeps.mark_slow(items)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Lightning sets the number by the cores where OMP_NUM_THREADS does not say it, and leaves it so."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """What was imported stays: a collection of garbage, and tests ask for many, need not look at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """Frameworks make a default process group and leave it: the next file begins without one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line now and once more at the end of the run."""
    lines = request.config.stash.setdefault(_LINES, [])

    def say(line: str) -> None:
        print(line)
        lines.append(line)

    return say


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # one of several processes (pytest-xdist): the first one reports
        session.config.workeroutput["seen"] = session.config.stash.get(_LINES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    node.config.stash.setdefault(_LINES, []).extend(getattr(node, "workeroutput", {}).get("seen", []))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    lines = config.stash.get(_LINES, [])
    if lines:
        terminalreporter.section("what the tests saw")
        for line in lines:
            terminalreporter.write_line(line)
