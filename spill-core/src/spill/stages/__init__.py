"""The stage contract: what a stage is given, what it answers, and the journal of rows or steps that stages keep.

A stage is opened with `target(work)`, then advanced. The runner decides when to commit and asks for a snapshot; the
stage never writes anywhere itself. A stage opened on a snapshot of its own goes on as if it had never stopped.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from spill.engine import AdapterSpec, Engine, Row
from spill.errors import StateError
from spill.folder import Folder
from spill.models.text import Text
from spill.records import Malformed, Plan, from_json, to_json
from spill.stores import Buffer

SEGMENTS_LIMIT = 12


@frozen(kw_only=True)
class Saved:
    """What the newest commit holds of a stage. `read(role)` gives an object's bytes, checked by size and sha256."""

    position: int
    total: int
    finished: bool
    summary: Mapping[str, Any]
    roles: tuple[str, ...]
    read: Callable[[str], bytes]


@frozen(kw_only=True)
class Work:
    """What a stage is given.

    Attributes:
        name: the name under which the stage is listed.
        plan, folder: what is built, from what.
        text: the student's tokenizer and chat template.
        rows: the tokenized training rows, in file order.
        adapter: which layers are adapted.
        engine: opens the engine on the first call, and answers the same one for all stages.
        saved: this stage's own last snapshot; None when it starts.
        others: last snapshots of the other stages, by name.
        taken_over: opens the engine and answers who made `saved`, in words, when that was another engine or kind of
            hardware; else an empty text.
        accept_drift: go on where a handover check finds a difference.
        note: records a line about this run in the state.
        say: tells the user a line.
    """

    name: str
    plan: Plan
    folder: Folder
    text: Text
    rows: tuple[Row, ...]
    adapter: AdapterSpec
    engine: Callable[[], Engine]
    saved: Saved | None
    others: Mapping[str, Saved]
    taken_over: Callable[[], str]
    accept_drift: bool
    note: Callable[[str], None]
    say: Callable[[str], None]


@frozen(kw_only=True)
class Progress:
    """One unit is done. `loss` in nats per answer token, where there is one."""

    position: int
    loss: float | None = None


class Reporter(Protocol):
    """Where a build tells the user what happens."""

    def say(self, line: str) -> None: ...

    def warn(self, line: str) -> None: ...

    def begin(self, stage: str, unit: str, position: int, total: int) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def end(self) -> None: ...


@frozen(kw_only=True)
class Snapshot:
    """All that is needed to go on. `objects` are new contents by role; `kept` are roles whose contents of the last
    snapshot stand as they are; every other role is dropped. `summary` is small JSON; `score`, a share from 0 to 1,
    and `truncated`, a count of rows, are shown in the table."""

    objects: Mapping[str, Sequence[Buffer]] = field(factory=dict)
    kept: frozenset[str] = frozenset()
    summary: Mapping[str, Any] = field(factory=dict)


class Stage(Protocol):
    """An open stage. `unit` is a word such as step or row; `position` counts units done, of `total`."""

    @property
    def unit(self) -> str: ...

    @property
    def total(self) -> int: ...

    @property
    def position(self) -> int: ...

    def advance(self, limit: int) -> Iterator[Progress]:
        """Do units until `position == limit`, yielding after each. Whatever raises in the middle of a unit (a stop
        through the engine's tick above all) leaves the stage as it was after the last yielded unit."""
        ...

    def snapshot(self) -> Snapshot:
        """The stage as it is after the last finished unit. Called between units only, or after `advance` raised."""
        ...


class Journal:
    """Records in order of work (a row graded, a step made), saved in segments that are written once.

    A snapshot writes only what came since the last one; when segments become many, or the stage is done, they are
    merged into one.
    """

    def __init__(self, saved: Saved | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._segments: list[str] = []
        if saved is None:
            return
        for role in sorted(r for r in saved.roles if re.fullmatch(r"journal-[0-9]{9}\.json", r)):
            if int(role[8:17]) != len(self.records):
                raise StateError(f"the journal's segment {role} does not follow {len(self.records)} records")
            self.records += _records(saved.read(role), role)
            self._segments.append(role)
        if len(self.records) != saved.position:
            raise StateError(f"the journal has {len(self.records)} records, the state is at {saved.position}")
        self._saved = len(self.records)

    _saved = 0

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def snapshot(self, finished: bool) -> tuple[dict[str, Sequence[Buffer]], frozenset[str]]:
        """New segments by role, and the roles of those that stand."""
        if len(self._segments) >= SEGMENTS_LIMIT or (finished and len(self._segments) > 0):
            self._segments, self._saved = [], 0
        kept = frozenset(self._segments)
        objects: dict[str, Sequence[Buffer]] = {}
        if self._saved < len(self.records):
            role = f"journal-{self._saved:09d}.json"
            objects[role] = [to_json(self.records[self._saved :])]
            self._segments.append(role)
            self._saved = len(self.records)
        return objects, kept


def _records(data: bytes, role: str) -> list[dict[str, Any]]:
    try:
        records = from_json(data)
    except Malformed as fault:
        raise StateError(f"the journal's segment {role} cannot be read: {fault}") from None
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise StateError(f"the journal's segment {role} is not a list of records")
    return records
