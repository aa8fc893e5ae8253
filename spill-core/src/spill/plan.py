"""Making a plan from a folder, a model and settings, tokenizing the rows, and telling two plans apart."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import fields, frozen

from spill.engine import AdapterSpec, Row
from spill.errors import InputError, PlanError, PluginError
from spill.folder import EXAM, TRAINING, Folder, Settings
from spill.models import Model, adapter_targets, default_learning_rate
from spill.models.text import Text
from spill.plugins import Registry
from spill.recipe import total_steps, warmup_steps
from spill.records import Plan, Scalar, printable

ANSWER_ROOM = 4


@frozen(kw_only=True)
class Student:
    """The model with what the core reads from it: text, adapted layers, and the folder's rows in its tokens."""

    model: Model
    text: Text
    adapter: AdapterSpec
    rows: tuple[Row, ...]
    max_new_tokens: int


def prepare(model: Model, stop_ids: tuple[int, ...], folder: Folder, settings: Settings) -> Student:
    """Tokenize everything, and refuse what does not fit, before any weight is loaded.

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
    rows: list[Row] = []
    faults: list[str] = []
    for training in folder.training:
        prompt, answer = text.prompt(training.prompt), text.answer(training.answer)
        tokens = np.concatenate([prompt, answer]).astype(np.int32)
        if len(tokens) > settings.max_length:
            faults.append(f"{TRAINING}:{training.line}: {len(tokens)} tokens, max_length is {settings.max_length}")
            continue
        mask = np.zeros(len(tokens), np.int32)
        mask[len(prompt) :] = 1
        rows.append(Row(tokens=tokens, mask=mask))
    # One end token, and room for white space that the grading strips.
    longest = max(len(text.answer(answer)) for row in folder.exam for answer in row.expected)
    max_new_tokens = longest + ANSWER_ROOM
    window = model.config.get("max_position_embeddings")
    if isinstance(window, int):
        for exam in folder.exam:
            length = max(len(text.prompt(exam.prompt, folder.instructions)), len(text.prompt(exam.prompt)))
            if length + max_new_tokens > window:
                faults.append(f"{EXAM}:{exam.line}: {length} tokens and an answer exceed the model's {window}")
    if faults:
        raise InputError(
            f"{len(faults)} row{'s' * (len(faults) > 1)} too long; shorten them, or raise max_length where it is the "
            "limit",
            faults[:50],
        )
    return Student(model=model, text=text, adapter=adapter, rows=tuple(rows), max_new_tokens=max_new_tokens)


def make_plan(
    folder: Folder,
    settings: Settings,
    student: Student,
    dtype: Literal["float32", "bfloat16"],
    registry: Registry,
    flags: Mapping[str, Scalar | list[str]],
    known_as: str,
) -> Plan:
    """The plan of a build. `known_as` is the student's name when the build began; the learning rate goes by it.

    Raises:
        PluginError: a stage that no plugin brings.
        InputError: the stages do not fit together.
    """
    plugins = {name: registry.get("stage", name).plugin.distribution for name in settings.stages}
    if "eval:tuned" in settings.stages and "tune" not in settings.stages[: settings.stages.index("eval:tuned")]:
        raise InputError("stages lists eval:tuned without tune before it; put tune first or leave eval:tuned out")
    steps = total_steps(len(student.rows), settings.batch, settings.epochs)
    rate = settings.learning_rate
    if rate is None:
        rate = default_learning_rate(known_as, student.model.parameters)
    return Plan(
        student=known_as,
        model=student.model.identity,
        files=folder.hashes(),
        dtype=dtype,
        seed=settings.seed,
        epochs=settings.epochs,
        batch=settings.batch,
        learning_rate=rate,
        warmup_steps=warmup_steps(steps),
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        weight_decay=0.0,
        clip_norm=1.0,
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
                f"{file}: sha256 was {_short(before.get(file))}, is {_short(now.get(file))}"
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
    return printable(value if isinstance(value, str) else repr(value))


def missing_stage_plugin(plan: Plan, registry: Registry) -> None:
    """Raises PluginError for a stage of the state that nothing installed brings, naming who brought it."""
    names = registry.named("stage")
    for stage in plan.stages:
        if stage not in names:
            raise PluginError(
                f"the state has stage {printable(stage)!r} of {printable(plan.plugins.get(stage, '?'))}, which is not "
                f"installed here: pip install {printable(plan.plugins.get(stage, '?'))}"
            )
