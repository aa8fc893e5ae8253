"""A run's hold on a state: claiming it, committing to it, fencing, and retention."""

import hashlib
import re
from collections.abc import Mapping, Sequence

from attrs import evolve

from spill.errors import HeldError, StateError, StoreError
from spill.records import (
    CLAIM_LIMIT,
    FORMAT,
    Commit,
    Malformed,
    ObjectRecord,
    Plan,
    Probe,
    Run,
    StageRecord,
    printable,
)
from spill.state import (
    COMMIT_LIMIT,
    CREATE_TRIES,
    KEPT_STATES,
    Damaged,
    Entry,
    Head,
    check_commit,
    entry_bytes,
    exists,
    log_name,
    read_entry,
    settle,
)
from spill.stores import Absent, Buffer, Exists, Store, Unanswered, Unreadable


class Claim:
    """A run's hold on a state. `commit` is the last commit; each method that writes raises HeldError when fenced."""

    def __init__(self, store: Store, entry: Entry, run: str, claim: int) -> None:
        self._store = store
        self._entry = entry
        self._run = run
        self._claim = claim
        self._serial = 0
        self._kept: list[Commit] = []
        self._doomed: set[str] = set()
        self._verified_commits = 0
        self._swept = False
        self.sweep_fault = ""  # why what is no longer needed could not be removed, the last time that was tried

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
        if number >= CLAIM_LIMIT:
            raise StateError(f"{store.uri}: there is no number above {log_name(number - 1)}; remove that entry")
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
        self._refuse_vanished()
        self._entry = _append(self._store, commit)
        self._retain(last)
        return written

    def _refuse_vanished(self) -> None:
        """A commit after one that is gone would begin a state of its own, which nobody could go on from."""
        name = log_name(self._entry.commit.number)
        try:
            data = self._store.read(name, COMMIT_LIMIT)
        except (Absent, Unreadable):
            data = b""
        if hashlib.sha256(data).hexdigest() != self._entry.sha256:
            raise StateError(
                f"{self._store.uri}: the state has vanished or was changed under this run ({name} is not what was "
                "written); nothing was committed: restore it, or build anew"
            )

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
        self._doomed |= {name for commit in dropped for name in commit.objects}
        self._verified_commits += 1
        try:
            if self._verified_commits >= KEPT_STATES and not self._swept:
                self._doomed |= {e.name for e in self._store.list("data/")}
                self._swept = True
            self._delete(self._doomed, kept)
        except StoreError as fault:  # the commit stands; the next one tries again
            self.sweep_fault = fault.message
        else:
            self._doomed.clear()
            self.sweep_fault = ""

    def sweep(self, kept: Sequence[Commit]) -> tuple[int, int]:
        """Delete what none of `kept` names, in folders of this or earlier claims: (objects, bytes)."""
        sizes = {entry.name: entry.size for entry in self._store.list("data/")}
        gone = self._delete(set(sizes), kept)
        return len(gone), sum(sizes[name] for name in gone)

    def _delete(self, doomed: set[str], kept: Sequence[Commit]) -> list[str]:
        needed = {name for commit in kept for name in commit.objects}
        names = [name for name in sorted(doomed - needed) if self._may_delete(name)]
        if not names or exists(self._store, log_name(self.commit.number + 1)):
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
    """Create the log entry."""
    try:
        check_commit(commit, commit.number)
    except Malformed as fault:
        raise StateError(
            f"{store.uri}: commit {commit.number} cannot be made: {fault}; the last commit stands"
        ) from None
    commit, data = _fit(commit)
    if not settle(store, log_name(commit.number), data):
        raise HeldError(_who(store, commit.number))
    return Entry(commit=commit, sha256=hashlib.sha256(data).hexdigest())


def _prove_exclusive(store: Store, commit: Commit) -> None:
    """Create the claim a second time, with the same bytes: a store that accepts that ignores conditions."""
    for _ in range(CREATE_TRIES):
        try:
            store.create(log_name(commit.number), _fit(commit)[1])
        except Exists:
            return
        except Unanswered:
            continue  # says nothing of conditions
        raise StateError(
            f"{store.uri}: this store accepted the same exclusive create twice, so two runs could not be told apart; "
            "keep the state elsewhere"
        )
    raise Unanswered(f"{store.uri}: the store did not answer {CREATE_TRIES} tries to create an object twice; run again")


def stranger(store: Store, claim: Claim) -> str:
    """Who took the state over from this claim, in words; empty while nobody has."""
    number = claim.commit.number + 1
    try:
        commit = read_entry(store, number).commit
    except (Damaged, StateError):
        return ""
    return "" if commit.run == claim.run else _who(store, number)


def _fit(commit: Commit) -> tuple[Commit, bytes]:
    """The commit and its bytes; rows of runs on one engine and machine are folded where it would be too large.

    A row is folded into the next alike one, neighbours first, never into the newest: who worked last must stay last.
    """
    data = entry_bytes(commit)
    while len(data) > COMMIT_LIMIT:
        runs = list(commit.runs)
        older = range(len(runs) - 1)
        pairs = [(i, j) for i in older for j in older[i + 1 :] if _alike(runs[i], runs[j])]
        if not pairs:
            raise StateError(
                f"commit {commit.number} would have {len(data)} bytes, at most {COMMIT_LIMIT} are possible: "
                f"{len(runs)} runs have worked on this build; start it anew at another --state"
            )
        first, second = min(pairs, key=lambda pair: (pair[1] - pair[0], pair[0]))
        runs[second] = _folded(runs[first], runs[second])
        del runs[first]
        commit = evolve(commit, runs=tuple(runs))
        data = entry_bytes(commit)
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
