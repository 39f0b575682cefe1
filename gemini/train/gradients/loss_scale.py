"""The dynamic loss scale that an fp16 model has of its own, for plain backwards (``scaled_backward``).

It multiplies the gradient of a loss that the model computes itself, so that ``loss.backward()`` stays plain. A step
whose gradients are not finite is skipped and halves the scale; ``growth_interval`` good steps in a row double it (the
scheme of Micikevicius et al., "Mixed Precision Training", 2018, with torch.amp's defaults).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Mutable on purpose: one per fp16 model, saved in checkpoints."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    num_good_steps: int = 0
    largest: float = 2.0**24

    def skipped(self) -> None:
        """A step had inf or NaN: its weights, states and counters stay as they were."""
        self.scale = max(self.scale / 2, 2.0**-24)
        self.num_good_steps = 0

    def stepped(self) -> None:
        """A step was made."""
        self.num_good_steps += 1
        if self.num_good_steps >= self.growth_interval:
            self.scale = min(self.scale * 2, self.largest)
            self.num_good_steps = 0
