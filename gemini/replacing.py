"""Putting a new folder or file in the place of an old one, so that one of them is whole under its name at every moment.

A new one is written beside the place it is for, under a name that says which process writes it, and renamed when it is
whole on the disk. What a killed process leaves is removed by the next one that writes there. No torch.

    NAME                            the newest whole one
    .NAME.old                       the one before it, between two renames: the newest where there is no NAME
    .NAME.new-PID-STAMP-NUMBER      being written by a process, or left by a dead one (.old behind it: being removed)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gemini.errors import StorageError, of_storage

_WRITTEN_HERE: set[str] = set()
"""What this process is writing; the rest of what bears its number was left by one that had it before."""
_NUMBERS = itertools.count()
_AFTER_NEW = re.compile(r"(\d{1,18})(?:-([0-9a-f]{8})-\d+)?(?:\.old)?")


def place_of(name: str | os.PathLike[str]) -> Path:
    """The path of ``name``: absolute, so that it stays the same wherever the process goes, and no symbolic link, which
    renaming would replace instead of what it points to. Raises StorageError for a relative one, if the folder that the
    process works in was removed; for what is no path.
    """
    try:
        return Path(os.path.realpath(os.fsdecode(name)))
    except (OSError, ValueError) as e:
        raise StorageError(f"cannot tell where {os.fspath(name)!r} is: {getattr(e, 'strerror', None) or e}") from e


def check_renamable(final: Path, asked: str | os.PathLike[str]) -> None:
    """Refuse a folder that cannot be renamed, or must not be: the one we stand in, or one around it, or a mount point.
    Raises StorageError, saying which.
    """
    why = None
    if final.is_symlink():
        why = "is a symbolic link that leads back to itself"
    elif _working_folder().is_relative_to(final):
        why = "is the folder that this program works in, or holds it"
    elif os.path.ismount(final):
        why = "is where a file system is mounted"
    if why is not None:
        raise StorageError(
            f"{os.fspath(asked)!r} ({final}) {why}: the folder itself is renamed and replaced as a whole when it is "
            f"saved again, which this one cannot be. Give a folder in it, such as {os.fspath(final / 'checkpoint')!r}"
        )


def begin(final: Path) -> Path:
    """A name beside ``final``, not in use, under which this process may write a new one until :func:`end`; what killed
    processes were writing for ``final`` is removed.
    """
    for leftover in leftovers(final.parent, final.name):
        remove(leftover)
    work = final.with_name(f".{final.name}.new-{os.getpid()}-{_stamp(os.getpid()) or '0' * 8}-{next(_NUMBERS)}")
    _WRITTEN_HERE.add(work.name)
    return work


def end(work: Path) -> None:
    """Remove what stands under a name that :func:`begin` gave, if anything does: nobody writes it any more."""
    remove(work)
    _WRITTEN_HERE.discard(work.name)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A draft to write, which is the file ``path``, on the disk and under that name, when the block has ended well.
    Raises OSError; an existing file is then as it was.
    """
    path = place_of(path)
    draft = begin(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield draft
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        end(draft)


def sync(path: Path) -> None:
    """Bring what was written to a file, or which names a folder has, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def swap(work: Path, final: Path) -> None:
    """Put the whole folder ``work`` in the place of ``final``. At every moment one of them stands where :func:`find`
    finds it, also if processes were killed in several calls in a row. Raises OSError; ``final`` is then as it was.
    """
    old, going = _old_name(final), work.with_name(f"{work.name}.old")
    sync(work)
    restore(final)  # the only whole one may stand under the old name, so that must not be removed yet
    if old.exists():
        _discard(old, going)
    if _stands(final):
        os.rename(final, old)
    try:
        os.rename(work, final)
        sync(final.parent)
    except OSError:
        with contextlib.suppress(OSError):
            if not work.exists():
                os.rename(final, work)
            restore(final)
        raise
    with contextlib.suppress(OSError):  # the new one is there, what is left of the old one the next save removes
        if old.exists():
            _discard(old, going)


def restore(final: Path) -> None:
    """If the process was killed between the two renames of :func:`swap`, rename the old one back; else do nothing."""
    if not _stands(final) and _stands(_old_name(final)):
        os.rename(_old_name(final), final)


def find(final: Path) -> Path:
    """The place of what is called ``final``. Raises StorageError if there is none."""
    with of_storage(f"cannot read {final}"):
        for path in (final, _old_name(final), final):  # again: it may have been renamed while we looked
            if _stands(path):
                return path
        if final.is_dir():
            return final
    raise StorageError(
        f"there is no checkpoint at {final}; one that another model writes in the background is there when wait() of "
        "what save_checkpoint(wait=False) returned has ended"
    )


def leftovers(folder: Path, name: str | None = None) -> list[Path]:
    """Files that processes which are dead by now were writing in ``folder`` (for ``name`` alone, if given)."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        head, new, tail = path.name.rpartition(".new-")
        match = _AFTER_NEW.fullmatch(tail)
        if not new or match is None or not head.startswith(".") or (name is not None and head != f".{name}"):
            continue
        if path.name.removesuffix(".old") in _WRITTEN_HERE:
            continue
        # A number alone says nothing: another process may have it by now.
        pid = int(match[1])
        if match[2] is None or pid == os.getpid() or _stamp(pid) != match[2]:
            found.append(path)
    return found


def clean_up(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """What killed processes have left in ``folder`` of names that are ours: a whole one that was being replaced stands
    again, the rest is removed. What another living process is writing is left alone; one process calls.
    """
    for path in leftovers(folder):
        if is_ours(path.name[1:].rpartition(".new-")[0]):
            remove(path)
    for old in list(folder.iterdir()) if folder.is_dir() else []:
        final = folder / old.name[1:].removesuffix(".old")
        if old == _old_name(final) and is_ours(final.name):
            restore(final)
            if old.exists():
                _discard(old, begin(final))


def remove(path: Path) -> None:
    """Remove a folder or a file as far as possible."""
    if os.path.isdir(path) and not os.path.islink(path):  # of a name that is too long Path raises
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _discard(path: Path, going: Path) -> None:
    """Remove a folder: under the name ``going``, so that what a killed removal leaves never looks like a whole one.
    Raises OSError if it cannot even be renamed.
    """
    try:
        os.rename(path, going)
    finally:
        end(going)


def _stands(path: Path) -> bool:
    """A folder with something in it (an empty one may be renamed over)."""
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is not None
    except (FileNotFoundError, NotADirectoryError):
        return False


def _working_folder() -> Path:
    try:
        return Path(os.path.realpath(os.getcwd()))
    except OSError:  # it was removed
        return Path(os.sep)


def _old_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def _stamp(pid: int) -> str | None:
    """A mark of the process ``pid`` alone, of all that had or will have its number: when it began, in which boot of
    the machine. None if there is none (or one that has ended and that nobody has waited for).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{zlib.crc32(f'{boot} {fields[19]}'.encode()):08x}"
