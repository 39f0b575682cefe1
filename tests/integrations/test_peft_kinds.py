"""Methods of PEFT on kinds of layers: the bits of PEFT alone, or a refusal with a sentence.

Each third of all there are; ``benchmarks/peft_kinds.py`` runs them all, on NVMe too, and writes the table of lora.md.
"""

from collections.abc import Callable
from pathlib import Path

import peft
import pytest

from benchmarks.peft_kinds import cases, row_of


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(every=6)
@pytest.mark.parametrize(
    ("method", "layer", "config"), cases()[::3], ids=lambda value: value if isinstance(value, str) else ""
)
def test_trained_merged_disabled_saved(
    method: str, layer: str, config: Callable[[], peft.PeftConfig], tmp_path: Path
) -> None:
    cells = row_of(method, layer, config, tmp_path)
    if not isinstance(cells, Exception):  # else PEFT alone does not take it
        assert "trained" in cells
        refused = method in ("AdaLoRA", "cartridge") or layer == "MultiheadAttention"
        for step, cell in cells.items():
            assert not any(word in cell for word in ("RAW", "DIFFERS", *(() if refused else ("refused",)))), (
                step,
                cell,
            )
