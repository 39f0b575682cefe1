"""A Trainer's steps block by block: ``gemini.train_step`` of all micro-batches of a step.

The Trainer fetches all micro-batches of a step before it computes the first one, and calls ``training_step`` for each.
With the first one all are computed, and the others are given their losses. The trainer's own ``training_step`` and
``compute_loss`` run twice for each micro-batch: once up to where they call the model, to learn what it is given; and
once with what the model has given for that, which is where its loss, its scaling and its logs come from. Where a step
would not be the same, or cannot be known to be (a class has its own of these, which may count its calls), micro-batches
are computed one after another, and a warning says why, once. So they are, without one, where nothing has to move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves
from transformers import Trainer

from gemini.errors import GeminiError, warn
from gemini.patches import replaced
from gemini.pipeline import micro_batches
from gemini.pipeline.stages import Strayed
from gemini.train.checkpoint.states import rng_states, set_rng_states

Compute = Callable[[Any, Any], torch.Tensor]
"""The trainer's ``training_step``, of a model and a micro-batch."""


class _Called(BaseException):
    """A loss has come to where it calls its model, with these tensors; no ``except Exception`` of a trainer ends it."""

    def __init__(self, given: dict[str, Any]):
        self.given = given


class _Otherwise(BaseException):
    """Why a step cannot be computed block by block."""


_RUN_TWICE = ("_prepare_inputs", "_prepare_input", "compute_loss_context_manager", "compute_loss")
_LIBRARIES = ("transformers.", "trl.", "gemini.")
"""Whose trainers change nothing before they call the model, but for what is asked below."""


class BlockByBlock:
    """The steps of a trainer that computes block by block.

    Args:
        trainer: one of transformers', with an accelerator of Gemini's.
        module: where the ``training_step`` comes from that is called for a loss.
    """

    def __init__(self, trainer: Any, module: str):
        self._trainer, self._module = trainer, module
        self._why = ""  # micro-batches are computed one after another, from now on
        self._samples: Sequence[Any] = ()
        self._losses = deque[tuple[Any, torch.Tensor]]()
        self._call: Callable[[dict[str, Any]], Any] = _Called
        self._faces: dict[type, type] = {}

    def begin(self, samples: Sequence[Any]) -> None:
        """These are the micro-batches of the next step. What is left of another one, which failed, goes."""
        self._samples = samples
        self._losses.clear()

    def loss_of(self, model: Any, inputs: Any, compute: Compute) -> torch.Tensor | None:
        """The loss of a micro-batch of this step, as ``compute`` would return it, where it is computed; the gradients
        of all are there after the first one. None if it is to be computed by itself.

        Raises:
            GeminiError: for a batch that is not the next of this step.
        """
        if not self._losses and len(self._samples) > 1 and micro_batches.has_to_move(model):
            samples, self._samples = self._samples, ()
            if losses := self._computed(model, samples, inputs, compute):
                self._losses.extend(zip(samples, losses, strict=True))
        if not self._losses:
            return None
        sample, loss = self._losses.popleft()
        if sample is not inputs:
            raise GeminiError(
                'order="bfs" has computed the micro-batches that get_batch_samples() returned, and training_step() is '
                'given another one: change them in get_batch_samples() or in the data collator, or use order="dfs"'
            )
        return loss

    def _computed(self, model: Any, samples: Sequence[Any], inputs: Any, compute: Compute) -> list[torch.Tensor]:
        """The losses of all of them; nothing, and no gradients, if they are to be computed one after another."""
        engine = model._gemini_engine
        draws = rng_states()
        try:
            self._check(engine, samples, inputs)
            parts = [self._given_to_model(model, sample, compute) for sample in samples]
            if not _are_alike(draws, rng_states()):
                raise _Otherwise("compute_loss draws random numbers before it calls the model")
            found: dict[int, torch.Tensor] = {}

            def loss(output: Any, part: Mapping[str, Any]) -> torch.Tensor:
                if detect_fake_mode() is not None:  # of which not every tensor tells: small ones have values there
                    return _some_loss(output)
                number = next(number for number, own in enumerate(parts) if own is part)
                own, found[number] = self._scaled(model, output, samples[number], compute)
                return own

            # The last micro-batch of a step is among these, whatever accelerate says of the first one.
            with replaced(engine.state, "accumulating", False):
                micro_batches.train_step(model, parts, loss)
            return [found[number] for number in range(len(parts))]
        except _Otherwise as e:
            self._warn(str(e))
        except Strayed as e:  # a part of the step's gradients is there
            self._warn(str(e).partition(". ")[0])
        model.zero_grad()
        set_rng_states(draws)
        return []

    def _check(self, engine: Any, samples: Sequence[Any], inputs: Any) -> None:
        """Raises _Otherwise for a step that is told at once."""
        if self._why:
            raise _Otherwise(self._why)
        trainer, kind = self._trainer, type(self._trainer).__name__
        modules = {"training_step": self._module}
        modules |= {name: getattr(getattr(trainer, name), "__module__", "") for name in _RUN_TWICE}
        own = [name for name, module in modules.items() if not module.startswith(_LIBRARIES)]
        prepares = getattr(trainer._prepare_inputs, "__func__", None) is not Trainer._prepare_inputs
        offloads = not isinstance(getattr(trainer, "maybe_activation_offload_context", nullcontext()), nullcontext)
        reasons = {
            "there are several ranks": not engine.ranks.are_alone,
            'precision="fp16": the loss scale may change between micro-batches': engine.config.precision == "fp16",
            f"{kind} has its own {' and '.join(own)}, which would run twice for each (what is made of outputs and "
            "labels may be a compute_loss_func=)": bool(own),
            f"{kind} prepares its batches for several steps": prepares,
            "activation_offloading=True: TRL's hooks are for one forward at a time": offloads,
            "a reference model computes inside of its loss (without precompute_ref_log_probs=True)": (
                not getattr(trainer.args, "precompute_ref_log_probs", True)
            ),
            "training_step() is given another batch than get_batch_samples() returned": inputs is not samples[0],
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            raise _Otherwise(why[0])

    def _given_to_model(self, model: Any, sample: Any, compute: Compute) -> dict[str, Any]:
        """What the loss of a micro-batch gives the model. Nothing is computed."""

        def call(given: dict[str, Any]) -> Any:
            raise _Called(given)

        def no_loss(*_: Any, **__: Any) -> None:
            raise _Otherwise("compute_loss does not call the model that it is given")

        try:
            with replaced(self._trainer.accelerator, "backward", no_loss), replaced(self, "_call", call):
                compute(self._face(model), sample)
        except _Called as e:
            return e.given
        raise _Otherwise("training_step makes no backward")

    def _scaled(self, model: Any, output: Any, sample: Any, compute: Compute) -> tuple[torch.Tensor, torch.Tensor]:
        """What the trainer makes of what the model gave: what it differentiates, and what it returns."""
        accelerator, outputs, losses = self._trainer.accelerator, [output], list[torch.Tensor]()

        def call(given: dict[str, Any]) -> Any:
            if not outputs:
                raise _Otherwise("compute_loss calls the model more than once")
            return outputs.pop()

        def backward(loss: torch.Tensor, **_: Any) -> None:
            losses.append(loss / accelerator.gradient_accumulation_steps)

        with replaced(accelerator, "backward", backward), replaced(self, "_call", call):
            returned = compute(self._face(model), sample)
        return losses[0], returned

    def _face(self, model: Any) -> Any:
        """The model to whoever looks at it, and ``_call`` to whoever calls it."""
        kind = type(model)
        if kind not in self._faces:

            def call(_: Any, *args: Any, **given: Any) -> Any:
                if args:
                    raise _Otherwise("compute_loss gives the model tensors without names")
                return self._call(given)

            self._faces[kind] = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        face: Any = object.__new__(self._faces[kind])
        object.__setattr__(face, "__dict__", model.__dict__)  # the same one: what is set on one is set on the other
        return face

    def _warn(self, why: str) -> None:
        if self._why != why:
            warn(f'order="bfs": micro-batches are computed one after another, which fetches weights for each: {why}')
        self._why = why


def _are_alike(one: Any, other: Any) -> bool:
    """Whether these are the same random states."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b) for a, b in pairs)


def _some_loss(output: Any) -> torch.Tensor:
    """Of tensors without values, on which a trainer's loss cannot run: it may look at what it has found."""
    named = output if isinstance(output, dict) else {}
    made = next((named[name] for name in ("loss", "logits") if named.get(name) is not None), None)
    leaves = [leaf for leaf in tree_leaves(output if made is None else made) if isinstance(leaf, torch.Tensor)]
    return next(leaf for leaf in leaves if leaf.is_floating_point()).float().mean()
