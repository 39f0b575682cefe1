"""What the general rules get wrong for single models: fields of tiny configs, by model type."""

from __future__ import annotations

from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {}

INPUTS: dict[str, Any] = {}
"""By class name or model type: a function of the Batches that makes the whole batch, or ("+", function) to add to it."""

CLASS_CONFIGS: dict[str, dict[str, Any]] = {}
"""Fields that a single class needs, by class name; "model_type" says which config it takes."""
