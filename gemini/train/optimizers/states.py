"""Whose the states of params are, what may be loaded as one, and how they are read and written.

A param belongs to the HybridAdam that was given it last. As in torch a new optimizer starts anew: its params begin with
no steps and states of zero, whatever an optimizer before it has left in the planes. The master, in bf16 the residual
too, is the model's and stays. The optimizer of before has no states of these params any more, and says so.

A loaded state is looked at as a whole, before anything changes. Of a group only the hyperparameters are looked at, by
the rule. Every other key is a label: those of LR schedulers (``initial_lr``, ``swa_lr``), of frameworks
(``param_names``) and of users are kept, saved and given back.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from gemini.errors import GeminiError, warn
from gemini.interrupts import WHOLE
from gemini.kernels import crc32
from gemini.optim.around import CompactRule, upper_byte
from gemini.planning.planes import EMA, RESIDUAL, PlaneKind, RuleSpec, shapes_of
from gemini.planning.rules import scale_of
from gemini.ranks.agree import Facts, Point, checksum_text, plain
from gemini.rules import UpdateRule, is_decoupled, number_of, rule_of
from gemini.train.params.by_name import Owner, owner_of
from gemini.train.params.guard import ReadLater
from gemini.train.params.handle import (
    ParamHandle,
    give_to,
    handle_of,
    handles_of,
    optimizer_of,
    params_of,
    plain_params_of,
)

if TYPE_CHECKING:
    from gemini.train.optimizers.optimizer import HybridOptimizer


Group = Mapping[str, Any]

RESIDUAL_OF = "residual_of"
"""A state: the CRC-32 of the bf16 weights that "residual" completes, so that it completes these and no others."""
BEFORE = "before"
"""In the state of a plain param: the residual or master before one was loaded, until the next update. If the weights
that the loaded one is of are not there by then, it comes back.
"""
MASTER = "master"
"""A state in fp16: the fp32 master, which the weights that a model's state has are only the rounding of."""
REST = frozenset({RESIDUAL, RESIDUAL_OF, MASTER})
"""What a state may have of a master."""


class States(defaultdict):  # type: ignore[type-arg]
    """``optimizer.state``: of plain params what it holds, of managed ones a look at their planes. What takes the state
    of a managed param out of it (``clear``, ``pop``, ``del``, or ``{}`` in its place) lets that param start anew, as in
    torch. ``len`` and iteration count states of plain params alone.

    False before the first step, as in torch. torch.distributed.checkpoint, which loads into states that are there,
    would make a step with gradients of zeros then. It finds states of zeros in its place, and ``listed`` says that
    those of managed params are in ``state_dict()`` from then on.
    """

    def __init__(self, optimizer: HybridOptimizer, states: Mapping[Any, Any]):
        super().__init__(dict, states)
        self._optimizer = weakref.ref(optimizer)
        self.listed = False

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))  # a copy of an optimizer has plain params only

    def __bool__(self) -> bool:
        optimizer, asking = self._optimizer(), sys._getframe(1)
        if self.listed or len(self) > 0 or any(handle.num_steps for handle in managed_of(optimizer)):
            return True
        if optimizer is not None and asking.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            self.listed = True
            for _, param in plain_params_of(optimizer):
                if param.requires_grad:
                    self[param] = first_state(optimizer.rule.spec, param)
                    complete_master(param, self[param])
        return self.listed

    def __missing__(self, param: Any) -> Any:
        handle = self._managed(param)
        return super().__missing__(param) if handle is None else _Planes(handle)

    def __contains__(self, param: Any) -> bool:
        # As `get`: torch makes a state in a param's first step. What lists states gives those that are in here alone.
        return super().__contains__(param) or self.get(param) is not None

    def get(self, param: Any, default: Any = None) -> Any:
        handle = self._managed(param)
        if handle is None:
            return super().get(param, default)
        return _Planes(handle) if handle.num_steps else default  # which torch makes in a param's first step

    def __setitem__(self, param: Any, state: Any) -> None:
        handle = self._managed(param)
        if handle is None:
            super().__setitem__(param, state)
        elif state:
            raise _cannot_write(handle)
        else:
            start_anew([handle])

    def __delitem__(self, param: Any) -> None:
        handle = self._managed(param)
        if handle is None:
            super().__delitem__(param)
        else:
            start_anew([handle])

    def pop(self, param: Any, *default: Any) -> Any:
        handle = self._managed(param)
        if handle is None:
            return super().pop(param, *default)
        # Read before it is dropped: `pop` gives it back.
        state = read_state(handle)
        start_anew([handle])
        return state

    def _managed(self, param: Any) -> ParamHandle | None:
        """The handle of a managed param, whose state is not in here (but for steps before its model was wrapped)."""
        handle, optimizer = handle_of(param), self._optimizer()
        # In here although it is managed: states of steps before the wrap, until the model has taken them over.
        if handle is None or super().__contains__(param):
            return None
        if optimizer is not None:
            check_owned(optimizer, [handle])
        return handle

    def clear(self) -> None:
        # Plain ones go with the dict; managed ones start anew in their planes.
        super().clear()
        self.listed = False
        start_anew(managed_of(self._optimizer()))


def renewed(optimizer: HybridOptimizer, states: Mapping[Any, Any]) -> States:
    """``optimizer.state = states``, which is how programs let an optimizer start anew (``states`` are empty then)."""
    if not isinstance(states, States):
        # All are looked at before any starts anew.
        for handle in managed_of(optimizer):
            if states.get(handle.param):
                raise _cannot_write(handle)
        start_anew(managed_of(optimizer))
    return States(optimizer, states)


def managed_of(optimizer: HybridOptimizer | None) -> list[ParamHandle]:
    """The managed params that belong to an optimizer (none while it is being made, and when it is gone)."""
    params = params_of(optimizer) if hasattr(optimizer, "param_groups") else []
    return [handle for handle in handles_of(params) if optimizer_of(handle.param) is optimizer]


def _cannot_write(handle: ParamHandle) -> GeminiError:
    return GeminiError(
        f"this cannot be written to optimizer.state of managed param {handle.name!r}, whose states live in chunks: "
        "write values into a state in the shape of the param, as optimizer.state[param]['exp_avg'].mul_(0.5), load a "
        "whole state with optimizer.load_state_dict, or let the param start anew with optimizer.state.pop(param)"
    )


class _State(NamedTuple):
    """A state of a managed param as operations on it are given it: :class:`gemini.train.params.guard.Weights` of it."""

    handle: ParamHandle
    name: str

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def label(self) -> str:
        return f"the state {self.name!r} of managed param {self.handle.name!r}"

    def read(self) -> torch.Tensor:
        with torch.inference_mode(False):  # else it could not be written to, nor be saved for a backward
            return read_state(self.handle, self.name)[self.name].clone()

    def write(self, values: torch.Tensor) -> None:
        _Planes(self.handle)[self.name] = values

    def refuse(self, what: str, *, write: bool) -> NoReturn:
        raise _cannot_write(self.handle)


class _Planes(Mapping[str, torch.Tensor]):
    """The states of one managed param by name; each is read, whole and on the CPU, when it is used."""

    def __init__(self, handle: ParamHandle):
        self._handle = handle

    def __iter__(self) -> Iterator[str]:
        return iter(_names_in(self._handle))

    def __len__(self) -> int:
        return len(_names_in(self._handle))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in _names_in(self._handle):
            raise KeyError(f"{self._handle.name!r} has no state called {name!r}, only {', '.join(self)}")
        state = _State(self._handle, name)
        return ReadLater.make(state, state.read())

    def __setitem__(self, name: str, value: Any) -> None:
        handle = self._handle
        now = _State(handle, name).read() if name in _names_in(handle) else None
        if now is None or not isinstance(value, torch.Tensor) or value.shape != now.shape:
            raise _cannot_write(handle)
        value = value.detach().to("cpu", now.dtype)
        if torch.equal(value, now):  # a loop that puts states on a device
            return
        is_plane = name in handle.chunk.states and name != RESIDUAL and value.shape == handle.param.shape
        if not is_plane or _compact_rule(handle) is not None:
            raise _cannot_write(handle)
        owner_of(handle).stepping.updates.drain()
        with WHOLE:
            owner_of(handle).by_names.write_plane(handle, name, value)


def first_state(spec: RuleSpec, param: nn.Parameter) -> dict[str, Any]:
    """The state of a plain param before its first step."""
    return {
        "step": torch.tensor(0.0, device="cpu"),
        **{
            name: torch.zeros(shape, dtype=dtype, device=param.device)
            for name, (shape, dtype) in layout_of(spec, param).items()
        },
    }


def own(optimizer: HybridOptimizer, params: Iterable[nn.Parameter]) -> None:
    """Make the params the optimizer's; managed ones that were not its own start anew."""
    params = list(params)
    with WHOLE:
        # Before they are given away: what starts anew is what another optimizer has left.
        start_anew(h for h in handles_of(params) if optimizer_of(h.param) is not optimizer)
        give_to(optimizer, params)


def start_anew(handles: Iterable[ParamHandle]) -> None:
    """Set steps and states to zero. Where a param has had no update they are zero already, and nothing is written."""
    # The write is a whole plane, so it is spared where nothing was written.
    used = [handle for handle in handles if handle.num_steps]
    if not used:
        return
    state = owner_of(used[0]).state
    if state.corrupted_by:  # a checkpoint is going to overwrite all of it, and nothing less helps
        for handle in used:
            handle.num_steps = 0
        return
    state.check_masters("the state of an optimizer is written")
    owner_of(used[0]).stepping.updates.drain()
    with WHOLE, state.changing():
        for handle in used:
            write_state(handle, {})


def check_owned(optimizer: HybridOptimizer, handles: Iterable[ParamHandle]) -> None:
    """Refuse to go on with params that another optimizer has taken over."""
    lost = [handle for handle in handles if handle.optimizer() is not optimizer]
    if lost:
        others = f" and {len(lost) - 1} more params" if len(lost) > 1 else ""
        raise GeminiError(
            f"{lost[0].name!r}{others} were given to another HybridAdam after this one, which began their states and "
            "step counts anew: use the newer optimizer, and give every param to one of them only"
        )


def _compact_rule(handle: ParamHandle) -> CompactRule | None:
    """The rule of a param with compact states, or None for exact ones."""
    rule = owner_of(handle).stepping.rule.of(handle.chunk.spec.exact)
    return rule if isinstance(rule, CompactRule) else None


def _names_in(handle: ParamHandle) -> list[str]:
    """List what the states of a param are called."""
    if not handle.chunk.trained:
        return []
    shown, master = _shown(handle), [MASTER] if owner_of(handle).by_names.rounds(handle) else []
    return ["step", *shown, *([RESIDUAL_OF] if RESIDUAL in shown else []), *master, *handle.factors]


def _shown(handle: ParamHandle) -> list[PlaneKind]:
    """The states of a param by name, as the optimizer's rule has them."""
    rule, kinds = _compact_rule(handle), handle.chunk.states
    return kinds if rule is None else [kind for kind in kinds if kind in (RESIDUAL, *rule.face.spec.states)]


def read_state(handle: ParamHandle, name: str | None = None) -> dict[str, torch.Tensor]:
    """The states of one managed param, on the CPU, compact ones decoded (fp32, and a residual of int16); beside the
    step count only the one called ``name``, if given.
    """
    owner_of(handle).state.check_masters("the state of an optimizer is read")
    by_names, rule, compact = owner_of(handle).by_names, owner_of(handle).stepping.rule, _compact_rule(handle)
    state = {"step": torch.tensor(float(handle.num_steps), device="cpu")}
    for kind in _shown(handle):
        if name not in (None, kind):
            continue
        value = by_names.read_plane(handle, kind)
        if compact is None:
            value = shown(rule, kind, value)
        elif kind == RESIDUAL:
            # The upper 8 of the residual's 16 bits are what is kept: the rest reads as 0.
            value = value.short() << 8
        else:
            value = compact.decoded(value, by_names.read_plane(handle, scale_of(kind)))
        state[kind] = value
    if name in (None, MASTER) and by_names.rounds(handle):
        state[MASTER] = by_names.read(handle, torch.float32)
    if name == RESIDUAL_OF:
        state[RESIDUAL_OF] = torch.tensor(by_names.sum_of_weights(handle), device="cpu")
    if handle.factors:
        # Factors are no plane: nobody waits for their update unless asked.
        owner_of(handle).stepping.updates.wait(handle.chunk)
        state.update({kind: value.clone() for kind, value in handle.factors.items() if name in (None, kind)})
    return state


def shown(rule: UpdateRule, kind: str, value: torch.Tensor) -> torch.Tensor:
    """A state as it is shown: of a plane that holds one number for the whole param, that."""
    if kind not in rule.uniform:
        return value
    return value[0].clone() if value.numel() else value.new_zeros(())


def _encoded(rule: CompactRule, state: dict[str, Any]) -> dict[str, Any]:
    """States as a compact rule keeps them. What it does not keep in codes (step) passes as it is."""
    coded = {kind: value for kind, value in state.items() if kind not in rule.face.spec.kinds}
    for kind in (spec.kind for spec in rule.face.spec.planes):
        coded |= rule.encoded(kind, state[kind]) if kind in state else {}
    if RESIDUAL in state:
        coded[RESIDUAL] = upper_byte(state[RESIDUAL].to("cpu"))
    return coded


def write_state(handle: ParamHandle, state: dict[str, Any]) -> None:
    """Overwrite the states of one managed param; without any it has had no update. Compact ones are rounded."""
    by_names, rule = owner_of(handle).by_names, _compact_rule(handle)
    state = {kind: value for kind, value in state.items() if value is not None}
    state = state if rule is None else _encoded(rule, state)
    if handle.chunk.trained:  # else it is frozen, and nothing was kept
        handle.num_steps, handle.restored, handle.waiting = int(state.get("step", 0)), -1, None
    if MASTER in state and by_names.rounds(handle):
        by_names.complete(handle, state[MASTER], None)
    if RESIDUAL in state and RESIDUAL in handle.chunk.states:
        by_names.complete(handle, state[RESIDUAL], int(state[RESIDUAL_OF]) if RESIDUAL_OF in state else None)
    for kind in handle.chunk.states:
        # Starting anew: zeros. The residual stays, since it is half of the master, which is the model's.
        value = state.get(kind) if state else torch.zeros((), device="cpu")
        if value is None or kind == RESIDUAL:
            continue
        plane = handle.chunk.planes[kind]
        if not state or (plane.block != 1 and value.dim() == 0):  # one number for the whole param, as `shown` has it
            value = value.expand(handle.param.shape if plane.block == 1 else (plane.items(handle.param.numel()),))
        by_names.write_plane(handle, kind, value)
    if state and EMA in handle.chunk.planes and EMA not in state:
        # Of steps before the model was wrapped: its average begins here, at the master that these have left.
        by_names.write_plane(handle, EMA, by_names.read(handle, torch.float32))
    if handle.factors:
        owner_of(handle).stepping.updates.wait(handle.chunk)
        for kind, factor in handle.factors.items():
            if kind in state:
                factor.copy_(state[kind])
            elif not state:
                factor.zero_()


def end_waiting(handles: Iterable[ParamHandle]) -> None:
    """Note that these params are updated now, and warn of residuals whose weights never came."""
    alone = []
    for handle in handles:
        if handle.waiting is not None:
            alone += [handle.name] * (not handle.waiting.met)
            handle.waiting = None  # from the first update on the weights are others, which nothing can complete
    if alone:
        _warn_of_other_weights(repr(alone[0]) + (f" and {len(alone) - 1} more params" if len(alone) > 1 else ""))


def _warn_of_other_weights(whose: str) -> None:
    warn(
        f"the optimizer state that was loaded was saved with other weights than {whose} had since: "
        "what the masters that came with it have beyond their 16-bit weights was not used. To continue with the same "
        "bits load the model's state of the same moment too, before or after the optimizer's"
    )


def sum_of_plain(param: torch.Tensor) -> torch.Tensor:
    """The "residual_of" of a plain bf16 param: the CRC-32 of its weights, as a managed one has it."""
    return torch.tensor(crc32(param.detach().reshape(-1).cpu()), device="cpu")


def is_of(param: torch.Tensor, state: dict[str, Any]) -> bool:
    """Whether a loaded residual, or in fp16 a master, is of the weights that a plain param has now."""
    if MASTER in state:
        weights = param.detach().contiguous()
        # Bits: NaN is equal to itself, and 0.0 not to -0.0.
        return torch.equal(state[MASTER].to(weights.dtype).view(torch.int16), weights.view(torch.int16))
    return RESIDUAL_OF not in state or int(state[RESIDUAL_OF]) == int(sum_of_plain(param))


def complete_master(param: torch.Tensor, state: dict[str, Any]) -> None:
    """Make what a plain param's master has beyond its weights as they are now: what was loaded with an optimizer's
    state may be of other weights, and fp16 weights may have been written to since.
    """
    if BEFORE in state and not is_of(param, state):
        for name in (RESIDUAL, MASTER):
            state.pop(name, None)
        state.update(state[BEFORE])
        _warn_of_other_weights(f"a plain param of shape {tuple(param.shape)}")
    state.pop(BEFORE, None)
    state.pop(RESIDUAL_OF, None)
    if param.dtype is torch.bfloat16 and RESIDUAL not in state:
        state[RESIDUAL] = torch.zeros_like(param, dtype=torch.int16, memory_format=torch.contiguous_format)
    elif param.dtype is torch.float16:
        weights = param.detach().contiguous()
        master = state.setdefault(MASTER, weights.float())
        written = master.to(weights.dtype).view(torch.int16) != weights.view(torch.int16)
        if written.any():
            master[written] = weights[written].float()


def plain_state(rule: RuleSpec, param: nn.Parameter, state: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A loaded state of a plain param, as a step has it: a copy. ``before``: the state until now."""
    layout = layout_of(rule, param)
    if param.dtype is torch.bfloat16:
        layout[RESIDUAL] = (param.shape, torch.int16)
    if param.dtype is torch.float16:
        layout[MASTER] = (param.shape, torch.float32)
    # On the CPU wherever the param is, as in `step`: it is read in every step.
    found: dict[str, Any] = {"step": torch.tensor(float(state["step"]), device="cpu")}
    for name, (shape, dtype) in layout.items():
        if name in state:
            # A state dict may show one number for the whole param.
            found[name] = state[name].detach().expand(shape).to(param.device, dtype, copy=True).contiguous()
    if RESIDUAL in found and RESIDUAL_OF in state:
        found[RESIDUAL_OF] = torch.as_tensor(state[RESIDUAL_OF], device="cpu").clone()
    if is_of(param, found):
        found.pop(RESIDUAL_OF, None)
    elif RESIDUAL in found or MASTER in found:
        found[BEFORE] = {name: before[name] for name in (RESIDUAL, MASTER) if name in before}
    return found


def check_states(rule: UpdateRule, own: list[dict[str, Any]], state_dict: Any) -> None:
    """Refuse loaded states of other groups, those that are not of this rule (names, shapes, dtypes, step counts), and
    those of params that are frozen here, and have nowhere to keep them. Raises ValueError or TypeError, naming the
    param and the key.
    """
    if missing := sorted({"state", "param_groups"} - state_dict.keys()):
        raise ValueError(f"the loaded state has no {missing[0]!r}: give what optimizer.state_dict() returned")
    sizes, mine = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], own))
    if sizes != mine:
        raise ValueError(
            f"the loaded state has groups of {sizes} params, the optimizer has groups of {mine}: it was saved for "
            "another model or other groups"
        )
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in own for param in group["params"]]
    for index, (key, param) in enumerate(zip(keys, params, strict=True)):
        state, handle = state_dict["state"].get(key), handle_of(param)
        name = repr(f"param {index}" if handle is None else handle.name)
        if not state:  # it has had no update
            continue
        # The model's may keep more than the optimizer knows of.
        _check_state(rule if handle is None else rule_of(owner_of(handle).config.optimizer), state, param, name)
        if handle is not None and not handle.chunk.trained:
            raise ValueError(
                f"the loaded state has states of {name}, which is frozen here: call requires_grad_(True) before "
                "GeminiDDP(model), or leave its state out"
            )


def _check_state(rule: UpdateRule, state: Mapping[str, Any], param: nn.Parameter, name: str) -> None:
    wanted = ["step", *layout_of(rule.spec, param)]
    missing = [key for key in wanted if key not in state]
    # What completes the weights may stand beside them.
    strange = [key for key in state if key not in {*wanted, "residual", RESIDUAL_OF, "master"}]
    if missing or strange:
        wrong = f"has no {' and no '.join(map(repr, missing))}" if missing else f"has {strange[0]!r}"
        raise ValueError(
            f"the loaded state of {name} {wrong}, and the rule {rule.spec.name!r} has {', '.join(map(repr, wanted))}"
        )
    step = number_of(state["step"], f"'step' of {name}")
    if not (0 <= step < 2**53 and step == int(step)):
        raise ValueError(f"'step' of {name} is {step:g} in the loaded state: wanted a whole number, not negative")
    of_master = {"residual": (param.shape, torch.int16), "master": (param.shape, torch.float32)}
    for kind, (shape, dtype) in {**of_master, **shown_layout_of(rule, param)}.items():
        if kind in state:
            _check_tensor(state[kind], shape, dtype, f"{kind!r} of {name}")


def _check_tensor(value: Any, shape: torch.Size, dtype: torch.dtype, what: str) -> None:
    """Refuse what is no dense tensor of that shape and dtype; fp32 is made of any float dtype."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
        raise ValueError(f"{what} is not a dense tensor with values in the loaded state: {type(value)}")
    any_float = dtype is torch.float32
    if value.shape != shape or not (value.is_floating_point() if any_float else value.dtype is dtype):
        raise ValueError(
            f"{what} is {value.dtype} of shape {tuple(value.shape)} in the loaded state, wanted "
            f"{'a float dtype' if any_float else dtype} of shape {tuple(shape)}"
        )


def layout_of(rule: RuleSpec, param: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of every state that a rule keeps of a param."""
    layout = {
        spec.kind: (
            param.shape if spec.block == 1 else torch.Size([spec.num_items(param.numel())]),
            getattr(torch, spec.dtype),
        )
        for spec in rule.planes
    }
    factors = shapes_of(rule.factors, param.shape)
    return layout | {name: (torch.Size(shape), torch.float32) for name, shape in factors.items()}


def shown_layout_of(rule: UpdateRule, param: torch.Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The same as a state dict shows it: one number where a plane has it for every block."""
    layout = layout_of(rule.spec, param)
    return layout | {kind: (torch.Size(), layout[kind][1]) for kind in rule.uniform}


def check_decay(group: Group, mine: Group, what: str) -> None:
    """Refuse a group loaded into an Adam's that decays weights in the other one of both ways. Raises ValueError."""
    there = group.get("decoupled", group.get("decoupled_weight_decay"))
    here = is_decoupled(mine)
    if there is not None and bool(there) is not here and float(group.get("weight_decay", 0)) != 0:
        kinds = {True: "decoupled weight decay (AdamW)", False: "L2 weight decay (Adam)"}
        raise ValueError(
            f"{what} has {kinds[bool(there)]}, this optimizer has {kinds[here]}: make it with "
            f"HybridAdam(..., decoupled={bool(there)})"
        )


def loaded_group(saved: Group, mine: Group) -> dict[str, Any]:
    """Take from a saved group what goes into the optimizer's: neither params nor the kind of Adam (compared before)."""
    left = {"params", "decoupled", "decoupled_weight_decay"} if "decoupled" in mine else {"params", "decoupled"}
    kept = {k: v for k, v in saved.items() if k not in left}
    return copy.deepcopy(kept)  # a learning rate may be a tensor, which a scheduler fills, or a label a list


def agree_on_state(optimizer: Any, owner: Owner, state: Mapping[str, Any], refusal: BaseException | None) -> None:
    """See that every rank is about to load the same state into managed params, and has nothing against it. Raises
    RankMismatch on every rank, naming what differs, and GeminiError if one refuses, there its ``refusal``.
    """

    def facts() -> Facts:
        values: dict[str, str] = {}
        for index, (group, loaded) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
            pairs = zip(loaded["params"], map(handle_of, group["params"]), strict=True)
            managed = [(key, handle) for key, handle in pairs if handle]
            # Hyperparameters alone: labels may differ, and no update depends on them.
            for name in optimizer.defaults if managed else ():
                values[f"{name} of param group {index}"] = repr(plain(loaded.get(name, "not given")))
            for key, handle in managed:
                # A param without states says nothing: a rank that has some differs in that they are there.
                for name, value in state["state"].get(key, {}).items():
                    # Whole tensors go as checksums, numbers as what they say, so that an error can name both.
                    is_values = isinstance(value, torch.Tensor) and value.dim() > 0
                    values[f"{name} of {handle.name!r}"] = checksum_text(value) if is_values else repr(plain(value))
        return Facts(values)

    owner.stepping.company.agree(Point.LOAD_OPTIMIZER, "optimizer.load_state_dict", facts, refusal)
