"""The store in memory keeps the contract, and the faulty store fails exactly as it is told."""

import subprocess
import sys
from collections.abc import Callable, Mapping

import pytest

from spill.errors import StoreError
from spill.stores import Absent, Exists, Store, Unanswered
from spill.testing.faulty_store import (
    CONFLICT,
    DIE_AFTER,
    DIE_BEFORE,
    DROPPED,
    ERROR,
    LOST,
    TRUNCATED,
    Call,
    Died,
    Fault,
    FaultyStore,
    at,
    delay,
    never,
    randomly,
)
from spill.testing.memory_store import Backing, MemoryStore
from spill.testing.store_contract import StoreContract


class TestMemoryStore(StoreContract):
    settle_seconds = 0.0

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        backing = Backing()
        return lambda: MemoryStore(backing)

    @pytest.fixture
    def refusing_stores(self) -> Mapping[str, Store]:
        return {"no right": MemoryStore(Backing(refusal="no right"))}


class TestFaultyStoreWithoutFaults(StoreContract):
    settle_seconds = 0.0

    @pytest.fixture
    def make_store(self) -> Callable[[], Store]:
        backing = Backing()
        return lambda: FaultyStore(MemoryStore(backing), never)

    @pytest.fixture
    def refusing_stores(self) -> Mapping[str, Store]:
        return {"no right": FaultyStore(MemoryStore(Backing(refusal="no right")), never)}


def test_a_clock_of_ones_own_and_a_copy() -> None:
    now = [5.0]
    backing = Backing(clock=lambda: now[0])
    MemoryStore(backing).write("alive/1-a", [b"x"])
    copy = backing.copy()
    now[0] = 9.0
    MemoryStore(backing).write("alive/1-a", [b"y"])
    assert [e.modified for e in MemoryStore(backing).list("")] == [9.0]
    assert [e.modified for e in MemoryStore(copy).list("")] == [5.0]
    assert MemoryStore(copy).read("alive/1-a", 9) == b"x"


def do(store: Store, verb: str) -> object:
    """One request on a store that holds `log/1.json` (`before`)."""
    requests: dict[str, Callable[[], object]] = {
        "create": lambda: store.create("log/2.json", b"new bytes"),
        "write": lambda: store.write("log/1.json", [b"new ", b"bytes"]),
        "read": lambda: store.read("log/1.json", 99),
        "list": lambda: [e.name for e in store.list("log/")],
        "delete": lambda: store.delete("log/1.json"),
    }
    return requests[verb]()


def filled() -> MemoryStore:
    store = MemoryStore()
    store.create("log/1.json", b"before")
    return store


def held(store: MemoryStore) -> dict[str, bytes]:
    return {name: stored.data for name, stored in store.backing.objects.items()}


BEFORE = {"log/1.json": b"before"}
DONE = {
    "create": {"log/1.json": b"before", "log/2.json": b"new bytes"},
    "write": {"log/1.json": b"new bytes"},
    "delete": {},
    "read": BEFORE,
    "list": BEFORE,
}


@pytest.mark.parametrize("verb", DONE)
@pytest.mark.parametrize(
    ("fault", "raised", "applied"),
    [
        (ERROR, StoreError, False),
        (DROPPED, Unanswered, False),
        (LOST, Unanswered, True),
        (DIE_BEFORE, Died, False),
        (DIE_AFTER, Died, True),
    ],
)
def test_each_fault_does_what_it_says(verb: str, fault: Fault, raised: type[BaseException], applied: bool) -> None:
    inner = filled()
    store = FaultyStore(inner, at({1: fault}))
    expected = StoreError if verb in ("read", "list") and raised is Unanswered else raised
    with pytest.raises(expected) as found:
        do(store, verb)
    assert type(found.value) is expected
    assert held(inner) == (DONE[verb] if applied else BEFORE)
    assert store.calls[0].verb == verb


def test_a_lost_reply_is_lost_whatever_it_was() -> None:
    inner = filled()
    with pytest.raises(Unanswered):
        FaultyStore(inner, at({1: LOST})).create("log/1.json", b"other")
    assert held(inner) == BEFORE


def test_a_conflict_refuses_a_free_name() -> None:
    inner = filled()
    store = FaultyStore(inner, at({1: CONFLICT, 2: CONFLICT}))
    with pytest.raises(Exists):
        do(store, "create")
    with pytest.raises(StoreError):
        do(store, "write")
    assert held(inner) == BEFORE
    do(store, "create")
    assert held(inner) == DONE["create"]


def test_truncation() -> None:
    inner = filled()
    store = FaultyStore(inner, at(dict.fromkeys((1, 2, 3, 4, 5), TRUNCATED)))
    assert store.read("log/1.json", 99) == b"bef"
    do(store, "create")
    do(store, "write")
    assert held(inner) == {"log/1.json": b"new ", "log/2.json": b"new "}
    assert do(store, "list") == ["log/1.json"]
    do(store, "delete")
    assert len(held(inner)) == 2
    assert do(store, "list") == ["log/1.json", "log/2.json"], "the plan is over"


def test_a_delay_waits_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("spill.testing.faulty_store.sleep", slept.append)
    inner = filled()
    do(FaultyStore(inner, at({1: delay(1.5)})), "create")
    assert (slept, held(inner)) == ([1.5], DONE["create"])


def test_what_died_stays_dead() -> None:
    inner = filled()
    store = FaultyStore(inner, at({2: DIE_AFTER}))
    do(store, "read")
    with pytest.raises(Died):
        do(store, "write")
    for verb in DONE:
        with pytest.raises(Died):
            do(store, verb)
    assert held(inner) == DONE["write"]
    assert len(store.calls) == 2


def test_kill_ends_the_process() -> None:
    program = (
        "from spill.testing.faulty_store import *\n"
        "from spill.testing.memory_store import MemoryStore\n"
        "store = FaultyStore(MemoryStore(), at({2: DIE_BEFORE}), die=kill)\n"
        "store.create('a', b'x'); print('one', flush=True); store.create('b', b'x'); print('two', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-9, "one\n")


def test_random_faults_are_a_function_of_seed_and_index() -> None:
    rates = {ERROR: 0.2, LOST: 0.1}
    calls = [Call(index=i, verb="read", name="x") for i in range(1, 3001)]
    first, again, other = ([randomly(seed, rates)(c) for c in calls] for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert 500 < first.count(ERROR) < 700
    assert 240 < first.count(LOST) < 360
    with pytest.raises(ValueError):
        randomly(1, {ERROR: 0.9, LOST: 0.2})


def test_a_plan_may_aim_at_a_name() -> None:
    store = FaultyStore(filled(), lambda call: ERROR if call.name == "log/2.json" else None)
    assert do(store, "read") == b"before"
    with pytest.raises(StoreError):
        do(store, "create")
    with pytest.raises(Absent):
        store.read("log/3.json", 9)
