"""The stage tune: LoRA steps in the plan's order, with the checks that a training state meets when it moves."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from spill import arrays
from spill.engine import AdapterSpec, Engine, TrainingState
from spill.errors import NumericsError, StateError
from spill.handover import check_drift, fits, probe_rows, rounded_losses
from spill.recipe import batch_rows, initial_state, total_steps, update_for
from spill.stages import Journal, Progress, Saved, Snapshot, Work
from spill.stores import Buffer

STATE_ROLE = "state.safetensors"


def open_tune(work: Work) -> "Tune":
    """Open the tune at its start, or at the step that was saved."""
    return Tune(work)


class Tune:
    """An open tune. The journal holds, for every step, its rows, learning rate, loss, tokens and gradient norm."""

    unit = "step"

    def __init__(self, work: Work) -> None:
        self._work = work
        self._journal = Journal(work.saved)
        for number, record in enumerate(self._journal.records, start=1):
            if record.get("step") != number:
                raise StateError(f"the state's journal has step {record.get('step')!r:.20} where {number} belongs")
        self._engine: Engine | None = None
        self._probe_rows = [work.rows[i] for i in probe_rows(work.rows)]

    @property
    def total(self) -> int:
        return total_steps(len(self._work.rows), self._work.plan.batch, self._work.plan.epochs)

    @property
    def position(self) -> int:
        return len(self._journal.records)

    def advance(self, limit: int) -> Iterator[Progress]:
        if self.position >= limit:
            return
        engine = self._engine = self._open()
        plan, rows = self._work.plan, self._work.rows
        for step in range(self.position + 1, limit + 1):
            indexes = batch_rows(plan.seed, step, len(rows), plan.batch)
            update = update_for(plan, step, self.total)
            result = engine.step([rows[i] for i in indexes], update)
            loss = float(result.loss_sum) / int(result.count)
            if not (math.isfinite(loss) and math.isfinite(result.gradient_norm)):
                lines = ", ".join(str(self._work.folder.training[i].line) for i in indexes)
                raise NumericsError(
                    f"step {step}: the loss is {loss}, the gradient norm {result.gradient_norm} (train.jsonl lines "
                    f"{lines}; learning rate {update.learning_rate:g}); the state of step {step - 1} stands: try a "
                    "lower --learning-rate or --dtype float32 in a new build"
                )
            self._journal.add(
                {
                    "step": step,
                    "rows": indexes,
                    "learning_rate": update.learning_rate,
                    "loss": loss,
                    "tokens": int(result.count),
                    "norm": float(result.gradient_norm),
                }
            )
            yield Progress(position=step, loss=loss)

    def snapshot(self) -> Snapshot:
        if self._engine is None:
            raise AssertionError("a tune that made no step has nothing to save")
        objects, kept = self._journal.snapshot(finished=self.position == self.total)
        objects[STATE_ROLE] = state_parts(self._engine.export_state())
        summary = {
            "loss": self._journal.records[-1]["loss"],
            "probe": rounded_losses(self._engine.nll(self._probe_rows)),
        }
        return Snapshot(objects=objects, kept=kept, summary=summary)

    def _open(self) -> Engine:
        engine = self._work.engine()
        saved = self._work.saved
        if saved is None:
            engine.import_state(initial_state(self._work.adapter, self._work.plan.seed))
            return engine
        state = parse_state(saved.read(STATE_ROLE), self._work.adapter)
        engine.import_state(state)
        if digest(engine.export_state()) != digest(state):
            raise NumericsError(
                f"the engine does not give back the training state of step {self.position} that it was given; "
                "no step was made; resume on another engine"
            )
        if before := self._work.taken_over():
            check_probe(self._work, engine, saved, before, self._work.say)
        return engine


def check_probe(work: Work, engine: Engine, saved: Saved, before: str, say: Callable[[str], None]) -> None:
    """Refuse an engine that computes another function from a tune's arrays, imported just now, than `before` did.

    Raises:
        NumericsError: a token's loss of the two probe rows differs, unless drift is accepted.
        StateError: the saved losses cannot be those of the probe rows.
    """
    rows = [work.rows[i] for i in probe_rows(work.rows)]
    probe = saved.summary.get("probe")
    if not fits(probe, rows):
        raise StateError("the state's probe does not fit the folder's training rows")
    where = f"step {saved.position}"
    found = engine.nll(rows)
    check_drift(where, before, probe or [], found, accept=work.accept_drift, note=work.note, say=say)


def state_parts(state: TrainingState) -> list[Buffer]:
    """A training state as a safetensors file, in parts: `{group}/{array name}`, float32."""
    flat = {f"{group}/{name}": array for group, named in state.groups().items() for name, array in named.items()}
    return list(arrays.write_parts(flat))


def parse_state(data: bytes, spec: AdapterSpec) -> TrainingState:
    """A training state from untrusted bytes: exactly the spec's arrays, finite, float32.

    Raises:
        StateError: anything else.
    """
    shapes = spec.shapes()
    groups = ("adapter", "first_moment", "second_moment")
    expect: dict[str, tuple[Any, tuple[int, ...]]] = {
        f"{group}/{name}": (np.float32, shape) for group in groups for name, shape in shapes.items()
    }
    flat = arrays.read(data, expect=expect)
    adapter, first, second = ({name: flat[f"{group}/{name}"] for name in shapes} for group in groups)
    return TrainingState(adapter=adapter, first_moment=first, second_moment=second)


def load_training_state(work: Work) -> TrainingState:
    """The training state that the tune stage of this build saved.

    Raises:
        StateError: the tune has not finished.
    """
    tune = work.others.get("tune")
    if tune is None or not tune.finished:
        raise StateError(f"{work.name} needs a finished tune; list tune before it in stages")
    return parse_state(tune.read(STATE_ROLE), work.adapter)


def digest(state: TrainingState) -> str:
    """sha256 over every array's name and bytes."""
    total = hashlib.sha256()
    for part in state_parts(state):
        total.update(part)
    return total.hexdigest()
