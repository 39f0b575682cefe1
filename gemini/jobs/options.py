"""Options of a command as fields of a record: each says its help, its group and what it may be.

The command line, a YAML file and ``check`` read the same fields, so that an option is written down once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from gemini.errors import parse_bytes
from gemini.jobs.errors import JobError, as_job_error

TILES = int | str | None
"""The kind of an option that is a number of tokens or "auto"."""


_ELSEWHERE = (
    "--learning-rate=--lr --max-steps=--steps --num-train-epochs=--epochs --output-dir=--out "
    "--per-device-train-batch-size=--batch-size --model-name-or-path=--model --max-length=--seq-len "
    "--max-grad-norm=--clip --lora-r=--lora --save-steps=--save-every --eval-steps=--eval-every "
    "--logging-steps=--log-every --save-total-limit=--keep --resume-from-checkpoint=--resume --dataset=--data "
    "--optim=--optimizer --bf16=--precision --fp16=--precision --cpu=--cpu-memory --gpu=--gpu-memory "
    "--nvme=--nvme-memory --cpu-memory=--cpu --gpu-memory=--gpu --nvme-memory=--nvme "
    "--early-stopping=--patience --early-stopping-patience=--patience --num-epochs=--epochs "
    "--max-seq-length=--seq-len --warmup-steps=--warmup --lr-scheduler-type=--schedule "
    "--gradient-accumulation-steps=--accumulate"
)
ELSEWHERE = dict(pair.split("=") for pair in _ELSEWHERE.split())
"""What options are called in the Trainer's scripts, or in another of our commands, to what they are called here."""


def opt(
    default: Any,
    words: str,
    group: str | None,
    *,
    least: float | None = None,
    choices: tuple[str, ...] = (),
    size: bool = False,
) -> Any:
    """A field of a record of options.

    Args:
        default: its value if it is left out.
        words: the help.
        group: the heading it stands under; None: that of all commands.
        least: the smallest number it may be.
        choices: all it may be, if these are few.
        size: whether it is a number of bytes.
    """
    return field(
        default=default, metadata={"words": words, "group": group, "least": least, "choices": choices, "size": size}
    )


def one_of(default: str | None, words: str, group: str, choices: tuple[str, ...], more: str = ".") -> Any:
    """A field of a few words, which are in its help."""
    return opt(default, f"{words}: {', '.join(choices)}{more}", group, choices=choices)


def argument(default: Any, words: str, *, required: bool = False) -> Any:
    """A field that is given by its place and not by its name."""
    return field(default=default, metadata={"words": words, "required": required, "argument": True})


def options(record: type) -> dict[str, tuple[Field[Any], Any]]:
    """The options of a record by name: the field and its type."""
    kinds = get_type_hints(record)
    return {f.name: (f, kinds[f.name]) for f in fields(record) if "words" in f.metadata}


def spelled(name: str) -> str:
    """The command line's spelling of a field."""
    return "--" + name.replace("_", "-")


def check(record: Any) -> None:
    """Refuse values that no files or hardware could make right.

    Raises:
        JobError: naming the option, what was given and what is possible.
    """
    for name, (declared, _) in options(type(record)).items():
        value, about = getattr(record, name), declared.metadata
        if value is None or "argument" in about:
            continue
        if about["least"] is not None and isinstance(value, int) and value < about["least"]:
            raise JobError(f"{spelled(name)} must be at least {about['least']}, got {value}.")
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise JobError(f"{spelled(name)} must be a finite number and not negative, got {value}.")
        if about["choices"] and value not in about["choices"]:
            raise JobError(f"{spelled(name)} must be one of {', '.join(about['choices'])}, got {value!r}.")
        if about["size"]:
            check_size(spelled(name), value)


def check_size(asked: str, value: str) -> None:
    """Refuse what is no size, and a number alone, which is hardly meant as bytes.

    Raises:
        JobError: with the question.
    """
    with as_job_error(asked=f"{asked} {value}"):
        size = parse_bytes(value)
    if str(value).strip().isdigit() and 0 < size < 1 << 20:
        raise JobError(f"{asked} {value}: {value} bytes? Say the unit: {asked} {value}GiB, or {value}B if it is meant.")


def record_of(record: type, given: Mapping[str, Any]) -> Any:
    """The record of the options that were given, None and an empty list standing for one that was not.

    Raises:
        JobError: for a number of tokens that is none.
    """
    kinds = {name: kind for name, (_, kind) in options(record).items()}
    said = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return record(
        **{
            name: _tiles(spelled(name), value) if kinds.get(name) == TILES else value
            for name, value in said.items()
            if value is not None and value != ()
        }
    )


def _tiles(asked: str, given: Any) -> int | str:
    if given != "auto" and not (str(given).isdecimal() and int(given) >= 2):
        raise JobError(f"{asked} must be auto or a number of tokens, 2 or more, got {str(given)!r}.")
    return given if given == "auto" else int(given)


def from_yaml(path: Path, record: type) -> dict[str, Any]:
    """The options that a YAML file gives, by name; ``-`` and ``_`` are the same.

    Raises:
        JobError: for a file that cannot be read, and what is no option or of another type.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise JobError(f"--config {path} cannot be read: {e.strerror or e}.") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise JobError(f"--config {path}: this is not YAML: {' '.join(str(e).split())}") from e
    if not isinstance(given, dict):
        raise JobError(
            f"--config {path}: options are lines such as `seq-len: 512`, and this is a {type(given).__name__}."
        )
    known, found = options(record), {}
    del known["config"]
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            ours = ELSEWHERE.get(spelled(name), "").removeprefix("--")
            remedy = f"Here it is {ours}." if ours.replace("-", "_") in known else "`gemini train --help` lists them."
            raise JobError(f"--config {path}: there is no option {key!r}. {remedy}")
        with as_job_error(asked=f"--config {path}: {key}: {value!r}"):
            found[name] = _as(known[name][1], value)
    return found


def _as(kind: Any, value: Any) -> Any:
    """A value of YAML as a field has it."""
    text = str(kind)
    if value is None or kind == TILES:
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("this is true or false")
        return value
    if "tuple" in text:
        inner: Any = Path if "Path" in text else str
        return tuple(inner(one) for one in (value if isinstance(value, list) else [value]))
    if "Path" in text:
        return Path(str(value))
    if "float" in text:
        return float(value)
    if "int" in text:
        if isinstance(value, bool) or int(value) != float(value):
            raise ValueError("this is a whole number")
        return int(value)
    return str(value)


def to_yaml(record: Any, always: Collection[str] = ()) -> str:
    """The options of a record that are not its defaults, and those named, as ``--config`` reads them."""
    import yaml

    lines = {}
    for name, (declared, _) in options(type(record)).items():
        value = getattr(record, name)
        if name not in always and (value == declared.default or declared.default is MISSING):
            continue
        plain = [str(one) for one in value] if isinstance(value, tuple) else value
        lines[name.replace("_", "-")] = str(plain) if isinstance(plain, Path) else plain
    return str(yaml.safe_dump(lines, sort_keys=False, allow_unicode=True)) if lines else "{}\n"
