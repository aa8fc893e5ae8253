"""Looking after a state: verify it, tell its history, copy it to another store, and free what no kept commit names."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from attrs import evolve

from spill import environment
from spill.alive import watch
from spill.claim import Claim
from spill.errors import HeldError, StateError
from spill.holding import CLAIM_TRIES
from spill.opening import find, locate
from spill.plugins import Registry
from spill.records import Run, printable
from spill.state import (
    COMMIT_LIMIT,
    Damaged,
    Entry,
    Head,
    entry_numbers,
    kept_entries,
    log_name,
    newest,
    read_entry,
    read_object,
    settle,
    verified,
)
from spill.stores import Absent, Store, Unreadable, open_store

Tick = Callable[[], None]
COPY_TRIES = 20


def verify(target: str, state: str | None, registry: Registry) -> Iterator[str]:
    """Read every object of the newest states and check it. Writes nothing.

    Raises:
        StateError: the newest commit is damaged, or none is whole.
    """
    place, store, head = find(target, state, registry)
    while True:
        kept, damaged = kept_entries(store, head)
        # Whoever works on the state meanwhile sweeps away what is being read here.
        if not damaged or (found := newest(store)) is None or found.highest == head.highest:
            break
        head = found
    yield from _warnings(head)
    for entry in kept:
        commit = entry.commit
        size = sum(record.size for record in commit.objects.values())
        yield f"commit {commit.number}: whole, {len(commit.objects)} objects, {size:,} bytes, sha256 as named"
    if head.commit.number != head.highest:
        raise StateError(
            f"{place.uri}: commit {head.highest} is damaged; a resume goes on from commit {head.commit.number}: "
            f"spill resume {place.again}"
        )
    if damaged:
        whole = " and ".join(str(entry.commit.number) for entry in kept)
        advice = "" if len(kept) > 1 else f"; copy the only one with: spill state copy {place.again} DST"
        raise StateError(f"{place.uri}: {damaged}; whole: {whole}{advice}")
    yield f"next: spill state history {place.again}"


def _warnings(head: Head) -> Iterator[str]:
    return (f"warning: {note}" for note in head.notes)


def history(target: str, state: str | None, registry: Registry) -> Iterator[str]:
    """Who did what, one line a run, from the newest commit alone. Writes nothing."""
    place, _, head = find(target, state, registry)
    yield from _warnings(head)
    commit = head.commit
    yield f"state {commit.state}, {head.highest} commits, student {printable(commit.plan.student)}"
    before: Run | None = None
    for run in commit.runs:
        work = ", ".join(
            f"{printable(s)} {run.work[s][0]}-{run.work[s][1]}" for s in commit.plan.stages if s in run.work
        )
        hopped = before and run.work and before.engine != run.engine
        hop = f"  [hop from {printable(before.engine)}]" if before and hopped else ""
        notes = "".join(f"  [{printable(note)}]" for note in run.notes)
        times = f" ({run.starts} starts)" if run.starts > 1 else ""
        yield (
            f"commit {run.claim:>4}  {printable(run.started)}  {printable(run.machine)}  {printable(run.engine)}  "
            f"{printable(run.system)}  {work or 'nothing committed'}{times}{hop}{notes}"
        )
        before = run if run.work else before
    yield f"next: spill table {place.again}"


def copy(source: str, destination: str, registry: Registry, tick: Tick) -> Iterator[str]:
    """Copy a state: data that the kept commits name, then the log in order. The destination may be an older copy.

    Raises:
        StateError: the destination holds another state, or commits that the source lacks.
    """
    place, store, head = find(source, None, registry)
    other = open_store(destination, registry)
    for tries in reversed(range(COPY_TRIES)):
        try:
            numbers, size = _copy_once(store, other, head, tick)
        except StateError:
            # Whoever works on the state meanwhile commits, and sweeps away what is being read here.
            found = newest(store)
            if found is None or found.highest == head.highest or not tries:
                raise
            head = found
        else:
            break
    yield from _warnings(head)
    yield f"copied {place.uri} to {destination}: {numbers} commits, {size:,} bytes of data"
    yield f"next: spill resume {locate(destination, None).again}   (continue one of the two copies only)"


def _copy_once(store: Store, other: Store, head: Head, tick: Tick) -> tuple[int, int]:
    """Copy the state as it is at `head`. Returns how many log entries there are, and the bytes of data written."""
    numbers = [number for number in entry_numbers(store) if number <= head.highest]
    _refuse_foreign(store, other, head, numbers)
    kept, _ = kept_entries(store, head)
    size = _bring(store, other, kept, {entry.name: entry.size for entry in other.list("data/")}, tick)
    for number in numbers:
        tick()
        try:
            data = store.read(log_name(number), COMMIT_LIMIT)
        except (Absent, Unreadable):  # a damaged entry is no state; its number stays free in the copy
            continue
        if not settle(other, log_name(number), data):
            raise StateError(f"{other.uri}: somebody wrote commit {number} meanwhile; nothing was lost")
    if not _holds(other, kept):
        # Something of the right size was there already, and is damaged: nothing there is trusted, all is sent.
        size += _bring(store, other, kept, {}, tick)
        if not _holds(other, kept):
            raise StateError(f"{other.uri}: the copy does not verify; copy to another place")
    return len(numbers), size


def _bring(store: Store, other: Store, kept: Sequence[Entry], have: Mapping[str, int], tick: Tick) -> int:
    """Write what the kept commits name and `have`, sizes by name, lacks. Returns the bytes written."""
    sent: dict[str, int] = {}
    for entry in kept:
        for name, record in entry.commit.objects.items():
            tick()
            if name not in sent and have.get(name) != record.size:
                other.write(name, [read_object(store, entry.commit, name)])
                sent[name] = record.size
    return sum(sent.values())


def _holds(store: Store, kept: Sequence[Entry]) -> bool:
    """Whether the first of these is a store's newest whole commit, and the others are whole there too."""
    try:
        head = newest(store)
        return head is not None and [verified(store, e.commit.number, {}).sha256 for e in kept] == [
            head.entry.sha256,
            *(e.sha256 for e in kept[1:]),
        ]
    except (StateError, Damaged):  # no commit there is whole, or one of these is not
        return False


def _refuse_foreign(store: Store, other: Store, head: Head, numbers: list[int]) -> None:
    theirs = entry_numbers(other)
    identities = (_identity(other, number) for number in reversed(theirs))
    identity = next((found for found in identities if found), "")
    if theirs and not identity:
        raise StateError(f"{other.uri} holds damaged commits only; copy to another place")
    if identity and identity != head.commit.state:
        raise StateError(
            f"{other.uri} holds another state ({identity[:8]}, not {head.commit.state[:8]}); copy to another place"
        )
    for number in theirs:
        if number not in numbers or _bytes(store, number) != _bytes(other, number):
            raise StateError(
                f"{other.uri} has commit {number}, which {store.uri} lacks: it was continued by itself; copy the other "
                "way, or to another place"
            )


def _identity(store: Store, number: int) -> str:
    try:
        return read_entry(store, number).commit.state
    except Damaged:
        return ""


def _bytes(store: Store, number: int) -> bytes:
    try:
        return store.read(log_name(number), COMMIT_LIMIT)
    except (Absent, Unreadable):
        return b""


def collect(
    target: str, state: str | None, takeover: bool, registry: Registry, tick: Tick, say: Callable[[str], None]
) -> Iterator[str]:
    """Free what no kept commit names. It is a run like any other: it claims first, and can be refused.

    Raises:
        HeldError: another run holds the state.
    """
    place, store, head = find(target, state, registry)
    run = Run(
        nonce=environment.nonce(),
        claim=0,
        started=environment.utc_now(),
        engine="-",
        machine=environment.machine_name(),
        system=environment.operating_system(),
        notes=("freed unnamed objects",),
    )
    for tries in reversed(range(CLAIM_TRIES)):
        command = f"spill state gc {place.again}"
        watched = watch(store, head, takeover=takeover, command=command, tick=tick, say=say)
        # The holder may have committed before it went, and somebody have claimed since.
        found = (newest(store) if watched.anew else None) or head
        quiet, head = found.commit.run == head.commit.run, found
        if not quiet:
            continue
        if head.commit.number != head.highest:
            raise StateError(
                f"{place.uri}: {head.notes[0]}, and gc would free what it names; go back to commit "
                f"{head.commit.number} first: spill resume {place.again}"
            )
        kept = [entry.commit for entry in kept_entries(store, head)[0]]
        if watched.note:
            run = evolve(run, notes=("freed unnamed objects", watched.note))
        try:
            claim = Claim.begin(store, head, head.commit.plan, run, head.commit.state)
            break
        except HeldError:
            if not tries:
                raise
            head = newest(store) or head
    else:
        raise HeldError(f"{place.uri}: others claim it all the time; run again")
    objects, size = claim.sweep(kept)
    yield f"{place.uri}: removed {objects} objects, {size:,} bytes; {len(kept)} states kept"
    yield f"next: spill state verify {place.again}"
