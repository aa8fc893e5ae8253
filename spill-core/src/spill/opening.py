"""Finding a build, and comparing it with what is asked, before anything is written or loaded."""

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from spill import models
from spill.errors import InputError, StateError, StoreError
from spill.folder import DATA_FILES, Folder, Settings, load, make_settings, parse
from spill.plan import differences, missing_stage_plugin, refuse_differences
from spill.plugins import Registry
from spill.records import Commit, Malformed, Plan, StageRecord, from_json, printable
from spill.stages import Saved
from spill.state import Head, newest, read_object
from spill.stores import Store, local_path, open_store, scheme_of
from spill.stores.local import explain


@frozen(kw_only=True)
class Request:
    """What the command line asks for. `target` is a folder or a state's URI; `flags` are settings by name."""

    target: str
    state: str | None = None
    flags: Mapping[str, Any] = field(factory=dict)
    weights: str = ""
    stop_after: str | None = None
    commit_every: float | None = None
    accept_drift: bool = False
    takeover: bool = False
    resume: bool = False


@frozen(kw_only=True)
class Place:
    """Where a build lives: its folder on this machine, if there is one, and its state."""

    directory: Path | None
    uri: str

    @property
    def again(self) -> str:
        """The argument(s) that name this place in a command."""
        if self.directory is None:
            return shlex.quote(self.uri)
        folder = shlex.quote(str(self.directory))
        usual = str(self.directory / ".spill" / "state")
        return folder if self.uri == usual else f"{folder} --state {shlex.quote(self.uri)}"


@frozen(kw_only=True)
class Opened:
    """A build's state and inputs, read and compared, before anything is written or loaded."""

    place: Place
    store: Store
    head: Head | None
    folder: Folder
    settings: Settings


def locate(target: str, state: str | None) -> Place:
    """A folder with its state, or a state alone.

    Raises:
        InputError: a state's URI and --state together, or there is nothing of this name.
    """
    if not target.strip() or (state is not None and not state.strip()):
        raise InputError("a folder or a state's URI is empty; give a folder, a path, s3://, gs:// or az://")
    if scheme_of(target) != "file":
        if state:
            raise InputError(f"{target} is a state already; leave --state out")
        return Place(directory=None, uri=target)
    path = local_path(target)
    assert path is not None
    try:
        alone = (path / "log").is_dir() and not any((path / name).exists() for name in DATA_FILES)
    except OSError as error:
        raise StoreError(explain("read", path, 0, error)) from error
    if alone:
        if state:
            raise InputError(f"{target} is a state already; leave --state out")
        return Place(directory=None, uri=str(path))
    if not path.is_dir():
        raise InputError(f"there is no folder or state {target}; `spill example relay` writes a folder to begin with")
    return Place(directory=path, uri=state or str(path / ".spill" / "state"))


def find(target: str, state: str | None, registry: Registry) -> tuple[Place, Store, Head]:
    """A state that must exist, for commands that only read.

    Raises:
        StateError: there is none.
    """
    place = locate(target, state)
    store = open_store(place.uri, registry)
    head = newest(store)
    if head is None:
        raise StateError(f"there is no state at {place.uri}; `spill build FOLDER` begins one")
    return place, store, head


def open_build(request: Request, registry: Registry) -> Opened:
    """Read the state and the folder, and compare what can be compared without a model."""
    place = locate(request.target, request.state)
    store = open_store(place.uri, registry)
    head = newest(store)
    if head is None and (request.resume or place.directory is None):
        raise StateError(f"there is no state at {place.uri} to resume; `spill build FOLDER --state URI` begins one")
    folder = load(place.directory) if place.directory else stored_folder(store, head.commit if head else None)
    if head is None:
        return Opened(place=place, store=store, head=None, folder=folder, settings=folder.settings(request.flags))
    plan = head.commit.plan
    missing_stage_plugin(plan, registry)
    if place.directory is None:
        settings = make_settings({**plan_settings(plan), **request.flags})
    else:
        settings = folder.settings({**remembered_flags(plan), **request.flags})
    asked = {key: getattr(settings, key) for key in plan_settings(plan) if key != "student"}
    now = evolve(
        plan,
        files=folder.hashes(),
        **{key: value for key, value in asked.items() if value is not None},
    )
    refuse_differences(place.uri, differences(plan, now, without=changeable(request)))
    return Opened(place=place, store=store, head=head, folder=folder, settings=settings)


def refuse_local(student: str) -> None:
    """A state names no directory to load: a model's path comes from the user alone.

    Raises:
        InputError: it does, or its student was a directory elsewhere.
    """
    if student == "local" or models.names_directory(student):
        raise InputError("this build's student was a directory: give one of equal content with --student PATH")


def pinned(student: str, commit: Commit, at_hand: Callable[[str], models.Model | None]) -> str:
    """The student as the build began with it: where the hub has moved on, the revision that the state's runs used."""
    revisions = [r.versions["model"] for r in commit.runs if re.fullmatch(r"[0-9a-f]{40}", r.versions.get("model", ""))]
    if not revisions:
        return student
    here = at_hand(student)
    return student if here and here.identity == commit.plan.model else models.at_revision(student, revisions[-1])


def plan_settings(plan: Plan) -> dict[str, Any]:
    """The settings that a plan pins, by their names."""
    names = ("student", "dtype", "seed", "epochs", "batch", "learning_rate", "rank", "alpha", "max_length", "stages")
    return {name: getattr(plan, name) for name in names}


def remembered_flags(plan: Plan) -> dict[str, Any]:
    """The flags that the build began with, as far as a state may decide: settings of the plan, and no path."""
    pinned_names = plan_settings(plan)
    flags = {name: value for name, value in plan.flags.items() if name in pinned_names}
    student = flags.get("student")
    if student is not None and (not isinstance(student, str) or models.names_directory(student)):
        del flags["student"]
    return flags


def changeable(request: Request) -> tuple[str, ...]:
    """A dtype that is asked for by flag may change on resume: it is recorded as a hop."""
    return ("dtype",) if request.flags.get("dtype") else ()


def stored_folder(store: Store, commit: Commit | None) -> Folder:
    """The folder's data files as the state keeps them.

    Raises:
        StateError: the state holds none, or holds other files than its plan names.
    """
    if commit is None or not commit.folder:
        raise StateError(f"{store.uri} does not hold the folder's files yet; run `spill build FOLDER` with the folder")
    try:
        files = from_json(read_object(store, commit, commit.folder))
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            raise Malformed("not a mapping of names to texts")
        contents = {name: text.encode() for name, text in files.items()}
    except (Malformed, UnicodeEncodeError) as fault:
        raise StateError(f"{store.uri}: the folder's files cannot be read: {fault}") from None
    folder = parse(contents, f"the folder kept in {store.uri}")
    if set(contents) - set(DATA_FILES) or folder.hashes() != dict(commit.plan.files):
        raise StateError(f"{store.uri}: the folder's files in the state are not those of its plan")
    return folder


def saved_stage(store: Store, commit: Commit, record: StageRecord) -> Saved:
    """What a commit holds of a stage, with its objects read on demand."""
    return Saved(
        position=record.position,
        total=record.total,
        finished=record.finished,
        summary=record.summary,
        roles=tuple(record.objects),
        read=lambda role: read_object(store, commit, _object(record, role)),
    )


def _object(record: StageRecord, role: str) -> str:
    if role not in record.objects:
        raise StateError(f"the state lacks the object {role!r}")
    return record.objects[role]


def parse_stop_after(text: str | None, stages: tuple[str, ...]) -> tuple[str | None, int | None]:
    """`tune` is (tune, None): to its end; `tune:20` is (tune, 20).

    Raises:
        InputError: no such stage, or no such place in it.
    """
    if text is None:
        return None, None
    if text in stages:
        return text, None
    stage, _, number = text.rpartition(":")
    if stage not in stages or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise InputError(
            f"--stop-after {text!r} names no stage of this build; give one of {', '.join(stages)}, "
            f"or a place in one, such as {stages[-1]}:1"
        )
    return stage, int(number)


def model_line(plan: Plan, model: models.Model) -> str:
    return (
        f"model was {printable(plan.student)} with {printable(plan.model)[:24]}, "
        f"is {model.student} with {model.identity[:24]}"
    )
