"""What a model tells of its steps: ``model.memory_report()`` and the ``timeline`` of ``model.recording()``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gemini.errors import GeminiError, human_bytes, listed
from gemini.interrupts import WHOLE
from gemini.ledger import Ledger
from gemini.memory.devices.device import Device
from gemini.memory.watching import RecordedStep, Recorder
from gemini.planning.planes import GRADS
from gemini.planning.timeline import Timeline, Track, human_seconds
from gemini.planning.trace import MemoryTrace, tile_words
from gemini.tiers import Tier
from gemini.train.engine import Engine
from gemini.train.modules.mixed import MADE
from gemini.train.observers import iter_tensors

_FOR_RANKS = ("other ranks", Track.GATHER.value, Track.REDUCE.value)


class MemoryReport(dict[str, Any]):
    """``report["cpu"]["peak"]`` in bytes, ``report["moved"]["nvme->cpu"]``, and so on. ``print(report)`` shows a table.

    Its keys:

    - "gpu", "cpu", "nvme": for each tier "budget", "used", "peak" and "holders" (bytes by what uses them). With several
      ranks, those of this rank. Of a :class:`gemini.SharedBudget`, whose ``report()`` has those of all its models,
      "budget" is the whole.
    - "moved": bytes moved between two tiers in the last step.
    - "sent": with several ranks, bytes that this rank sent in the last step, by collective.
    - "stalls": seconds that the training thread waited in the last step (from the end of one ``optimizer.step()`` to
      the end of the next), by cause, the longest first. Causes are for example "fetch from nvme" (waiting for weights),
      "gradient landing", "update", "activation", and with several ranks "other ranks", "all-gather" and
      "reduce-scatter". If one wait happens inside another, all of it counts for the outer one.
    - "params": the number of managed params. "bytes_per_param": bytes of weights and states. "grad_bytes_per_param":
      bytes reserved for gradients between backward and update. Both are per trained param.
    - "fp32": by why, the number of params that stay in fp32 in a model of bf16 or fp16 (``GeminiConfig(keep_fp32=)``).
    - "tile_tokens", "kept_blocks": as in the config, or with "auto" what the planner chose. None: not tiled.
    - "step", of ``GeminiConfig(step="fastest")`` after three steps, else None: its seconds as "measured" in a recorded
      one, as "predicted", and as "corrected", predicted with "hardware", the machine as that step has it.
    - "speculation": how many of the updates that ``HybridAdam(speculate=True)`` made during backward were "kept" and
      how many "undone" (or not made, for lack of room), since the model was wrapped.
    - "allocator", on CUDA: torch's "allocated" and "reserved" bytes, their peaks ("allocated_peak", "reserved_peak"),
      and "driver", the bytes of the GPU that all programs use. Compared with what Gemini manages: "unmanaged" bytes are
      allocated by torch for something else (activations, workspaces, your own tensors), "cached" ones are reserved by
      torch and not in use (fragmentation too), and "elsewhere" are not torch's (CUDA itself, other programs).

    On CUDA "stalls" does not contain the time in which the GPU waits for weights, since the training thread does not.
    """

    def __str__(self) -> str:
        lines = [f"{'tier':<6}{'used':>12}{'peak':>12}{'budget':>12}  held by"]
        for name in [tier.value for tier in Tier if tier.value in self]:
            tier = self[name]
            held = listed(dict(sorted(tier["holders"].items(), key=lambda item: -item[1])))
            sizes = "".join(f"{human_bytes(tier[key]):>12}" for key in ("used", "peak", "budget"))
            lines.append(f"{name:<6}{sizes}  {held}")
        if "allocator" in self:
            lines += _allocator_lines(self["allocator"])
        lines.append(f"moved in the last step: {listed(self['moved'])}")
        lines.append(f"waited in the last step: {listed(self['stalls'], human_seconds)}")
        if "sent" in self:
            seconds = sum(self["stalls"].get(cause, 0.0) for cause in _FOR_RANKS)
            lines.append(f"of that for other ranks: {human_seconds(seconds)}")
            lines.append(f"sent to other ranks in the last step: {listed(self['sent'])}")
        if any(self["speculation"].values()):
            kept, undone = self["speculation"]["kept"], self["speculation"]["undone"]
            lines.append(f"updates begun before their step was known: {kept:,} kept, {undone:,} undone")
        lines.append(
            f"{self['params']:,} params ({self['trained_params']:,} trained): {self['bytes_per_param']:.2f} bytes "
            f"each when trained, and {self['grad_bytes_per_param']:.2f} for gradients between backward and update"
        )
        if self["fp32"]:
            stay = ", ".join(f"{num_params:,} {why}" for why, num_params in self["fp32"].items())
            lines.append(f"params that stay in fp32: {stay}")
        if self["tile_tokens"] is not None:
            lines.append(f"in tiles: {tile_words(self['tile_tokens'])} at a time")
        if self["kept_blocks"]:
            lines.append(f"not computed again in backward: {self['kept_blocks']} blocks")
        if step := self["step"]:
            seconds = (human_seconds(step[name]) for name in ("measured", "predicted", "corrected"))
            lines.append("the third step: {} recorded, {} predicted, {} by its figures".format(*seconds))
        return "\n".join(lines)


def _allocator_lines(figures: dict[str, int]) -> list[str]:
    size = {key: human_bytes(num_bytes) for key, num_bytes in figures.items()}
    return [
        f"gpu, says torch: allocated {size['allocated']} (peak {size['allocated_peak']}), {size['unmanaged']} of it "
        f"not managed here; reserved {size['reserved']} (peak {size['reserved_peak']}), {size['cached']} of it unused",
        f"gpu, says the driver: used {size['driver']}, {size['elsewhere']} of it not by torch here",
    ]


def _reconcile(device: Device, ledger: Ledger) -> dict[str, int]:
    """Put the allocator's and the driver's figures beside the ledger's; nothing where the device has none."""
    figures = device.memory_figures()
    if not figures:
        return {}
    holders = ledger.holders(device.tier)
    rooms = ("activations", "context")  # which nothing managed is in
    managed = sum(num_bytes for holder, num_bytes in holders.items() if holder not in rooms)
    return {
        **figures,
        # Not below zero: torch rounds what it allocates, and the two are not read at one instant.
        "unmanaged": max(figures["allocated"] - managed, 0),
        "cached": figures["reserved"] - figures["allocated"],
        "elsewhere": max(figures["driver"] - figures["reserved"], 0),
    }


def make_report(engine: Engine) -> MemoryReport:
    """Make the report of a model as it stands, nothing in flight."""
    store, decision, guesses = engine.store, engine.decision, engine.updates.guesses
    ledger, report = store.ledger, MemoryReport()
    report["fp32"] = dict(sorted(Counter(decision.kept.get(key, MADE) for key in engine.params.in_fp32).items()))
    report["speculation"] = {"kept": guesses.num_kept, "undone": guesses.num_undone}
    report["tile_tokens"], report["kept_blocks"] = decision.tile_tokens, decision.kept_blocks
    report["step"] = decision.compared
    for tier in ledger.tiers:
        report[tier.value] = {
            "budget": ledger.budget(tier),
            "used": ledger.used(tier),
            "peak": ledger.peak(tier),
            "holders": ledger.holders(tier),
        }
    if allocator := _reconcile(store.device, ledger):
        report["allocator"] = allocator
    report["moved"] = dict(sorted(store.mover.watch.moved_last_step.counts().items()))
    report["stalls"] = dict(store.mover.watch.stalls)
    if engine.ranks.shares_params:
        report["sent"] = dict(sorted(engine.shards.sent_last_step.items()))
    trained = [chunk for chunk in store.chunks if chunk.trained]
    num_trained = sum(chunk.spec.payload for chunk in trained)
    ranks = decision.problem.layout.ranks  # each holds an equal shard
    # Bytes of all ranks over params of the whole model: padding of shards is in it.
    state = ranks * sum(p.num_bytes for c in trained for kind, p in c.planes.items() if kind not in GRADS)
    state += ledger.holders(Tier.CPU).get("factors", 0)
    grads = ranks * sum(p.num_bytes for c in trained for kind, p in c.planes.items() if kind in GRADS)
    # Codes are bytes of two weights each.
    report["params"] = sum(chunk.payload * (2 if chunk.coded else 1) for chunk in decision.problem.layout.chunks)
    report["trained_params"] = num_trained
    report["bytes_per_param"] = state / num_trained if num_trained else 0.0
    report["grad_bytes_per_param"] = grads / num_trained if num_trained else 0.0
    return report


# ---- recording -------------------------------------------------------------------------------------------------------

# The engine tells a Recording when modules begin and end, forward and backward; it names the stretches of computing
# between moves, and knows where a step begins (the first forward with gradients after an update) and ends.

LOSS = "loss"
"""The name of what is computed between the end of the model's forward and the beginning of its backward."""


class _Whole(NamedTuple):
    step: RecordedStep
    tokens: int
    num_batches: int


class Recording:
    """What ``model.recording()`` gives: read :attr:`timeline` after a whole step, inside the block or behind it."""

    def __init__(self, engine: Engine, model: nn.Module, trace: MemoryTrace | None):
        """PlanMismatch is raised for a trace of another model."""
        # Weakly: a program may keep the recording, to read its timeline, for longer than the model.
        self._engine: Callable[[], Any] = weakref.ref(engine)
        self._flops = 0 if trace is None else trace.flops  # of a batch
        if trace is not None:
            ours = engine.decision.trace
            # A trace may have been made without knowing what stays in fp32 here.
            ours.check_same_model(trace.with_fp32({p.name for p in ours.params if p.fp32}), what="the trace")
        self._recorder = Recorder(engine.store.device)
        # By `id`, as of now: the model is the caller's, and outlives the block.
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._name = type(model).__name__
        self._ranks = engine.ranks.everyone.size
        self._title = f"{self._name}, {engine.config.precision}, {engine.store.device.name}"
        self._title += f", 1 of {self._ranks} ranks" if self._ranks > 1 else ""
        self._budgets = {tier: engine.store.ledger.budget(tier) for tier in engine.store.ledger.tiers}
        self.gives_way: Callable[[], Callable[[], None] | None] = lambda: None
        """Finds what ends it for a recording of the program's, where it is one of Gemini's own."""
        self._is_open = False
        # A step whose beginning was before the block is not recorded.
        self._is_late = engine.state.computing or engine.backward.sink.has_gradients
        self._in_backward = ""
        self._num_backwards = self._tokens = 0
        self.last: _Whole | None = None

    @property
    def timeline(self) -> Timeline:
        """The last whole step: from its first forward to the next step's first forward; if there was none, to the end
        of ``optimizer.step()`` and of the updates that it left in flight, which are waited for.

        So of steps in a row each has the end of the updates of the one before. ``stalls`` is what the training thread
        waited for. ``moments`` are stretches of computing. ``moved`` is what crossed each boundary for the step: with
        nothing else done in between, ``memory_report()["moved"]`` after it. Recomputation of a block whose weights do
        not move counts to the block's backward.

        Raises:
            GeminiError: if no whole step was recorded.
        """
        if self.last is None:
            raise GeminiError(
                "no whole step was recorded: let a forward with gradients, its backward and optimizer.step() run "
                "inside `with model.recording()`, and zero_grad() of what was there before"
            )
        self.drain()
        step, tokens, num_batches = self.last
        flops, tokens = self._flops * num_batches, tokens * self._ranks
        return step.timeline(title=self._title, tokens=tokens, flops=flops, budgets=self._budgets)

    # ---- told by the engine -------------------------------------------------------------------------------------

    def begin_call(self, module: nn.Module) -> None:
        """Note that a hooked module starts: what it gathers is gathered for it. Called under the lock of the books."""
        engine = self._engine()
        # A step begins with the first outermost forward with gradients; evaluation in between is no step.
        outermost = not engine.forward.calls.running and not engine.state.in_backward
        if outermost and torch.is_grad_enabled() and not self._recorder.in_step and not self._is_late:
            self._recorder.begin_step({tier: engine.store.ledger.holders(tier) for tier in engine.store.ledger.tiers})
            self._tokens, self._num_backwards = 0, 0
        self._recorder.computing(self._name_of(module, "recompute" if engine.state.in_backward else "forward"))

    def end_call(self) -> None:
        """Note that a hooked module is over: the one around it goes on. Called under the lock of the books."""
        engine = self._engine()
        around = engine.forward.calls.innermost if engine.forward.calls.running else None
        if around is not None and around.module is not None:
            phase = "recompute" if engine.state.in_backward else "forward"
            self._recorder.computing(self._name_of(around.module, phase))
        elif engine.state.in_backward:
            self._recorder.computing(self._in_backward)
        else:
            # The outermost one ended: what comes before its backward is the loss.
            self._recorder.computing(LOSS if torch.is_grad_enabled() else None)

    def watch_backward(self, module: nn.Module, output: Any) -> None:
        """Notice when the gradient of a module's output arrives: its backward begins."""
        name = self._name_of(module, "backward")

        def begins(grad: torch.Tensor) -> None:
            # The graph may be run after the block.
            if self._is_open:
                self._in_backward = name
                self._recorder.computing(name)

        for tensor in iter_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(begins)

    def begin_backward(self) -> None:
        """Note that the first gradient of a backward has arrived."""
        # A backward outside of any recorded step: its forward was before the block, so its step is not whole.
        self._is_late = self._is_late or not self._recorder.in_step
        self._num_backwards += 1
        if not self._in_backward:
            self._in_backward = f"backward {self._name}"
        self._recorder.computing(self._in_backward)

    def end_backward(self) -> None:
        """Note that the whole graph is done."""
        self._in_backward = ""
        self._recorder.computing(None)

    def discard(self) -> None:
        """Forget the step if no gradient is left: what was computed for those that were forgotten became none."""
        if not self._engine().backward.sink.has_gradients and (self._num_backwards or self._is_late):
            self._recorder.close()
            self._is_late, self._num_backwards = False, 0

    def end_step(self) -> None:
        """Keep the step that an optimizer step has ended, if it was recorded from its beginning."""
        if self._recorder.in_step:
            self.last = _Whole(self._recorder.end_step(), self._tokens, self._num_backwards)
        self._is_late, self._num_backwards = False, 0

    # ---- inside -------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[Recording]:
        """Record the steps of ``model`` inside."""
        engine = self._engine()
        observers, watch, ledger = engine.forward.observers, engine.store.mover.watch, engine.store.ledger
        if not observers.make_way():
            raise GeminiError("this model is being recorded already: open one recording() at a time")

        def count(module: nn.Module, args: Any, kwargs: Mapping[str, Any] = {}) -> None:  # without, removed meanwhile
            if self._recorder.in_step and torch.is_grad_enabled() and not engine.state.in_backward:
                self._tokens += count_tokens(args, kwargs)  # a recomputation has none

        counting = list[RemovableHandle]()

        def end() -> None:
            with WHOLE:
                # First: what follows must not be told to a recorder that ends.
                self._is_open = False
                observers.record()
                watch.recorder = ledger.on_change = None
                self._recorder.close()
                for handle in counting:
                    handle.remove()

        try:
            with WHOLE:
                counting.append(model.register_forward_pre_hook(count, with_kwargs=True))
                del model  # which may be what keeps this open
                observers.record(self)
                watch.recorder, ledger.on_change = self._recorder, self._recorder.held
                # Last: `drain` and hooks of graphs go by it.
                self._is_open = True
            # Only if nothing was raised: after an interrupt a wait might raise again, and hide the first error.
            yield self
            self.drain()
        finally:
            try:
                end()
            except KeyboardInterrupt:
                end()  # it may have come before the first time
                raise

    def drain(self) -> None:
        """Let updates that the last step left in flight end: they are part of it, unless the next one has begun."""
        engine = self._engine()
        if engine is not None and self._is_open and self.last is not None and self.last.step.next_start is None:
            engine.drain()

    def _name_of(self, module: nn.Module, phase: str) -> str:
        return f"{phase} {self._paths.get(id(module)) or self._name}"


def count_tokens(args: Any, kwargs: Mapping[str, Any]) -> int:
    """Count the positions that a call works on: token ids if there are any, else samples (rows of the first input)."""
    ids = kwargs.get("input_ids")
    tensors = [ids] if isinstance(ids, torch.Tensor) else list(iter_tensors((args, dict(kwargs))))
    if not tensors or tensors[0].dim() == 0:
        return 0
    first = tensors[0]
    return first.numel() if not first.is_floating_point() and first.dim() == 2 else first.shape[0]
