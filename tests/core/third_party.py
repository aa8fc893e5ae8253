"""A third party's stage, as its author would write it: the loss of every training row after the tune. Tests also copy
this file into a folder of installed packages, so it imports nothing of the tests."""

from collections.abc import Iterator

from spill.errors import StateError
from spill.stages import Journal, Progress, Snapshot, Work
from spill.stages.tune import load_training_state

LEARNT = 1.0  # nats a token


def open_audit(work: Work) -> "Audit":
    return Audit(work)


class Audit:
    """Counts the training rows whose mean loss is below one nat a token."""

    unit = "row"

    def __init__(self, work: Work) -> None:
        self.work = work
        self.journal = Journal(work.saved)
        if any(type(record.get("loss")) is not float for record in self.journal.records):
            raise StateError(f"{work.name}: a row in the state has no loss")

    @property
    def total(self) -> int:
        return len(self.work.rows)

    @property
    def position(self) -> int:
        return len(self.journal.records)

    def advance(self, limit: int) -> Iterator[Progress]:
        if self.position >= limit:
            return
        engine = self.work.engine()
        engine.import_state(load_training_state(self.work))
        for index in range(self.position, limit):
            loss = float(engine.nll([self.work.rows[index]])[0].mean())
            self.journal.add({"row": index, "loss": loss})
            yield Progress(position=self.position, loss=loss)

    def snapshot(self) -> Snapshot:
        objects, kept = self.journal.snapshot(finished=self.position == self.total)
        learnt = sum(record["loss"] < LEARNT for record in self.journal.records)
        return Snapshot(objects=objects, kept=kept, summary={"score": learnt / max(1, self.position)})
