"""The folder a build is made from: its files, settings and rows, with every fault told at once, by file and line."""

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, fields, frozen

from spill.errors import InputError
from spill.records import Malformed, Scalar, unique_keys

EXAM = "evals.jsonl"
TRAINING = "train.jsonl"
INSTRUCTIONS = "instructions.txt"
SETTINGS = "spill.toml"
DATA_FILES = (EXAM, TRAINING, INSTRUCTIONS)
FILES = (*DATA_FILES, SETTINGS)
REQUIRED = (EXAM, TRAINING)
FILE_LIMIT = 256 * 1024**2
ROW_LIMIT = 1024**2
SHOWN_FAULTS = 50


@frozen(kw_only=True)
class Settings:
    """What spill.toml and the flags may set. `None` leaves the choice to spill; docs name the defaults.

    Attributes:
        student: a tag such as qwen2.5:0.5b, hf:org/name@revision, or a directory.
        engine: an engine's name; the best available one otherwise.
        dtype: compute dtype of the base, float32 or bfloat16; float32 on a CPU, bfloat16 on a GPU otherwise.
        seed: of the order of rows and of the adapter's first values.
        epochs: passes over the training rows.
        batch: rows per step.
        learning_rate: its peak; by the student's size otherwise.
        rank: of the adapter.
        alpha: the adapter's scale is alpha / rank.
        max_length: most tokens a training row may have, prompt and answer.
        stages: names, in order.
        reference: URI of an uninterrupted build whose scores the table shows.
    """

    student: str = "qwen2.5:0.5b"
    engine: str | None = None
    dtype: str | None = None
    seed: int = 0
    epochs: int = 2
    batch: int = 4
    learning_rate: float | None = None
    rank: int = 16
    alpha: float = 32.0
    max_length: int = 1024
    stages: tuple[str, ...] = ("eval:base", "tune", "eval:tuned")
    reference: str | None = None


@frozen(kw_only=True)
class TrainingRow:
    """A row of train.jsonl; `line` counts from 1."""

    line: int
    prompt: str
    answer: str


@frozen(kw_only=True)
class ExamRow:
    """A row of evals.jsonl; any of `expected` is right."""

    line: int
    prompt: str
    expected: tuple[str, ...]


@frozen(kw_only=True)
class Folder:
    """A folder's files, read and found faultless. `contents` maps names to bytes as they lie on disk."""

    contents: Mapping[str, bytes]
    training: tuple[TrainingRow, ...]
    exam: tuple[ExamRow, ...]
    instructions: str
    toml: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def hashes(self) -> dict[str, str]:
        """sha256 of every data file; spill.toml is not among them, its effect is in the plan."""
        return {n: hashlib.sha256(self.contents[n]).hexdigest() for n in DATA_FILES if n in self.contents}

    def settings(self, flags: Mapping[str, Any]) -> Settings:
        """Defaults, then spill.toml, then flags. Raises InputError on an impossible value in either."""
        return make_settings({**self.toml, **flags})


def read_files(directory: Path) -> dict[str, bytes]:
    """The folder's files as bytes.

    Raises:
        InputError: the folder or a file it must have is missing, or a file cannot be read.
    """
    if not directory.is_dir():
        raise InputError(f"there is no folder {directory}; `spill example relay` writes one to begin with")
    contents: dict[str, bytes] = {}
    faults = []
    for name in FILES:
        path = directory / name
        try:
            if path.stat().st_size > FILE_LIMIT:
                faults.append(f"{name}: larger than {FILE_LIMIT // 1024**2} MiB")
                continue
            contents[name] = path.read_bytes()
        except FileNotFoundError:
            if name in REQUIRED:
                faults.append(f"{name}: missing")
        except OSError as error:
            faults.append(f"{name}: cannot be read: {error.strerror}")
    if faults:
        raise InputError(f"{directory} is not a folder to build from", faults)
    return contents


def parse(contents: Mapping[str, bytes], where: str) -> Folder:
    """Check everything that can be known without a model.

    Raises:
        InputError: with one detail line for every fault, by file and line.
    """
    faults: list[str] = []
    training = tuple(_training_rows(contents.get(TRAINING, b""), faults))
    exam = tuple(_exam_rows(contents.get(EXAM, b""), faults))
    instructions = _text(INSTRUCTIONS, contents.get(INSTRUCTIONS, b""), faults).strip()
    toml = _toml(contents.get(SETTINGS, b""), faults)
    try:
        make_settings(toml)
    except InputError as error:
        faults += [f"{SETTINGS}: {detail}" for detail in error.details]
    if faults:
        more = len(faults) - SHOWN_FAULTS
        shown = [*faults[:SHOWN_FAULTS], *([f"and {more} more"] if more > 0 else [])]
        raise InputError(f"{where} has {len(faults)} fault{'s' * (len(faults) > 1)}; mend and run again", shown)
    return Folder(
        contents=dict(contents),
        training=training,
        exam=exam,
        instructions=instructions,
        toml=toml,
        warnings=tuple(_leaks(training, exam)),
    )


def load(directory: Path) -> Folder:
    """`read_files` and `parse` in one."""
    return parse(read_files(directory), str(directory))


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from plain values.

    Raises:
        InputError: with one detail line for every unknown key and impossible value.
    """
    faults = []
    known = {f.name: f for f in fields(Settings)}
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            faults.append(f"unknown key {key!r}; known: {', '.join(known)}")
            continue
        made, fault = _setting(key, value)
        if fault:
            faults.append(f"{key} is {value!r}: {fault}")
        else:
            good[key] = made
    if faults:
        raise InputError("a setting cannot be used", faults)
    return evolve(Settings(), **good)


_WHOLE = {"epochs": 1, "batch": 1, "rank": 1, "max_length": 2}


def _setting(key: str, value: Any) -> tuple[Any, str]:
    """The value as a setting, or why it is none."""
    whole, number = type(value) is int, type(value) in (int, float)
    if key in _WHOLE:
        return value, "" if whole and _WHOLE[key] <= value < 10**9 else f"give a whole number from {_WHOLE[key]}"
    if key == "seed":
        return value, "" if whole and 0 <= value < 2**63 else "give a whole number from 0"
    if key == "learning_rate":
        return (float(value), "") if number and 0 <= value < 10 else (None, "give a number from 0, such as 1e-3")
    if key == "alpha":
        return (float(value), "") if number and 0 < value < 10**6 else (None, "give a number above 0")
    if key == "dtype":
        return value, "" if value in ("float32", "bfloat16") else "give float32 or bfloat16"
    if key == "stages":
        good = isinstance(value, list | tuple) and value and all(isinstance(v, str) and v.strip() for v in value)
        if not good:
            return None, 'give a list of stage names, such as ["eval:base", "tune", "eval:tuned"]'
        if len({v.casefold() for v in value}) < len(value):
            return None, "two stages have the same name (case does not count)"
        return tuple(value), ""
    return value, "" if isinstance(value, str) and value.strip() else "give a text that is not empty"


def settings_flags(flags: Mapping[str, Any]) -> dict[str, Scalar | list[str]]:
    """The flags that are given and belong into the plan, as JSON values."""
    left_out = {"engine", "reference", "student"}  # these may differ from machine to machine
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in flags.items()
        if value is not None and key not in left_out
    }


def _text(name: str, data: bytes, faults: list[str]) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        faults.append(f"{name}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8")
        return ""


def _toml(data: bytes, faults: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(SETTINGS, data, faults).replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        faults.append(f"{SETTINGS}: not TOML: {error}")
        return {}


def _objects(name: str, data: bytes, faults: list[str]) -> Iterable[tuple[int, dict[str, Any]]]:
    """(line, object) of every good line; blank lines, CRLF, a BOM and a missing last newline are fine."""
    if data.startswith(b"\xef\xbb\xbf"):
        data = data[3:]
    rows = 0
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        rows += 1
        if len(raw) > ROW_LIMIT:
            faults.append(f"{name}:{line}: {len(raw):,} bytes, a row may have {ROW_LIMIT:,}")
            continue
        try:
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
        except UnicodeDecodeError as error:
            faults.append(f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8")
        except Malformed as error:
            faults.append(f"{name}:{line}: {error}")
        except (ValueError, RecursionError) as error:
            faults.append(f"{name}:{line}: not JSON: {error}")
        else:
            if isinstance(value, dict):
                yield line, value
            else:
                faults.append(f"{name}:{line}: not a JSON object")
    if rows == 0:
        faults.append(f"{name}: no rows")


def _training_rows(data: bytes, faults: list[str]) -> Iterable[TrainingRow]:
    for line, row in _objects(TRAINING, data, faults):
        bad = [f"{TRAINING}:{line}: {_column_fault(row, c)}" for c in ("prompt", "answer") if _column_fault(row, c)]
        faults += bad
        if not bad:
            yield TrainingRow(line=line, prompt=row["prompt"], answer=row["answer"])


def _exam_rows(data: bytes, faults: list[str]) -> Iterable[ExamRow]:
    for line, row in _objects(EXAM, data, faults):
        bad = [fault] if (fault := _column_fault(row, "prompt")) else []
        expected = row.get("expected")
        accepted: list[Any] = expected if isinstance(expected, list) and expected else [expected]
        if "expected" not in row:
            bad.append("no column 'expected'")
        elif not all(_is_filled(a) for a in accepted):
            bad.append(f"'expected' is {expected!r:.60}, give a text or a list of texts, none of them empty")
        faults += [f"{EXAM}:{line}: {b}" for b in bad]
        if not bad:
            yield ExamRow(line=line, prompt=row["prompt"], expected=tuple(accepted))


def _column_fault(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        return f"no column {column!r}"
    return "" if _is_filled(row[column]) else f"{column!r} is {row[column]!r:.60}, give a text that is not empty"


def _is_filled(value: object) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate from a \\ud800 escape is no text
        return False
    return True


def _leaks(training: Iterable[TrainingRow], exam: Iterable[ExamRow]) -> list[str]:
    seen = {" ".join(r.prompt.casefold().split()): r.line for r in training}
    return [
        f"{EXAM}:{row.line} asks what {TRAINING}:{seen[key]} trains on"
        for row in exam
        if (key := " ".join(row.prompt.casefold().split())) in seen
    ]
