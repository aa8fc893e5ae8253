"""Using what a build made: asking the model, and exporting the adapter. Nothing here writes to the state."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from spill import models
from spill.engine import AdapterSpec, Numerics, TrainingState
from spill.errors import InputError, PlanError, StateError
from spill.folder import load
from spill.models.text import Text
from spill.plugins import Registry
from spill.records import Plan, printable
from spill.runner import Place, find, open_engine, saved_stage, stored_folder
from spill.signals import StopRequest
from spill.stages.tune import STATE_ROLE, parse_state


@frozen(kw_only=True)
class Made:
    """A build's student and what its tune made; `state` is None where the tune is not finished."""

    place: Place
    plan: Plan
    model: models.Model
    adapter: AdapterSpec
    state: TrainingState | None
    instructions: str


def _made(
    *, target: str, state: str | None, student: str | None, weights: str, registry: Registry, stop: StopRequest
) -> Made:
    place, store, head = find(target, state, registry)
    plan = head.commit.plan
    name = student or plan.student
    if not student and place.directory and plan.student == "local":
        name = load(place.directory).settings({}).student
    if name == "local":
        raise InputError("this build's student was a directory: give --student PATH")
    model = models.resolve(name, weights=weights, tick=stop.tick, say=lambda line: None)
    assert model is not None
    if model.identity != plan.model:
        raise PlanError(
            f"{printable(name)} has {model.identity[:24]}, this build was made from {printable(plan.model)[:24]}: "
            "give --student with the same content"
        )
    spec = AdapterSpec(rank=plan.rank, alpha=plan.alpha, targets=models.adapter_targets(model))
    record = head.commit.stages.get("tune")
    trained = None
    if record and record.finished:
        trained = parse_state(saved_stage(store, head.commit, record).read(STATE_ROLE), spec)
    folder = stored_folder(store, head.commit)
    return Made(place=place, plan=plan, model=model, adapter=spec, state=trained, instructions=folder.instructions)


@contextmanager
def open_answers(
    *, engine: str | None, base: bool, max_tokens: int, registry: Registry, stop: StopRequest, **where: Any
) -> Iterator[Callable[[str], str]]:
    """A function from a prompt to the model's answer, greedy.

    Raises:
        StateError: the tune is not finished and `base` was not asked for.
    """
    made = _made(registry=registry, stop=stop, **where)
    if made.state is None and not base:
        raise StateError(f"the tune is not finished: spill resume {made.place.again}, or ask with --base")
    spec = registry.engine(engine) if engine else registry.choose_engine()[0]
    text = Text.load(made.model.directory, models.stop_ids(made.model))
    opened = open_engine(spec, made.model.directory, made.adapter, Numerics(dtype=made.plan.dtype), stop.tick)
    if made.state is not None and not base:
        opened.import_state(made.state)

    def answer(prompt: str) -> str:
        tokens = text.prompt(prompt, made.instructions if base else "")
        completion = next(iter(opened.generate([tokens], max_tokens, text.stop_ids, adapter=not base)))
        return printable(text.decode(completion.tokens), limit=10**6, keep_lines=True)

    try:
        yield answer
    finally:
        opened.close()


def export_adapter(*, out: str, registry: Registry, stop: StopRequest, **where: Any) -> list[str]:
    """Write the tuned adapter in PEFT's layout; lines for the user."""
    from spill.export import write_peft

    made = _made(registry=registry, stop=stop, **where)
    if made.state is None:
        raise StateError(f"the tune is not finished, there is no adapter yet: spill resume {made.place.again}")
    files = write_peft(Path(out), made.state, made.adapter, made.plan)
    return [f"wrote {path}" for path in files] + [
        f"next: peft.PeftModel.from_pretrained(base, {str(out)!r}) with base {made.plan.student}"
    ]
