"""A store in a folder of this machine: whole files, made durable before they are named."""

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from spill.environment import nonce
from spill.errors import StoreError
from spill.stores import Absent, Buffer, Entry, Exists, Unreadable, check_name, local_path

# What a file system answers that has no hard links (exFAT, some network mounts, some containers).
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
WRITE_TRIES = 2


class LocalStore:
    """Objects are files below one folder. Links are never followed below it."""

    def __init__(self, uri: str) -> None:
        path = local_path(uri)
        assert path is not None
        self.root = Path(os.path.abspath(path))
        self.uri = uri

    def create(self, name: str, data: bytes) -> None:
        if not data:
            raise ValueError("an exclusive create of an empty object cannot be told from a torn one")
        path = self._path(name)
        with self._faults("write", path, len(data)):
            self._refuse_links(name)
            self._make_folder(path.parent)
            temporary = self._write_temporary(path, [data])
            try:
                os.link(temporary, path, follow_symlinks=False)
            except FileExistsError:
                raise Exists(name) from None
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                self._create_exclusively(path, data)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            _sync_folder(path.parent)

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._faults("write", path, sum(memoryview(p).nbytes for p in parts)):
            self._refuse_links(name)
            self._make_folder(path.parent)
            try:
                os.replace(self._write_temporary(path, parts), path)
            except FileNotFoundError:  # another run has swept it away while this one slept
                self._make_folder(path.parent)
                os.replace(self._write_temporary(path, parts), path)
            _sync_folder(path.parent)

    def read(self, name: str, limit: int) -> bytes:
        path = self._path(name)
        with self._faults("read", path):
            if self._link_before(name):
                raise Unreadable(f"{name} lies behind a link")
            try:
                # Not blocking, so that a named pipe in an object's place cannot hang the reader.
                handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                raise Absent(name) from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise Unreadable(f"{name} is not a regular file") from None
                raise
            try:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise Unreadable(f"{name} is not a regular file")
                if found.st_size > limit:
                    raise Unreadable(f"{name} has {found.st_size} bytes, at most {limit} are possible")
                with open(handle, "rb", closefd=False) as file:
                    return file.read(found.st_size)  # not the limit: that much memory would be taken beforehand
            finally:
                os.close(handle)

    def list(self, prefix: str) -> list[Entry]:
        entries: list[Entry] = []
        with self._faults("list", self.root / prefix):
            for name, found in self._walk(prefix):
                with contextlib.suppress(FileNotFoundError):  # removed between listing and looking
                    status = found.stat(follow_symlinks=False)
                    entries.append(Entry(name=name, size=status.st_size, modified=status.st_mtime))
        return sorted(entries, key=lambda entry: entry.name)

    def names(self, prefix: str) -> Sequence[str]:
        with self._faults("list", self.root / prefix):
            return [name for name, _ in self._walk(prefix)]

    def delete(self, name: str) -> None:
        path = self._path(name)
        with self._faults("delete", path):
            self._refuse_links(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):  # the folder of a claim goes with its last object
                path.parent.rmdir()

    def _walk(self, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every object's name and place. Texts instead of paths: a log of thousands is listed at every start."""
        self._refuse_links(f"{prefix}any")
        folders = [(str(self._path(prefix.rstrip("/")) if prefix else self.root), prefix)]
        while folders:
            folder, before = folders.pop()
            try:
                entries = os.scandir(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            with entries:
                for entry in entries:
                    if not entry.name.isprintable() or "\\" in entry.name:  # no name of ours: `check_name`
                        continue
                    if entry.is_file(follow_symlinks=False):
                        yield before + entry.name, entry
                    elif entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, f"{before}{entry.name}/"))

    def _path(self, name: str) -> Path:
        check_name(name)
        return self.root.joinpath(*PurePosixPath(name).parts)

    def _link_before(self, name: str) -> Path | None:
        """The first folder of the name that is a link. The root itself may be one: the user named it."""
        folder = self.root
        for part in PurePosixPath(name).parts[:-1]:
            folder = folder / part
            if folder.is_symlink():
                return folder
        return None

    def _refuse_links(self, name: str) -> None:
        if link := self._link_before(name):
            raise StoreError(f"{link} is a link, which a state never holds: put the folder itself there")

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            _sync_folder(path.parent)

    def _write_temporary(self, path: Path, parts: Sequence[Buffer]) -> Path:
        """A durable file beside `path`. After a failed fsync the kernel may have dropped the pages and call the file
        clean, so the bytes are written anew under another name, never synced again under the old one."""
        for attempt in range(WRITE_TRIES):
            temporary = path.with_name(f".{path.name}.{nonce()}")
            try:
                with self._new_file(temporary) as file:
                    for part in parts:
                        _write_all(file.fileno(), part)
                    try:
                        _sync(file.fileno())
                    except OSError:
                        if attempt + 1 == WRITE_TRIES:
                            raise
                        temporary.unlink()
                        continue
                return temporary
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
        raise AssertionError("the loop returns or raises")

    def _new_file(self, path: Path) -> io.FileIO:
        """Another run that deletes the last object of a folder takes the folder along: make it once more."""
        try:
            return open(path, "xb", buffering=0)
        except FileNotFoundError:
            self._make_folder(path.parent)
            return open(path, "xb", buffering=0)

    def _create_exclusively(self, path: Path, data: bytes) -> None:
        """Where hard links are refused. A kill in the middle leaves a torn entry: damaged, its number is spent."""
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            raise Exists(path.name) from None
        with open(handle, "wb", buffering=0) as file:
            _write_all(file.fileno(), data)
            _sync(file.fileno())

    @contextlib.contextmanager
    def _faults(self, verb: str, path: Path, size: int = 0) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(explain(verb, path, size, error)) from error


def explain(verb: str, path: Path, size: int, error: OSError) -> str:
    """A fault of the file system in one line: what was tried, what stands in the way, what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no room to {verb} {path}: {size:,} bytes are needed; make room and run again, the last commit stands"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        existing = next((p for p in (path, *path.parents) if _exists(p)), path)
        owner = existing.stat().st_uid if _exists(existing) else -1
        return (
            f"no right to {verb} {path} ({error.strerror}; {existing} belongs to user {owner}, "
            f"you are {os.geteuid()}): change the owner or the mode, or give another --state"
        )
    return f"cannot {verb} {path}: {error.strerror or error}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _write_all(handle: int, part: Buffer) -> None:
    if not memoryview(part).nbytes:
        return  # an array without elements has a shape that cannot be cast
    view = memoryview(part).cast("B")
    while view.nbytes:
        view = view[os.write(handle, view) :]


def _sync(handle: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS: fsync alone does not reach the disk's platter
    if full is not None:
        try:
            fcntl.fcntl(handle, full)
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
        else:
            return
    os.fsync(handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        _sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(handle)
