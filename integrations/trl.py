"""TRL's trainers with the model managed by Gemini, ready made: ``GeminiSFTTrainer``, ``GeminiDPOTrainer``, ...

    from gemini.integrations.trl import GeminiDPOTrainer as DPOTrainer

Each takes ``gemini_config=`` besides its own arguments, as :class:`~gemini.integrations.huggingface.GeminiTrainerMixin`
says; put that mixin before any other trainer. A class is made, and its trainer imported, when it is first asked for.
"""

from __future__ import annotations

import copy
from statistics import median
from typing import Any

import torch
from transformers import Trainer

try:
    import trl
except ImportError as e:
    raise ImportError(
        f"gemini.integrations.trl needs trl 1.0 or newer ({e}), the extra 'train' of Gemini: pip install 'trl>=1.0'",
        name="trl",
    ) from e

from gemini.errors import counted

from .huggingface import GeminiTrainerMixin

__all__ = [f"Gemini{kind}Trainer" for kind in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation")]


class _OwnLoss:
    """For ``SFTTrainer``: where layers, sequences or tokens are cut, the loss is the model's own."""

    has_own_loss = True
    args: Any
    accelerator: Any
    model: Any
    current_gradient_accumulation_steps: int
    _metrics: dict[str, Any]
    _total_train_tokens: int

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As TRL's, which multiplies by the whole weight of the output head in tiles of its own: slices of that weight
        and Gemini's tiles need the model's forward pass.
        """
        cut = self.accelerator.tensor_size * self.accelerator.context_size > 1
        if not cut and self.model._gemini_engine.config.tile_tokens is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        loss, outputs = Trainer.compute_loss(self, model, {**inputs, "use_cache": False}, True, num_items_in_batch)
        balance = outputs.get("aux_loss") if isinstance(outputs, dict) else None
        if balance is not None and num_items_in_batch is not None:
            # The Trainer's factors are for sums over tokens; the loss for the balance of experts is a mean.
            excess = self.args.world_size - 1 / self.current_gradient_accumulation_steps
            loss = loss - excess * model.config.get_text_config().router_aux_loss_coef * balance.to(loss.device)
        if model.training:  # what TRL counts beside its loss
            mask = inputs.get("attention_mask")
            count = torch.as_tensor(inputs["input_ids"].numel(), device=loss.device) if mask is None else mask.sum()
            count = self.accelerator.gather_for_metrics(count).sum().item()
            self._total_train_tokens += int(count) // self.accelerator.tensor_size
            self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return (loss, outputs) if return_outputs else loss


class CountsRows:
    """Put before a trainer of TRL's that tokenizes rows: ``told`` says of each dataset what is cut or left out. That
    takes a second pass over the rows.

    Raises:
        ValueError: where nothing is left of any row.
    """

    told: tuple[str, ...] = ()

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        prepare: Any = super()._prepare_dataset  # type: ignore[misc]
        kept = prepare(dataset, processing_class, args, *rest)
        most = getattr(args, "max_length", None)
        if most is None or not hasattr(dataset, "__len__") or "input_ids" in dataset.column_names:
            return kept
        uncut = copy.copy(args)
        uncut.max_length = None
        # SFT's comes with whether to pack and a function before the name: whole rows are not packed.
        packs = len(rest) == 3 and rest[0]
        whole = prepare(dataset, processing_class, uncut, *([False, *rest[1:]] if len(rest) == 3 else rest))
        lengths = lengths_of(whole)
        cut = 0 if packs and args.packing_strategy != "bfd" else sum(length > most for length in lengths)
        left_out = 0 if packs else len(whole) - len(kept)
        parts = [f"{'rows' if rest[-1] == 'train' else 'rows to evaluate on'}: {len(lengths):,}"]
        parts += [f"packed into {counted(len(kept), 'sequence')} of max_length {most}"] if packs else []
        parts += [f"{cut:,} longer than max_length {most}"] if cut or not packs else []
        parts += [f"{left_out:,} left out"] if left_out else []
        parts += [f"longest {max(lengths, default=0):,}, median {int(median(lengths or [0])):,} tokens"]
        hint = " (a larger max_length cuts fewer, and takes more memory)" if cut or left_out else ""
        line = "; ".join(parts) + hint
        self.told = (*self.told, line)
        if not len(kept):
            raise ValueError(f"max_length {most} leaves nothing of any row to learn: give a larger one. {line}")
        return kept


def lengths_of(rows: Any) -> list[int]:
    """The tokens of each row: of a pair of answers those of the longer one."""
    parts = [c for c in rows.column_names if c in ("input_ids", "prompt_ids", "completion_ids")]
    pair = [c for c in rows.column_names if c in ("chosen_ids", "rejected_ids")]
    return [
        sum(len(row[c]) for c in parts) + max((len(row[c]) for c in pair), default=0)
        for row in rows.select_columns(parts + pair)
    ]


def __getattr__(name: str) -> type[Any]:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(__all__)}")
    stock = getattr(trl, name.removeprefix("Gemini"))
    about = (
        f"``trl.{stock.__name__}`` with the model managed by Gemini: takes ``gemini_config=`` besides its arguments."
    )
    bases = (*([_OwnLoss] if name == "GeminiSFTTrainer" else []), GeminiTrainerMixin, stock)
    return globals().setdefault(name, type(name, bases, {"__doc__": about, "__module__": __name__}))  # type: ignore[no-any-return]
