"""Staging folders: written under a name that nobody reads, renamed when complete, swept after a crash.

Note [staging]. `.NAME.incomplete-PID-TOKEN` holds a lock file that its process keeps locked; the kernel drops the lock
with the process, however it ends, so a staging folder whose lock can be taken, or that has none, is a leftover. The
lock file moves along when the folder gets its real name and is removed only then, so that a folder that is about to
be renamed never looks like a leftover. Removal, too, begins by renaming to such a name: if it is interrupted, what is
left is swept by the next save.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from overspill.errors import TierError

LOCK = ".lock"
_PROBE = ".probe"

log = logging.getLogger("overspill")


@contextlib.contextmanager
def staged(parent: Path, name: str) -> Iterator[Path]:
    """A new folder in `parent`, see Note [staging]; removed at the end unless `move_in` has moved it."""
    sweep(parent, name)
    folder = _staging_path(parent, name)
    with contextlib.ExitStack() as undo:
        os.mkdir(folder)
        undo.callback(_remove, folder, ignore_errors=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        undo.callback(os.close, lock)
        try:
            _lock(lock)
        except OSError as error:  # some network disks have no locks; then nobody can sweep what a crash leaves
            log.warning("%s cannot be locked (%s); a killed save must be removed by hand", folder, error.strerror)
        yield folder


def move_in(folder: Path, path: Path) -> None:
    """Give a staging folder that is safe on disk its real name; there may be nothing or an empty folder."""
    os.rename(folder, path)
    fsync_folder(path.parent)
    os.unlink(path / LOCK)


def link_others(folder: Path, into: Path, own: Collection[str] = (), newer: bool = False) -> None:
    """What is in `folder`, but for its `own` files, is in another one as well, and safe on disk there. Of two files of
    one name the one in `into` stays, but where those in `folder` are `newer`. They are linked, or copied where that
    cannot be."""
    for found in sorted(folder.iterdir()):
        to = into / found.name
        if found.name in own:
            continue
        if _is_folder(found):
            is_new = not os.path.lexists(to)
            if is_new:
                # Nobody's but ours until it is as closed as the other one.
                to.mkdir(0o700)
            if _is_folder(to):
                link_others(found, to, newer=newer)
            if is_new or newer:
                shutil.copystat(found, to)
            continue
        if newer and os.path.lexists(to):
            to.unlink()
        if not os.path.lexists(to):
            _link(found, to)
    fsync_folder(into)


def clashes(folder: Path, into: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """What in `folder` would take the place of one of the `own` files of another one, or that of a folder there, or is
    a folder where that has none but a file."""
    for found in sorted(folder.iterdir()):
        to = into / found.name
        if found.name in own or (os.path.lexists(to) and _is_folder(found) != _is_folder(to)):
            yield found
        elif _is_folder(found) and _is_folder(to):
            yield from clashes(found, to)


def copied_bytes(folder: Path, into: Path, own: Collection[str] = ()) -> int:
    """How much `link_others` will copy into an empty folder, because it cannot be linked."""
    copied, probe = 0, into / _PROBE
    for found in folder.iterdir():
        if found.name in own:
            continue
        if _is_folder(found):
            copied += copied_bytes(found, into)
            continue
        try:
            os.link(found, probe, follow_symlinks=False)
            os.unlink(probe)
        except OSError:
            copied += found.lstat().st_size
    return copied


def _is_folder(path: Path) -> bool:
    # Not by `is_dir` first, which looks where a link leads to.
    return not path.is_symlink() and path.is_dir()


def _link(file: str | Path, to: str | Path) -> None:
    try:
        os.link(file, to, follow_symlinks=False)
    except OSError:
        log.info("%s cannot be linked, so it is copied", file)
        shutil.copy2(file, to, follow_symlinks=False)
        if not os.path.islink(to):
            with open(to, "rb") as copied:
                os.fsync(copied.fileno())


def discard(folder: Path, name: str) -> None:
    """Remove `folder` such that an interrupted removal leaves nothing under its name, but a leftover of `name`, which
    the next save removes."""
    leftover = _staging_path(folder.parent, name)
    os.rename(folder, leftover)
    try:
        _remove(leftover)
    except OSError as error:
        # What replaces it is in its place and whole.
        log.warning("the leftover folder %s could not be removed: %s", leftover, error)


def _remove(folder: Path, ignore_errors: bool = False) -> None:
    """Also where a folder may not be written to: what the user has in it is linked where it goes on."""
    for at, inner, _ in os.walk(folder):
        for path in (at, *(os.path.join(at, name) for name in inner)):
            # Not what a link leads to, and not what is open enough: it may be somebody else's.
            if not os.path.islink(path) and not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def sweep(parent: Path, name: str) -> None:
    """Remove staging folders of `name` whose processes are gone."""
    for folder in leftovers(parent, name):
        try:
            with contextlib.ExitStack() as opened:
                with contextlib.suppress(FileNotFoundError):  # without a lock file, see Note [staging]
                    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                    opened.callback(os.close, lock)
                    _lock(lock)
                _remove(folder)
        except BlockingIOError:
            continue  # its process is alive
        except OSError as error:
            log.warning("the leftover folder %s could not be removed: %s", folder, error)


def leftovers(parent: Path, name: str) -> list[Path]:
    """The staging folders of `name`, of whatever process."""
    pattern = re.compile(rf"\.{re.escape(name)}\.incomplete-\d+-[0-9a-f]+")
    return [parent / found for found in sorted(os.listdir(parent)) if pattern.fullmatch(found)]


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` safe on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk_errors(task: str) -> Iterator[None]:
    """What the operating system refuses becomes a TierError that says what was to be done."""
    try:
        yield
    except OSError as error:
        raise TierError(f"expected to {task}, found: {error}; check the path, its permissions and the disk") from error


def _staging_path(parent: Path, name: str) -> Path:
    return parent / f".{name}.incomplete-{os.getpid()}-{secrets.token_hex(4)}"


def _lock(fd: int) -> None:
    """BlockingIOError where another has it. No record lock, because those do not show another thread's."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
