"""The state at a store: its layout, reading its commits, and finding the newest one that is whole.

    log/<n>.json                    commits; created if absent, never overwritten, never deleted
    data/<claim>-<nonce>/<name>     what commits name, by size and sha256; never overwritten

A commit is one exclusive create of the next log entry, made after everything it names is durable. What no commit names
does not exist. A run claims the state by a commit that names the newest commit's objects again, and is fenced as soon
as anybody else's commit takes the number it wants.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from spill import environment
from spill.errors import StateError
from spill.records import (
    FORMAT,
    Commit,
    Malformed,
    ObjectRecord,
    Parent,
    from_json,
    printable,
    structure,
    to_json,
    unstructure,
)
from spill.stores import Absent, Exists, Store, Unanswered, Unreadable

COMMIT_LIMIT = 64 * 1024
OBJECTS_LIMIT = 64
OBJECT_SIZE_LIMIT = 64 * 1024**3
KEPT_STATES = 2
CREATE_TRIES = 5
SETTLE_SECONDS = 300.0  # a store without an answer has been asked for as long by itself

_LOG_NAMES = re.compile(r"^log/(0|[1-9][0-9]{0,11})\.json$", re.MULTILINE)
_DATA_NAME = re.compile(r"data/([1-9][0-9]{0,11})-[0-9a-f]{16}/[a-z0-9][a-z0-9._-]{0,120}")
_STATE_ID = re.compile(r"[0-9a-f]{32}")


@frozen(kw_only=True)
class Entry:
    """A log entry that was read whole: its commit and the sha256 of its bytes."""

    commit: Commit
    sha256: str

    @property
    def parent(self) -> Parent:
        return Parent(number=self.commit.number, sha256=self.sha256)


@frozen(kw_only=True)
class Head:
    """The newest commit whose objects verify; `highest` is the highest log number there is, damaged or not; `notes`
    are lines for the user about what was passed over."""

    entry: Entry
    highest: int
    notes: tuple[str, ...]

    @property
    def commit(self) -> Commit:
        return self.entry.commit


class Damaged(Exception):
    """Found when reading: a log entry or an object is absent, unreadable or has the wrong hash; the text says which."""


def log_name(number: int) -> str:
    return f"log/{number}.json"


def entry_bytes(commit: Commit) -> bytes:
    """A log entry: the commit as JSON, and in it as `seal` the sha256 of that JSON without it. The entry after this one
    will hold this one's hash too; of the newest the seal is all that tells damage."""
    return _sealed(unstructure(commit))


def _sealed(plain: dict[str, Any]) -> bytes:
    return to_json({**plain, "seal": hashlib.sha256(to_json(plain)).hexdigest()})


def read_object(store: Store, commit: Commit, name: str) -> bytes:
    """A data object, checked against the size and sha256 that the commit names.

    Raises:
        StateError: it is absent or damaged.
    """
    try:
        return _read_checked(store, name, commit.objects[name])
    except Damaged as damage:
        raise StateError(
            f"{store.uri}: {damage}; run the same command again, it goes back to the last commit that is whole"
        ) from None


def newest(store: Store) -> Head | None:
    """The head of the state, every object of it verified; None where there is no log entry at all.

    Raises:
        StateError: entries exist but none is whole, or one is of a newer format.
        StoreError: the store failed in any way that is not plain absence.
    """
    for _ in range(CREATE_TRIES):
        numbers = entry_numbers(store)
        if not numbers:
            return None
        found, notes = _newest_of(store, numbers)
        # Damage counts only when the log, read again, has not moved on: a retention may have run meanwhile.
        if notes and entry_numbers(store) != numbers:
            continue
        if found is None:
            raise StateError(f"{store.uri}: no commit of this state is whole", notes[:20])
        if notes:
            notes.append(f"going back to commit {found.commit.number}")
        if broken := _parent_fault(store, found.commit):
            notes.append(broken)
        return Head(entry=found, highest=numbers[-1], notes=tuple(notes))
    raise StateError(f"{store.uri}: the log moves on faster than it can be read; run again")


def entry_numbers(store: Store) -> list[int]:
    """Every entry's number, ascending: one listing, then upward until absent, since a listing may lag."""
    # All names as one text: a log of thousands is looked through at every start.
    numbers = sorted(map(int, _LOG_NAMES.findall("\n".join(store.names("log/")))))
    while numbers and exists(store, log_name(numbers[-1] + 1)):
        numbers.append(numbers[-1] + 1)
    return numbers


def exists(store: Store, name: str) -> bool:
    try:
        store.read(name, COMMIT_LIMIT)
    except Absent:
        return False
    except Unreadable:
        return True
    return True


def _newest_of(store: Store, numbers: Sequence[int]) -> tuple[Entry | None, list[str]]:
    """The newest of these entries that verifies, and a note for every newer one that does not."""
    notes: list[str] = []
    checked: dict[str, ObjectRecord] = {}
    for number in reversed(numbers):
        try:
            return verified(store, number, checked), notes
        except Damaged as damage:
            notes.append(f"commit {number} is damaged ({damage})")
    return None, notes


def verified(store: Store, number: int, checked: dict[str, ObjectRecord]) -> Entry:
    """An entry, after reading every object that it names but those in `checked`, to which they are added.

    Raises:
        Damaged: two readings, one after the other, found it: a reply that was cut short is no damage.
    """
    for last in (False, True):
        try:
            entry = read_entry(store, number)
            for name, record in entry.commit.objects.items():
                if checked.get(name) != record:
                    _read_checked(store, name, record)
                    checked[name] = record
        except Damaged:
            if last:
                raise
        else:
            break
    return entry


def kept_entries(store: Store, head: Head) -> tuple[list[Entry], str]:
    """The newest distinct states that verify, the head first: those that retention keeps. And what is damaged of a
    state that should be among them, if anything is."""
    kept, damaged = [head.entry], ""
    for number in reversed(entry_numbers(store)):
        if number >= head.commit.number or len(kept) == KEPT_STATES:
            continue
        try:
            entry = read_entry(store, number)
            if all(set(entry.commit.objects) != set(k.commit.objects) for k in kept):
                kept.append(verified(store, number, {}))
        except Damaged as damage:
            damaged = damaged or f"commit {number} is damaged ({damage})"
    return kept, damaged


def settle(store: Store, name: str, data: bytes) -> bool:
    """Create an object that is never overwritten, and settle by reading back what a refusal or a lost reply left open.
    Answers whether these bytes lie there now, by whomever.

    Raises:
        Unanswered: the store did not say, however often it was asked.
    """
    begun = environment.seconds()
    for _ in range(CREATE_TRIES):
        try:
            store.create(name, data)
        except (Exists, Unanswered):
            try:
                return store.read(name, COMMIT_LIMIT) == data
            except Absent:
                if environment.seconds() - begun >= SETTLE_SECONDS:
                    break
                continue
            except Unreadable:
                return False
        return True
    raise Unanswered(f"{store.uri}: the store did not answer whether it has created {name}, and has not; run again")


def read_entry(store: Store, number: int) -> Entry:
    """Read and check one log entry by itself (not its objects).

    Raises:
        StateError: it is of a newer format.
        Damaged: it is absent, torn, or not a commit.
    """
    name = log_name(number)
    try:
        data = store.read(name, COMMIT_LIMIT)
    except Absent:
        raise Damaged(f"{name} is missing") from None
    except Unreadable as fault:
        raise Damaged(str(fault)) from None
    try:
        plain = from_json(data)
        if not isinstance(plain, dict):
            raise Malformed("not a JSON object")
        plain.pop("seal", None)
        if data != _sealed(plain):  # in every format, or a flipped bit could make a newer one
            raise Malformed("its seal is not that of its content")
        found = plain.get("format")
        if type(found) is int and found > FORMAT:
            raise StateError(
                f"{store.uri}: commit {number} is of state format {found}, this spill reads up to {FORMAT}: "
                "upgrade spill-core"
            )
        commit = structure(plain, Commit)
        check_commit(commit, number)
    except Malformed as fault:
        raise Damaged(f"{name}: {printable(str(fault))}") from None
    return Entry(commit=commit, sha256=hashlib.sha256(data).hexdigest())


def check_commit(commit: Commit, number: int) -> None:
    """What types alone do not say."""
    if commit.format < 1 or commit.number != number or not _STATE_ID.fullmatch(commit.state):
        raise Malformed("format, number or state id is wrong")
    if len(commit.objects) > OBJECTS_LIMIT:
        raise Malformed(f"names {len(commit.objects)} objects, at most {OBJECTS_LIMIT} are possible")
    for name, record in commit.objects.items():
        if not _DATA_NAME.fullmatch(name):
            raise Malformed(f"{printable(name)!r} is not the name of a data object")
        if not 0 <= record.size <= OBJECT_SIZE_LIMIT or not re.fullmatch(r"[0-9a-f]{64}", record.sha256):
            raise Malformed(f"{name} has an impossible size or hash")
    named = [name for stage in commit.stages.values() for name in stage.objects.values()]
    if any(name not in commit.objects for name in [*named, *([commit.folder] if commit.folder else [])]):
        raise Malformed("a stage names an object that the commit does not")
    if set(commit.stages) - set(commit.plan.stages):
        raise Malformed("a stage is not in the plan")
    for stage in commit.stages.values():
        if not 0 <= stage.position <= stage.total or (stage.finished and stage.position != stage.total):
            raise Malformed("a stage's position is not within its total")


def _parent_fault(store: Store, commit: Commit) -> str:
    if commit.parent is None:
        return ""
    name = log_name(commit.parent.number)
    try:
        data = store.read(name, COMMIT_LIMIT)
    except Absent:
        return f"commit {commit.number} continues {name}, which is missing: this is a mix of copies"
    except Unreadable:
        data = b""
    if hashlib.sha256(data).hexdigest() != commit.parent.sha256:
        return f"commit {commit.number} continues another {name} than the one here: this is a mix of copies"
    return ""


def _read_checked(store: Store, name: str, record: ObjectRecord) -> bytes:
    try:
        data = store.read(name, record.size)
    except Absent:
        raise Damaged(f"{name} is missing") from None
    except Unreadable as fault:
        raise Damaged(str(fault)) from None
    except MemoryError:  # no damage: a larger machine may read it
        raise StateError(
            f"{store.uri}: {name} has {record.size:,} bytes, for which this machine has no memory; check who wrote it, "
            "or use a larger machine"
        ) from None
    if len(data) != record.size:
        raise Damaged(f"{name} has {len(data)} bytes, not {record.size}")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise Damaged(f"{name} has another sha256 than commit says")
    return data
