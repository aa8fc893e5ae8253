"""What must hold of a state whoever works on it: the rules of DESIGN, and a witness that looks after every request.

The witness shares no code with spill: it reads the log by itself.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from attrs import frozen

from spill.testing.faulty_store import Call
from spill.testing.memory_store import Backing, Stored

if TYPE_CHECKING:
    from tests.core.interleavings import Actor

TOTAL = 7


class Rule(Enum):
    """What the witness holds the runs to: rules of what may be done, and promises of what can be relied on."""

    LOG_KEPT = "a log entry, once written, is never changed and never deleted"
    DATA_KEPT = "a data object is never overwritten"
    TWO_STATES = "the newest two distinct states are kept"
    FOLDERS = "a run writes in its own folder, and deletes in its own and those of earlier claims"
    CLAIM = "a run claims before anything else: its first commit names the newest commit's objects again"
    ONE_HOLDER = "at most one run can commit"

    LOADABLE = "the newest commit that nobody damaged can be loaded, at most one state back"
    FENCE = "a number is given once, to one run"
    HISTORY = "along the parents every position comes once, and its content is what it must be"
    FINISHED = "one more run finishes the build, and sleepers that wake later change nothing"


PROMISES = frozenset({Rule.LOADABLE, Rule.FENCE, Rule.HISTORY, Rule.FINISHED})
RULES = frozenset(Rule) - PROMISES


class Violation(AssertionError):
    """A rule does not hold."""

    def __init__(self, rule: Rule, found: str) -> None:
        super().__init__(f"{rule.name}: {found} ({rule.value})")
        self.rule = rule


# ---- the work of a build, and what it must come to


def unit(content: str, position: int) -> str:
    """What a step makes of the content before it: to lose, double or swap a step shows in all that follow."""
    return hashlib.sha256(f"{content} {position}".encode()).hexdigest()


def reference(position: int) -> str:
    content = ""
    for number in range(1, position + 1):
        content = unit(content, number)
    return content


REFERENCE = tuple(reference(position) for position in range(TOTAL + 1))


@frozen(kw_only=True)
class Record:
    """A log entry as it was written. `objects` maps each name to size and sha256."""

    number: int
    data: bytes
    sha256: str
    run: str
    parent: tuple[int, str] | None
    position: int
    objects: Mapping[str, tuple[int, str]]
    roles: Mapping[str, str]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.objects)


def parse(data: bytes) -> Record:
    plain: dict[str, Any] = json.loads(data)
    stage = plain["stages"].get("tune", {"position": 0, "objects": {}})
    return Record(
        number=plain["number"],
        data=data,
        sha256=hashlib.sha256(data).hexdigest(),
        run=plain["run"],
        parent=(plain["parent"]["number"], plain["parent"]["sha256"]) if plain["parent"] else None,
        position=stage["position"],
        objects={name: (record["size"], record["sha256"]) for name, record in plain["objects"].items()},
        roles=stage["objects"],
    )


def digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


class Witness:
    """Remembers everything that was ever committed, and compares the store with it after every request."""

    def __init__(self, backing: Backing, ignored: frozenset[Rule]) -> None:
        self.log: dict[int, Record] = {}
        self.damaged: set[str] = set()
        self.claims: dict[str, int] = {}
        self.tally: Counter[str] = Counter()
        self._backing = backing
        self._ignored = ignored
        self._seen: dict[str, Stored] = {}
        self._digests: dict[str, tuple[int, str]] = {}

    def refuse(self, rule: Rule, found: str) -> None:
        if rule not in self._ignored:
            raise Violation(rule, found)

    def after_request(self, actor: "Actor", call: Call) -> None:
        old, new = self._seen.get(call.name), self._backing.objects.get(call.name)
        if new is not old:
            self._take(call.name)
            if call.name.startswith("log/"):
                self._log_changed(call.name, old, new)
            elif call.name.startswith("data/"):
                self._data_changed(actor, call.name, old, new)
            self.promises()
        if actor.claim and actor.claim.commit.run == actor.row.nonce:
            number = actor.claim.commit.number
            if number not in self.log or self.log[number].run != actor.row.nonce:
                self.refuse(Rule.FENCE, f"{actor.name} was told that commit {number} is its own")

    def after_damage(self, name: str) -> None:
        self.damaged.add(name)
        self._take(name)
        self.promises()

    def one_holder(self, actors: "list[Actor]") -> None:
        able = [
            actor.name
            for actor in actors
            if actor.claim and f"log/{actor.claim.commit.number + 1}.json" not in self._backing.objects
        ]
        if len(able) > 1:
            self.refuse(Rule.ONE_HOLDER, f"{' and '.join(able)} can commit")

    def is_damaged(self, record: Record) -> bool:
        return f"log/{record.number}.json" in self.damaged or not self.damaged.isdisjoint(record.objects)

    def is_whole(self, record: Record) -> bool:
        entry = self._backing.objects.get(f"log/{record.number}.json")
        if entry is None or entry.data != record.data:
            return False
        return all(self._digests.get(name) == expected for name, expected in record.objects.items())

    def descending(self) -> Iterator[Record]:
        return (self.log[number] for number in sorted(self.log, reverse=True))

    def newest_two(self) -> list[Record]:
        """The newest entry of each of the newest two distinct states, damaged or not."""
        found: list[Record] = []
        for record in self.descending():
            if all(record.names != other.names for other in found):
                found.append(record)
                if len(found) == 2:
                    break
        return found

    def head(self) -> Record | None:
        return next((record for record in self.descending() if self.is_whole(record)), None)

    def promises(self) -> None:
        """A state can be loaded, the newest that nobody damaged; and the one before it is there as well."""
        head = self.head()
        if head is None:
            if self.log:
                self.refuse(Rule.LOADABLE, "no commit is whole")
            return
        for record in self.descending():
            if record.number == head.number:
                break
            if not self.is_damaged(record):
                self.refuse(Rule.LOADABLE, f"commit {record.number} cannot be loaded, and nobody damaged it")
        lost = self.log[max(self.log)].position - head.position
        if lost > 1:
            self.refuse(Rule.LOADABLE, f"{lost} steps are lost")
        for record in self.newest_two():
            if not self.is_damaged(record) and not self.is_whole(record):
                self.refuse(Rule.TWO_STATES, f"commit {record.number} is not whole any more")

    def finished(self) -> None:
        head = self.head()
        if head is None or head.position != TOTAL:
            self.refuse(Rule.FINISHED, f"the build ended at {head and head.position} of {TOTAL}")
        else:
            self._content(head, Rule.FINISHED)

    def _take(self, name: str) -> None:
        stored = self._backing.objects.get(name)
        if stored is None:
            self._seen.pop(name, None)
            self._digests.pop(name, None)
        else:
            self._seen[name] = stored
            self._digests[name] = digest(stored.data)

    def _log_changed(self, name: str, old: Stored | None, new: Stored | None) -> None:
        if old is not None and (new is None or new.data != old.data):
            self.refuse(Rule.LOG_KEPT, f"{name} was {'changed' if new else 'deleted'}")
        if new is None or (old is not None and new.data == old.data):
            return
        record = parse(new.data)
        highest = max(self.log, default=0)
        if record.number != highest + 1 or name != f"log/{record.number}.json":
            self.refuse(Rule.FENCE, f"{name} was committed after commit {highest}")
        self.tally["commits"] += 1
        self._parent(record)
        self.log[record.number] = record
        self._content(record, Rule.HISTORY)

    def _parent(self, record: Record) -> None:
        """Whether an entry continues what is in effect, by a claim or by a commit of who made the one before."""
        first = record.run not in self.claims
        if first:
            self.claims[record.run] = record.number
        if record.parent is None:
            if self.log:
                self.refuse(Rule.HISTORY, f"commit {record.number} has no parent")
            return
        number, sha256 = record.parent
        parent = self.log.get(number)
        if parent is None or parent.sha256 != sha256:
            self.refuse(Rule.HISTORY, f"commit {record.number} continues a commit {number} that is not in the log")
            return
        passed = [n for n in range(number + 1, record.number) if n in self.log and not self.is_damaged(self.log[n])]
        if passed:
            self.refuse(Rule.HISTORY, f"commit {record.number} continues {number} and passes over {passed}")
        if first and (record.names, record.position) != (parent.names, parent.position):
            self.refuse(Rule.CLAIM, f"commit {record.number} is the first of its run, and is work")
        if not first and parent.run != record.run:
            self.refuse(Rule.HISTORY, f"commit {record.number} continues another run's commit {number}")
        if record.position - parent.position not in (0, 1):
            self.refuse(Rule.HISTORY, f"commit {record.number} goes from {parent.position} to {record.position}")
        self.tally["claims"] += first
        self.tally["went back"] += first and number < record.number - 1

    def _content(self, record: Record, rule: Rule) -> None:
        if record.position == 0 or self.is_damaged(record) or not self.is_whole(record):
            return
        made = {role: self._backing.objects[name].data for role, name in record.roles.items()}
        rows = [row for role in sorted(made) if role != "state" for row in json.loads(made[role])]
        if made["state"].decode() != REFERENCE[record.position] or rows != list(range(1, record.position + 1)):
            self.refuse(rule, f"commit {record.number} does not hold what {record.position} steps come to")

    def _data_changed(self, actor: "Actor", name: str, old: Stored | None, new: Stored | None) -> None:
        claim, _, nonce = name.split("/")[1].partition("-")
        own = max((self.claims.get(nonce, 0) for nonce in actor.nonces), default=0)
        if own == 0:
            self.refuse(Rule.CLAIM, f"{actor.name} changed {name} without a claim")
        if new is None:
            self.tally["deleted"] += 1
            if int(claim) > own or (int(claim) == own and nonce not in actor.nonces):
                self.refuse(Rule.FOLDERS, f"{actor.name}, of claim {own}, deleted {name}")
        elif old is not None:
            self.refuse(Rule.DATA_KEPT, f"{actor.name} overwrote {name}")
        elif int(claim) != own or nonce not in actor.nonces:
            self.refuse(Rule.FOLDERS, f"{actor.name}, of claim {own}, wrote {name}")
