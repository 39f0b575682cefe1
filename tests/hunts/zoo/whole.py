"""The loss and gradients of a tiny language model on a long batch, to compare with what is computed in parts."""

import argparse
import copy
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from torch import nn

from gemini.errors import GeminiError
from tests.hunts.zoo.mappings import Entry, all_entries
from tests.hunts.zoo.runner import Untried, build, find_batches, loss_of, seed_all

Gradients = dict[str, torch.Tensor]
Compute = Callable[[nn.Module, dict[str, Any]], tuple[float, Gradients, str]]
"""The loss, the gradients, and what else is to be told, of a model and a batch."""


@dataclass(frozen=True)
class Limits:
    """How far what is computed in parts may be off."""

    loss: float
    """As a part of the loss; 0 for the same bits."""
    gradient: float
    """As a part of the largest element of the same gradient, or of a thousandth of the largest of all."""


def without_dropout(model: nn.Module) -> nn.Module:
    """Dropout draws other numbers in parts than in one."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    return model


def long(batch: dict[str, Any], tokens: int, rounded: int = 1) -> dict[str, Any]:
    """The same batch, so often after itself that it has three times ``tokens`` and more: what has a length of tokens.
    ``rounded``: and that times as often.
    """
    length = next((v.shape[1] for k, v in batch.items() if k == "input_ids" and isinstance(v, torch.Tensor)), 0)
    times = -(-3 * tokens // max(length, 1)) * rounded
    return {
        k: v.repeat(1, times) if isinstance(v, torch.Tensor) and v.dim() == 2 and v.shape[1] == length else v
        for k, v in batch.items()
    }


def gradients(model: nn.Module, batch: dict[str, Any], seed: int = 0) -> tuple[float, Gradients]:
    loss, _ = loss_of(model, batch, seed)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compare(
    entry: Entry, lengthen: Callable[[dict[str, Any]], dict[str, Any]], in_parts: Compute, limits: Limits
) -> tuple[str, str]:
    """How it ended, and what is to be said of it."""
    seed_all(0)
    try:
        batches, how = find_batches(entry, "fp32")
        batch = batches(0)
        if how != "loss" or not isinstance(batch.get("labels"), torch.Tensor):
            return "untried", "no loss or no labels of its own"
        batch = lengthen(batch)
        model = without_dropout(build(entry))
        loss, wanted = gradients(copy.deepcopy(model), batch)
    except Untried as e:
        return "untried", str(e)[:100]
    except Exception as e:
        return "untried", f"longer: {type(e).__name__} {str(e)[:80]}"
    try:
        found, got, told = in_parts(model, batch)
    except Untried as e:
        return "untried", str(e)
    except Exception as e:
        if isinstance(e, GeminiError) or (isinstance(e, ValueError) and "sequence_batch" in str(e)):
            return "refused", re.sub(r"^(context parallel[^:]*|tile_tokens=\d+): ", "", str(e))[:120]
        return "FAILED", f"{type(e).__name__}: {str(e)[:120]}"
    least = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    worst = max(
        float((got[n] - g).abs().max()) / max(float(g.abs().max()), least) if n in got else float("inf")
        for n, g in wanted.items()
        if float(g.abs().max()) or n in got
    )
    told += f"loss off by {abs(found - loss):.1e}, gradients by {worst:.1e}"
    if not abs(found - loss) <= limits.loss * max(abs(loss), 1):
        return "LOSS", told
    return ("right" if worst <= limits.gradient else "GRADIENT"), told


def make_parser(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="classes whose name matches this regular expression")
    return parser


def hunt(kinds: tuple[str, ...], only: str, ends: Callable[[Entry], tuple[str, str]]) -> int:
    """Print how each class ended; the exit code: 1 if one ended otherwise (in capital letters)."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for kind, entry in all_entries():
        if kind in kinds and re.search(only, entry.name):
            end, words = ends(entry)
            counts[end] += 1
            print(f"{end:9} {entry.name:45} {words}", flush=True)
    print(dict(counts))
    return int(any(end.isupper() for end in counts))
