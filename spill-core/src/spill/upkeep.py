"""Looking after a state: verify it, tell its history, copy it to another store, and free what no kept commit names."""

from collections.abc import Iterator

from spill import environment
from spill.alive import watch
from spill.claim import Claim
from spill.errors import StateError
from spill.opening import find, locate
from spill.plugins import Registry
from spill.records import Run, printable
from spill.state import (
    COMMIT_LIMIT,
    Damaged,
    Head,
    entry_numbers,
    kept_entries,
    log_name,
    newest,
    read_entry,
    read_object,
)
from spill.stores import Absent, Exists, Store, Unanswered, Unreadable, open_store


def verify(target: str, state: str | None, registry: Registry) -> Iterator[str]:
    """Read every object of the newest states and check it. Writes nothing.

    Raises:
        StateError: the newest commit is damaged, or none is whole.
    """
    place, store, head = find(target, state, registry)
    yield from (f"warning: {note}" for note in head.notes)
    for entry in kept_entries(store, head):
        commit = entry.commit
        size = sum(record.size for record in commit.objects.values())
        yield f"commit {commit.number}: whole, {len(commit.objects)} objects, {size:,} bytes, sha256 as named"
    if head.commit.number != head.highest:
        raise StateError(
            f"{place.uri}: commit {head.highest} is damaged; a resume goes on from commit {head.commit.number}: "
            f"spill resume {place.again}"
        )
    yield f"next: spill state history {place.again}"


def history(target: str, state: str | None, registry: Registry) -> Iterator[str]:
    """Who did what, one line a run, from the newest commit alone. Writes nothing."""
    place, _, head = find(target, state, registry)
    yield from (f"warning: {note}" for note in head.notes)
    commit = head.commit
    yield f"state {commit.state}, {head.highest} commits, student {printable(commit.plan.student)}"
    before: Run | None = None
    for run in commit.runs:
        work = ", ".join(
            f"{printable(s)} {run.work[s][0]}-{run.work[s][1]}" for s in commit.plan.stages if s in run.work
        )
        hop = "" if before is None or before.engine == run.engine else f"  [hop from {printable(before.engine)}]"
        notes = "".join(f"  [{printable(note)}]" for note in run.notes)
        times = f" ({run.starts} starts)" if run.starts > 1 else ""
        yield (
            f"commit {run.claim:>4}  {printable(run.started)}  {printable(run.machine)}  {printable(run.engine)}  "
            f"{printable(run.system)}  {work or 'nothing committed'}{times}{hop}{notes}"
        )
        before = run
    yield f"next: spill table {place.again}"


def copy(source: str, destination: str, registry: Registry) -> Iterator[str]:
    """Copy a state: data that the kept commits name, then the log in order. The destination may be an older copy.

    Raises:
        StateError: the destination holds another state, or commits that the source lacks.
    """
    place, store, head = find(source, None, registry)
    other = open_store(destination, registry)
    numbers = entry_numbers(store)
    _refuse_foreign(store, other, head, numbers)
    have = {entry.name: entry.size for entry in other.list("data/")}
    copied = 0
    for entry in kept_entries(store, head):
        for name, record in entry.commit.objects.items():
            if have.get(name) != record.size:
                other.write(name, [read_object(store, entry.commit, name)])
                have[name] = record.size
                copied += record.size
    for number in numbers:
        try:
            data = store.read(log_name(number), COMMIT_LIMIT)
        except (Absent, Unreadable):  # a damaged entry is no state; its number stays free in the copy
            continue
        try:
            other.create(log_name(number), data)
        except (Exists, Unanswered):
            if other.read(log_name(number), COMMIT_LIMIT) != data:
                raise StateError(f"{destination}: somebody wrote commit {number} meanwhile; nothing was lost") from None
    found = newest(other)
    if found is None or found.entry.sha256 != head.entry.sha256:
        raise StateError(f"{destination}: the copy does not verify; run the same command again")
    yield f"copied {place.uri} to {destination}: {len(numbers)} commits, {copied:,} bytes of data"
    yield f"next: spill resume {locate(destination, None).again}   (continue one of the two copies only)"


def _refuse_foreign(store: Store, other: Store, head: Head, numbers: list[int]) -> None:
    theirs = entry_numbers(other)
    if not theirs:
        return
    try:
        identity = read_entry(other, theirs[-1]).commit.state
    except Damaged as damage:
        raise StateError(f"{other.uri} holds a damaged commit ({damage}); copy to another place") from None
    if identity != head.commit.state:
        raise StateError(
            f"{other.uri} holds another state ({identity[:8]}, not {head.commit.state[:8]}); copy to another place"
        )
    for number in theirs:
        try:
            same = number in numbers and read_entry(store, number).sha256 == read_entry(other, number).sha256
        except Damaged:
            same = False
        if not same:
            raise StateError(
                f"{other.uri} has commit {number}, which {store.uri} lacks: it was continued by itself; copy the other "
                "way, or to another place"
            )


def collect(target: str, state: str | None, takeover: bool, registry: Registry) -> Iterator[str]:
    """Free what no kept commit names. It is a run like any other: it claims first, and can be refused.

    Raises:
        HeldError: another run holds the state.
    """
    place, store, head = find(target, state, registry)
    lines: list[str] = []
    watch(store, head, takeover=takeover, again=place.again, tick=lambda: None, say=lines.append)
    yield from lines
    kept = [entry.commit for entry in kept_entries(store, head)]
    run = Run(
        nonce=environment.nonce(),
        claim=0,
        started=environment.utc_now(),
        engine="-",
        machine=environment.machine_name(),
        system=environment.operating_system(),
        notes=("freed unnamed objects",),
    )
    claim = Claim.begin(store, head, head.commit.plan, run, head.commit.state)
    objects, size = claim.sweep(kept)
    yield f"{place.uri}: removed {objects} objects, {size:,} bytes; {len(kept)} states kept"
    yield f"next: spill state verify {place.again}"
