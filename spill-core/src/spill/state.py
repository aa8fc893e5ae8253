"""The state at a store: finding its newest verified commit, claiming it, committing to it, and retention.

    log/<n>.json                    commits; created if absent, never overwritten, never deleted
    data/<claim>-<nonce>/<name>     what commits name, by size and sha256; never overwritten

A commit is one exclusive create of the next log entry, made after everything it names is durable. What no commit names
does not exist. A run claims the state by a commit that names the newest commit's objects again, and is fenced as soon
as anybody else's commit takes the number it wants.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from spill.errors import HeldError, StateError
from spill.records import (
    FORMAT,
    Commit,
    Malformed,
    ObjectRecord,
    Parent,
    Plan,
    Probe,
    Run,
    StageRecord,
    from_json,
    printable,
    structure,
    to_json,
)
from spill.stores import Absent, Buffer, Exists, Store, Unanswered, Unreadable

COMMIT_LIMIT = 64 * 1024
OBJECTS_LIMIT = 64
OBJECT_SIZE_LIMIT = 64 * 1024**3
KEPT_STATES = 2
CREATE_TRIES = 5

_LOG_NAME = re.compile(r"log/(0|[1-9][0-9]{0,11})\.json")
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
    numbers = sorted(int(m[1]) for entry in store.list("log/") if (m := _LOG_NAME.fullmatch(entry.name)))
    while numbers and _exists(store, log_name(numbers[-1] + 1)):
        numbers.append(numbers[-1] + 1)
    return numbers


def _exists(store: Store, name: str) -> bool:
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
            entry = read_entry(store, number)
            for name, record in entry.commit.objects.items():
                if checked.get(name) != record:
                    _read_checked(store, name, record)
                    checked[name] = record
        except Damaged as damage:
            notes.append(f"commit {number} is damaged ({damage})")
        else:
            return entry, notes
    return None, notes


def kept_entries(store: Store, head: Head) -> list[Entry]:
    """The newest distinct states that verify, the head first: those that retention keeps."""
    kept = [head.entry]
    for number in reversed(entry_numbers(store)):
        if number >= head.commit.number or len(kept) == KEPT_STATES:
            continue
        try:
            entry = read_entry(store, number)
            if all(set(entry.commit.objects) != set(k.commit.objects) for k in kept):
                for name, record in entry.commit.objects.items():
                    _read_checked(store, name, record)
                kept.append(entry)
        except Damaged:
            continue
    return kept


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
        found = plain.get("format")
        if type(found) is int and found > FORMAT:
            raise StateError(
                f"{store.uri}: commit {number} is of state format {found}, this spill reads up to {FORMAT}: "
                "upgrade spill-core"
            )
        commit = structure(plain, Commit)
        _check(commit, number)
    except Malformed as fault:
        raise Damaged(f"{name}: {printable(str(fault))}") from None
    return Entry(commit=commit, sha256=hashlib.sha256(data).hexdigest())


def _check(commit: Commit, number: int) -> None:
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
    if len(data) != record.size:
        raise Damaged(f"{name} has {len(data)} bytes, not {record.size}")
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise Damaged(f"{name} has another sha256 than commit says")
    return data


class Claim:
    """A run's hold on a state. `commit` is the last commit; each method that writes raises HeldError when fenced."""

    def __init__(self, store: Store, entry: Entry, run: str, claim: int) -> None:
        self._store = store
        self._entry = entry
        self._run = run
        self._claim = claim
        self._serial = 0
        self._kept: list[Commit] = []
        self._verified_commits = 0

    @property
    def commit(self) -> Commit:
        return self._entry.commit

    @property
    def number(self) -> int:
        """The number of the claim itself, by which its data folder is named."""
        return self._claim

    @property
    def run(self) -> str:
        """The run's nonce."""
        return self._run

    @classmethod
    def begin(cls, store: Store, head: Head | None, plan: Plan, run: Run, state: str) -> "Claim":
        """Claim the state: commit number one above the highest entry, naming the head's objects again.

        `state` is the id that a new state gets.

        Raises:
            HeldError: somebody else was quicker.
            StoreError: the store does not honour exclusive creation; it cannot hold a state.
        """
        number = head.highest + 1 if head else 1
        run = evolve(run, claim=number)
        if head is None:
            commit = Commit(
                format=FORMAT,
                state=state,
                number=1,
                run=run.nonce,
                parent=None,
                plan=plan,
                runs=(run,),
                stages={},
                objects={},
                folder="",
            )
        else:
            commit = evolve(
                head.commit,
                format=FORMAT,
                number=number,
                run=run.nonce,
                parent=head.entry.parent,
                plan=plan,
                runs=(*head.commit.runs, run),
            )
        claim = cls(store, _append(store, commit), run.nonce, number)
        _prove_exclusive(store, claim.commit)
        claim._kept = [head.commit] if head else []
        return claim

    def write(
        self,
        *,
        run: Run,
        stages: Mapping[str, StageRecord] | None = None,
        new: Mapping[tuple[str, str], Sequence[Buffer]] | None = None,
        folder: Sequence[Buffer] | None = None,
        probe: Probe | None = None,
    ) -> int:
        """Make new objects durable, then commit. Returns the bytes written.

        Args:
            run: this run's row, which replaces the one in the last commit.
            stages: records that replace those of the same stage; their `objects` may name older objects again.
            new: contents by (stage, role); their names are put into the stage's record.
            folder: the folder's files as one object.
            probe: the base model's probe.
        """
        last = self.commit
        records = {**last.stages, **(stages or {})}
        known = dict(last.objects)
        written = 0
        for (stage, role), parts in (new or {}).items():
            name, record = self._put(f"{stage}-{role}", parts)
            known[name] = record
            written += record.size
            records[stage] = evolve(records[stage], objects={**records[stage].objects, role: name})
        folder_name = last.folder
        if folder is not None:
            folder_name, record = self._put("folder.json", folder)
            known[folder_name] = record
            written += record.size
        named = {name for stage in records.values() for name in stage.objects.values()} | {folder_name}
        commit = evolve(
            last,
            number=last.number + 1,
            run=self._run,
            parent=self._entry.parent,
            runs=tuple(run if r.nonce == run.nonce else r for r in last.runs),
            stages=records,
            objects={name: record for name, record in known.items() if name in named},
            folder=folder_name,
            probe=probe or last.probe,
        )
        self._entry = _append(self._store, commit)
        self._retain(last)
        return written

    def _put(self, label: str, parts: Sequence[Buffer]) -> tuple[str, ObjectRecord]:
        """Write one data object under a name that nobody else ever uses."""
        self._serial += 1
        slug = re.sub(r"[^a-z0-9._-]+", "-", label.lower())
        name = f"data/{self._claim}-{self._run}/{self._serial:06d}-{slug}"
        digest = hashlib.sha256()
        size = 0
        for part in parts:
            digest.update(part)
            size += memoryview(part).nbytes
        self._store.write(name, parts)
        return name, ObjectRecord(size=size, sha256=digest.hexdigest())

    def _retain(self, last: Commit) -> None:
        """Keep the newest two distinct states; delete what only older ones name, in folders of this or earlier claims.

        Also sweeps, once two states of this run stand, what killed writers of earlier claims left unnamed.
        """
        kept = [self.commit]
        for commit in (last, *self._kept):
            if all(set(commit.objects) != set(k.objects) for k in kept) and len(kept) < KEPT_STATES:
                kept.append(commit)
        dropped = [c for c in (last, *self._kept) if c not in kept]
        self._kept = kept[1:]
        if len(kept) < KEPT_STATES:
            self._kept += dropped
            return
        doomed = {name for commit in dropped for name in commit.objects}
        self._verified_commits += 1
        if self._verified_commits == KEPT_STATES:
            doomed |= {e.name for e in self._store.list("data/")}
        self._delete(doomed, kept)

    def sweep(self, kept: Sequence[Commit]) -> tuple[int, int]:
        """Delete what none of `kept` names, in folders of this or earlier claims: (objects, bytes)."""
        sizes = {entry.name: entry.size for entry in self._store.list("data/")}
        gone = self._delete(set(sizes), kept)
        return len(gone), sum(sizes[name] for name in gone)

    def _delete(self, doomed: set[str], kept: Sequence[Commit]) -> list[str]:
        needed = {name for commit in kept for name in commit.objects}
        names = [name for name in sorted(doomed - needed) if self._may_delete(name)]
        if not names or _exists(self._store, log_name(self.commit.number + 1)):
            return []  # where somebody else goes on from here already, what to keep is theirs to say
        for name in names:
            self._store.delete(name)
        return names

    def _may_delete(self, name: str) -> bool:
        folder = re.match(r"data/([1-9][0-9]{0,11})-([0-9a-f]{16})/", name)
        if folder is None:
            return False
        claim = int(folder[1])
        return claim < self._claim or (claim == self._claim and folder[2] == self._run)


def _append(store: Store, commit: Commit) -> Entry:
    """Create the log entry, and settle by reading back what a refusal or a lost reply left open."""
    commit, data = _fit(commit)
    name = log_name(commit.number)
    for _ in range(CREATE_TRIES):
        try:
            store.create(name, data)
        except (Exists, Unanswered):
            try:
                found = store.read(name, COMMIT_LIMIT)
            except Absent:
                continue
            except Unreadable:
                found = b""
            if found != data:
                raise HeldError(_who(store, commit.number)) from None
        return Entry(commit=commit, sha256=hashlib.sha256(data).hexdigest())
    raise Unanswered(f"{store.uri}: the store did not answer {CREATE_TRIES} tries to commit; the last commit stands")


def _prove_exclusive(store: Store, commit: Commit) -> None:
    """Create the claim a second time, with the same bytes: a store that accepts that ignores conditions."""
    try:
        store.create(log_name(commit.number), _fit(commit)[1])
    except (Exists, Unanswered):
        return
    raise StateError(
        f"{store.uri}: this store accepted the same exclusive create twice, so two runs could not be told apart; "
        "keep the state elsewhere"
    )


def stranger(store: Store, claim: Claim) -> str:
    """Who took the state over from this claim, in words; empty while nobody has."""
    number = claim.commit.number + 1
    try:
        commit = read_entry(store, number).commit
    except (Damaged, StateError):
        return ""
    return "" if commit.run == claim.run else _who(store, number)


def _fit(commit: Commit) -> tuple[Commit, bytes]:
    """The commit and its bytes; rows of old runs on one engine and machine are folded where it would be too large."""
    data = to_json(commit)
    while len(data) > COMMIT_LIMIT:
        runs = list(commit.runs)
        pair = next((i for i in range(len(runs) - 2) if _alike(runs[i], runs[i + 1])), None)
        if pair is None:
            raise StateError(
                f"commit {commit.number} would have {len(data)} bytes, at most {COMMIT_LIMIT} are possible: "
                f"{len(runs)} runs have worked on this build; start it anew at another --state"
            )
        runs[pair : pair + 2] = [_folded(runs[pair], runs[pair + 1])]
        commit = evolve(commit, runs=tuple(runs))
        data = to_json(commit)
    return commit, data


def _alike(a: Run, b: Run) -> bool:
    return (a.engine, a.machine, a.system, a.hardware) == (b.engine, b.machine, b.system, b.hardware)


def _folded(a: Run, b: Run) -> Run:
    work = dict(a.work)
    for stage, (start, end) in b.work.items():
        first, last = work.get(stage, (start, end))
        work[stage] = (min(first, start), max(last, end))
    return evolve(b, work=work, starts=a.starts + b.starts, started=a.started, notes=(*a.notes, *b.notes)[-4:])


def _who(store: Store, number: int) -> str:
    try:
        commit = read_entry(store, number).commit
    except Damaged:
        return f"{store.uri}: another run took commit {number} (its entry is damaged); run again to go on"
    other = next((r for r in commit.runs if r.nonce == commit.run), None)
    who = f"{printable(other.machine)} ({printable(other.engine)})" if other else "another run"
    at = ", ".join(f"{printable(s)} {r.position}/{r.total}" for s, r in commit.stages.items() if not r.finished)
    return f"{store.uri}: taken over by {who} at commit {number}{f' ({at})' if at else ''}"
