"""Values from plain data: what files and manifests say, compared with the declaration of the value that they stand for.

A value is declared once, as a dataclass, ``NamedTuple`` or ``msgspec.Struct`` with annotations; msgspec reads it
strictly (no int for a bool, no text for a number) and says in which place what was expected.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def read(data: Any, kind: type[T]) -> T:
    """The value of type ``kind`` that ``data`` (as JSON has it) stands for; parts of it may be values already.

    Raises:
        ValueError: for what it cannot be. Whoever knows the file turns it into an error that names it.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as e:
        # What a value itself objects to when it is made needs no place.
        raise ValueError(str(e.__cause__ or e)) from e
