"""The store contract over any bucket: retries with a bound, lost replies, parts of large objects, limits of reads.

A provider's module brings a `Bucket`: single requests without retries, and `judge`, which says what an error means.
Everything that follows from that is decided here, once.
"""

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from enum import Enum, auto
from typing import Any, Literal, Protocol, TypeVar

from attrs import frozen

from spill.environment import nonce, seconds, sleep
from spill.errors import StoreError
from spill.stores import Absent, Buffer, Entry, Exists, Unanswered, Unreadable, check_name
from spill_store_cloud.place import Place

PART_SIZE = 8 * 1024**2  # a multiple of 256 KiB, as GCS asks; 10,000 parts, as S3 allows, are 80 GB
PATIENCE_SECONDS = 300.0
QUIET_SECONDS = 3.0
SAY_EVERY_SECONDS = 30.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
# One request, from its first byte to the answer's last: for the answer, and for its bytes on a slow line.
REQUEST_SECONDS, LAST_TRY_SECONDS = 60.0, 10.0
SLOWEST_BYTES_PER_SECOND = 200_000
FORGET_SECONDS = 30.0
READ_RESTARTS = 5
UPLOAD_TRIES = 3

Verb = Literal["create", "write", "read", "list", "delete"]
_CHANGING: tuple[Verb, ...] = ("create", "write", "delete")
T = TypeVar("T")


class Kind(Enum):
    """What an error means for what was asked."""

    ABSENT = auto()  # there is no such object
    TAKEN = auto()  # the name of an exclusive create is not free
    MOVED = auto()  # the object was replaced while it was read
    LOST = auto()  # the parts of an unfinished upload are gone: send them all again
    BUSY = auto()  # the store says that it did nothing: ask again
    SILENT = auto()  # no answer, or none that says what was done: ask again
    REFUSED = auto()  # asking again does not help


@frozen(kw_only=True)
class Fault:
    """A judged error. `reason` is one line: what was found and, where asking again does not help, what to do."""

    kind: Kind
    reason: str


@frozen(kw_only=True)
class Piece:
    """Bytes of an object from some offset on; `size` is the whole object's, `version` names what was read."""

    data: bytes
    size: int
    version: str


class Upload(Protocol):
    """An object on its way in parts. It does not exist before `finish` returns."""

    def send(self, number: int, start: int, data: bytes) -> None:
        """Bring part `number` (from 0), which starts at byte `start`. May be called again after a failure."""
        ...

    def finish(self) -> int:
        """Make the object. Returns the size that the store says it has. May be called again after a failure."""
        ...

    def abandon(self) -> None:
        """Give up; nothing is to be seen of it."""
        ...


class Bucket(Protocol):
    """Single requests to one bucket, each without retries. Keys are whole names in the bucket.

    Each method may raise anything; `judge` says what it means. `lanes` is how many parts may be on their way at once,
    `whole_size` how many bytes at most go up in one request.
    """

    lanes: int
    whole_size: int

    def put(self, key: str, data: bytes, exclusive: bool) -> None: ...

    def begin(self, key: str, views: Sequence[memoryview]) -> Upload: ...

    def get(self, key: str, start: int, count: int, version: str) -> Piece:
        """Up to `count` (at least 1) bytes from `start` on; with a version, of that version or none."""
        ...

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str]:
        """Objects by whole keys, and the mark to ask for the next page with; empty after the last."""
        ...

    def remove(self, key: str) -> None: ...

    def judge(self, error: Exception) -> Fault: ...


class _Short(Exception):
    """A reply that ended before its time."""


class _Moved(Exception):
    """The object was replaced while it was read."""


class _Lost(Exception):
    """An upload has to begin again; says why."""


_left: ContextVar[float] = ContextVar("seconds until patience ends", default=PATIENCE_SECONDS)


def in_time(files: Any, request: Callable[..., Any], *arguments: Any, size: int = 0, **keywords: Any) -> Any:
    """Run a coroutine of the fsspec file system `files` in its own loop, for as long as a request may take. `size` is
    how many bytes it moves, with those of others beside it on the same line. The libraries' own limits miss a store
    that accepts a connection and falls silent within it.

    Raises:
        TimeoutError: it took longer, and was cancelled.
    """
    from fsspec.asyn import sync

    limit = min(REQUEST_SECONDS, max(_left.get(), LAST_TRY_SECONDS)) + size / SLOWEST_BYTES_PER_SECOND
    return sync(files.loop, request, *arguments, timeout=limit, **keywords)


class CloudStore:
    """A folder of a bucket as a store; safe to use from several threads. See `spill.stores.Store`."""

    def __init__(self, place: Place, bucket: Bucket) -> None:
        self.uri = place.uri
        self.patience_seconds = PATIENCE_SECONDS
        self._thread = threading.local()
        self._folder = place.folder
        self._bucket = bucket

    def create(self, name: str, data: bytes) -> None:
        if not data:
            raise ValueError("an exclusive create of an empty object cannot be told from none on some stores")
        key = self._key(name)
        self._ask("create", name, lambda: self._bucket.put(key, bytes(data), True))

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        key = self._key(name)
        views = [memoryview(p).cast("B") for p in parts if memoryview(p).nbytes]
        if sum(v.nbytes for v in views) <= self._bucket.whole_size:
            data = b"".join(views)
            self._ask("write", name, lambda: self._bucket.put(key, data, False))
        else:
            self._upload(name, key, views)

    def read(self, name: str, limit: int) -> bytes:
        key = self._key(name)
        for _ in range(READ_RESTARTS):
            first = self._get(name, key, 0, min(limit + 1, PART_SIZE), "")
            if first.size > limit:
                raise Unreadable(f"{name} has {first.size} bytes, at most {limit} are possible")
            try:
                return self._rest(name, key, first)
            except _Moved:
                continue  # it was replaced meanwhile: the new one, from its start
        raise StoreError(f"cannot read {self.uri}/{name}: it is replaced faster than it can be read; run again")

    def names(self, prefix: str) -> Sequence[str]:
        return [entry.name for entry in self.list(prefix)]

    def list(self, prefix: str) -> list[Entry]:
        top = self._folder + "/"
        entries: list[Entry] = []
        after = ""
        while True:
            asked = after
            found, after = self._ask("list", prefix, lambda start=asked: self._bucket.page(top + prefix, start))
            if after and after == asked:
                raise StoreError(f"cannot list {self.uri}/{prefix}: the store answers the same page again and again")
            for entry in found:
                # Consoles and file-system views of a bucket mark folders by objects whose names end in a slash.
                if not entry.name.endswith("/"):
                    entries.append(Entry(name=entry.name.removeprefix(top), size=entry.size, modified=entry.modified))
            if not after:
                return sorted(entries, key=lambda e: e.name)

    def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            self._ask("delete", name, lambda: self._bucket.remove(key))
        except Absent:
            return

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._folder}/{name}"

    def _get(self, name: str, key: str, start: int, count: int, version: str) -> Piece:
        def ask() -> Piece:
            piece = self._bucket.get(key, start, count, version)
            if version and piece.version != version:
                raise _Moved  # from a store that does not look at the condition
            if len(piece.data) < min(count, piece.size - start):
                raise _Short(f"{len(piece.data)} bytes came where {min(count, piece.size - start)} were asked for")
            return piece

        return self._ask("read", name, ask)

    def _rest(self, name: str, key: str, first: Piece) -> bytes:
        """The whole object, of whose beginning `first` is. Parts go to their place as they come."""
        have = len(first.data)
        if have >= first.size:
            return first.data[: first.size]
        whole = io.BytesIO()  # its value is handed over without a copy
        whole.write(first.data)
        starts = range(have, first.size, PART_SIZE)
        with ThreadPoolExecutor(self._bucket.lanes) as pool:
            for piece in _in_order(
                pool,
                self._bucket.lanes,
                (lambda s=start: self._get(name, key, s, PART_SIZE, first.version) for start in starts),
            ):
                whole.write(piece.data)
        return whole.getvalue()

    def _upload(self, name: str, key: str, views: Sequence[memoryview]) -> None:
        for tries in reversed(range(UPLOAD_TRIES)):
            try:
                self._upload_once(name, key, views)
            except _Lost as lost:
                if not tries:
                    raise StoreError(
                        f"cannot write {self.uri}/{name}: {lost}, {UPLOAD_TRIES} times; run again, the last commit "
                        "stands"
                    ) from None
            else:
                return

    def _upload_once(self, name: str, key: str, views: Sequence[memoryview]) -> None:
        size = sum(v.nbytes for v in views)
        upload = self._ask("write", name, lambda: self._bucket.begin(key, views))
        patience = self._patience()
        try:
            with ThreadPoolExecutor(self._bucket.lanes) as pool:
                sends = (
                    lambda n=number, s=number * PART_SIZE, d=data: self._ask(
                        "write", name, lambda: upload.send(n, s, d), patience
                    )
                    for number, data in enumerate(_slices(views))
                )
                for _ in _in_order(pool, self._bucket.lanes, sends):
                    pass
            found = self._ask("write", name, upload.finish, patience)
        except BaseException:
            # What is left of it is not seen, and swept by the store's rule for unfinished uploads.
            with contextlib.suppress(Exception):
                upload.abandon()
            raise
        if found != size:
            raise StoreError(f"{self.uri}/{name} has {found} bytes at the store, {size} were sent; run again")

    def _patience(self) -> "_Patience":
        """One for each thread: what it asks after five minutes of silence does not get five more."""
        patience: _Patience | None = getattr(self._thread, "patience", None)
        if patience is None or patience.limit != self.patience_seconds:
            patience = self._thread.patience = _Patience(uri=self.uri, limit=self.patience_seconds)
        return patience

    def _ask(self, verb: Verb, name: str, call: Callable[[], T], patience: "_Patience | None" = None) -> T:
        """Ask until there is an answer, or patience ends.

        Raises:
            Absent, Exists, _Moved, _Lost: as judged.
            Unanswered: it changes something, and it is not known whether that was done.
            StoreError: refused, or no success for too long.
        """
        patience = patience or self._patience()
        unsure = False
        attempt = 0
        while True:
            begun = seconds()
            _left.set(patience.left(begun))
            try:
                answer = call()
            except _Moved:
                raise
            except Exception as error:  # of any kind: each library has its own, and lets those of others through
                fault = self._judge(error)
                if fault.kind not in (Kind.BUSY, Kind.SILENT):
                    patience.succeeded()  # in that the store answers
                if fault.kind is Kind.ABSENT and verb in ("read", "delete"):
                    raise Absent(name) from None
                if fault.kind is Kind.TAKEN and verb == "create":
                    raise Exists(name) from None
                if fault.kind in (Kind.MOVED, Kind.TAKEN) and verb == "read":  # Google has one answer for both
                    raise _Moved from None
                if fault.kind is Kind.LOST and verb == "write":
                    raise _Lost(fault.reason) from None
                what = f"cannot {verb} {self.uri}/{name}: {fault.reason}"
                if fault.kind is Kind.ABSENT:
                    raise StoreError(f"{what}; is the bucket still there?") from error
                if fault.kind not in (Kind.BUSY, Kind.SILENT):
                    raise StoreError(what) from error
                unsure |= fault.kind is Kind.SILENT
                if not patience.pause(begun, fault.reason, attempt):
                    end = f"{what}; nothing succeeded in {patience.limit:.0f} s of trying: run again, the last "
                    end += "commit stands"
                    raise (Unanswered if unsure and verb in _CHANGING else StoreError)(end) from error
                attempt += 1
            else:
                patience.succeeded()
                return answer

    def _judge(self, error: Exception) -> Fault:
        if isinstance(error, _Short):
            return Fault(kind=Kind.SILENT, reason=f"the connection broke off ({error})")
        return self._bucket.judge(error)


class _Patience:
    """How long a thread has asked without an answer, and what was said of it. An object's parts share one."""

    def __init__(self, uri: str, limit: float) -> None:
        self.limit = limit
        self._uri = uri
        self._lock = threading.Lock()
        self._since: float | None = None  # when the first request began that failed after the last answer
        self._failed = 0.0  # when the last one failed
        self._said = False

    def left(self, now: float) -> float:
        with self._lock:
            return self.limit - self._gone(now, now)

    def pause(self, begun: float, reason: str, attempt: int) -> bool:
        """Wait before asking again; False when that has gone on for too long. `begun` is when the last request was."""
        with self._lock:
            now = seconds()
            gone = self._gone(begun, now)
            self._since = now - gone
            self._failed = now
        if gone >= self.limit:
            return False
        if gone >= QUIET_SECONDS and say(f"{self._uri}: {reason}; trying again for up to {self.limit - gone:.0f} s"):
            self._said = True
        jitter = 0.5 + int(nonce(), 16) / 2**65
        pause = min(FIRST_PAUSE * 2 ** min(attempt, 10), LONGEST_PAUSE) * jitter
        sleep(min(pause, max(0.0, self.limit - gone)))
        return True

    def succeeded(self) -> None:
        with self._lock:
            since, said = self._since, self._said
            self._since, self._said = None, False
        if said and since is not None:
            say(f"{self._uri}: answers again after {seconds() - since:.0f} s", always=True)

    def _gone(self, begun: float, now: float) -> float:
        """Seconds without an answer up to `now`, for a request that began at `begun`: what failed long before that, and
        was given up, is another matter."""
        if self._since is None or begun - self._failed > FORGET_SECONDS:
            return now - begun
        return now - self._since


_saying = threading.Lock()
_last_said = -SAY_EVERY_SECONDS


def say(line: str, *, always: bool = False) -> bool:
    """One line on standard error, at most every 30 s unless `always`. Returns whether it was said."""
    global _last_said
    with _saying:
        now = seconds()
        if not always and now - _last_said < SAY_EVERY_SECONDS:
            return False
        if not always:
            _last_said = now
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        return True


def _slices(views: Sequence[memoryview]) -> Iterator[bytes]:
    """The concatenation of the views in parts of `PART_SIZE`, the last one shorter; each is copied when it is due."""
    part: list[memoryview] = []
    room = PART_SIZE
    for view in views:
        while view.nbytes:
            taken, view = view[:room], view[room:]
            part.append(taken)
            room -= taken.nbytes
            if not room:
                yield b"".join(part)
                part, room = [], PART_SIZE
    if part:
        yield b"".join(part)


def _in_order(pool: ThreadPoolExecutor, lanes: int, calls: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Results in the order of the calls, at most `lanes` of them under way, so that memory stays bounded."""
    running: list[Future[T]] = []
    try:
        for call in calls:
            running.append(pool.submit(call))
            if len(running) >= lanes:
                yield running.pop(0).result()
        while running:
            yield running.pop(0).result()
    finally:
        for future in running:
            future.cancel()
