"""``MetricsCallback``: what Gemini knows of a step, for whoever a Trainer tells of its losses."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class MetricsCallback(TrainerCallback):
    """Adds to each row that a :class:`~gemini.integrations.huggingface.GeminiTrainerMixin` logs while it trains: what
    each tier holds and held at most (``cpu_bytes``, ``cpu_peak_bytes``), the seconds that computing waited in the last
    step by cause (``waits_for_...``), and the means since the last row: ``step_seconds``, ``seconds_left``, and
    ``tokens_per_second`` where the trainer counts tokens (``num_tokens``: TRL's do).

    The mixin calls it before all others, so that trackers and ``state.log_history`` have it too. Bytes and waits are
    those of this process.
    """

    def __init__(self) -> None:
        self._since = 0.0  # when the rows since the last one began, after which step, after how many tokens
        self._at = 0
        self._seen: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since, self._at = time.perf_counter(), state.global_step
        self._seen = 0.0 if state.global_step == 0 else None  # of a resumed run a trainer may count anew or on

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], model: Any = None, **_: Any) -> None:
        engine = getattr(model, "__dict__", {}).get("_gemini_engine")  # of a managed model
        if "loss" not in logs or engine is None:
            return
        now, steps = time.perf_counter(), max(1, state.global_step - self._at)
        seconds = (now - self._since) / steps
        tokens = logs.get("num_tokens")
        found = {"step_seconds": seconds, "seconds_left": seconds * (state.max_steps - state.global_step)}
        if tokens is not None and self._seen is not None:
            found["tokens_per_second"] = (tokens - self._seen) / max(now - self._since, 1e-9)
        self._since, self._at, self._seen = now, state.global_step, tokens
        store = engine.store  # memory_report() would wait for the updates that are in flight
        for tier in store.ledger.tiers:
            found[f"{tier.value}_bytes"] = store.ledger.used(tier)
            found[f"{tier.value}_peak_bytes"] = store.ledger.peak(tier)
        for cause, waited in store.mover.watch.stalls.items():
            found[f"waits_for_{cause.replace(' ', '_')}"] = waited
        logs.update(found)
        state.log_history[-1].update(found)  # the Trainer has put a copy there before
