"""``HybridOptimizer``: an update rule on exact fp32 masters where the states live, for managed and plain params; and
``HybridAdam``, which is Adam and AdamW, in native kernels.

It is a true ``torch.optim.Optimizer``: param groups, LR schedulers, ``state_dict`` and ``add_param_group`` are torch's.
For params of a ``GeminiDDP`` model the states are planes of chunks and the gradients are in chunks; for plain params
the states are in ``self.state`` (a bf16 param gets an int16 ``residual``, the other half of its master; an fp16 param
an fp32 ``master``). The update is written down once, in the rule, and is the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from gemini import rules
from gemini.errors import GeminiError
from gemini.interrupts import WHOLE, call_with_grad, without_grad
from gemini.patches import replaced
from gemini.ranks.agree import Attempt
from gemini.rules import UpdateRule, Where, refuse_other
from gemini.train.gradients.scaling import scaler_steps
from gemini.train.optimizers import states as states_of
from gemini.train.optimizers.states import RESIDUAL_OF, loaded_group
from gemini.train.params.by_name import Owner, owner_of
from gemini.train.params.handle import (
    Leftover,
    ParamHandle,
    give_to,
    handle_of,
    handles_of,
    optimizer_of,
    params_of,
    stepping_in_backward,
)
from gemini.train.passes.stepping import Stepping
from gemini.train.step import run_alone

Group = dict[str, Any]


class HybridOptimizer(torch.optim.Optimizer):
    """An optimizer with any update rule. Exact fp32 masters are updated on the tier where the states are stored.

    It is a ``torch.optim.Optimizer``: param groups, LR schedulers and ``state_dict`` work as in torch.

    Args:
        params: params or param groups, managed or not. The optimizer may be created before or after
            ``GeminiDDP(model)``. A param belongs to the optimizer that got it last, where its states and step count
            start at zero, as in torch. In bf16 its master keeps all its bits.
        rule: the update rule. The model must be wrapped with ``GeminiConfig(optimizer=rule)``.
        step_in_backward: update params during ``loss.backward()``, as soon as all gradients of their chunk are known.
            They cannot be clipped then, except with ``speculate``. With ``GeminiConfig(gradients="transient")``
            gradients take no memory of their own; with "retain" or "accumulate" they are kept, and all backwards of a
            step except the last must be inside ``model.no_sync()``. Still call ``step()`` at the end of every step.
        speculate: make the updates of ``step_in_backward`` as guesses: as if gradients were finite and not clipped. If
            the step then asks for exactly these updates they are kept, else they are undone and made again. Results
            always have the bits of ``step_in_backward=False``, and gradients may be clipped and read as without it.
            Needs gradients that are kept. Guesses are made for chunks that the CPU updates, if most of the last steps
            were not clipped, and if either the states are in a durable store (``MemoryBudget(durable=True)``) or memory
            has room for the old values. ``model.memory_report()`` counts the updates that were kept and undone.
        hypers: hyperparameters of the rule, the defaults of all groups.

    Raises:
        ValueError: for a hyperparameter that is out of range or that the rule does not have, also in a group, and for
            ``speculate`` without ``step_in_backward``. No param was taken over.
        TypeError: for a hyperparameter that is not a number.
        GeminiError: for params of a model that was wrapped for another rule.
    """

    rule: UpdateRule = rules.ADAM
    # The number of the backward in which the groups were looked at last (`step_in_backward`).
    _backward_checked = -1

    def __init__(
        self,
        params: Any,
        rule: UpdateRule,
        *,
        step_in_backward: bool = False,
        speculate: bool = False,
        **hypers: Any,
    ):
        if not isinstance(rule, UpdateRule):
            raise TypeError(f"rule= is a gemini.rules.UpdateRule, got {rule!r}")
        unknown = [name for name in hypers if name not in rule.defaults]
        if unknown:
            raise TypeError(f"{unknown[0]}= is not a hyperparameter of {rule.spec.name!r}: {list(rule.defaults)}")
        self.rule = rule
        defaults = {**rule.defaults, **hypers}
        # Before torch's constructor takes the params over: what is refused here has changed nothing.
        self.rule.check_group(defaults, type(self).__name__)
        self._update(step_in_backward, speculate)
        torch.optim.Optimizer.__init__(self, params, defaults)  # not that of a class which this one is in place of
        self._end_of_making(params_of(self))

    def _update(self, step_in_backward: bool, speculate: bool) -> None:
        """Set when updates are made: inside backward or in the step, as guesses or not."""
        if speculate and not step_in_backward:
            raise ValueError("speculate=True needs step_in_backward=True: it is about updates inside backward")
        self.step_in_backward, self.speculate = step_in_backward, speculate
        self._is_made = False

    def _take_over(
        self, rule: UpdateRule, states: dict[int, dict[str, Any]], what: str, *, step_in_backward: bool
    ) -> None:
        """Make one of this, whose class was another one (``in_place.py``), with the states of params by number. Raises
        ValueError or TypeError or GeminiError as for a new one. Attributes were set, and params taken over.
        """
        self.rule = rule
        self._update(step_in_backward, False)
        for group in self.param_groups:
            self.rule.check_group(group, what)
        # Refuses params of two models, while nothing has been taken over.
        self._owner()
        vars(self)["state"] = states_of.States(self, {})
        if states:  # which are written over those of an optimizer before, once all ranks have accepted them
            # torch's state dict: params by number, in the order of the groups.
            numbers = iter(range(len(params_of(self))))
            groups = [{"params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]
            give_to(self, params_of(self))
            self._load({"state": states, "param_groups": groups})
        self._end_of_making(params_of(self))

    def _end_of_making(self, params: Iterable[nn.Parameter]) -> None:
        states_of.own(self, params)
        self._is_made = True
        if self.step_in_backward:
            stepping_in_backward.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, states_of.renewed(self, value) if name == "state" else value)

    def __getstate__(self) -> dict[str, Any]:
        own = {"rule": self.rule, "step_in_backward": self.step_in_backward, "speculate": self.speculate}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy an optimizer of the params that were copied with it."""
        super().__setstate__(state)
        # Through __setattr__, which makes it States of this optimizer.
        self.state = state["state"]
        self._end_of_making(param for param in params_of(self) if optimizer_of(param) is None)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of params with hyperparameters of its own, as in torch.

        Keys that no optimizer uses are kept as labels.

        Raises:
            ValueError, TypeError: for hyperparameters that are invalid or that the rule does not have, and for params
                of a second GeminiDDP model. Nothing was changed.
            GeminiError: for params of a model that was wrapped for another rule. Nothing was changed.
        """
        if isinstance(param_group, dict):
            self.rule.check_group({**self.defaults, **param_group}, f"param group {len(self.param_groups)}")
        # torch refuses params that are in a group already; the rest is asked of the owner below.
        super().add_param_group(param_group)
        try:
            self._owner()
        except (GeminiError, ValueError):
            self.param_groups.pop()
            raise
        if self._is_made:  # else they become its own when every group has been accepted
            states_of.own(self, self.param_groups[-1]["params"])

    def _handles(self) -> list[ParamHandle]:
        return handles_of(params_of(self))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every param that has a gradient. Params without a gradient are skipped, and so are their step counts.

        The gradients of managed params are consumed. With a ``gemini.GradScaler``, which fp16 needs, call
        ``scaler.step(optimizer)`` instead: it skips a step with inf or NaN as a whole.

        When the host waits for the GPU: if everything is on the GPU, never in this call; an error about inf or NaN then
        comes from the next backward, or from what waits for updates before it (a checkpoint, ``memory_report()``). If
        the CPU makes some of the updates, in fp16 and with several ranks, once per step: in ``clip_grad_norm_`` if it
        is called, else here.

        Raises:
            NonFiniteGradient: naming the param. Nothing was changed, unless ``step_in_backward`` has updated other
                params; the message says so. ``clip_grad_norm_(..., error_if_nonfinite=True)`` raises it before the
                step.
            GeminiError: for gradients that a scaler has scaled and not unscaled.
        """
        # Outside of WHOLE: a closure is the program's forward and backward, which Ctrl-C may break off.
        loss = None if closure is None else call_with_grad(closure)
        with WHOLE:
            self._step()
        return loss

    @without_grad
    def _step(self) -> None:
        # Kept, not raised: with managed params the other ranks are told first.
        refusal = self._refusal()
        plain: list[tuple[nn.Parameter, Group, int]] = []
        managed: dict[ParamHandle, Group] = {}
        for number, (group, param) in enumerate([(g, p) for g in self.param_groups for p in g["params"]]):
            if (handle := handle_of(param)) is not None:
                managed[handle] = group
            elif param.grad is not None and param.grad.is_sparse:
                kind = type(self).__name__
                refusal = GeminiError(f"{kind} has no sparse gradients: build the embedding with sparse=False")
            elif param.grad is not None:
                plain.append((param, group, number))  # by which torch knows it in messages
        if refusal is not None and not managed:
            raise refusal
        if managed:
            states_of.check_owned(self, managed)
            self._step_managed(managed, refusal)
        # After the managed ones, which may still be refused.
        for param, group, number in plain:
            self._step_plain(param, group, number)

    def _refusal(self) -> Exception | None:
        """Find what is wrong with the hyperparameters of the groups."""
        for number, group in enumerate(self.param_groups):
            try:
                self.rule.check_group(group, f"param group {number}")
            except (TypeError, ValueError) as e:
                return e
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this optimizer's params. ``set_to_none=False`` sets them to zero instead; :meth:`step`
        then updates params that get no other gradient too, as in torch.

        Raises:
            GeminiError: for ``set_to_none=False`` with ``GeminiConfig(gradients="transient")``.
        """
        handles = []
        for param in params_of(self):
            if (handle := handle_of(param)) is not None:
                handles.append(handle)
            elif set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        if handles:
            owner_of(handles[0]).stepping.discard(handles, to_zero=not set_to_none)

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        """The states of one managed param, as tensors on the CPU: "step", those of the rule (for Adam "exp_avg" and
        "exp_avg_sq"), and in bf16 "residual", the other 16 bits of the master.

        Raises:
            KeyError: if the optimizer has no managed param of that name.
            GeminiError: if another optimizer has taken the param over.
        """
        self._owner()  # which refuses params of two models
        found = [handle for handle in self._handles() if name in handle.names]
        if not found:
            raise KeyError(f"this {type(self).__name__} owns no managed param called {name!r}")
        states_of.check_owned(self, found)
        return states_of.read_state(found[0])

    def owner(self) -> Owner | None:
        """Find what manages the managed params, if any. Raises GeminiError if another optimizer has taken some over."""
        states_of.check_owned(self, self._handles())
        return self._owner()

    def state_dict(self) -> dict[str, Any]:
        """As in torch: ``{"state": {index: {"step", "exp_avg", "exp_avg_sq", ...}}, "param_groups": [...]}``.

        States are whole tensors on the CPU, for Adam in fp32. A bf16 param also has "residual" (int16), the other 16
        bits of its master, and "residual_of", the CRC-32 of the weights that these complete. As in torch a param has no
        states before its first step by this optimizer. What its master has beyond its weights by then, of the fp32
        weights that it was made from or of an optimizer before, is in :func:`gemini.save_checkpoint`, and in
        ``model.state_dict(dtype=torch.float32)``.

        Raises:
            GeminiError: if another optimizer has taken some of the params over.
        """
        states_of.check_owned(self, self._handles())
        hooks = self._optimizer_state_dict_post_hooks
        with replaced(self, "_optimizer_state_dict_post_hooks", {}):
            result = super().state_dict()
        listed = isinstance(self.state, states_of.States) and self.state.listed
        for index, param in enumerate(params_of(self)):
            handle = handle_of(param)
            if handle is not None and (handle.num_steps or listed and handle.chunk.trained):
                found = result["state"][index] = states_of.read_state(handle)
                found |= states_of.read_state(handle, RESIDUAL_OF) if "residual" in found else {}
            elif index in result["state"]:  # a copy: these are the states themselves
                found = {name: states_of.shown(self.rule, name, v) for name, v in result["state"][index].items()}
                found.pop(states_of.BEFORE, None)
                if "residual" in found:
                    found.setdefault(RESIDUAL_OF, states_of.sum_of_plain(param))
                result["state"][index] = found
        return self._changed_by(hooks.values(), result)  # which see all of it, as in torch

    def _changed_by(self, hooks: Iterable[Callable[..., Any]], state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state as hooks of the program leave it, which may give another one."""
        for hook in hooks:
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned. :class:`HybridAdam` also loads the state of ``torch.optim.AdamW``, or,
        with ``decoupled=False`` or without weight decay, of ``torch.optim.Adam``.

        States have the dtypes of the rule, whatever the dtype of the param. The groups get the loaded hyperparameters
        and labels. "residual" and "master" of another precision are ignored, as weights belong to the model.

        A residual (in fp16 a master) completes the weights that it was saved with, whether they are there already or
        are loaded later, up to the next update; to other weights nothing is done. So the state of the model may be
        loaded before or after this one, or in parts.

        Raises:
            ValueError, TypeError: for other param groups and the state of another optimizer; the message names the
                param and the key. Nothing was changed.
            GeminiError: if another optimizer has taken some of the params over.
        """
        self._load(state_dict, self._optimizer_load_state_dict_pre_hooks.values())
        for then in self._optimizer_load_state_dict_post_hooks.values():
            then(self)

    @without_grad
    def _load(self, state_dict: dict[str, Any], hooks: Iterable[Callable[..., Any]] = ()) -> None:
        owner = self._owner()
        # All that can be refused is refused up to the agreement of ranks; from there on nothing is.
        with Attempt() as attempt:
            if owner is not None:
                owner.state.check_masters("the state of an optimizer is written")
            states_of.check_owned(self, self._handles())
            # A copy, as in torch: what a hook puts into it is not put into the caller's.
            state_dict = self._changed_by(hooks, dict(state_dict))
            states_of.check_states(self.rule, self.param_groups, state_dict)
            saved = state_dict["param_groups"]
            for number, (group, mine) in enumerate(zip(saved, self.param_groups, strict=True)):
                self.rule.check_group({**mine, **group}, what := f"group {number} of the loaded state")
                if self.rule == rules.ADAM:
                    states_of.check_decay(group, mine, what)
            keys = [*chain.from_iterable(group["params"] for group in saved)]
            states = [dict(state_dict["state"].get(key, {})) for key in keys]
        # The last look before the first change: ranks with other states go on as they were.
        if owner is not None:
            states_of.agree_on_state(self, owner, state_dict, attempt.refusal)
        elif attempt.refusal is not None:
            raise attempt.refusal
        groups = [loaded_group(group, mine) for group, mine in zip(saved, self.param_groups, strict=True)]
        with WHOLE, nullcontext() if owner is None else owner.state.changing():
            for param, state in zip(params_of(self), states, strict=True):
                if (handle := handle_of(param)) is not None:
                    states_of.write_state(handle, state)
                elif state:
                    self.state[param] = states_of.plain_state(self.rule.spec, param, state, self.state.get(param, {}))
                else:
                    self.state.pop(param, None)
            # What the program keeps under keys of its own stays as it is, as in torch.
            self.state.update({key: state_dict["state"][key] for key in state_dict["state"].keys() - keys})
            for group, loaded in zip(self.param_groups, groups, strict=True):
                group.update(loaded)

    def start_anew(self) -> None:
        """Drop the states and step counts of all params, as if this optimizer had just been created. Params that
        another optimizer has taken over belong to this one again.
        """
        with WHOLE:
            states_of.own(self, params_of(self))
            self.state.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler.step asks for this before it looks for gradients that are not there.
        if not scaler_steps.get() and self._handles():
            raise GeminiError(
                "torch.amp.GradScaler sees no gradients of a managed model (it looks at p.grad, and they live in "
                "chunks): use gemini.GradScaler, which is used in the same way"
            )
        return False

    def skip_step(self) -> None:
        """Drop the gradients of managed params in place of a step (``GradScaler.step`` has found inf or NaN)."""
        if handles := self._handles():
            owner_of(handles[0]).stepping.skip(handles)

    # ---- managed params -----------------------------------------------------------------------------------------

    def scalars_in_backward(self, handle: ParamHandle, backward_number: int, scale: float) -> Any:
        """The scalars to update a param with whose gradient has just become complete (``step_in_backward``)."""
        if self._backward_checked != backward_number:  # before the first update of this backward
            self._check_mode(owner_of(handle).stepping)
            self._backward_checked = backward_number
            # Once per backward, since its first update cannot be taken back.
            if (refusal := self._refusal()) is not None:
                raise refusal
        # By identity: == of tensors compares values.
        group = next(g for g in self.param_groups if any(p is handle.param for p in g["params"]))
        return owner_of(handle).stepping.rule.scalars(group, handle.num_steps + 1, scale)

    def _step_managed(self, managed: dict[ParamHandle, Group], refusal: Exception | None) -> None:
        """Step, while no other thread is in the model. ``refusal``: what is wrong with this rank's groups."""
        first = next(iter(managed))
        if any(handle.owner is not first.owner for handle in managed):
            self._owner()  # of two models, wrapped after this optimizer was made: refused
        stepping = (first.owner() or owner_of(first)).stepping  # which refuses where the model is gone
        self._check_mode(stepping)
        run_alone(stepping.state, self._step_alone, stepping, managed, refusal)

    def _step_alone(self, stepping: Stepping, managed: dict[ParamHandle, Group], refusal: Exception | None) -> None:
        # All ranks come here and agree; only then is a refusal of this rank's own raised.
        stepping.begin_step(self)
        if refusal is not None:
            raise refusal
        # Behind the agreement: a residual that waits for its weights is given up by all ranks alike.
        states_of.end_waiting(managed)
        taking = {handle: group for handle, group in managed.items() if handle.takes_step}
        if len(taking) < len(managed) and not (
            stepping.state.updated_in_backward or (self.step_in_backward and not self.speculate)
        ):
            used = [handle.name for handle in managed if handle.leftover is Leftover.USED and not handle.has_grad]
            if used:
                raise GeminiError(
                    f"{used[0]!r}, one of {len(used)}, has no new gradient, and optimizer.step() has used the one "
                    "before it without zero_grad() since, so torch would use it again, and Gemini keeps no "
                    "gradient that a step has used. Call optimizer.zero_grad() after every optimizer.step()"
                )
        stepping.step(taking)
        if taking and stepping.looks_for_optimizers:
            stepping.warn_of_no_optimizer()

    def _check_mode(self, stepping: Stepping) -> None:
        refuse_other(self.rule, stepping.rule)
        stepping.check_mode(self.step_in_backward, self.speculate)

    def adopt_plain_states(self) -> list[nn.Parameter]:
        """Write the states of steps that were made before the model was wrapped into its chunks (GeminiDDP calls it):
        the params that had them, and keep them here.
        """
        adopted = []
        for param in params_of(self):
            handle = handle_of(param)
            if handle is not None and dict.__contains__(self.state, param):  # not in planes
                adopted.append(param)
                state = dict(dict.__getitem__(self.state, param))
                # What was loaded may wait for its weights there as well.
                kept = states_of.REST & state.keys() if states_of.BEFORE in state else ()
                loaded = {name: state[name] for name in kept}
                if "master" in state:
                    # In fp16 the master was among the states, and the weights only its rounding.
                    states_of.complete_master(param, state)
                    owner_of(handle).by_names.write(handle, state["master"])
                states_of.write_state(handle, {**state, **loaded})
        return adopted

    def _owner(self) -> Owner | None:
        handles = {handle.owner: handle for handle in self._handles()}
        if len(handles) > 1:
            raise ValueError(
                f"this {type(self).__name__} was given params of two GeminiDDP models: make one optimizer per model "
                "(clipping, loss scale and skipped steps are per model)"
            )
        for handle in handles.values():
            refuse_other(self.rule, owner_of(handle).stepping.rule)
        return next((owner_of(handle) for handle in handles.values()), None)

    # ---- plain params -------------------------------------------------------------------------------------------

    def _step_plain(self, param: nn.Parameter, group: Group, index: int) -> None:
        """``index``: of the param in all groups; a plain one has no other name."""
        state = self.state[param]
        if not state:
            state.update(states_of.first_state(self.rule.spec, param))
        states_of.complete_master(param, state)
        state["step"] += 1
        # In fp16 the master is updated, and the weights are its rounding.
        weights = state.get("master", param.data).contiguous()
        residual = state.get("residual")
        scalars = self.rule.scalars(group, int(state["step"]), 1.0)
        where = Where(f"plain param {index}", 0, param.shape) if self.rule.spec.needs != "elements" else None
        arrays = rules.Arrays(
            weights.view(-1),
            None if residual is None else residual.view(-1),
            {**state, **{spec.kind: state[spec.kind].view(-1) for spec in self.rule.spec.planes}},
            param.grad.contiguous().view(-1),  # type: ignore[union-attr]
        )
        self.rule.run(arrays, [rules.Segment(0, weights.numel(), scalars, where)])
        # Updated elsewhere: a master, or a copy of a param with gaps.
        if weights.data_ptr() != param.data_ptr():
            param.data.copy_(weights)
        torch.autograd.graph.increment_version(param)  # for autograd a write in place, as torch's own steps are


class HybridAdam(HybridOptimizer):
    """AdamW (Loshchilov and Hutter, 2019), or with ``decoupled=False`` Adam with L2 regularization (Kingma and Ba,
    2015). It is a :class:`HybridOptimizer` with the rule that models are wrapped for by default.

    Args:
        params: as in :class:`HybridOptimizer`.
        lr: learning rate.
        betas: decay rates of the moments ``exp_avg`` and ``exp_avg_sq``.
        eps: added to the denominator.
        weight_decay: the decoupled weight decay of AdamW, or the L2 coefficient of Adam.
        decoupled: True for AdamW, False for Adam.
        step_in_backward, speculate: as in :class:`HybridOptimizer`, which says what is raised too.
    """

    def __init__(
        self,
        params: Any,
        lr: float = rules.ADAM.defaults["lr"],
        betas: tuple[float, float] = rules.ADAM.defaults["betas"],
        eps: float = rules.ADAM.defaults["eps"],
        weight_decay: float = rules.ADAM.defaults["weight_decay"],
        *,
        decoupled: bool = rules.ADAM.defaults["decoupled"],
        step_in_backward: bool = False,
        speculate: bool = False,
    ):
        super().__init__(
            params,
            rules.ADAM,
            step_in_backward=step_in_backward,
            speculate=speculate,
            lr=lr,
            betas=tuple(betas) if isinstance(betas, list) else betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
        )


def refuse_stock_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse one of torch's optimizers, before its step: it would find no gradient on managed params and do nothing.
    ``GeminiDDP`` sees to it, whether or not the program has ever looked at one of ours.
    """
    if isinstance(optimizer, HybridOptimizer):
        return
    for handle in handles_of(params_of(optimizer)):
        kind = type(optimizer).__name__
        raise GeminiError(
            f"{kind} cannot update {handle.name!r}: the gradients and masters of a managed model live in chunks. Use "
            "gemini.HybridAdam(model.parameters(), ...), another optimizer of gemini.optim, or this one as a rule: "
            f"gemini.optim.adopt({kind})"
        )
