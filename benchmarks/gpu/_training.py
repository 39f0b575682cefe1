"""Gemini training a Llama on the GPU, as the benchmarks of this folder do: built, stepped, timed, and taken down."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import gemini
from benchmarks.gpu import _llama
from benchmarks.gpu._card import Card
from benchmarks.gpu._llama import PiecewiseLlama, Shape
from gemini.planning.working import activation_bytes

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5


class Schedule(NamedTuple):
    name: str
    clip: bool = False
    in_backward: bool = False


CLIPPED = Schedule("with clipping", clip=True)
AFTER = Schedule("without clipping, updates after backward")
IN_BACKWARD = Schedule("without clipping, updates in backward", in_backward=True)


def trace_of(shape: Shape, tokens: int, seq_len: int, card: Card) -> Any:
    """A step ahead of time: what activations and workspaces take."""
    config = _llama.config_of(shape, seq_len)
    batch = {name: ids.to("meta") for name, ids in _llama.make_batch(shape, tokens, seq_len, 0).items()}
    return gemini.trace(
        config, batch, precision="bf16", target="cuda" if card.real else "cpu",
        checkpointing="reentrant" if PiecewiseLlama.reentrant else "non-reentrant", model_class=PiecewiseLlama,
    )  # fmt: skip


def tight_gpu(shape: Shape, trace: Any, fractions: Mapping[str, float], card: Card) -> int:
    """A GPU budget for activations, what a static placement puts there, and windows for a few blocks of weights only,
    so that those which live elsewhere are fetched in forward and in backward.
    """
    largest = max(shape.of_layer + 2 * shape.hidden, shape.hidden * shape.vocab)
    planes = 2 * fractions.get("weights_on_gpu", 0) + 14 * fractions.get("optimizer_on_gpu", 0)
    slack = 16 * largest if planes else 0  # a fraction is honoured to one chunk
    staging = 2**30 if fractions.get("updates_on_gpu") else 0
    managed = activation_bytes(trace, offloaded=False) + int(planes * shape.params) + slack + staging + 3 * 2 * largest
    return managed + card.beside_bytes


class Training:
    """One managed model. ``settings`` are of ``GeminiConfig``."""

    def __init__(self, card: Card, shape: Shape, tokens: int, seq_len: int, settings: Mapping[str, Any]):
        self.card, self.shape, self.tokens, self.seq_len = card, shape, tokens, seq_len
        begin = time.perf_counter()
        torch.manual_seed(0)
        with _llama.quick_weights():
            self.model: Any = gemini.from_config(
                _llama.config_of(shape, seq_len), gemini.GeminiConfig(device=card.device, **settings),
                model_class=PiecewiseLlama,
            )  # fmt: skip
        _llama.with_checkpointing(self.model)
        self.optimizer: Any = None
        self.done = 0
        card.synchronize()
        self.build_seconds = time.perf_counter() - begin

    def use(self, schedule: Schedule) -> None:
        """Train in this way from the next step on: a new optimizer takes over the states."""
        self.finish()
        self.schedule, self.optimizer = schedule, None
        self.optimizer = gemini.HybridAdam(self.model.parameters(), **HYPER, step_in_backward=schedule.in_backward)

    def batch(self) -> dict[str, torch.Tensor]:
        self.done += 1
        return _llama.make_batch(self.shape, self.tokens, self.seq_len, self.done, self.card.torch)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        loss.backward()
        if self.schedule.clip:
            self.model.clip_grad_norm_(CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> Any:
        """A report of a finished world."""
        report = self.model.memory_report()
        self.card.synchronize()
        return report

    def timed_steps(self, steps: int, warm_up: int = 2) -> tuple[list[float], list[float]]:
        """Seconds from the first thing that the GPU does for a step to that of the next one, and the losses.

        One more step than are counted, so that the last one ends where another begins, with its updates in flight.
        """
        batches = [self.batch() for _ in range(warm_up + steps + 1)]
        stamps, losses = [], []
        for batch in batches:
            stamps.append(self.card.stamp())
            losses.append(self.step(batch))
        self.finish()
        stamps = stamps[warm_up:]
        seconds = [self.card.seconds(a, b) for a, b in zip(stamps, stamps[1:], strict=False)]
        return seconds, [float(loss) for loss in losses]

    def update_alone(self, times: int = 2) -> list[float]:
        """W: seconds of all updates, with nothing beside them, from the call of ``step`` until none is in flight."""
        found = []
        for _ in range(times):
            self.model(**self.batch()).loss.backward()
            self.card.synchronize()
            begin = time.perf_counter()
            self.optimizer.step()
            self.finish()
            found.append(time.perf_counter() - begin)
            self.optimizer.zero_grad()
        return found

    def close(self) -> None:
        self.optimizer = self.model = None
        self.card.forget()


def computing_alone(card: Card, shape: Shape, tokens: int, seq_len: int, times: int) -> tuple[list[float], list[float]]:
    """Seconds of forward and of backward of the plain model, its weights on the GPU, each gradient let go as it comes.

    Raises:
        torch.cuda.OutOfMemoryError: where that does not fit.
    """
    model = _llama.plain_model(shape, seq_len, card.torch)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    forwards, backwards = [], []
    for number in range(times + 1):
        batch = _llama.make_batch(shape, tokens, seq_len, number, card.torch)
        card.synchronize()
        begin = card.stamp()
        loss = model(**batch).loss
        middle = card.stamp()
        loss.backward()
        end = card.stamp()
        if number:
            forwards.append(card.seconds(begin, middle))
            backwards.append(card.seconds(middle, end))
    del model, loss
    card.forget()
    return forwards, backwards
