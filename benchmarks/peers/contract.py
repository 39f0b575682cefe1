"""What every peer has in common: the model, the batches, the hyperparameters, and the orders that it obeys.

A peer is a script with one function, ``build(settings) -> Trainer``, ended by ``contract.run(build)``. It runs in a
virtual environment of its own, so nothing here needs more than torch and transformers. Orders come as lines of JSON on
stdin, each is answered by one line on stdout (``_ranks.serve``), and between them the process sleeps in a read:

    {"order": "begin", "arguments": SETTINGS}       builds the model                    -> versions, sizes, notes
    {"order": "block", "arguments": {"steps": 5}}   trains that many steps, measured    -> seconds, losses, peak RSS

Everybody starts from the same weights, drawn in bf16: DeepSpeed rounds to bf16 before it makes
its masters, so the others may not know more than that.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import _ranks
import torch

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Of AdamW, for everybody."""

WORDS = 256
"""Tokens are drawn from that many of the vocabulary, so that the loss falls within a few steps."""


class Trainer(Protocol):
    """A model in training, whoever trains it."""

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward, clipping if it is asked for, update. The loss, detached."""

    def finish(self) -> None:
        """Wait for whatever the steps so far have left in flight: it belongs to their time."""

    def notes(self) -> dict[str, Any]:
        """What a report should say of this peer: where its states are, which settings were taken."""


def make_model(shape: Mapping[str, int]) -> Any:
    """A Llama in bf16, the same weights in every process. Rotary frequencies stay fp32, as transformers makes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(1, shape["hidden"] // 64)
    config = LlamaConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["hidden"] * 11 // 4,
        num_hidden_layers=shape["layers"], num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=max(shape["seq_len"], 64), use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def make_batch(shape: Mapping[str, int], step: int) -> dict[str, torch.Tensor]:
    """``step`` counts from 0 over the whole life of a peer: at the same step all see the same tokens.

    Frequent words are drawn more often (a squared uniform), so there is something to learn at every learning rate.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    rows, words = shape["tokens"] // shape["seq_len"], min(WORDS, shape["vocab"])
    ids = (torch.rand(rows, shape["seq_len"], generator=generator) ** 2 * words).long()
    return {"input_ids": ids, "labels": ids}


def memory() -> dict[str, int]:
    """Bytes: resident now, and at most since the process began or :func:`forget_peak`, as two sources have it."""
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status if line.startswith(("VmHWM", "VmRSS"))]
    found = {name[:-1]: int(kib) * 1024 for name, kib, _ in lines}
    return found | {"ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def forget_peak() -> bool:
    """Let VmHWM begin anew at what is resident now; False where the system does not offer it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def trim() -> None:
    """Give freed heap memory back to the system, once, after building: what is left over from it is nobody's."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def run(build: Callable[[dict[str, Any]], Trainer]) -> None:
    """Obey orders until stdin ends."""
    _ranks.serve(lambda settings: _orders(build, settings))


def _orders(build: Callable[[dict[str, Any]], Trainer], settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import transformers
    import transformers.models.llama.modeling_llama  # what imports take is not the model's

    torch.set_num_threads(settings["threads"])
    shape = settings["shape"]
    empty = memory()["VmRSS"]
    trainer = build(settings)
    trim()
    done = {"steps": 0}
    whole_life = [memory()["VmHWM"]]

    def block(steps: int) -> dict[str, Any]:
        batches = [make_batch(shape, done["steps"] + number) for number in range(steps)]
        begin, worked = time.perf_counter(), time.process_time()
        losses = [trainer.step(batch) for batch in batches]
        trainer.finish()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - worked
        done["steps"] += steps
        found = memory()
        whole_life.append(found["VmHWM"])
        # ru_maxrss forgets with VmHWM; what it says before the first forgetting is told with the rest.
        return {"seconds": seconds, "cpu": cpu, "losses": [float(loss) for loss in losses], **found,
                "peak_rss": max(whole_life)}  # fmt: skip

    def about() -> dict[str, Any]:
        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        with torch.device("meta"):
            num_params = sum(param.numel() for param in make_model(shape).parameters())
        return {"versions": found, "num_params": num_params, "empty_rss": empty, "threads": torch.get_num_threads(),
                "notes": trainer.notes()}  # fmt: skip

    return {"block": block, "forget_peak": forget_peak, "about": about}


def micro_batch(shape: Mapping[str, int]) -> int:
    """Sequences per step."""
    return shape["tokens"] // shape["seq_len"]
