"""The stages eval:base and eval:tuned: the exam, greedily answered and graded by exact match, row by row."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from spill.errors import PluginError, StateError
from spill.folder import ExamRow
from spill.stages import Journal, Progress, Snapshot, Work
from spill.stages.tune import check_probe, load_training_state


def is_right(output: str, row: ExamRow) -> bool:
    """The whole rule: outer white space is stripped from both sides, then one accepted answer must equal the output
    character by character."""
    return output.strip() in {expected.strip() for expected in row.expected}


def open_base(work: Work) -> "Evaluation":
    """Grade the base model, with the folder's instructions as its system prompt."""
    return Evaluation(work, tuned=False)


def open_tuned(work: Work) -> "Evaluation":
    """Grade the tuned model, without instructions: what they said is in the adapter now."""
    return Evaluation(work, tuned=True)


class Evaluation:
    """An open exam. Rows are answered in file order as far as the engine's batches let them; the journal holds, for
    every row, its index, the raw output, how it ended and whether it is right."""

    unit = "row"

    def __init__(self, work: Work, *, tuned: bool) -> None:
        self._work = work
        self._tuned = tuned
        self._journal = Journal(work.saved)
        self._exam = work.folder.exam
        done = [_row_index(record, len(self._exam)) for record in self._journal.records]
        if len(set(done)) != len(done):
            raise StateError(f"{work.name}: a row is graded twice in the state")
        self._done = set(done)

    @property
    def total(self) -> int:
        return len(self._exam)

    @property
    def position(self) -> int:
        return len(self._journal.records)

    def advance(self, limit: int) -> Iterator[Progress]:
        pending = [i for i in range(self.total) if i not in self._done][: limit - self.position]
        if not pending:
            return
        engine = self._work.engine()
        if self._tuned:
            engine.import_state(load_training_state(self._work))
            # Whoever made the tune: a wrong scale would show as nothing but a wrong score. Silent where all is well.
            say = self._work.say if self._work.accept_drift else lambda line: None
            check_probe(self._work, engine, self._work.others["tune"], "the tune", say)
        system = "" if self._tuned else self._work.folder.instructions
        prompts = [self._work.text.prompt(self._exam[i].prompt, system) for i in pending]
        answers = engine.generate(
            prompts, self._work.plan.max_new_tokens, self._work.text.stop_ids, adapter=self._tuned
        )
        with closing(answers):  # type: ignore[type-var]
            for answer in answers:
                index = pending[answer.index] if 0 <= answer.index < len(pending) else -1
                if index < 0 or index in self._done:
                    raise PluginError(f"{self._work.name}: the engine answered prompt {answer.index} unasked")
                output = self._work.text.decode(answer.tokens)
                self._journal.add(
                    {
                        "row": index,
                        "output": output,
                        "right": is_right(output, self._exam[index]),
                        "ended": answer.reason,
                        "tokens": len(answer.tokens),
                    }
                )
                self._done.add(index)
                yield Progress(position=self.position)
        if self.position < limit:
            raise PluginError(
                f"{self._work.name}: the engine ended after {self.position} of {limit} rows; the last commit stands, "
                "resume on another engine"
            )

    def snapshot(self) -> Snapshot:
        objects, kept = self._journal.snapshot(finished=self.position == self.total)
        records = self._journal.records
        right = sum(r["right"] for r in records)
        summary = {
            "right": right,
            "score": right / len(records) if records else 0.0,
            "truncated": sum(r["ended"] == "length" for r in records),
        }
        return Snapshot(objects=objects, kept=kept, summary=summary)


def _row_index(record: dict[str, Any], rows: int) -> int:
    index, right = record.get("row"), record.get("right")
    if type(index) is not int or not 0 <= index < rows or type(right) is not bool or "ended" not in record:
        raise StateError(f"the state holds a graded row that cannot be: {record!r:.80}")
    return index
