"""From how a student is asked for to a model directory: the table of tags, and the other forms."""

import os
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from spill.engine import Tick
from spill.errors import ModelError
from spill.models import converting, hub, staging
from spill.models.directory import Model, read_directory
from spill.records import printable

LOCAL = "local"


@frozen(kw_only=True)
class Tag:
    """A short name of a hub repository.

    Attributes:
        repository: `org/name` on the hub.
        revision: a commit, branch or tag. For a branch, the commit that it stood for when it was fetched is in
            `Model.revision`, and what a build is held to on every machine is `Model.identity`, the content's hash.
        learning_rate: what a tune starts from unless told otherwise.
    """

    repository: str
    revision: str
    learning_rate: float


TAGS = {
    "qwen2.5:0.5b": Tag(repository="Qwen/Qwen2.5-0.5B-Instruct", revision="main", learning_rate=1e-3),
    "qwen2.5:1.5b": Tag(repository="Qwen/Qwen2.5-1.5B-Instruct", revision="main", learning_rate=5e-4),
    "qwen2.5:7b": Tag(repository="Qwen/Qwen2.5-7B-Instruct", revision="main", learning_rate=2e-4),
    "smollm2:135m": Tag(repository="HuggingFaceTB/SmolLM2-135M-Instruct", revision="main", learning_rate=2e-3),
    "smollm2:360m": Tag(repository="HuggingFaceTB/SmolLM2-360M-Instruct", revision="main", learning_rate=1e-3),
    "smollm2:1.7b": Tag(repository="HuggingFaceTB/SmolLM2-1.7B-Instruct", revision="main", learning_rate=5e-4),
    "llama3.2:1b": Tag(repository="meta-llama/Llama-3.2-1B-Instruct", revision="main", learning_rate=5e-4),
    "llama3.2:3b": Tag(repository="meta-llama/Llama-3.2-3B-Instruct", revision="main", learning_rate=5e-4),
}

# Up to so many weights, this learning rate. Measured with LoRA of rank 16 on 100 rows, 50 steps: 135 M weights learn at
# 2e-3 (exact match 1.00 and 0.95 with two seeds), less at 1e-3 (0.85), nothing at 1e-4. At 3e-3 they learn no more, and
# rounding grows a thousandfold within a tune, so that two engines part. Larger models take smaller rates.
RATES = ((250_000_000, 2e-3), (750_000_000, 1e-3), (4_000_000_000, 5e-4))
RATE_ABOVE = 2e-4


def default_learning_rate(student: str, parameters: int) -> float:
    """The tag's own rate; for any other student the rate of its size, which never rises with the size."""
    if student in TAGS:
        return TAGS[student].learning_rate
    return next((rate for limit, rate in RATES if parameters <= limit), RATE_ABOVE)


def resolve(
    student: str, *, weights: str = "", tick: Tick, say: Callable[[str], None], offline: bool = False
) -> Model | None:
    """The model that `student` names, on this machine, hashed.

    Args:
        student: a tag; `smollm2:135m-q4`; `hf:org/name@revision`; or a directory (it holds a separator or exists).
        weights: URI of a store that holds the model's directory; it is staged, and the hub is not asked.
        tick: called between reads and downloads; it may raise, which ends them.
        say: takes plain lines about what is fetched, staged or converted, never called when there is nothing to do.
        offline: no network and no store; None where that leaves nothing on this machine. Converting the packaged
            model is local work and is done.

    Raises:
        ModelError: unknown, not to be had, or not usable, in one line with the ways out.
        StoreError: the store behind `weights` fails.
    """
    student = student.strip()
    if student in TAGS:
        name = hub.HubName(repository=TAGS[student].repository, revision=TAGS[student].revision)
        return _remote(student, name, weights, tick, say, offline)
    if student.startswith("hf:"):
        name = hub.HubName.parse(student)
        return _remote(str(name), name, weights, tick, say, offline)
    if student == converting.TAG:
        return _packaged(weights, tick, say, offline)
    return _directory(student, weights, tick, offline)


def _remote(
    student: str, name: hub.HubName, weights: str, tick: Tick, say: Callable[[str], None], offline: bool
) -> Model | None:
    if weights:
        return _staged(student, weights, tick, say, offline)
    directory = hub.fetched(name) if offline else hub.fetch(name, asked=student, tick=tick, say=say)
    if directory is None:
        return None
    return read_directory(directory, student=student, tick=tick, revision=hub.revision_of(directory))


def _packaged(weights: str, tick: Tick, say: Callable[[str], None], offline: bool) -> Model | None:
    if weights:
        return _staged(converting.TAG, weights, tick, say, offline)
    if offline and not converting.available():
        return None
    directory = converting.converted(tick=tick, say=say)
    return read_directory(directory, student=converting.TAG, tick=tick)


def _staged(student: str, weights: str, tick: Tick, say: Callable[[str], None], offline: bool) -> Model | None:
    directory = staging.staged(weights) if offline else staging.stage(weights, tick=tick, say=say)
    return None if directory is None else read_directory(directory, student=student, tick=tick)


def at_revision(student: str, commit: str) -> str:
    """The same student as the hub had it at a commit of 40 hexadecimal digits; unchanged where it is not the hub's."""
    if student in TAGS:
        return str(hub.HubName(repository=TAGS[student].repository, revision=commit))
    if student.startswith("hf:"):
        return str(hub.HubName(repository=hub.HubName.parse(student).repository, revision=commit))
    return student


def names_directory(student: str) -> bool:
    """Whether `resolve` would take this for a directory of this machine. A name that comes out of a state must not be
    one: a model's path is the user's to give."""
    if student in TAGS or student == converting.TAG or student.startswith("hf:"):
        return False
    separated = any(separator in student for separator in ("/", os.sep))
    return separated or os.path.exists(os.path.expanduser(student))


def _directory(student: str, weights: str, tick: Tick, offline: bool) -> Model | None:
    if not names_directory(student):
        if student == LOCAL:
            raise ModelError("the student was a directory elsewhere; give one of equal content with --student PATH")
        tags = ", ".join([*TAGS, converting.TAG])
        raise ModelError(f"unknown student {printable(student)!r}: take {tags}, hf:org/name@revision or a directory")
    if weights:
        raise ModelError(f"the student is the directory {printable(student)}: leave out --weights, or name a tag")
    directory = Path(os.path.abspath(os.path.expanduser(student)))
    if offline and not directory.exists():
        return None
    return read_directory(directory, student=LOCAL, tick=tick)
