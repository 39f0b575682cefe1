"""Reading masters and states of a checkpoint: what this rank needs of the saved parts, compared first.

Whatever number of ranks wrote the checkpoint, a rank reads the ranges that overlap its own parts. Before any rank
changes anything all of them together have compared every checksum, each a share of them, and whatever could be refused
has been refused.

States may have been saved in one form and be kept in another: exact ones read into a compact model, masters in two
halves into a param that stays in fp32, and the other way. Such a param is converted tile by tile, master and states
together. From compact to exact nothing is lost that was there; that exact states lose something is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from gemini import kernels
from gemini.errors import PlanMismatch, warn
from gemini.kernels import reference
from gemini.memory.movement.mover import Mover, tiles
from gemini.planning.planes import RESIDUAL, WEIGHTS, PlaneKind, PlaneSpec, RuleSpec
from gemini.planning.rules import compact, scale_of
from gemini.train.checkpoint.format import VALUES, Manifest, SavedParam, TensorFile
from gemini.train.checkpoint.write import PlanePart
from gemini.train.observers import WriteObservers
from gemini.train.params.by_name import store_range
from gemini.train.params.handle import ParamHandle, TensorSlice

Values = Mapping[PlaneKind, torch.Tensor]


def face_of(rule: RuleSpec) -> RuleSpec:
    """The rule that an optimizer has, however its states are kept."""
    return rule.exact or rule


def check_rule(path: Path, saved: RuleSpec, here: RuleSpec) -> None:
    """Refuse states that a model of the rule ``here`` cannot take over. Raises PlanMismatch for states of another rule,
    and for compact ones of another form.
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
        halves = [PlaneSpec(WEIGHTS, "bfloat16"), PlaneSpec(RESIDUAL, self.rule.residual)]
        return [*([PlaneSpec(WEIGHTS, "float32")] if self.fp32 else halves), *self.rule.planes]


def converted(saved: Form, here: Form, read: Callable[[PlaneSpec], torch.Tensor]) -> Values:
    """The planes, as ``here`` has them, of elements whose saved planes ``read`` gives; they begin with a block."""
    there = {spec.kind: read(spec) for spec in saved.specs}
    n = there[WEIGHTS].numel()
    made = {s.kind: torch.empty(s.num_items(n), dtype=getattr(torch, s.dtype), device="cpu") for s in here.specs}
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
        is_exact = saved.rule.exact is None
        values = there[kind] if is_exact else reference.decode(there[kind], there[scale_of(kind)])
        if here.rule.exact is None:
            made[kind] = values
        else:
            reference.encode(values, made[kind], made[scale_of(kind)])
    return made


class _SavedRange(NamedTuple):
    """Items ``[start, stop)`` of a master or state, or of a slice of it: one tensor in a file."""

    start: int
    stop: int
    file: TensorFile
    name: str
    slice: int


class Reader:
    """Masters and states of one checkpoint, for this rank's ``sources``. ``started``: they are being overwritten."""

    def __init__(
        self,
        manifest: Manifest,
        opened: Mapping[str, TensorFile],
        sources: list[PlanePart],
        mover: Mover,
        rule: RuleSpec,
    ):
        self._sources, self._mover, self._piece, self._params = sources, mover, manifest.piece, manifest.params
        # Params of which a form was saved that is not the one here, with both: converted as a whole, master and states.
        self._others: dict[str, tuple[ParamHandle, Form, Form]] = {}
        exact, in_bf16 = frozenset(manifest.exact), sources if manifest.precision == "bf16" else []
        for name, handle in {source.handle.whole_name: source.handle for source in in_bf16}.items():
            saved, spec = manifest.params[name], handle.chunk.spec
            there, here = Form(manifest.rule.of(name in exact), saved.fp32), Form(rule.of(spec.exact), spec.fp32)
            if saved.trained and handle.chunk.trained and there.specs != here.specs:
                self._others[name] = handle, there, here
        self._num_rounded = 0  # params whose states were exact and are compact here
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
        """Compare this rank's share of the checksums, one of ``size``. That no part is missing is known already. Raises
        StorageError, naming the file and tensor that is not what was written.
        """
        for file, name, entry in self._entries[rank::size]:
            file.check(name, self._piece, entry.sums)

    def read(self, observers: WriteObservers) -> None:
        """Overwrite what this rank keeps, range by range."""
        # From here on the model is neither what it was nor what was saved: whoever called marks it, if this breaks off.
        self.started = True
        # A checkpoint that is being written behind the training gets each chunk as it was.
        for chunk in {source.handle.chunk.spec.index: source.handle.chunk for source in self._sources}.values():
            observers.before_write(chunk)
        # All planes of params that were saved in another form.
        for handle, saved, here in self._others.values():
            part = handle.part
            # Only from exact to compact is anything lost that is worth telling.
            self._num_rounded += saved.rule.exact is None and here.rule.exact is not None and part.numel > 0
            for start, stop in tiles(0, part.numel, self._mover.tile):
                read = partial(self._saved_part, handle, part.offset + start, part.offset + stop)
                for kind, values in converted(saved, here, read).items():
                    store_range(self._mover, handle.chunk.planes[kind], part.start + start, values)
        for source in self._sources:
            if source.handle.whole_name not in self._others:
                for start, stop in tiles(0, source.numel, self._mover.tile):
                    self._read_range(source, start, stop)

    def tell_loss(self, path: Path) -> None:
        """Warn, if states have lost precision."""
        if self._num_rounded:
            warn(
                f"{path} was saved with exact states, and the model keeps compact ones: in {self._num_rounded} params "
                "masters have 24 bits now and states 8. The run goes on close to what it was, not with its bits"
            )

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
            store_range(self._mover, source.plane, source.handle.part.start + start * source.plane.block, values)

    def _fill(self, values: torch.Tensor, key: str, handle: ParamHandle, first: int) -> None:
        """Read the saved items of a plane from ``first`` on, as the slice that a param is here counts them."""
        if self._params[handle.whole_name].cut != SavedParam.of(handle).cut:
            self._fill_from_slices(values, key, handle, first)
            return
        own, last = 0 if handle.cut is None else handle.cut.rank, first + len(values)
        for run in self._saved[key]:
            begin, end = max(run.start, first), min(run.stop, last)
            if run.slice == own and begin < end:
                run.file.read_into(run.name, begin - run.start, values[begin - first : end - first])

    def _fill_from_slices(self, values: torch.Tensor, key: str, handle: ParamHandle, first: int) -> None:
        """Read them from slices that are others than those of here."""
        cut, param, last = handle.cut, self._params[handle.whole_name], first + len(values)
        # By their numbers in the whole param, then by which slice has them and where.
        elements = torch.arange(first, last, device="cpu") if cut is None else cut.in_whole(first, last)
        slices, own = torch.zeros_like(elements), elements
        if param.cut is not None:
            dim, groups, size = param.cut
            slices, own = TensorSlice(param.shape, dim, groups, 0, size).of_whole(elements)
        for run in self._saved[key]:
            there = ((slices == run.slice) & (own >= run.start) & (own < run.stop)).nonzero().view(-1)
            if there.numel():
                wanted = own[there]
                # One read of all from the first to the last: the wanted ones lie close together in a slice.
                low, high = int(wanted.min()), int(wanted.max()) + 1
                read = torch.empty(high - low, dtype=values.dtype, device="cpu")
                run.file.read_into(run.name, low - run.start, read)
                values[there] = read[wanted - low]
