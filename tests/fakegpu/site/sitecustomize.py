"""With this folder on PYTHONPATH every Python that starts computes on the runtime of ``cudart.cpp``."""

from tests.fakegpu import computing, launches

computing.install()
launches.install()
