"""What stands in the manifest of a checkpoint, and the one reader of it, which believes nothing.

A manifest may have been damaged, or written by somebody else, and its checksum says nothing about the latter. So every
value is compared here with what :func:`gemini.save_checkpoint` writes: kinds, ranges, names, and that the parts of each
master and moment, as the headers of the files have them, are those that the params need, once each, without a gap.
Whoever works with a :class:`Manifest` afterwards looks nothing up that may not be there. What is not described here
(groups, buffers, scheduler, RNGs, ``extra``) are plain values, decoded by ``plain_data.py`` and compared with what they
are for in ``checkpoint_rest.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gemini.planning.planes import ADAM, PRECISIONS, RuleSpec, plane_specs
from gemini.train.checkpoint.tensor_file import Malformed, TensorFile

FORMAT, VERSION = "gemini-checkpoint", 2
VALUES = "values.safetensors"
"""The file of tensors that are not masters or moments: buffers, RNGs, what the scheduler and ``extra`` hold."""

T = TypeVar("T")
Reader = Callable[[Any, str], T]
"""Turns a value of a manifest into what it stands for, given its place in words.

Raises:
    Malformed: naming the place, for what cannot stand there.
"""


class SavedParam(NamedTuple):
    """A param: its shape, its updates, and whether there are moments of it."""

    shape: tuple[int, ...]
    step: int
    trained: bool


class SavedTensor(NamedTuple):
    """A tensor in a file: elements ``[start, ...)`` of what is called ``of``, with the CRC-32 of each piece."""

    of: str
    start: int
    sums: tuple[int, ...]


class SavedFile(NamedTuple):
    """A file: the CRC-32 of its header, and its tensors by their names in it."""

    header: int
    tensors: dict[str, SavedTensor]


class Manifest(NamedTuple):
    """A whole manifest. What is ``Any`` is encoded plain data, with tensors in ``VALUES``."""

    precision: str
    rule: RuleSpec
    """Of the updates: Adam where a checkpoint does not say it."""
    piece: int
    """Elements of a checksum."""
    params: dict[str, SavedParam]
    files: dict[str, SavedFile]
    loss_scale: dict[str, float] | None
    scheduler_kind: str | None
    """The name of its class; None without one, and in checkpoints that do not say it."""
    scheduler: Any
    groups: Any
    plain: Any
    buffers: Any
    extra: Any
    rng: Any


def read(data: Any) -> Manifest:
    """The manifest that ``data``, as JSON has it, stands for.

    Raises:
        Malformed: naming the place of a value that no checkpoint has.
    """
    data = {"scheduler_kind": None, "rule": ADAM.to_body(), **_fields(data, "the manifest")}
    any_of = dict.fromkeys(("scheduler", "groups", "plain", "buffers", "extra", "rng"), _anything)
    manifest: Manifest = _record(
        Manifest,
        precision=_one_of(PRECISIONS),
        rule=_rule,
        piece=_integer(1, 2**48),
        params=_mapping(_record(SavedParam, shape=_sequence(_integer(0, 2**48)), step=_COUNT, trained=_flag)),
        files=_mapping(_record(SavedFile, header=_CRC, tensors=_mapping(_TENSOR))),
        loss_scale=_or_none(_mapping(_number)),
        scheduler_kind=_or_none(_text),
        **any_of,
    )({name: value for name, value in data.items() if name not in ("format", "version")}, "the manifest")
    if (manifest.loss_scale is None) != (manifest.precision != "fp16"):
        raise Malformed(f"loss_scale does not belong to {manifest.precision}")
    if VALUES not in manifest.files:
        raise Malformed(f"files has no {VALUES}")
    for name in manifest.files:
        if "/" in name or "\0" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise Malformed(f"files has {name!r}, which is no name of a file of a checkpoint")
    return manifest


def compare(manifest: Manifest, opened: dict[str, TensorFile]) -> None:
    """See that the files hold just what the manifest says, and that this is all there has to be.

    Raises:
        Malformed: naming the first difference.
    """
    for name, listed in manifest.files.items():
        specs, piece = opened[name].specs, manifest.piece
        if specs.keys() != listed.tensors.keys():
            different = sorted(specs.keys() ^ listed.tensors.keys())[0]
            raise Malformed(f"{name} and the manifest do not agree on there being a tensor {different!r}")
        for tensor, entry in listed.tensors.items():
            pieces = -(-specs[tensor].numel // (max(specs[tensor].numel, 1) if name == VALUES else piece))
            if len(entry.sums) != pieces:
                raise Malformed(f"files.{name}.{tensor} has {len(entry.sums)} checksums of {pieces} pieces")
    values = manifest.files[VALUES].tensors
    if any(str(i) not in values or values[str(i)][:2] != (str(i), 0) for i in range(len(values))):
        raise Malformed(f"files.{VALUES} is not a list of tensors")
    _compare_parts(manifest, opened)


def _compare_parts(manifest: Manifest, opened: dict[str, TensorFile]) -> None:
    needed = {
        f"{kind}/{name}": (whole_shape(param.shape, spec.num_items(math.prod(param.shape))), getattr(torch, spec.dtype))
        for name, param in manifest.params.items()
        for kind, spec in plane_specs(manifest.precision, "transient", manifest.rule, trainable=param.trained).items()
    }
    found: dict[str, list[tuple[int, int]]] = {key: [] for key in needed}
    for name, listed in manifest.files.items():
        for tensor, entry in listed.tensors.items() if name != VALUES else ():
            spec = opened[name].specs[tensor]
            if entry.of not in needed:
                raise Malformed(f"{name} has {entry.of!r}, which no param has")
            shape, dtype = needed[entry.of]
            stop = entry.start + spec.numel
            whole, part = (entry.of, shape), (f"{entry.of}[{entry.start}:{stop}]", (spec.numel,))
            if (tensor, spec.shape) not in (whole, part) or spec.dtype is not dtype:
                raise Malformed(f"{name} has {tensor!r} as {spec.dtype} {list(spec.shape)}, which is not what it is")
            found[entry.of].append((entry.start, stop))
    for key, spans in found.items():
        end = 0
        for start, stop in sorted(spans):
            if start != end:
                raise Malformed(f"{key} has elements {min(start, end)} to {max(start, end)} {_often(start, end)}")
            end = stop
        if end != math.prod(needed[key][0]):
            raise Malformed(f"{key} is not complete: {end} of {math.prod(needed[key][0])} elements are there")


def whole_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """Of a whole plane of a param: the param's, or flat where a plane has fewer items than the param elements."""
    return tuple(shape) if math.prod(shape) == numel else (numel,)


def _often(start: int, end: int) -> str:
    return "nowhere" if start > end else "twice"


# ---- readers of single values ----------------------------------------------------------------------------------------


def _anything(value: Any, where: str) -> Any:
    return value


def _integer(low: int, high: int) -> Reader[int]:
    def read_integer(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value < high:
            raise Malformed(f"{where} is {_shown(value)}, and no integer from {low} to {high - 1}")
        return value

    return read_integer


def _number(value: Any, where: str) -> float:
    """Finite, not negative, of the type it has."""
    if type(value) not in (int, float) or not 0 <= value < 2**63:
        raise Malformed(f"{where} is {_shown(value)}, and no number from 0 to 2**63")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"{where} is {_shown(value)}, and neither true nor false")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{where} is {_shown(value)}, and no text")
    return value


def _rule(value: Any, where: str) -> RuleSpec:
    try:
        return RuleSpec.from_body(value)
    except (TypeError, ValueError) as e:
        raise Malformed(f"{where} is {_shown(value)}, and no update rule: {e}") from e


def _one_of(names: tuple[str, ...]) -> Reader[str]:
    def read_name(value: Any, where: str) -> str:
        if value not in names:
            raise Malformed(f"{where} is {_shown(value)}, and none of {', '.join(names)}")
        return value

    return read_name


def _or_none(reader: Reader[T]) -> Reader[T | None]:
    return lambda value, where: None if value is None else reader(value, where)


def _sequence(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    def read_sequence(value: Any, where: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise Malformed(f"{where} is {_shown(value)}, and no list")
        return tuple(reader(v, f"{where}[{i}]") for i, v in enumerate(value))

    return read_sequence


def _fields(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{where} is {_shown(value)}, and no object")
    return value


def _mapping(reader: Reader[T]) -> Reader[dict[str, T]]:
    return lambda value, where: {name: reader(v, f"{where}.{name}") for name, v in _fields(value, where).items()}


def _record(made: Callable[..., T], **fields: Reader[Any]) -> Reader[T]:
    def read_record(value: Any, where: str) -> T:
        if _fields(value, where).keys() != fields.keys():
            different = sorted(value.keys() ^ fields.keys())[0]
            raise Malformed(f"{where} {'lacks' if different in fields else 'has no use for'} {different!r}")
        return made(**{name: reader(value[name], f"{where}.{name}") for name, reader in fields.items()})

    return read_record


def _shown(value: Any) -> str:
    """Short, whatever it is."""
    return f"a {type(value).__name__}" if isinstance(value, (dict, list, str)) and len(value) > 20 else repr(value)[:80]


_COUNT, _CRC = _integer(0, 2**53), _integer(0, 2**32)
_TENSOR = _record(SavedTensor, of=_text, start=_integer(0, 2**62), sums=_sequence(_CRC))
