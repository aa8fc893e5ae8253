"""The model cache below `spill.environment.home()`: hashes of files, remembered; directories that appear whole."""

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from spill.engine import Tick
from spill.environment import home, nonce

CHUNK = 8 * 2**20
POLL_SECONDS = 0.2
# What a killed run left behind is removed by a later one, once it is this much older on the file system's own clock.
ABANDONED_SECONDS = 86_400.0
T = TypeVar("T")


def sha256_of(path: Path, tick: Tick) -> str:
    """The file's sha256 in hexadecimal; `tick` is called at every 8 MiB.

    It is computed once per machine: `hashes.json` remembers it under the real path, and believes it as long as size,
    modification time, change time and inode stay the same. A cache that cannot be read or written costs time only.
    """
    real = path.resolve()
    known = _remembered()
    before = _fingerprint(real)
    entry = known.get(str(real))
    if entry is not None and entry[:-1] == before:
        return str(entry[-1])
    digest = hashlib.sha256()
    with real.open("rb") as file:
        while block := file.read(CHUNK):
            tick()
            digest.update(block)
    if _fingerprint(real) == before:  # else it is being written, and what was read is nobody's content
        _remember(str(real), [*before, digest.hexdigest()])
    return digest.hexdigest()


def _fingerprint(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _remembered() -> dict[str, list[int | str]]:
    try:
        known = json.loads((home() / "hashes.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {path: entry for path, entry in known.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[4], str):
        return False
    return all(type(number) is int for number in entry[:4]) and len(entry[4]) == 64


def _remember(path: str, entry: list[int | str]) -> None:
    # Two runs at once may each drop the other's new entry, which then is hashed again.
    target = home() / "hashes.json"
    temporary = target.with_name(f"hashes.{nonce()}.tmp")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps({**_remembered(), path: entry}, indent=0, sort_keys=True))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """A fresh directory beside `final`, renamed to it when the block ends; removed when the block raises.

    So `final` is absent or whole. If another run was faster, its directory stays and this one's is dropped: of equal
    sources both hold the same. To replace a directory, `discard` it first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.parent / f".{final.name}.{nonce()}.tmp"
    temporary.mkdir()
    try:
        _remove_abandoned(temporary, final.name)
        yield temporary
        # Hashes are remembered by size and time, so what they were computed from must outlive a power cut.
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        try:
            os.rename(temporary, final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard(directory: Path) -> None:
    """Take a directory away in one step, then remove what it holds."""
    aside = directory.parent / f".{directory.name}.{nonce()}.tmp"
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        os.rename(directory, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_abandoned(mine: Path, name: str) -> None:
    now = mine.stat().st_mtime
    for other in mine.parent.glob(f".{name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if now - other.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def ticking(work: Callable[[], T], tick: Tick) -> T:
    """What `work` answers, calling `tick` while it blocks. If `tick` raises, the work is left behind in its thread,
    which does not keep the process alive."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # handed to the caller, whatever it is
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        tick()
        thread.join(POLL_SECONDS)
    if errors:
        raise errors[0]
    return result[0]
