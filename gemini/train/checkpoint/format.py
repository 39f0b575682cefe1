"""The folder of a checkpoint: its manifest, what stands in it, and the one reader of it, which believes nothing.

``manifest.json`` says what there is: params, step counts, optimizer groups, scheduler, loss scale, RNGs, and for every
file the CRC-32 of its header and of each piece of each tensor; a CRC-32 of its own guards it. JSON and safetensors
only, no pickle.

A manifest may have been damaged, or written by somebody else, and its checksum says nothing about the latter. So every
value is compared here with what :func:`gemini.save_checkpoint` writes: kinds, ranges, names, and that the parts of each
master and state, as the headers of the files have them, are those that the params need, once each, without a gap.
Whoever works with a :class:`Manifest` afterwards looks nothing up that may not be there. What is not described here
(groups, buffers, scheduler, RNGs, ``extra``) are plain values, decoded by ``plain_data.py`` and compared with what they
are for in ``states.py`` and ``read.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
from msgspec import Meta

from gemini import schema
from gemini.errors import StorageError
from gemini.planning.planes import ADAM, RuleSpec, plane_specs, precision_of
from gemini.replacing import check_renamable, sync
from gemini.train.checkpoint.tensor_file import Malformed, TensorFile, open_regular, parse_json
from gemini.train.params.tensor_slice import TensorSlice

FORMAT, VERSION = "gemini-checkpoint", 4
READABLE = (2, 3, 4)
"""Version 2 knows no slices, and both before 4 of the model's state only its buffers; they are otherwise the same."""
ALL_OF_MODEL = 4
"""The first version whose ``buffers`` are all that the model's ``state_dict()`` has beside params."""
MANIFEST = "manifest.json"
VALUES = "values.safetensors"
"""The file of tensors that are not masters or states: buffers, RNGs, what modules, scheduler and ``extra`` hold."""

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Size = Annotated[int, Meta(ge=0, lt=2**48)]
Crc = Annotated[int, Meta(ge=0, lt=2**32)]


class SavedParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A param: its whole shape, its updates, whether there are states of it, how it was cut into slices (dim, groups
    and size of :class:`TensorSlice`, or None), whether it is bytes of codes, and whether it stays in fp32.
    """

    shape: tuple[Size, ...]
    step: Count
    trained: bool
    cut: tuple[Crc, ...] | None = None
    coded: bool = False
    fp32: bool = False

    @property
    def first_slice(self) -> TensorSlice | None:
        """The slice that the first rank had; None for all of it."""
        return None if self.cut is None else TensorSlice(self.shape, self.cut[0], self.cut[1], 0, self.cut[2])


class SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a file: elements ``[start, ...)`` of what is called ``of`` or of a slice of it, with the CRC-32 of
    each piece.
    """

    of: str
    start: Annotated[int, Meta(ge=0, lt=2**62)]
    sums: tuple[Crc, ...]
    slice: Annotated[int, Meta(ge=0, lt=2**32)] = 0


class SavedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: the CRC-32 of its header, and its tensors by their names in it."""

    header: Crc
    tensors: dict[str, SavedTensor]


class LossScale(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loss scale that a model kept itself, in versions that scaled backwards without a ``GradScaler``."""

    scale: Annotated[float, Meta(gt=0, lt=2**63)]
    growth_interval: Count
    num_good_steps: Count
    largest: Annotated[float, Meta(gt=0, lt=2**63)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole manifest. What is ``Any`` is encoded plain data, with tensors in ``VALUES``."""

    format: str = FORMAT
    version: Annotated[int, Meta(ge=READABLE[0], le=READABLE[-1])]
    precision: Literal["bf16", "fp16", "fp32"]
    rule: RuleSpec = ADAM
    """Of the updates: Adam where a checkpoint does not say it."""
    exact: tuple[str, ...] = ()
    """Of a rule with compact states: the params whose states are exact."""
    piece: Annotated[int, Meta(ge=1, lt=2**48)]
    """Elements of a checksum."""
    params: dict[str, SavedParam]
    files: dict[str, SavedFile]
    loss_scale: LossScale | None = None
    """None but in fp16 of versions before."""
    scheduler_kind: str | None = None
    """The name of its class; None without one, and in checkpoints that do not say it."""
    scheduler: Any
    groups: Any
    plain: Any
    buffers: Any
    extra: Any
    rng: Any
    factors: Any = None
    """None in checkpoints of rules without any."""


# ---- the folder ------------------------------------------------------------------------------------------------------


def check_target(final: Path, asked: str | os.PathLike[str]) -> None:
    """Refuse to write over what is not a checkpoint, or where nothing can be written.

    Raises:
        StorageError: saying which.
    """
    try:
        check_renamable(final, asked)
        there = final.exists()
        if there and not (final.is_dir() and (not any(final.iterdir()) or (final / MANIFEST).exists())):
            raise StorageError(
                f"{final} exists and is not a checkpoint: it will not be overwritten; give another directory"
            )
        if not final.parent.is_dir():
            raise StorageError(f"cannot save a checkpoint in {final.parent}: no such directory; create it")
    except OSError as e:
        raise StorageError(f"cannot save a checkpoint as {final}: {e.strerror or e}") from e


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """The last file to be written; on the disk when this returns."""
    with open(directory / MANIFEST, "w") as file:
        json.dump({"checksum": _checksum(manifest), **manifest}, file, indent=1)
    sync(directory / MANIFEST)


def read_manifest(path: Path) -> Manifest:
    """Read what stands in the manifest.

    Raises:
        StorageError: if it is missing, damaged, of another format or version, or no checkpoint has it.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            data = parse_json(file.read())
    except FileNotFoundError as e:
        raise StorageError(f"{path} is not a checkpoint: it has no manifest.json") from e
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}/{MANIFEST} cannot be read: {e}") from e
    # It is over everything else in the manifest.
    checksum = data.pop("checksum", None) if isinstance(data, dict) else None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise StorageError(f"{path}/{MANIFEST} is not that of a Gemini checkpoint")
    if type(data.get("version")) is not int or data["version"] not in READABLE:
        readable = " and ".join(map(str, READABLE))
        raise StorageError(
            f"{path} has checkpoint version {str(data.get('version'))[:80]}, this Gemini reads versions {readable}: "
            "load it with the Gemini that wrote it, and carry the weights over with model.save_pretrained"
        )
    with as_damage(path / MANIFEST):
        if checksum != _checksum(data):
            raise Malformed("it is not what was written")
        return _manifest_of(data)


def manifest_of(data: Any, parts: Mapping[str, TensorFile]) -> Manifest:
    """The manifest that plain data stand for, if ``parts`` (files by name, without ``VALUES``) hold what it needs.

    Raises:
        Malformed: naming the place of what no checkpoint has.
    """
    manifest = _manifest_of(data)
    _compare_parts(manifest, parts)
    return manifest


def open_files(path: Path, manifest: Manifest) -> dict[str, TensorFile]:
    """The files of a checkpoint, with the headers that the manifest wants.

    Raises:
        StorageError: if one is missing or holds other tensors than the manifest says and the params need.
    """
    opened = {name: TensorFile(path / name) for name in manifest.files}
    # The headers first: what is compared below is believed to be what they say.
    for name, file in opened.items():
        if file.header_checksum != manifest.files[name].header:
            raise StorageError(f"{path / name} is damaged: its header is not what was written. Use an older checkpoint")
    with as_damage(path / MANIFEST):
        _compare(manifest, opened)
    return opened


def read_values(path: Path, manifest: Manifest, opened: Mapping[str, TensorFile]) -> list[torch.Tensor]:
    """The tensors that plain values refer to, by number. Raises StorageError if one is not what was written."""
    file, listed = opened[VALUES], manifest.files[VALUES].tensors
    for name, entry in listed.items():
        compare_sums(file, name, max(file.specs[name].numel, 1), entry)
    return [file.whole(str(i)) for i in range(len(listed))]


def compare_sums(file: TensorFile, name: str, piece: int, entry: SavedTensor) -> None:
    """Compare the checksums of a tensor. Raises StorageError if it is not what was written."""
    if tuple(file.checksums(name, piece)) != entry.sums:
        raise StorageError(f"{file.path} is damaged: {name!r} is not what was written. Use an older checkpoint")


@contextlib.contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Turn what cannot be into the error that a user gets. Raises StorageError for a Malformed inside."""
    try:
        yield
    except (Malformed, RecursionError) as e:
        raise StorageError(f"{path} is damaged: {e}. Use an older checkpoint") from e


def _checksum(manifest: dict[str, Any]) -> int:
    """CRC-32 of the manifest in one canonical form (names sorted, no blanks), however the file is laid out."""
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


# ---- what stands in the manifest -------------------------------------------------------------------------------------


def _manifest_of(data: Any) -> Manifest:
    """The manifest that ``data``, as JSON has it, stands for.

    Raises:
        Malformed: naming the place of a value that no checkpoint has.
    """
    if isinstance(data, dict) and "rule" in data:
        data = {**data, "rule": _rule_of(data["rule"])}
    try:
        manifest = schema.read(data, Manifest, "the manifest")
    except schema.Misfit as e:
        raise Malformed(str(e)) from e
    if VALUES not in manifest.files:
        raise Malformed(f"files has no {VALUES}")
    for name in manifest.files:
        # A name from somebody else's manifest must not lead out of the folder.
        if "/" in name or "\0" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise Malformed(f"files has {name!r}, which is no name of a file of a checkpoint")
    return manifest


def _rule_of(body: Any) -> RuleSpec:
    try:
        return RuleSpec.from_body(body)
    except (TypeError, ValueError, OverflowError) as e:
        raise Malformed(f"rule is {schema.shown(body)}, and no update rule: {e}") from e


def _compare(manifest: Manifest, opened: dict[str, TensorFile]) -> None:
    """See that the files hold just what the manifest says, and that this is all there has to be.

    Raises:
        Malformed: naming the first difference.
    """
    for name, listed in manifest.files.items():
        specs, piece = opened[name].specs, manifest.piece
        # Either side alone could hide a tensor that nobody compares.
        if specs.keys() != listed.tensors.keys():
            different = sorted(specs.keys() ^ listed.tensors.keys())[0]
            raise Malformed(f"{name} and the manifest do not agree on there being a tensor {different!r}")
        for tensor, entry in listed.tensors.items():
            # A value is one piece, however large; no piece of an empty tensor was summed.
            pieces = -(-specs[tensor].numel // (max(specs[tensor].numel, 1) if name == VALUES else piece))
            if len(entry.sums) != pieces:
                raise Malformed(f"files.{name}.{tensor} has {len(entry.sums)} checksums of {pieces} pieces")
    # Values are numbered from 0 without a gap: the encoded data refer to them by number.
    values = manifest.files[VALUES].tensors
    numbered = ((number, values.get(number)) for number in map(str, range(len(values))))
    if any(entry is None or (entry.of, entry.start) != (number, 0) for number, entry in numbered):
        raise Malformed(f"files.{VALUES} is not a list of tensors")
    _compare_parts(manifest, opened)


def _compare_parts(manifest: Manifest, opened: Mapping[str, TensorFile]) -> None:
    exact = frozenset(manifest.exact)
    # By key what a param of this form must have: the shape of a slice, its dtype, and how many slices there are.
    needed: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
    for name, param in manifest.params.items():
        shape, size = _shape_of_slices(name, param), 1 if param.cut is None else param.cut[2]
        # One manifest may have exact and compact params, whose planes differ.
        rule = manifest.rule.of(name in exact)
        precision = precision_of(param, manifest.precision)
        specs = plane_specs(precision, "transient", rule, trainable=param.trained, coded=param.coded)
        for kind, plane in specs.items():
            items = plane.num_items(math.prod(shape))
            needed[f"{kind}/{name}"] = whole_shape(shape, items), getattr(torch, plane.dtype), size
    # By key and slice the spans of elements that files have: they must meet end to end.
    found: dict[tuple[str, int], list[tuple[int, int]]] = {
        (key, rank): [] for key, (_, _, size) in needed.items() for rank in range(size)
    }
    for name, listed in manifest.files.items():
        for tensor, entry in listed.tensors.items() if name != VALUES else ():
            spec = opened[name].specs[tensor]
            if (entry.of, entry.slice) not in found:
                raise Malformed(f"{name} has {entry.of!r} (slice {entry.slice}), which no param has")
            shape, dtype, size = needed[entry.of]
            stop = entry.start + spec.numel
            key = key_in_file(entry.of, entry.slice, size)
            whole, part = (key, shape), (f"{key}[{entry.start}:{stop}]", (spec.numel,))
            if (tensor, spec.shape) not in (whole, part) or spec.dtype is not dtype:
                raise Malformed(f"{name} has {tensor!r} as {spec.dtype} {list(spec.shape)}, which is not what it is")
            found[entry.of, entry.slice].append((entry.start, stop))
    for (of, rank), spans in found.items():
        shape, _, size = needed[of]
        key = key_in_file(of, rank, size)
        end = 0
        # An overlap or a gap shows as a span that does not begin where the one before it ends.
        for start, stop in sorted(spans):
            if start != end:
                raise Malformed(f"{key} has elements {min(start, end)} to {max(start, end)} {_often(start, end)}")
            end = stop
        if end != math.prod(shape):
            raise Malformed(f"{key} is not complete: {end} of {math.prod(shape)} elements are there")


def key_in_file(of: str, rank: int, size: int) -> str:
    """Name slice ``rank`` of ``size`` of a plane as files do; ``size`` is 1 for a whole one."""
    return of if size == 1 else f"{of}[slice {rank} of {size}]"


def _shape_of_slices(name: str, param: SavedParam) -> tuple[int, ...]:
    """The shape of one slice of a param. Raises Malformed if it cannot have been cut so."""
    if param.cut is None:
        return param.shape
    if len(param.cut) != 3:
        raise Malformed(f"params.{name}.cut is {schema.shown(param.cut)}, and no dim, groups and size")
    dim, groups, size = param.cut
    if dim >= len(param.shape) or groups < 1 or size < 2 or param.shape[dim] % (groups * size):
        raise Malformed(f"params.{name}.cut is {schema.shown(param.cut)}, which does not divide {list(param.shape)}")
    cut = param.first_slice
    assert cut is not None
    return cut.own_shape


def whole_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Shape of a whole plane of a param: the param's, or flat where a plane has fewer items than the param elements."""
    return tuple(shape) if math.prod(shape) == numel else (numel,)


def _often(start: int, end: int) -> str:
    return "nowhere" if start > end else "twice"
