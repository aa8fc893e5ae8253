"""A store around another that fails as told: errors, lost replies, refusals, delays, cut objects, and deaths.

    store = FaultyStore(MemoryStore(), at({3: DIE_AFTER}))          # the third request is done, then the process "dies"
    store = FaultyStore(LocalStore(uri), randomly(7, {ERROR: 0.1, LOST: 0.05}))
    store = FaultyStore(store, at({k: DIE_BEFORE}), die=kill)       # for a process of its own: SIGKILL at request k

A plan is any callable that answers a `Fault` (or None) for a `Call`, so that a test can aim at a verb or a name:

    FaultyStore(store, lambda call: LOST if call.verb == "create" and call.name == "log/2.json" else None)
"""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Literal, NoReturn, TypeVar

from attrs import frozen

from spill.environment import sleep
from spill.errors import StoreError
from spill.stores import Buffer, Entry, Exists, Store, Unanswered

Verb = Literal["create", "write", "read", "list", "delete"]
T = TypeVar("T")


class _Kind(Enum):
    ERROR = auto()
    DROPPED = auto()
    LOST = auto()
    CONFLICT = auto()
    TRUNCATED = auto()
    DELAY = auto()
    DIE_BEFORE = auto()
    DIE_AFTER = auto()


@frozen(kw_only=True)
class Fault:
    """One way to fail: one of the constants of this module, or what `delay` answers."""

    kind: _Kind
    seconds: float = 0.0


ERROR = Fault(kind=_Kind.ERROR)
"""A `StoreError`; nothing was done."""
DROPPED = Fault(kind=_Kind.DROPPED)
"""`Unanswered`, and it was not done. A read or a listing raises a `StoreError`."""
LOST = Fault(kind=_Kind.LOST)
"""`Unanswered`, but it was done. A read or a listing raises a `StoreError`."""
CONFLICT = Fault(kind=_Kind.CONFLICT)
"""A create is refused with `Exists` although the name is free and stays so, as a 409 that came through. Of any other
request a `StoreError`."""
TRUNCATED = Fault(kind=_Kind.TRUNCATED)
"""Half of the bytes: a read answers half, what lies there is whole; a create or a write stores half and says nothing.
A listing leaves out every other object. A delete does nothing and says nothing."""
DIE_BEFORE = Fault(kind=_Kind.DIE_BEFORE)
"""The process dies before the request reaches the store."""
DIE_AFTER = Fault(kind=_Kind.DIE_AFTER)
"""The process dies when the store has done it."""


def delay(seconds: float) -> Fault:
    """The request is done, after a wait of `seconds`."""
    return Fault(kind=_Kind.DELAY, seconds=seconds)


class Died(BaseException):
    """Stands for the death of the process, in one process. Not an `Exception`: nothing may handle it."""


def kill() -> NoReturn:
    """A `die` that really ends this process, with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL was sent to this process")


def _raise_died() -> NoReturn:
    raise Died("the fault plan ends this process here")


@frozen(kw_only=True)
class Call:
    """One request of a client. `index` counts them from 1, over all threads."""

    index: int
    verb: Verb
    name: str


Plan = Callable[[Call], Fault | None]


def never(call: Call) -> Fault | None:
    """The plan of a run without faults, to count its requests (`len(store.calls)`)."""
    return None


def at(faults: Mapping[int, Fault]) -> Plan:
    """Faults at the calls of these indices."""
    return lambda call: faults.get(call.index)


def randomly(seed: int, rates: Mapping[Fault, float]) -> Plan:
    """Each fault with its probability (together at most 1), a function of seed and index alone."""
    if sum(rates.values()) > 1:
        raise ValueError(f"the probabilities add up to {sum(rates.values())}")

    def plan(call: Call) -> Fault | None:
        drawn = random.Random(f"{seed} {call.index}").random()
        for fault, rate in rates.items():
            if drawn < rate:
                return fault
            drawn -= rate
        return None

    return plan


class FaultyStore:
    """The store `inner`, failing by plan; `calls` are the requests so far, in order. Safe to use from several threads.

    A store that has died stays dead: every later request of it dies too and does nothing, so that what a program does
    while the exception passes through it leaves no trace in the store, as after a real death.

    Args:
        die: how to die; raises `Died` by default. `kill` ends the process.
    """

    def __init__(self, inner: Store, plan: Plan, *, die: Callable[[], NoReturn] = _raise_died) -> None:
        self.inner = inner
        self.uri = inner.uri
        self.calls: list[Call] = []
        self._plan = plan
        self._die = die
        self._dead = False
        self._lock = threading.Lock()

    def create(self, name: str, data: bytes) -> None:
        half = data[: max(1, len(data) // 2)]
        self._do("create", name, lambda: self.inner.create(name, data), lambda: self.inner.create(name, half))

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        def cut() -> None:
            whole = b"".join(memoryview(p).tobytes() for p in parts)
            self.inner.write(name, [whole[: len(whole) // 2]])

        self._do("write", name, lambda: self.inner.write(name, parts), cut)

    def read(self, name: str, limit: int) -> bytes:
        def cut() -> bytes:
            whole = self.inner.read(name, limit)
            return whole[: len(whole) // 2]

        return self._do("read", name, lambda: self.inner.read(name, limit), cut)

    def list(self, prefix: str) -> list[Entry]:
        return self._do("list", prefix, lambda: self.inner.list(prefix), lambda: self.inner.list(prefix)[::2])

    def names(self, prefix: str) -> Sequence[str]:
        return self._do("list", prefix, lambda: self.inner.names(prefix), lambda: self.inner.names(prefix)[::2])

    def delete(self, name: str) -> None:
        self._do("delete", name, lambda: self.inner.delete(name), lambda: None)

    def _do(self, verb: Verb, name: str, work: Callable[[], T], cut: Callable[[], T]) -> T:
        fault = self._next(verb, name)
        kind = fault.kind if fault else None
        where = f"{self.uri}/{name}"
        changing = verb in ("create", "write", "delete")
        if kind is _Kind.DIE_BEFORE:
            self._end()
        if kind is _Kind.CONFLICT and verb == "create":
            raise Exists(name)
        if kind in (_Kind.ERROR, _Kind.CONFLICT) or (kind in (_Kind.LOST, _Kind.DROPPED) and not changing):
            raise StoreError(f"cannot {verb} {where}: a fault was injected")
        if kind is _Kind.DROPPED:
            raise Unanswered(f"no answer to {verb} {where}: a fault was injected")
        if kind in (_Kind.LOST, _Kind.DIE_AFTER):
            with contextlib.suppress(Exception):  # whatever the store answers, nobody hears it
                work()
            if kind is _Kind.DIE_AFTER:
                self._end()
            raise Unanswered(f"no answer to {verb} {where}: a fault was injected")
        if fault is not None and kind is _Kind.DELAY:
            sleep(fault.seconds)
        return cut() if kind is _Kind.TRUNCATED else work()

    def _next(self, verb: Verb, name: str) -> Fault | None:
        with self._lock:
            if self._dead:
                self._die()
            call = Call(index=len(self.calls) + 1, verb=verb, name=name)
            self.calls.append(call)
            return self._plan(call)

    def _end(self) -> NoReturn:
        with self._lock:
            self._dead = True
        self._die()
