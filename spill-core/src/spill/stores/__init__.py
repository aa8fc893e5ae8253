"""The store contract, its exceptions, and opening a store by URI. What lies behind a name is bytes, whole or absent.

A name is a relative POSIX path such as `log/7.json`. `spill.testing.StoreContract` holds a store to what follows.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

from spill.errors import InputError, StoreError
from spill.plugins import Registry, discover, load_target

Buffer = bytes | bytearray | memoryview

# Two letters at least: one is a drive.
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")


class Absent(Exception):
    """There is no object of this name."""


class Exists(Exception):
    """An exclusive create found an object of this name. It may be one's own, after a lost reply: read it back."""


class Unreadable(Exception):
    """What lies there cannot be an object of ours: larger than the limit, or not a regular file."""


class Unanswered(StoreError):
    """The store did not say whether it did what was asked. Nothing may be deleted on this; reading back decides."""


@frozen(kw_only=True)
class Entry:
    """One listed object. `modified` is in seconds on the store's own clock, comparable only within one store."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """Obligations of a store. Any fault that is not one of the exceptions named here is a `StoreError`."""

    uri: str

    def create(self, name: str, data: bytes) -> None:
        """Durably store a small, never empty object, only if the name is free: of racing creates exactly one wins.

        Raises:
            Exists: the name is taken.
            Unanswered: it is not known whether the object was stored.
        """
        ...

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        """Durably store the concatenation of the parts, whole or not at all; replaces what was there."""
        ...

    def read(self, name: str, limit: int) -> bytes:
        """The whole object, as the last finished write left it (never from a cache).

        Raises:
            Absent: no such object.
            Unreadable: more than `limit` bytes, or no regular object.
        """
        ...

    def list(self, prefix: str) -> list[Entry]:
        """Every object whose name starts with `prefix` (which ends in `/` or is empty), never from a cache."""
        ...

    def names(self, prefix: str) -> Sequence[str]:
        """The names of what `list` answers. A log of thousands is looked through at every start: where a listing pays
        for sizes and times by the object, as on a disk, this one must not."""
        ...

    def delete(self, name: str) -> None:
        """Remove the object; that it is not there is no fault."""
        ...


def check_name(name: str) -> None:
    """Refuse, with a ValueError, what is no relative POSIX path of plain parts: each store calls this first."""
    parts = name.split("/")
    if "" in parts or "." in parts or ".." in parts or "\\" in name or not name.isprintable():
        raise ValueError(f"not a name below the store: {name!r}")


def scheme_of(uri: str) -> str:
    """`s3` of `s3://bucket/key`, `file` of a plain path."""
    scheme, divider, _ = uri.partition("://")
    return scheme.lower() if divider else "file"


def local_path(uri: str) -> Path | None:
    """The folder that a plain path or a file:// URI names; None for every other scheme.

    Raises:
        InputError: a URI with one slash too few, which would otherwise become a folder of that name; a home directory
            of nobody.
    """
    if scheme_of(uri) != "file":
        return None
    if found := _ONE_SLASH.match(uri):
        scheme, rest = found[1], uri[found.end() :]
        raise InputError(
            f"{uri} has one slash: write {scheme}://{rest} for the store, ./{uri} for a folder of that name"
        )
    _, divider, rest = uri.partition("://")
    if divider and not rest.startswith("/"):
        raise InputError(f"{uri!r} is not of the form file:///FOLDER; or give the folder's path")
    try:
        return Path(rest if divider else uri).expanduser()
    except RuntimeError as error:
        raise InputError(f"{uri}: {error} Give the whole path") from None


def open_store(uri: str, registry: Registry | None = None) -> Store:
    """Open the store that the URI's scheme names.

    Raises:
        InputError: an empty URI.
        PluginError: no plugin brings this scheme.
    """
    if not uri.strip():
        raise InputError("a state's URI is empty; give a path, s3://, gs:// or az://")
    found = (registry or discover()).get("store", scheme_of(uri))
    store: Store = load_target(found.spec)(uri)
    return store
