"""Named machines, from ``gemini/machines/*.json``, and one way to read a machine by name or by path.

The files hold *peaks* by the makers' data sheets, each figure with its source: what share of a peak a program reaches
is the business of whoever computes with it. A machine that was measured (``gemini doctor --measure --json FILE``) is
read by its path, and its figures are what was reached.
"""

from __future__ import annotations

from pathlib import Path

from gemini.errors import PlanMismatch, parse_bytes
from gemini.planning import document
from gemini.planning.hardware import Hardware
from gemini.tiers import Tier

_FOLDER = Path(__file__).resolve().parents[1] / "machines"


def machine_names() -> tuple[str, ...]:
    """The machines that come with Gemini, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


def machine(name: str) -> Hardware:
    """The machine of that name.

    Raises:
        PlanMismatch: if there is none of that name; the message lists those there are.
    """
    if name not in machine_names():
        raise PlanMismatch(f"there is no machine {name!r}; there are {', '.join(machine_names())}")
    return Hardware.from_json((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """A machine by its name (a ``str`` out of :func:`machine_names`), or else from the JSON file at that path. Behind
    either may stand what this one has more or less of: ``"rtx4090,cpu=128GiB,nvme=4TB"``.

    Raises:
        PlanMismatch: if it is neither, the file cannot be read or is no hardware of this version, or for a size that is
            none.
    """
    path = Path(name_or_path)
    name, *sizes = str(name_or_path).split(",")
    if sizes and not path.exists():
        return _with_sizes(load_hardware(name), sizes)
    if name in machine_names():
        return machine(name)
    if not path.exists():
        raise PlanMismatch(
            f"{str(name_or_path)!r} is neither a machine that Gemini knows nor a file: there are "
            f"{', '.join(machine_names())}; gemini doctor --measure --json FILE writes one of this machine"
        )
    return document.load(path, "", Hardware.from_json)


def _with_sizes(hardware: Hardware, sizes: list[str]) -> Hardware:
    for asked in sizes:
        tier, _, size = asked.partition("=")
        try:
            figure = f"{Tier(tier.strip()).value}_bytes"
            hardware = hardware.with_figures("as given", **{figure: parse_bytes(size)})
        except ValueError:
            raise PlanMismatch(
                f"{hardware.name},{asked}: behind a machine stands what it has of gpu, cpu or nvme, such as "
                f"{hardware.name},cpu=128GiB"
            ) from None
    return hardware
