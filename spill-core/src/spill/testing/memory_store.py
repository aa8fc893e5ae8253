"""A store in memory. A `Backing` is the place, and every `MemoryStore` a client of it, as machines are of a bucket."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from attrs import define, field, frozen

from spill.environment import seconds
from spill.errors import StoreError
from spill.stores import Absent, Buffer, Entry, Exists, Unreadable, check_name


@frozen(kw_only=True)
class Stored:
    """An object's bytes, and when they came, in seconds on the backing's clock."""

    data: bytes
    modified: float


@define(kw_only=True, eq=False)
class Backing:
    """What clients share. `objects` may be read and changed by a test at will, under `lock` where threads are at work.

    Attributes:
        clock: seconds on the store's own clock; a test sets what it needs.
        refusal: while it is not empty every request fails with a `StoreError` of this text: no right, no bucket.
    """

    clock: Callable[[], float] = seconds
    refusal: str = ""
    objects: dict[str, Stored] = field(factory=dict)
    lock: threading.RLock = field(factory=threading.RLock, repr=False)

    def copy(self) -> "Backing":
        """Another place with the same objects, as a plain copy makes it; same clock."""
        with self.lock:
            return Backing(clock=self.clock, objects=dict(self.objects))


class MemoryStore:
    """A client of a backing; see `spill.stores.Store`. Any number of clients and threads may use one backing."""

    def __init__(self, backing: Backing | None = None, uri: str = "memory://state") -> None:
        self.backing = backing or Backing()
        self.uri = uri

    def create(self, name: str, data: bytes) -> None:
        if not data:
            raise ValueError("an exclusive create of an empty object cannot be told from a torn one")
        with self._request(name) as objects:
            if name in objects:
                raise Exists(name)
            objects[name] = Stored(data=bytes(data), modified=self.backing.clock())

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(memoryview(p).tobytes() for p in parts)
        with self._request(name) as objects:
            objects[name] = Stored(data=data, modified=self.backing.clock())

    def read(self, name: str, limit: int) -> bytes:
        with self._request(name) as objects:
            if name not in objects:
                raise Absent(name)
            data = objects[name].data
        if len(data) > limit:
            raise Unreadable(f"{name} has {len(data)} bytes, at most {limit} are possible")
        return data

    def list(self, prefix: str) -> list[Entry]:
        with self._request() as objects:
            return [
                Entry(name=name, size=len(stored.data), modified=stored.modified)
                for name, stored in sorted(objects.items())
                if name.startswith(prefix)
            ]

    def names(self, prefix: str) -> Sequence[str]:
        return [entry.name for entry in self.list(prefix)]

    def delete(self, name: str) -> None:
        with self._request(name) as objects:
            objects.pop(name, None)

    @contextlib.contextmanager
    def _request(self, name: str | None = None) -> Iterator[dict[str, Stored]]:
        """One request: nobody else's is under way meanwhile."""
        if name is not None:
            check_name(name)
        with self.backing.lock:
            if self.backing.refusal:
                raise StoreError(f"{self.uri}: {self.backing.refusal}")
            yield self.backing.objects
