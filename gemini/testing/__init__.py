"""What tests and benchmarks need and no user: a GPU for machines without one, and a clock for it.

Nothing below imports it. ``import gemini.testing`` makes ``device="standin"`` a device.
"""

from gemini.testing.standin import RandomClock as RandomClock
from gemini.testing.standin import StandinDevice as StandinDevice

__all__ = ["RandomClock", "StandinDevice"]
