"""Whole builds on any store: what a state holds, copies of it object by object, and a store that fails by plan."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from attrs import frozen

from spill.records import Commit
from spill.state import COMMIT_LIMIT, log_name, newest, read_object
from spill.stores import Store
from spill.testing.faulty_store import FaultyStore, Plan
from spill.testing.memory_store import MemoryStore

OBJECT_LIMIT = 64 * 1024**2


@frozen(kw_only=True)
class Site:
    """A store to build on: `environment` is what a process needs to reach it."""

    name: str
    open: Callable[[str], Store]
    environment: Mapping[str, str]

    def uri(self, state: str) -> str:
        return self.open(state).uri


def head(store: Store) -> Commit:
    found = newest(store)
    assert found is not None, f"there is no state in {store.uri}"
    assert not found.notes
    return found.commit


def everything(store: Store) -> dict[str, Any]:
    """All that a build made, to compare exactly: every journal, and adapter and moments as they are stored."""
    commit = head(store)
    made: dict[str, Any] = {}
    for stage, record in commit.stages.items():
        for role, name in sorted(record.objects.items()):
            data = read_object(store, commit, name)
            if role.startswith("journal-"):
                made.setdefault(stage, []).extend(json.loads(data))
            else:
                made[f"{stage} {role}"] = data
    return made


def each_unit_once(store: Store) -> Commit:
    """Assert that the runs' shares of every stage make the whole of it without an overlap, that the journal has every
    step once, and that the log is one chain to its beginning. Returns the newest commit."""
    commit = head(store)
    for stage, record in commit.stages.items():
        shares = sorted(run.work[stage] for run in commit.runs if stage in run.work)
        assert [start for start, _ in shares] == [0, *(end for _, end in shares[:-1])], (stage, shares)
        assert shares[-1][1] == record.position
    steps = [record["step"] for record in everything(store).get("tune", [])]
    assert steps == list(range(1, len(steps) + 1))
    parent = None
    for number in range(1, commit.number + 1):
        data = store.read(log_name(number), COMMIT_LIMIT)
        assert json.loads(data)["parent"] == parent, f"log/{number}.json continues something else"
        parent = {"number": number, "sha256": hashlib.sha256(data).hexdigest()}
    return commit


def contents(store: Store) -> dict[str, bytes]:
    """Every object of a state but what is alive."""
    names = [e.name for e in store.list("") if not e.name.startswith("alive/")]
    return {name: store.read(name, OBJECT_LIMIT) for name in names}


def taken(store: Store) -> MemoryStore:
    """A copy in memory: what is looked at there costs the server nothing."""
    copy = MemoryStore()
    put(copy, contents(store))
    return copy


def put(store: Store, objects: Mapping[str, bytes]) -> None:
    """Objects as a plain tool copies them."""
    for name, data in objects.items():
        store.write(name, [data])


def put_between(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Every store that this process opens from now on fails by this plan."""
    from spill import stores

    real = stores.load_target
    patch.setattr(stores, "load_target", lambda spec: lambda uri: FaultyStore(real(spec)(uri), plan))
