"""The files of the nvme tier: private, locked, removed at the end, swept after a crash, read past the page cache.

Note [lock and sweep]. Each file has a folder of its own, with a lock file that its process keeps locked for life.
The kernel drops the lock with the process, however it ends, so a folder whose lock can be taken is a leftover.
The folder gets its real name only once it is locked, so nobody can find it unlocked; a folder that still bears the
name it was born with after a minute is a leftover too. POSIX record locks are used because a forked child does not
inherit them. Their price: closing any descriptor of the file drops the lock, so we never look into our own folders.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import re
import secrets
import stat
import time
from pathlib import Path

from overspill.errors import TierError
from overspill.specs import BLOCK

_NAME = "overspill-"
_BORN = ".overspill-new-"
_BORN_SECONDS = 60
_FILES = ("data", "lock")  # the lock goes last, so that an interrupted removal can be taken up
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2), which Python does not offer
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ours: set[str] = set()  # tokens of the folders this process has made

log = logging.getLogger("overspill")


def sweep(parent: Path) -> None:
    """Remove what processes of this user left in `parent` when they were killed."""
    pattern = re.compile(rf"(?P<kind>{re.escape(_BORN)}|{_NAME})(?P<token>{os.geteuid()}-\d+-[0-9a-f]+)")
    for name in os.listdir(parent):
        match = pattern.fullmatch(name)
        if match is None or match["token"] in _ours:
            continue
        try:
            _sweep_folder(parent / name, born=match["kind"] == _BORN)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            log.warning("the leftover folder %s could not be removed: %s", parent / name, error)


def _sweep_folder(folder: Path, born: bool) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    if born and time.time() - found.st_mtime < _BORN_SECONDS:
        return
    with contextlib.ExitStack() as opened:
        fd = _open_folder(folder)
        opened.callback(os.close, fd)
        with contextlib.suppress(FileNotFoundError):  # without a lock file it is a removal that was interrupted
            lock = os.open("lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            opened.callback(os.close, lock)
            if not _try_lock(lock):
                return
        _remove(fd, folder)
    log.info("removed %s, left by a process that was killed", folder)


def _open_folder(folder: Path) -> int:
    """Open a folder of ours, and no link or foreign folder that was put in its place."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both EAGAIN and EACCES for "held by another"
        return False
    return True


def _remove(folder_fd: int, folder: Path) -> None:
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


class SpillFolder:
    """A locked folder (0700) of this process, see Note [lock and sweep]."""

    def __init__(self, parent: Path) -> None:
        self._pid = os.getpid()
        self._token = f"{os.geteuid()}-{self._pid}-{secrets.token_hex(8)}"
        self.path = parent / (_NAME + self._token)
        born = parent / (_BORN + self._token)
        _ours.add(self._token)
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(_ours.discard, self._token)
                os.mkdir(born, 0o700)
                undo.callback(os.rmdir, born)
                self._fd = _open_folder(born)
                undo.callback(os.close, self._fd)
                self._lock = self.create("lock")
                undo.callback(os.close, self._lock)
                undo.callback(os.unlink, "lock", dir_fd=self._fd)
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(born, self.path)
                undo.pop_all()
        except OSError as error:
            raise TierError(
                f"expected an nvme path in which files can be made and locked, found {str(parent)!r}: {error}; "
                f"give a path on a local disk that you may write to"
            ) from error

    def create(self, name: str) -> int:
        """Make a file (0600) that nobody else has made, and open it for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o600, dir_fd=self._fd)

    def reopen(self, name: str, flags: int) -> int:
        """Open a file of this folder again."""
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=self._fd)

    def is_ours(self) -> bool:
        """Whether this is the process that made it, and not a forked child."""
        return os.getpid() == self._pid

    def remove(self) -> None:
        """Remove it and let go of the lock."""
        try:
            _remove(self._fd, self.path)
        except OSError as error:
            log.warning("the folder %s could not be removed: %s; remove it by hand", self.path, error)
        os.close(self._lock)
        os.close(self._fd)
        _ours.discard(self._token)


class SpillFile:
    """One data file of reserved size; reads and writes are direct where the file system can."""

    def __init__(self, parent: Path, nbytes: int) -> None:
        self.nbytes = 0
        with contextlib.ExitStack() as undo:
            self._folder = SpillFolder(parent)
            undo.callback(self._folder.remove)
            self.path = self._folder.path / "data"
            # Space is reserved through a descriptor of its own: where the file system cannot do it, the C library
            # writes single bytes, which O_DIRECT would refuse.
            self._plain = self._create()
            undo.callback(os.close, self._plain)
            self.resize(nbytes)
            self._fd = self._open_direct()
            self.direct = self._fd != self._plain
            undo.pop_all()

    def resize(self, nbytes: int) -> None:
        """Reserve or give back space at the end, so that a full disk shows here and not in a later write."""
        try:
            if nbytes > self.nbytes:
                os.posix_fallocate(self._plain, self.nbytes, nbytes - self.nbytes)
            elif nbytes < self.nbytes:
                os.ftruncate(self._plain, nbytes)
        except OSError as error:
            cure = "free some space or give a smaller nvme size" if error.errno in _FULL else "give another nvme path"
            raise TierError(
                f"expected room for a file of {nbytes} bytes at {str(self.path)!r}, found: {error.strerror}; {cure}"
            ) from error
        self.nbytes = nbytes

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the space of these whole blocks back. They can be written again, if there is still room by then."""
        code = _libc().fallocate(self._plain, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
        if code != 0:
            # Not every file system can; then the space stays taken until the file is removed.
            log.debug("no hole was made in %s: %s", self.path, os.strerror(ctypes.get_errno()))

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` (whole blocks) from `offset`."""
        done = 0
        while done < len(into):
            # Python itself repeats a call that a signal has interrupted.
            try:
                got = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise self._failed("read", len(into), offset, str(error)) from error
            step = self._progress(got, len(into) - done)
            if step == 0:
                raise self._failed("read", len(into), offset, f"the file is torn, it ends after {done + got}")
            done += step
        self._drop_cache(offset, len(into))

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` (whole blocks) at `offset`."""
        done = 0
        while done < len(data):
            try:
                put = os.pwritev(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise self._failed("write", len(data), offset, str(error)) from error
            step = self._progress(put, len(data) - done)
            if step == 0:
                raise self._failed("write", len(data), offset, f"only {done + put} were taken")
            done += step
        self._drop_cache(offset, len(data))

    def disk_bytes(self) -> int:
        """Bytes of disk that the file takes, by its blocks."""
        return os.fstat(self._plain).st_blocks * 512

    def close(self) -> None:
        """Remove the file. In a forked child, where it is the parent's, nothing happens. May be called twice."""
        if self._fd < 0 or not self._folder.is_ours():
            return
        for fd in {self._plain, self._fd}:
            os.close(fd)
        self._plain = self._fd = -1
        self._folder.remove()

    def _create(self) -> int:
        try:
            return self._folder.create("data")
        except OSError as error:
            raise TierError(f"expected to make {str(self.path)!r}, found: {error}; give another nvme path") from error

    def _open_direct(self) -> int:
        """A descriptor past the page cache that is known to work, or the plain one."""
        fd = -1
        try:
            fd = self._folder.reopen("data", os.O_DIRECT)
            if self.nbytes > 0:
                os.preadv(fd, [mmap.mmap(-1, BLOCK)], 0)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise self._failed("open", self.nbytes, 0, str(error)) from error
            log.warning("%s cannot bypass the page cache (no O_DIRECT); nvme will be slower", self._folder.path.parent)
            return self._plain
        return fd

    def _progress(self, moved: int, wanted: int) -> int:
        # After a partial transfer a direct one can only go on from a block boundary.
        return moved if moved == wanted or not self.direct else moved - moved % BLOCK

    def _drop_cache(self, offset: int, nbytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def _failed(self, verb: str, nbytes: int, offset: int, found: str) -> TierError:
        return TierError(
            f"expected to {verb} {nbytes} bytes at offset {offset} of {str(self.path)!r}, found: {found}; "
            f"check the disk, and resume from the last checkpoint"
        )


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
