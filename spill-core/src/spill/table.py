"""The table of who made each stage, with scores beside a reference's, from commits alone."""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from spill.records import Commit, Run, StageRecord, printable

HEADINGS = ("stage", "engine", "machine", "os", "score", "reference")
NOTHING = "-"


@frozen(kw_only=True)
class Line:
    """One stage's line, as texts ready to print."""

    stage: str
    engine: str
    machine: str
    os: str
    score: str
    reference: str

    def cells(self) -> tuple[str, ...]:
        return (self.stage, self.engine, self.machine, self.os, self.score, self.reference)


def lines(commit: Commit, reference: Commit | None) -> list[Line]:
    """A line for every stage of the plan. A stage that moved lists every producer, in order."""
    made = []
    for number, stage in enumerate(commit.plan.stages, start=1):
        workers = [r for r in commit.runs if stage in r.work and r.work[stage][1] > r.work[stage][0]]
        workers.sort(key=lambda r: r.work[stage][0])  # rows that were folded stand where the last of them stood
        made.append(
            Line(
                stage=f"{number} {printable(stage)}",
                engine=_chain([r.engine for r in workers]),
                machine=_chain([r.machine for r in workers]),
                os=_chain([r.system for r in workers]),
                score=score_text(commit.stages.get(stage)),
                reference=score_text(reference.stages.get(stage), finished_only=True) if reference else NOTHING,
            )
        )
    return made


def render(commit: Commit, reference: Commit | None) -> str:
    """The table as aligned plain text, followed by a line for every stage whose answers were cut."""
    rows = [HEADINGS, *(line.cells() for line in lines(commit, reference))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for stage, record in commit.stages.items():
        cut = record.summary.get("truncated")
        if type(cut) is int and cut > 0:
            limit = commit.plan.max_new_tokens
            text.append(f"{printable(stage)}: {cut} of {record.position} answers were cut at {limit} tokens")
    return "\n".join(text)


def score_text(record: StageRecord | None, finished_only: bool = False) -> str:
    """`0.950` of a finished graded stage, `12/50` of one under way, else `-`."""
    if record is None or (finished_only and not record.finished):
        return NOTHING
    if not record.finished:
        return f"{record.position}/{record.total}"
    score: Any = record.summary.get("score")  # from a state: it may be anything
    return f"{score:.3f}" if type(score) in (int, float) and 0 <= score <= 1 else NOTHING


def finished(commit: Commit) -> bool:
    """Whether every stage of the plan is done."""
    return all((record := commit.stages.get(stage)) and record.finished for stage in commit.plan.stages)


def who(run: Run) -> str:
    """A run in words, for the user."""
    return f"{printable(run.machine)} ({printable(run.engine)}, {printable(run.system)})"


def _chain(values: Sequence[str]) -> str:
    kept: list[str] = []
    for value in values:
        if not kept or kept[-1] != value:
            kept.append(value)
    return " -> ".join(printable(v) for v in kept) or NOTHING
