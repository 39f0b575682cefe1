"""Reading a checkpoint: what this rank needs of the saved parts, and everything else that was saved, compared first.

Whatever number of ranks wrote the checkpoint, a rank reads the ranges that overlap its own parts. Before any rank
changes anything all of them together have compared every checksum, each a share of them, and whatever could be refused
has been refused.

States may have been saved in one form and be kept in another: exact ones read into a compact model, masters in two
halves into a param that stays in fp32, and the other way. Such a param is converted tile by tile, master and states
together. From compact to exact nothing is lost that was there; that exact states lose something is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini import kernels
from gemini.errors import PlanMismatch, warn
from gemini.interrupts import WHOLE
from gemini.kernels import reference
from gemini.memory.movement.mover import Mover, tiles
from gemini.planning.compact import BLOCK, compact, scale_of
from gemini.planning.planes import RESIDUAL, WEIGHTS, PlaneKind, PlaneSpec, RuleSpec
from gemini.ranks.agree import Handshake
from gemini.train.checkpoint.format import ALL_OF_MODEL, VALUES, Manifest, SavedParam, decode
from gemini.train.checkpoint.states import (
    check_groups,
    check_plain_states,
    check_scheduler,
    factors_of,
    load_factors,
    load_plain_states,
    own_values,
    set_rng_states,
    taken_back_on_error,
    with_unsaid,
)
from gemini.train.checkpoint.tensor_file import TensorFile
from gemini.train.checkpoint.write import PlanePart
from gemini.train.engine import Engine
from gemini.train.modules.codes import scales_in
from gemini.train.observers import WriteObservers
from gemini.train.optimizers.optimizer import HybridOptimizer
from gemini.train.params.by_name import store_range
from gemini.train.params.handle import ParamHandle, ParamSet
from gemini.train.params.state_dict import beside_params, load_beside_params, undone_on_error

Values = Mapping[PlaneKind, torch.Tensor]


def face_of(rule: RuleSpec) -> RuleSpec:
    """The rule that an optimizer has, however its states are kept."""
    return rule.exact or rule


def check_rule(path: Path, saved: RuleSpec, here: RuleSpec) -> None:
    """Refuse states that a model of the rule ``here`` cannot take over.

    Raises:
        PlanMismatch: for states of another rule, and for compact ones of another form.
    """
    if face_of(saved) != face_of(here):
        raise PlanMismatch(
            f"{path} was saved with states of the update rule {saved.name!r}, the model was wrapped for "
            f"{here.name!r}: wrap it with GeminiConfig(optimizer=) of the same rule"
        )
    if saved.exact is not None:
        ours = compact(face_of(here))
        if (saved.planes, saved.residual, saved.codes) != (ours.planes, ours.residual, ours.codes):
            raise PlanMismatch(
                f"{path} has compact states of another form ({_form(saved)}), this Gemini knows {_form(ours)}: load it "
                'with the Gemini that wrote it, and save it with states="exact"'
            )


def _form(rule: RuleSpec) -> str:
    planes = ", ".join(f"{s.kind} {s.dtype}{f' for {s.block} elements' if s.block > 1 else ''}" for s in rule.planes)
    return f"{planes or 'no states'}, residual {rule.residual}, codes of form {rule.codes}"


class Form(NamedTuple):
    """How a trained param of a bf16 model is kept: by which rule, and whether its weights stay in fp32."""

    rule: RuleSpec
    fp32: bool

    @property
    def specs(self) -> list[PlaneSpec]:
        """Its planes."""
        halves = [PlaneSpec(WEIGHTS, "bfloat16"), PlaneSpec(RESIDUAL, self.rule.residual)]
        return [*([PlaneSpec(WEIGHTS, "float32")] if self.fp32 else halves), *self.rule.planes]


def converted(saved: Form, here: Form, read: Callable[[PlaneSpec], torch.Tensor]) -> Values:
    """The planes, as ``here`` has them, of elements whose saved planes ``read`` gives; they begin with a block."""
    there = {spec.kind: read(spec) for spec in saved.specs}
    n = there[WEIGHTS].numel()
    made = {spec.kind: _empty(spec, n) for spec in here.specs}
    master = there[WEIGHTS] if saved.fp32 else torch.empty(n, dtype=torch.float32, device="cpu")
    # Through the fp32 master, whichever two forms these are.
    if not saved.fp32:
        kernels.join_master(there[WEIGHTS], there[RESIDUAL], master)
    if here.fp32:
        made[WEIGHTS] = master
    else:
        kernels.split_master(master, made[WEIGHTS], made[RESIDUAL])
    # The states have the same names in both rules; compact ones come with scales.
    for kind in (spec.kind for spec in face_of(saved.rule).planes):
        values = there[kind]
        if saved.rule.exact is not None:
            values = reference.decode(values, there[scale_of(kind)])
        if here.rule.exact is None:
            made[kind] = values
        else:
            reference.encode(values, made[kind], made[scale_of(kind)])
    return made


def _empty(spec: PlaneSpec, numel: int) -> torch.Tensor:
    assert spec.block in (1, BLOCK)
    return torch.empty(spec.num_items(numel), dtype=getattr(torch, spec.dtype), device="cpu")


class _SavedRange(NamedTuple):
    """Items ``[start, stop)`` of a master or state, or of a slice of it: one tensor in a file."""

    start: int
    stop: int
    file: TensorFile
    name: str
    slice: int


class Reader:
    """Masters and states of one checkpoint, for the ``sources`` of this rank.

    ``started``: they are being overwritten.
    """

    def __init__(
        self,
        manifest: Manifest,
        opened: Mapping[str, TensorFile],
        sources: list[PlanePart],
        mover: Mover,
        rule: RuleSpec,
    ):
        self._sources, self._mover, self._piece = sources, mover, manifest.piece
        exact = frozenset(manifest.exact)
        self._rule, self._params, self._is_bf16 = rule, manifest.params, manifest.precision == "bf16"
        self._forms = {name: Form(manifest.rule.of(name in exact), p.fp32) for name, p in manifest.params.items()}
        self._num_rounded = 0
        """Params whose states were exact and are compact here."""
        # In one order on every rank: each compares its share of them.
        self._entries = [
            (opened[file], name, entry)
            for file, listed in manifest.files.items()
            if file != VALUES
            for name, entry in listed.tensors.items()
        ]
        self._saved: dict[str, list[_SavedRange]] = {}
        for file, name, entry in self._entries:
            run = _SavedRange(entry.start, entry.start + file.specs[name].numel, file, name, entry.slice)
            self._saved.setdefault(entry.of, []).append(run)
        self.started = False

    def check(self, rank: int, size: int) -> None:
        """Compare this rank's share of the checksums, one of ``size``. That no part is missing is known already.

        Raises:
            StorageError: naming the file and tensor that is not what was written.
        """
        for file, name, entry in self._entries[rank::size]:
            file.check(name, self._piece, entry.sums)

    def read(self, observers: WriteObservers) -> None:
        """Overwrite what this rank keeps, range by range."""
        # From here on the model is neither what it was nor what was saved: whoever called marks it, if this breaks off.
        self.started = True
        chunks = {source.handle.chunk.spec.index: source.handle.chunk for source in self._sources}.values()
        # A checkpoint that is being written behind the training gets each chunk as it was.
        for chunk in chunks:
            observers.before_write(chunk)
        # A param in another form is converted as a whole, master and states together, and left out below.
        others = {
            source.handle.whole_name: source.handle for source in self._sources if self._other_form(source.handle)
        }
        for handle in others.values():
            self._convert(handle)
        for source in self._sources:
            if source.handle.whole_name not in others:
                for start, stop in tiles(0, source.numel, self._mover.tile):
                    self._read_range(source, start, stop)
        for chunk in chunks:
            observers.after_write(chunk)

    def tell_loss(self, path: Path) -> None:
        """Warn, if states have lost precision."""
        if self._num_rounded:
            warn(
                f"{path} was saved with exact states, and the model keeps compact ones: in {self._num_rounded} params "
                "masters have 24 bits now and states 8. The run goes on close to what it was, not with its bits"
            )

    def _other_form(self, handle: ParamHandle) -> bool:
        """Whether a param was saved with states in another form than it keeps here."""
        both = self._params[handle.whole_name].trained and handle.chunk.trained
        return self._is_bf16 and both and self._forms[handle.whole_name].specs != self._form_here(handle).specs

    def _form_here(self, handle: ParamHandle) -> Form:
        return Form(self._rule.of(handle.chunk.spec.exact), handle.chunk.spec.fp32)

    def _convert(self, handle: ParamHandle) -> None:
        """Overwrite all planes of a param, tile by tile."""
        saved, here, part = self._forms[handle.whole_name], self._form_here(handle), handle.part
        # Only from exact to compact is anything lost that is worth telling.
        self._num_rounded += saved.rule.exact is None and here.rule.exact is not None and part.numel > 0
        for start, stop in tiles(0, part.numel, self._mover.tile):
            read = partial(self._saved_part, handle, part.offset + start, part.offset + stop)
            for kind, values in converted(saved, here, read).items():
                store_range(self._mover, handle.chunk.planes[kind], part.start + start, values)

    def _saved_part(self, handle: ParamHandle, start: int, stop: int, spec: PlaneSpec) -> torch.Tensor:
        """Elements ``[start, stop)`` of a param in a saved plane."""
        first, last = start // spec.block, spec.num_items(stop)
        values = torch.empty(last - first, dtype=getattr(torch, spec.dtype), device="cpu")
        self._fill(values, f"{spec.kind}/{handle.whole_name}", handle, first)
        return values

    def _read_range(self, source: PlanePart, start: int, stop: int) -> None:
        """Overwrite items of this rank's part, in place where the host can write them, else through a staging area."""
        in_place = source.plane.host_view(source.place(start), source.place(stop))
        values = self._mover.scratch(2, source.plane.dtype, stop - start) if in_place is None else in_place
        if source.key in self._saved:
            self._fill(values, source.key, source.handle, source.offset + start)
        else:
            # Trained here, frozen when it was saved: what is there belongs to weights that are gone.
            values.zero_()
        if in_place is None:
            at = source.handle.part.start + start * source.plane.block
            store_range(self._mover, source.plane, at, values)

    def _fill(self, values: torch.Tensor, key: str, handle: ParamHandle, first: int) -> None:
        """Read the saved items of a plane from ``first`` on, as the slice that a param is here counts them."""
        if is_cut_anew(self._params[handle.whole_name], handle):
            self._fill_from_slices(values, key, handle, first)
            return
        own, last = 0 if handle.cut is None else handle.cut.rank, first + len(values)
        for run in self._saved[key]:
            begin, end = max(run.start, first), min(run.stop, last)
            if run.slice == own and begin < end:
                run.file.read_into(run.name, begin - run.start, values[begin - first : end - first])

    def _fill_from_slices(self, values: torch.Tensor, key: str, handle: ParamHandle, first: int) -> None:
        """Read them from slices that are others than those of here."""
        cut, saved = handle.cut, self._params[handle.whole_name].first_slice
        last = first + len(values)
        # By their numbers in the whole param, then by which slice has them and where.
        elements = torch.arange(first, last, device="cpu") if cut is None else cut.in_whole(first, last)
        slices, own = (torch.zeros_like(elements), elements) if saved is None else saved.of_whole(elements)
        for run in self._saved[key]:
            there = ((slices == run.slice) & (own >= run.start) & (own < run.stop)).nonzero().view(-1)
            if there.numel():
                wanted = own[there]
                # One read of all from the first to the last: the wanted ones lie close together in a slice.
                low, high = int(wanted.min()), int(wanted.max()) + 1
                read = torch.empty(high - low, dtype=values.dtype, device="cpu")
                run.file.read_into(run.name, low - run.start, read)
                values[there] = read[wanted - low]


class Rest:
    """What a checkpoint holds besides masters and states.

    What is of another model, optimizer or scheduler is refused in the making of it, which changes nothing, or by the
    model and the scheduler in ``load_own``; ``put_back`` has nothing left to object to.

    Raises:
        PlanMismatch: saying what is of another.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        values: list[torch.Tensor],
        engine: Engine,
        model: nn.Module,
        optimizer: HybridOptimizer,
        scheduler: Any,
    ):
        params, handles = engine.params, engine.params.handles
        self._path, self._manifest, self._handles = path, manifest, handles
        self._model, self._optimizer, self._scheduler, self._by_names = model, optimizer, scheduler, engine.by_names
        _compare_params(path, manifest, params, engine.config.precision, engine.stepping.rule.spec)
        self._groups = check_groups(path, decode(manifest.groups, values), optimizer, params)
        self._plain = decode(manifest.plain, values)
        check_plain_states(path, optimizer, self._plain)
        self._factors = own_values(decode(manifest.factors, values) or {}, params, factors_of(handles))
        self._scales = scales_in(model.named_parameters())
        here = self._beside_params()
        self._model_state = own_values(decode(manifest.buffers, values), params, here)
        if manifest.version < ALL_OF_MODEL:
            self._model_state = with_unsaid(path, model, here, self._model_state)
        self._rng, self.extra = decode(manifest.rng, values), decode(manifest.extra, values)
        self._state = decode(manifest.scheduler, values)
        if (scheduler is None) != (self._state is None):
            had = "with" if scheduler is None else "without"
            raise PlanMismatch(f"{path} was saved {had} a scheduler: pass the same arguments to load_checkpoint")
        if scheduler is not None:
            check_scheduler(path, scheduler, self._state, manifest.scheduler_kind)

    def load_own(self, ranks: Handshake, writing: ExitStack) -> None:
        """Give the model what its state had beside params, and the scheduler its state, on all ranks or none: first of
        all, since they may refuse. Then Ctrl-C waits until ``writing`` ends.

        Raises:
            PlanMismatch: naming what they do not take. They are as they were.
        """
        with undone_on_error(self._model, self._by_names), taken_back_on_error(self._scheduler):
            ranks.step(self._load_own, lambda _: None)
            writing.enter_context(WHOLE)

    def _load_own(self) -> None:
        now, refusal = self._beside_params(), None
        # Scales belong to codes, which are params: `put_back` copies them, not the model.
        own = {name: value for name, value in self._model_state.items() if name not in self._scales}
        try:
            load_beside_params(self._model, self._by_names, own)
            now = self._beside_params()
        except Exception as e:
            refusal = e
        saved, here = ({name: _form_of(v) for name, v in of.items()} for of in (self._model_state, now))
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        if different or refusal is not None:
            first = different[0] if different else ""
            which = (
                f"{len(different)} differ, the first is {first!r} (saved {saved.get(first)}, here {here.get(first)})"
            )
            why = [which] * bool(different) + [f"its load_state_dict says: {refusal}"] * (refusal is not None)
            raise PlanMismatch(
                f"{self._path} was saved for a model with other buffers or extra state: {'; '.join(why)}"
            ) from refusal
        if self._scheduler is not None:
            try:
                self._scheduler.load_state_dict(self._state)
            except Exception as e:
                kind = type(self._scheduler).__name__
                raise PlanMismatch(f"{self._path} was saved with another scheduler than this {kind} ({e})") from e

    def _beside_params(self) -> dict[str, Any]:
        return {**self._scales, **beside_params(self._model, self._by_names)}

    def put_back(self, rank: int) -> None:
        """Masters and states are there: the rest, with the random states of a rank if they were saved."""
        for handle in self._handles:
            handle.num_steps = handle.restored = self._manifest.params[handle.whole_name].step
            handle.waiting = None
        with torch.no_grad():
            for name, scale in self._scales.items():
                scale.copy_(self._model_state[name])
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(saved)
        load_plain_states(self._optimizer, self._plain)
        load_factors(self._handles, self._factors)
        # More ranks than wrote it: the others keep their own generators.
        if rank < len(self._rng):
            set_rng_states(self._rng[rank])


def _form_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | str:
    """The form that two values must share, so that one can take the place of the other in a model's state."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else "plain values"


def _compare_params(path: Path, manifest: Manifest, params: ParamSet, precision: str, rule: RuleSpec) -> None:
    handles = params.handles
    if manifest.precision != precision:
        raise PlanMismatch(
            f"{path} was saved in {manifest.precision}, the model is in {precision}: wrap it with "
            f"GeminiConfig(precision={manifest.precision!r})"
        )
    check_rule(path, manifest.rule, rule)
    saved = {name: param.shape for name, param in manifest.params.items()}
    here = {name: param.shape for name, param in params.of_stages.items()}
    here = here or {handle.whole_name: handle.whole_shape for handle in handles}
    if saved != here:
        different = sorted(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
        raise PlanMismatch(
            f"{path} was saved for another model: {len(different)} params differ, the first is {different[0]!r} "
            f"(saved {saved.get(different[0])}, here {here.get(different[0])})"
        )
    # A scale of compact states is for a block of elements as they follow each other in one slice.
    anew = [handle for handle in handles if is_cut_anew(manifest.params[handle.whole_name], handle)]
    if anew and (manifest.rule.exact is not None or rule.exact is not None):
        sizes = [1 if cut is None else cut[2] for cut in (manifest.params[anew[0].whole_name].cut, _cut_of(anew[0]))]
        raise PlanMismatch(
            f"{path} was saved with tp={sizes[0]} and the mesh has tp={sizes[1]}: compact states have one scale for "
            "many elements of a slice, and slices of another size have others. Load it with the same tp, or save and "
            'load with states="exact"'
        )
    for handle in handles:
        saved_in, here_in = manifest.params[handle.whole_name].fp32, handle.chunk.spec.fp32
        if saved_in != here_in and (handle in anew or not manifest.params[handle.whole_name].trained):
            raise PlanMismatch(
                f"{handle.whole_name!r} was saved in {'fp32' if saved_in else manifest.precision} in {path} and is in "
                f"{'fp32' if here_in else precision} here, which only a trained param in the same slices can be read "
                "into: wrap the model with the same GeminiConfig(keep_fp32=)"
            )
        was, now = manifest.params[handle.whole_name].trained, handle.chunk.trained
        if was and not now:
            raise PlanMismatch(
                f"{handle.whole_name!r} was trained when {path} was saved and is frozen here: call "
                "requires_grad_(True) on it before the model is wrapped, or load the weights alone with load_state_dict"
            )
        if now and not was and manifest.precision == "fp16":
            raise PlanMismatch(
                f"{handle.whole_name!r} was frozen when {path} was saved, which has no fp32 master of it as fp16 "
                "training needs one: freeze it here too, or load its weights with load_state_dict"
            )


def is_cut_anew(saved: SavedParam, handle: ParamHandle) -> bool:
    """Whether a param was saved in other slices than it has here."""
    return saved.cut != _cut_of(handle)


def _cut_of(handle: ParamHandle) -> tuple[int, ...] | None:
    return None if handle.cut is None else (handle.cut.dim, handle.cut.groups, handle.cut.size)
