"""The suite of a real GPU: skipped, after probing, where torch sees none.

``GEMINI_GPU_TESTS=standin`` runs on the stand-in device what can run there, so that no test waits for a GPU to be
executed for the first time. Files named ``test_cuda_*`` and tests that ask for ``card`` are about CUDA itself.
"""

import os

# Before CUDA begins: without a workspace of fixed size cuBLAS may add up in another order from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.gpu.gpu_cases import ON_STANDIN  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" not in str(item.fspath):
            continue
        item.add_marker(pytest.mark.gpu)
        if ON_STANDIN and (item.path.stem.startswith("test_cuda_") or "card" in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.skip(reason="about CUDA itself, which the stand-in is not"))
        elif not ON_STANDIN and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(autouse=True)
def deterministic() -> object:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def card() -> torch.device:
    """A real GPU: the stand-in has no memory of its own that torch counts."""
    return torch.device("cuda", torch.cuda.current_device())
