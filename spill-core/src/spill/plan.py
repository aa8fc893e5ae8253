"""Making a plan from a folder, a model and settings, tokenizing the rows, and telling two plans apart."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import fields, frozen

from spill.engine import AdapterSpec, Row
from spill.errors import InputError, PlanError, PluginError
from spill.folder import EXAM, TRAINING, Folder, Settings, shown
from spill.models import Model, adapter_targets, default_learning_rate
from spill.models.text import Text
from spill.plugins import Registry
from spill.recipe import EPSILON, total_steps, warmup_steps
from spill.records import Plan, Scalar, printable

ANSWER_ROOM = 4
DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,80}[A-Za-z0-9])?")


@frozen(kw_only=True)
class Student:
    """The model with what the core reads from it: text, adapted layers, and the folder's rows in its tokens."""

    model: Model
    text: Text
    adapter: AdapterSpec
    rows: tuple[Row, ...]
    max_new_tokens: int


def prepare(
    model: Model, stop_ids: tuple[int, ...], folder: Folder, settings: Settings, tick: Callable[[], None]
) -> Student:
    """Tokenize everything, and refuse what does not fit, before any weight is loaded. Ticks at every row.

    Raises:
        InputError: rows that are too long, by file and line; a rank larger than a layer.
    """
    text = Text.load(model.directory, stop_ids)
    adapter = AdapterSpec(rank=settings.rank, alpha=settings.alpha, targets=adapter_targets(model))
    smallest = min(adapter.targets, key=lambda t: min(t.in_features, t.out_features))
    if settings.rank > min(smallest.in_features, smallest.out_features):
        raise InputError(
            f"rank is {settings.rank}, but {smallest.name} has only {smallest.out_features} x {smallest.in_features} "
            "weights: give a lower --rank"
        )
    window = model.config.get("max_position_embeddings")
    room = window if type(window) is int else None
    faults: list[str] = []
    rows = _training_rows(folder, text, settings.max_length, room, faults, tick)
    max_new_tokens = _answer_limit(folder, text, faults)
    for exam in folder.exam:
        tick()
        length = max(len(text.prompt(exam.prompt, folder.instructions)), len(text.prompt(exam.prompt)))
        if room is not None and length + max_new_tokens > room:
            faults.append(
                f"{EXAM}:{exam.line}: {length} tokens and {max_new_tokens} for the answer, the model reads {room}"
            )
    if faults:
        raise InputError(
            f"{len(faults)} row{'s do' if len(faults) > 1 else ' does'} not fit the model; shorten what is too long, "
            "or raise max_length where it is the limit",
            shown(faults),
        )
    return Student(model=model, text=text, adapter=adapter, rows=tuple(rows), max_new_tokens=max_new_tokens)


def _training_rows(
    folder: Folder, text: Text, max_length: int, room: int | None, faults: list[str], tick: Callable[[], None]
) -> list[Row]:
    """The rows as tokens, prompt masked; `room` is how many tokens the model reads."""
    rows: list[Row] = []
    for training in folder.training:
        tick()
        try:
            prompt, answer = text.prompt(training.prompt), text.answer(training.answer)
        except InputError as error:
            faults.append(f"{TRAINING}:{training.line}: {error.message}")
            continue
        tokens = np.concatenate([prompt, answer]).astype(np.int32)
        if len(tokens) > max_length:
            faults.append(f"{TRAINING}:{training.line}: {len(tokens)} tokens, max_length is {max_length}")
        elif room is not None and len(tokens) > room:
            faults.append(f"{TRAINING}:{training.line}: {len(tokens)} tokens, the model reads {room}")
        else:
            mask = np.zeros(len(tokens), np.int32)
            mask[len(prompt) :] = 1
            rows.append(Row(tokens=tokens, mask=mask))
    return rows


def _answer_limit(folder: Folder, text: Text, faults: list[str]) -> int:
    """Most tokens of an exam's answer: the longest expected one, its end token, and room for white space that the
    grading strips."""
    longest = 0
    for exam in folder.exam:
        for answer in exam.expected:
            try:
                longest = max(longest, len(text.answer(answer)))
            except InputError as error:
                faults.append(f"{EXAM}:{exam.line}: {error.message}")
    return longest + ANSWER_ROOM


def make_plan(
    folder: Folder,
    settings: Settings,
    student: Student,
    dtype: Literal["float32", "bfloat16"],
    registry: Registry,
    flags: Mapping[str, Scalar | list[str]],
    known_as: str,
    before: Plan | None,
) -> Plan:
    """The plan of a build. `known_as` is the student's name when the build began; the learning rate goes by it. What
    nobody can set is as in `before`, the plan that the build began with: a newer spill may begin with other values.

    Raises:
        PluginError: a stage that no plugin brings.
    """
    plugins = {name: registry.get("stage", name).plugin.distribution for name in settings.stages}
    steps = total_steps(len(student.rows), settings.batch, settings.epochs)
    rate = settings.learning_rate
    if rate is None:
        rate = default_learning_rate(known_as, student.model.parameters)
    fixed: dict[str, Any] = {
        "warmup_steps": warmup_steps(steps),
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": EPSILON,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
    }
    if before:
        fixed = {name: getattr(before, name) for name in fixed}
    return Plan(
        student=known_as,
        model=student.model.identity,
        files=folder.hashes(),
        dtype=dtype,
        seed=settings.seed,
        epochs=settings.epochs,
        batch=settings.batch,
        learning_rate=rate,
        **fixed,
        rank=settings.rank,
        alpha=settings.alpha,
        max_length=settings.max_length,
        max_new_tokens=student.max_new_tokens,
        stages=settings.stages,
        plugins=plugins,
        flags=dict(flags),
    )


def differences(old: Plan, new: Plan, *, without: Sequence[str] = ()) -> list[str]:
    """One line for every field that differs, with both values; for files, one for every file."""
    lines: list[str] = []
    for attribute in fields(Plan):
        name = attribute.name
        if name in Plan.NOT_COMPARED or name in without:
            continue
        before, now = getattr(old, name), getattr(new, name)
        if name == "files":
            lines += [
                f"{printable(file)}: sha256 was {_short(before.get(file))}, is {_short(now.get(file))}"
                for file in sorted({*before, *now})
                if before.get(file) != now.get(file)
            ]
        elif before != now:
            lines.append(f"{name} was {_shown(before)}, is {_shown(now)}")
    return lines


def refuse_differences(uri: str, lines: Sequence[str]) -> None:
    """Raises PlanError where there are any."""
    if lines:
        raise PlanError(
            f"the state at {uri} was built from something else; undo the change, or build at another --state", lines
        )


def _short(digest: str | None) -> str:
    return printable(digest)[:16] if digest else "no such file"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return printable(value if isinstance(value, str) else repr(value))


def missing_stage_plugin(plan: Plan, registry: Registry) -> None:
    """Raises PluginError for a stage of the state that nothing installed brings, naming who brought it."""
    names = registry.named("stage")
    for stage in plan.stages:
        if stage not in names:
            # What a state says is not to be trusted: only a distribution's name may stand in a command.
            named = plan.plugins.get(stage, "")
            hint = f"pip install {named}" if DISTRIBUTION.fullmatch(named) else "install the plugin that brings it"
            broken = next((p for p in registry.plugins if p.cause and p.distribution == named), None)
            if broken:
                hint = f"{broken.label} is broken: {broken.cause} (`spill plugins` shows all of it)"
            bringer = printable(repr(named)) if named else "an unnamed plugin"
            raise PluginError(
                f"the state has a stage {printable(stage)!r} of {bringer}, and nothing installed here brings it: {hint}"
            )
