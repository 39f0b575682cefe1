"""Door of a source checkout to ``integrations/`` at the repository root; an installed package has the folder itself."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "integrations")]
