"""What every peer has in common, on a CPU and on a GPU: the model, the batches, hyperparameters, and orders.

A peer is a script with a :class:`Trainer` made from settings, ended by ``contract.run(Trainer)``. It runs in a virtual
environment of its own, so nothing here needs more than torch and transformers. Orders come as lines of JSON on stdin,
each is answered by one line on stdout (``_processes.serve``), and between them the process sleeps in a read:

    {"order": "begin", "arguments": SETTINGS}       builds the model                    -> nothing
    {"order": "block", "arguments": {"steps": 5}}   trains that many steps, measured    -> seconds, losses, memory
    {"order": "rest"}                               gives back what torch keeps for later
    {"order": "about"}                                                                  -> versions, sizes, notes

Everybody starts from the same weights, drawn in bf16: DeepSpeed rounds to bf16 before it makes its masters, so the
others may not know more than that. ``settings["shape"]`` is a small Llama's (hidden, layers, vocab, tokens, seq_len),
or names one of ``benchmarks.gpu._llama.SHAPES``, which is trained with gradient checkpointing.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks import _memory, _models, _processes

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Of AdamW on the small shapes, for everybody."""


class Trainer:
    """A model in training, whoever trains it."""

    model: Any
    optimizer: Any
    clip: float | None

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward, backward, clipping if it is asked for, update. The loss, detached."""
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        if self.clip:
            self.clip_grads(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def clip_grads(self, norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def finish(self) -> None:
        """Wait for whatever the steps so far have left in flight: it belongs to their time."""

    def notes(self) -> dict[str, Any]:
        """What a report should say of this peer: where its states are, which settings were taken."""
        return {}


def on_card(settings: Mapping[str, Any]) -> bool:
    return settings.get("device") == "cuda"


def is_large(settings: Mapping[str, Any]) -> bool:
    """Whether the model is one of those for a GPU."""
    return isinstance(settings["shape"], str)


def hyper(settings: Mapping[str, Any]) -> dict[str, Any]:
    return HYPER | ({"lr": 1e-4} if is_large(settings) else {})


def make_model(settings: Mapping[str, Any]) -> Any:
    """A Llama in bf16 on the CPU. Rotary frequencies stay fp32, as transformers makes them."""
    shape = settings["shape"]
    if is_large(settings):
        from benchmarks.gpu import _llama

        return _llama.plain_model(_llama.SHAPES[shape], settings["seq_len"])
    config = _models.llama_config(shape["hidden"], shape["layers"], shape["vocab"], positions=shape["seq_len"])
    return _models.build(config, "bfloat16")


def num_params(settings: Mapping[str, Any]) -> int:
    if is_large(settings):
        from benchmarks.gpu import _llama

        return _llama.SHAPES[settings["shape"]].params
    with torch.device("meta"):
        return sum(param.numel() for param in make_model(settings).parameters())


def make_batch(settings: Mapping[str, Any], step: int, tokens: int | None) -> dict[str, torch.Tensor]:
    shape = settings["shape"]
    if is_large(settings):
        from benchmarks.gpu import _llama

        where = "cuda" if on_card(settings) else "cpu"
        return _llama.make_batch(_llama.SHAPES[shape], tokens or 0, settings["seq_len"], step, where)
    return _models.skewed_batch(shape["vocab"], micro_batch(settings), shape["seq_len"], step)


def micro_batch(settings: Mapping[str, Any]) -> int:
    """Sequences per step, at most."""
    if is_large(settings):
        return max(1, max(settings["tokens"]) // settings["seq_len"])
    return settings["shape"]["tokens"] // settings["shape"]["seq_len"]


def run(build: Callable[[dict[str, Any]], Trainer]) -> None:
    """Obey orders until stdin ends."""
    _processes.serve(lambda settings: _orders(build, settings))


def _orders(build: Callable[[dict[str, Any]], Trainer], settings: dict[str, Any]) -> Mapping[str, Callable[..., Any]]:
    import transformers
    import transformers.models.llama.modeling_llama  # what imports take is not the model's

    torch.set_num_threads(settings["threads"])
    empty, begin = _memory.status()["VmRSS"], time.perf_counter()
    trainer = build(settings)
    built, done = time.perf_counter() - begin, {"steps": 0}
    _memory.trim()
    whole_life = [_memory.status()["VmHWM"]]

    def finish() -> None:
        trainer.finish()
        if on_card(settings):
            torch.cuda.synchronize()

    def block(steps: int, tokens: int | None = None) -> dict[str, Any]:
        batches = [make_batch(settings, done["steps"] + number, tokens) for number in range(steps)]
        finish()
        if on_card(settings):
            torch.cuda.reset_peak_memory_stats()
        begin, worked = time.perf_counter(), time.process_time()
        losses = [trainer.step(batch) for batch in batches]
        finish()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - worked
        done["steps"] += steps
        found = _memory.status() | {"ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        whole_life.append(found["VmHWM"])
        card = {}
        if on_card(settings):
            card = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        # ru_maxrss forgets with VmHWM; what it says before the first forgetting is told with the rest.
        return {"seconds": seconds, "cpu": cpu, "losses": [float(loss) for loss in losses], **found,
                "peak_rss": max(whole_life), "card": card}  # fmt: skip

    def rest() -> None:
        finish()
        if on_card(settings):
            torch.cuda.empty_cache()

    def about() -> dict[str, Any]:
        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {
            "versions": found, "num_params": num_params(settings), "empty_rss": empty,
            "threads": torch.get_num_threads(), "build seconds": built, "notes": trainer.notes(),
        }  # fmt: skip

    return {"block": block, "rest": rest, "forget_peak": _memory.forget_peak, "about": about}
