"""What a person sees while a build runs: one progress bar on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from spill import stages
from spill.environment import seconds
from spill.rates import duration

LINE_SECONDS = 20.0
LINE_SHARE = 0.2
RATE_SECONDS = 1.0


def make_reporter() -> "PlainReporter":
    """A bar where standard output is a terminal, else plain lines."""
    return BarReporter() if sys.stdout.isatty() else PlainReporter()


class PlainReporter:
    """Plain lines: one when a stage begins, then at most every 20 s or fifth of the stage, and one at its end."""

    def __init__(self, write: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
        self._write = write

    def say(self, line: str) -> None:
        self._write(line)

    def warn(self, line: str) -> None:
        self._write(f"warning: {line}")

    def begin(self, stage: str, unit: str, position: int, total: int) -> None:
        self._stage, self._unit, self._total = stage, unit, total
        self._first = self._position = self._shown = position
        self._shown_at = seconds()
        self._first_at: float | None = None  # of the first unit: what comes before it is loading
        self._loss: float | None = None

    def progress(self, progress: stages.Progress) -> None:
        self._count(progress)
        due = self._position - self._shown >= max(1.0, LINE_SHARE * self._total)
        if due or seconds() - self._shown_at >= LINE_SECONDS:
            self._show()

    def end(self) -> None:
        if self._position != self._shown:
            self._show()

    def _count(self, progress: stages.Progress) -> None:
        self._position, self._loss = progress.position, progress.loss
        if self._first_at is None:
            self._first, self._first_at = progress.position, seconds()

    def _rate(self) -> float | None:
        """Units a second since the first one; None while that says little, since rows end a batch at a time."""
        if self._first_at is None or self._position == self._first:
            return None
        since = seconds() - self._first_at
        return (self._position - self._first) / since if since >= RATE_SECONDS else None

    def _show(self) -> None:
        self._shown, self._shown_at = self._position, seconds()
        rate = self._rate()
        parts = [f"  {self._stage} {self._unit} {self._position}/{self._total}"]
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if rate is not None:
            parts.append(f"{rate:.2f} {self._unit}s/s")
            if self._position < self._total:
                parts.append(f"{duration((self._total - self._position) / rate)} left")
        self._write(", ".join(parts))


class BarReporter(PlainReporter):
    """One bar for the running stage, with loss, rate and time left."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        super().__init__(lambda line: self._console.print(line, markup=False))
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def begin(self, stage: str, unit: str, position: int, total: int) -> None:
        super().begin(stage, unit, position, total)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(f"{stage} {unit}s", total=total, completed=position, note="")
        self._bar.start()

    def progress(self, progress: stages.Progress) -> None:
        self._count(progress)
        rate = self._rate()
        loss = f"loss {progress.loss:.4f}  " if progress.loss is not None else ""
        assert self._bar is not None
        self._bar.update(self._task, completed=progress.position, note=f"{loss}{rate:.2f}/s" if rate else loss)

    def end(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None
        super().end()
