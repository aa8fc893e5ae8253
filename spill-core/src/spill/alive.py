"""`alive/<claim>-<nonce>`: advice on whether a run is at work, judged on the store's clock alone. Never the fence.

A run rewrites its object every 15 s, and looks whether a stranger has committed. A newcomer that finds the holder's
object compares the store's own timestamps on it and on a fresh one of its own, and watches: over 60 s old, or unchanged
through 60 s, counts as dead. Pid, host name and the machines' clocks decide nothing.
"""

import contextlib
import threading
from collections.abc import Callable

from attrs import frozen

from spill import environment
from spill.claim import Claim, stranger
from spill.errors import HeldError, StoreError
from spill.records import Commit, Malformed, from_json, printable, to_json
from spill.signals import StopRequest
from spill.state import Head, newest
from spill.stores import Absent, Store, Unreadable

RENEW_SECONDS = 15.0
DEAD_SECONDS = 60.0
WATCH_SECONDS = 2.0
SIZE_LIMIT = 4096


class Alive:
    """A run's own object, there from `announce` on, kept up by a thread from `start` to `stop`.

    `number` is that of the claim which the run is about to make.
    """

    def __init__(self, store: Store, number: int, nonce: str, stop: StopRequest, where: Callable[[], str]) -> None:
        self._store = store
        self._number = number
        self._name = f"alive/{number}-{nonce}"
        self._stop = stop
        self._where = where
        self._beats = 0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        """Write the object before the claim is made, so that nobody ever finds the claim without it."""
        self._beat()

    def start(self, claim: Claim) -> None:
        """Sweep the objects of earlier claims, and keep renewing. What cannot be swept is left to the next run."""
        with contextlib.suppress(StoreError):
            for entry in self._store.list("alive/"):
                if _claim_of(entry.name) < self._number:
                    self._store.delete(entry.name)
        self._thread = threading.Thread(target=self._run, args=(claim,), name="alive", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing and remove the object. That it cannot be removed is no fault: it grows old by itself."""
        self._done.set()
        if self._thread:
            self._thread.join(RENEW_SECONDS)
        with contextlib.suppress(StoreError):
            self._store.delete(self._name)

    def _run(self, claim: Claim) -> None:
        while not self._done.wait(RENEW_SECONDS):
            # A store that is away for a while costs nothing here: the next commit decides.
            with contextlib.suppress(StoreError):
                if other := stranger(self._store, claim):
                    self._stop.fence(other)
                    return
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._store.write(self._name, [to_json({"beat": self._beats, "at": self._where()})])


@frozen(kw_only=True)
class Watched:
    """What watching came to: whether the state is to be read anew, and a note on who was taken over, if anybody was."""

    anew: bool = False
    note: str = ""


def watch(
    store: Store, head: Head, *, takeover: bool, command: str, tick: Callable[[], None], say: Callable[[str], None]
) -> Watched:
    """Return once the holder of the state counts as gone. `command` is what the user runs, for a refusal to name.

    Raises:
        HeldError: the holder renewed its object.
    """
    commit = head.commit
    who, name = _holder(commit)
    first = _read(store, name) if name else b""
    if not first:
        return Watched()
    if takeover:
        say(f"taking over from {who}, which was at {_where(first, commit)}; what it did since is discarded there")
        return Watched(note=f"took over from {who} at {_where(first, commit)}")
    mine = f"alive/{head.highest + 1}-{environment.nonce()}"
    begun, told = environment.seconds(), False
    try:
        while True:
            store.write(mine, [to_json({"beat": 0, "at": "watching"})])
            stamps = {e.name: e.modified for e in store.list("alive/")}
            if name not in stamps:
                return Watched(anew=True)
            age = stamps.get(mine, stamps[name]) - stamps[name]
            now = _read(store, name)
            if now != first:
                if not now:
                    return Watched(anew=True)
                found = newest(store)  # it may have committed while it was watched
                commit = found.commit if found else commit
                raise HeldError(
                    f"{store.uri} is held by {who} at {_where(now, commit)}, alive {max(0.0, age):.0f} s ago; wait, or "
                    f"take over with: {command} --takeover (it loses what is not committed since {_committed(commit)})"
                )
            waited = environment.seconds() - begun
            if age > DEAD_SECONDS or waited > DEAD_SECONDS:
                say(
                    f"{who} has not been alive for {max(age, waited):.0f} s; it was at {_where(first, commit)}: what "
                    f"it did since {_committed(commit)} is done again"
                )
                return Watched(anew=True, note=f"took over from {who}, silent, at {_where(first, commit)}")
            if not told:
                say(
                    f"{who} was alive {max(0.0, age):.0f} s ago; watching for up to {DEAD_SECONDS:.0f} s whether it "
                    "still is (--takeover claims at once)"
                )
                told = True
            for _ in range(10):
                tick()
                environment.sleep(WATCH_SECONDS / 10)
    finally:
        with contextlib.suppress(StoreError):
            store.delete(mine)


def _holder(commit: Commit) -> tuple[str, str]:
    """The run of a commit in words, and the name of its object; empty where the commit has no row of it."""
    run = next((r for r in commit.runs if r.nonce == commit.run), None)
    if run is None:
        return "", ""
    return f"{printable(run.machine)} ({printable(run.engine)})", f"alive/{run.claim}-{run.nonce}"


def _claim_of(name: str) -> int:
    number = name.removeprefix("alive/").removeprefix(".").partition("-")[0]  # of a write under way as well
    return int(number) if number.isascii() and number.isdigit() else 0


def _read(store: Store, name: str) -> bytes:
    try:
        return store.read(name, SIZE_LIMIT)
    except (Absent, Unreadable):
        return b""


def _where(data: bytes, commit: Commit) -> str:
    try:
        plain = from_json(data)
    except Malformed:
        plain = None
    at = plain.get("at") if isinstance(plain, dict) else None
    return printable(at) if isinstance(at, str) and at else _committed(commit)


def _committed(commit: Commit) -> str:
    at = [f"{printable(s)} {r.position}/{r.total}" for s, r in commit.stages.items() if not r.finished]
    return f"commit {commit.number}" + (f" ({', '.join(at)})" if at else "")
