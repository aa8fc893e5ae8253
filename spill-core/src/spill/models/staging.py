"""Model directories from a store (`--weights URI`), staged into the cache whole."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from spill.engine import Tick
from spill.environment import home
from spill.errors import ModelError, StoreError
from spill.models.cache import appearing, discard, ticking
from spill.models.directory import content_identity, is_model_file
from spill.records import printable
from spill.stores import Absent, Entry, Store, Unreadable, local_path, open_store

NOTE = "spill-staged.json"


def staged(uri: str) -> Path | None:
    """What was staged from this URI before, or None. Does not look at the store."""
    directory = _place(uri)
    return directory if (directory / NOTE).is_file() else None


def stage(uri: str, *, tick: Tick, say: Callable[[str], None]) -> Path:
    """Copy the model files that lie at `uri` into the cache, or find them staged and unchanged.

    They count as unchanged while the store lists the same names, sizes and times. Only model files are taken
    (`spill.models.directory.FILES`), none in folders below. One file at a time is held in memory.

    Raises:
        ModelError: no model lies there, or a file changed while it was copied.
        StoreError: the store fails.
    """
    store = open_store(uri)
    entries = [e for e in ticking(lambda: store.list(""), tick) if is_model_file(e.name)]
    if not any(e.name.endswith(".safetensors") for e in entries):
        raise ModelError(f"--weights {printable(uri)} holds no model*.safetensors; give the folder that holds them")
    listing = json.dumps([[e.name, e.size, e.modified] for e in sorted(entries, key=lambda e: e.name)])
    directory = _place(uri)
    if directory.is_dir():
        if _same(directory, listing):
            return directory
        discard(directory)
    total = sum(e.size for e in entries)
    say(f"staging {printable(uri)}: {len(entries)} files, {total / 1e6:.1f} MB")
    with appearing(directory) as fresh:
        done = 0
        for entry in entries:
            (fresh / entry.name).write_bytes(_read(store, entry, tick))
            done += entry.size
            say(f"  {entry.name}: {entry.size / 1e6:.1f} MB ({done * 100 // max(total, 1)} %)")
        (fresh / NOTE).write_text(listing)
    say(f"staged {len(entries)} files, {total / 1e6:.1f} MB, {content_identity(directory, tick)}")
    return directory


def _place(uri: str) -> Path:
    local = local_path(uri)
    key = uri.rstrip("/") if local is None else str(local.resolve())
    return home() / "staged" / hashlib.sha256(key.encode()).hexdigest()[:32]


def _same(directory: Path, listing: str) -> bool:
    try:
        return (directory / NOTE).read_text() == listing
    except OSError:
        return False


def _read(store: Store, entry: Entry, tick: Tick) -> bytes:
    try:
        data = ticking(lambda: store.read(entry.name, entry.size), tick)
    except (Absent, Unreadable) as error:
        raise ModelError(f"{store.uri}: {entry.name} changed while it was staged ({error}); try again") from error
    if len(data) != entry.size:
        raise StoreError(f"{store.uri}: {entry.name} has {len(data)} bytes where {entry.size} were listed; try again")
    return data
