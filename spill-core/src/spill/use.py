"""Using what a build made: asking the model, and exporting the adapter. Nothing here writes to the state."""

import sys
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
from spill.opening import Place, find, locate, pinned, saved_stage, stored_folder
from spill.plugins import Registry
from spill.records import Plan, printable
from spill.runner import open_engine
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
    for note in head.notes:
        _tell(f"warning: {printable(note)}")
    plan = head.commit.plan
    name = student or pinned(
        _recorded_student(place, plan),
        head.commit,
        lambda asked: models.resolve(asked, weights=weights, tick=stop.tick, say=_tell, offline=True),
    )
    model = models.resolve(name, weights=weights, tick=stop.tick, say=_tell)
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


def _recorded_student(place: Place, plan: Plan) -> str:
    """The student of a build whose user names none: the state's, but never a path that a state names."""
    name = plan.student
    if name == "local":
        folder = load(place.directory) if place.directory else None
        name = folder.settings({}).student if folder else name
        if name == "local":
            raise InputError("this build's student was a directory of another machine: give --student PATH")
        return name
    if models.names_directory(name):
        raise InputError(f"the state names a directory as its student ({printable(name)}): give --student yourself")
    if place.directory is None:
        _tell(f"the state names its student: {printable(name)}")
    return name


def _tell(line: str) -> None:
    """To standard error: standard output is for answers."""
    print(line, file=sys.stderr, flush=True)


def _no_tune(made: Made, otherwise: str) -> StateError:
    if "tune" not in made.plan.stages:
        return StateError(f"this build has no stage tune, so no adapter{otherwise}")
    return StateError(f"the tune is not finished, there is no adapter yet: spill resume {made.place.again}{otherwise}")


@contextmanager
def open_answers(
    *, engine: str | None, base: bool, max_tokens: int, registry: Registry, stop: StopRequest, **where: Any
) -> Iterator[Callable[[str], str]]:
    """A function from a prompt to the model's answer, greedy.

    Raises:
        StateError: the tune is not finished and `base` was not asked for.
    """
    directory = locate(where["target"], where["state"]).directory
    name = engine or (load(directory).settings({}).engine if directory else None)
    spec = registry.engine(name) if name else registry.choose_engine()[0]
    made = _made(registry=registry, stop=stop, **where)
    if made.state is None and not base:
        raise _no_tune(made, "; ask the untrained model with --base")
    text = Text.load(made.model.directory, models.stop_ids(made.model))
    opened = open_engine(spec, made.model.directory, made.adapter, Numerics(dtype=made.plan.dtype), stop.tick)
    window = made.model.config.get("max_position_embeddings")

    def answer(prompt: str) -> str:
        tokens = text.prompt(prompt, made.instructions if base else "")
        if type(window) is int and len(tokens) >= window:
            raise InputError(f"the prompt has {len(tokens)} tokens, the model reads {window}: shorten it")
        room = min(max_tokens, window - len(tokens)) if type(window) is int else max_tokens
        completion = next(iter(opened.generate([tokens], room, text.stop_ids, adapter=not base)))
        return printable(text.decode(completion.tokens), limit=10**6, keep_lines=True)

    try:
        if made.state is not None and not base:
            opened.import_state(made.state)
        yield answer
    finally:
        opened.close()


def export(*, out: str, layout: str, merged: bool, registry: Registry, stop: StopRequest, **where: Any) -> list[str]:
    """Write the tuned adapter, or the base with it merged in; lines for the user.

    Raises:
        StateError: the tune is not finished.
        InputError: `out` exists and is not empty.
    """
    from spill.export import repository, write_adapter, write_merged

    made = _made(registry=registry, stop=stop, **where)
    if made.state is None:
        raise _no_tune(made, "")
    if merged:
        done = write_merged(Path(out), made.model, made.state, made.adapter, stop.tick)
        return [f"wrote {path}" for path in done.files] + [
            f"merged in float32, stored as {done.dtype}: rounding changed a weight by at most {done.rounding:.1e}",
            f"next: load {out} as any model directory",
        ]
    files = write_adapter(Path(out), layout, made.state, made.adapter, made.plan)
    known = repository(made.plan.student)
    base = printable(known if "/" in known else str(made.model.directory))
    following = {
        "peft": f"PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base!r}), {out!r})",
        "mlx": f"mlx_lm.load({base!r}, adapter_path={out!r})",
    }
    return [*(f"wrote {path}" for path in files), f"next: {following[layout]}"]
