"""The folder a build is made from: its files, settings and rows, with every fault told at once, by file and line."""

import hashlib
import json
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from attrs import evolve, fields, frozen

from spill.errors import InputError
from spill.records import Malformed, Scalar, printable, unique_keys

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
SHOWN_WARNINGS = 5
EXAMPLES = {
    EXAM: '{"prompt": "...", "expected": "..."}',
    TRAINING: '{"prompt": "...", "answer": "..."}',
}


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


def load(directory: Path) -> Folder:
    """Read a folder and check everything that can be known without a model.

    Raises:
        InputError: it is not there, or, with one detail line for every fault, it cannot be built from.
    """
    contents, faults = _read_files(directory)
    return parse(contents, str(directory), faults)


def parse(contents: Mapping[str, bytes], where: str, faults: Sequence[str] = ()) -> Folder:
    """A folder from its files' bytes; `faults` are lines about files that could not even be read.

    Raises:
        InputError: with one detail line for every fault, by file and line.
    """
    found = list(faults)
    if not contents and not found:
        raise InputError(
            f"{where} holds neither {EXAM} nor {TRAINING}; `spill example relay` writes a folder to begin with"
        )
    for name in REQUIRED:
        if name not in contents and not any(fault.startswith(name) for fault in faults):
            found.append(f"{name}: missing; a file of lines such as {EXAMPLES[name]}")
    training = tuple(_training_rows(contents[TRAINING], found)) if TRAINING in contents else ()
    exam = tuple(_exam_rows(contents[EXAM], found)) if EXAM in contents else ()
    instructions = _text(INSTRUCTIONS, contents.get(INSTRUCTIONS, b""), found).strip()
    toml = _toml(contents.get(SETTINGS, b""), found)
    if found:
        more = "s; mend them" if len(found) > 1 else "; mend it"
        raise InputError(f"{where} has {len(found)} fault{more} and run again", shown(found))
    return Folder(
        contents=dict(contents),
        training=training,
        exam=exam,
        instructions=instructions,
        toml=toml,
        warnings=tuple(_leaks(training, exam)),
    )


def shown(lines: Sequence[str], limit: int = SHOWN_FAULTS) -> list[str]:
    """The first of many lines, and how many more there are."""
    more = len(lines) - limit
    return [*lines[:limit], *([f"and {more} more"] if more > 0 else [])]


def _read_files(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """The folder's files as bytes, and a line for each that cannot be read."""
    try:
        if not directory.is_dir():
            found = "is a file, not a folder" if directory.exists() else "does not exist"
            raise InputError(f"{directory} {found}; `spill example relay` writes a folder to begin with")
    except OSError as error:
        raise InputError(f"the folder {directory} cannot be read: {error.strerror}") from error
    contents: dict[str, bytes] = {}
    faults = []
    for name in FILES:
        path = directory / name
        try:
            found_file = path.stat()
            if not stat.S_ISREG(found_file.st_mode):  # a pipe or a device could be read for ever
                faults.append(f"{name}: not a file")
            elif found_file.st_size > FILE_LIMIT:
                faults.append(f"{name}: {found_file.st_size:,} bytes, a file may have {FILE_LIMIT:,}")
            else:
                contents[name] = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            faults.append(f"{name}: cannot be read: {error.strerror}")
    return contents, faults


def make_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from plain values.

    Raises:
        InputError: with one detail line for every unknown key and impossible value.
    """
    good, faults = _checked(values)
    if faults:
        raise InputError(
            f"{len(faults)} setting{'s' * (len(faults) > 1)} cannot be used; change and run again", [*faults.values()]
        )
    return evolve(Settings(), **good)


def _checked(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The usable values by key, and by key what is wrong with the others."""
    known = [f.name for f in fields(Settings)]
    good: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for key, value in values.items():
        if key not in known:
            faults[key] = f"unknown key {printable(key, 60)!r}; known: {', '.join(known)}"
            continue
        good[key], fault = _setting(key, value)
        if fault:
            faults[key] = f"{key} is {_written(value)}: {fault}"
    return good, faults


def _written(value: Any) -> str:
    """A setting as it may have been written down, cut."""
    try:
        return printable(json.dumps(value, default=str), 60)
    except ValueError:  # more digits than Python writes
        return "a number of too many digits"


_WHOLE = {"epochs": 1, "batch": 1, "rank": 1, "max_length": 2}


def _setting(key: str, value: Any) -> tuple[Any, str]:
    """The value as a setting, or why it is none."""
    whole, number = type(value) is int, type(value) in (int, float)
    if key in _WHOLE:
        least, most = _WHOLE[key], 10**9
        return value, "" if whole and least <= value <= most else f"give a whole number from {least} to {most}"
    if key == "seed":
        return value, "" if whole and 0 <= value < 2**63 else "give a whole number from 0"
    if key == "learning_rate":
        return (float(value), "") if number and 0 <= value <= 10 else (None, "give a number from 0 to 10, such as 1e-3")
    if key == "alpha":
        return (float(value), "") if number and 0 < value <= 10**6 else (None, "give a number above 0, such as 32")
    if key == "dtype":
        return value, "" if value in ("float32", "bfloat16") else "give float32 or bfloat16"
    if key == "stages":
        good = isinstance(value, list | tuple) and value and all(isinstance(v, str) and v.strip() for v in value)
        if not good:
            return None, 'give a list of stage names, such as ["eval:base", "tune", "eval:tuned"]'
        if len({v.casefold() for v in value}) < len(value):
            return None, "two stages have the same name (case does not count)"
        if "eval:tuned" in value and "tune" not in value[: list(value).index("eval:tuned")]:
            return None, "eval:tuned needs tune before it; put tune first or leave eval:tuned out"
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
    text = _text(SETTINGS, data, faults).replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # also of a number of too many digits
        told = re.fullmatch(r"(?s)(.*?)(?: \(at line (\d+), column (\d+)\))?", str(error))
        assert told is not None
        where, column = (f":{told[2]}", f" at column {told[3]}") if told[2] else ("", "")
        faults.append(f"{SETTINGS}{where}: not TOML: {printable(told[1])}{column}")
        return {}
    except RecursionError:
        faults.append(f"{SETTINGS}: nested too deeply")
        return {}
    for key, fault in _checked(values)[1].items():
        line = re.search(rf"(?m)^[ \t\[]*[\"']?{re.escape(key)}[\"']?[ \t]*[=.\]]", text)
        where = f":{text.count(chr(10), 0, line.start()) + 1}" if line else ""
        faults.append(f"{SETTINGS}{where}: {fault}")
    return values


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
            value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
        except UnicodeDecodeError as error:
            faults.append(f"{name}:{line}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8")
        except Malformed as error:
            faults.append(f"{name}:{line}: {error}")
        except (ValueError, RecursionError) as error:
            faults.append(f"{name}:{line}: not JSON: {_json_fault(error)}")
        else:
            if isinstance(value, dict):
                yield line, value
            else:
                faults.append(f"{name}:{line}: not a JSON object; give a line such as {EXAMPLES[name]}")
    if rows == 0:
        faults.append(f"{name}: no rows; give lines such as {EXAMPLES[name]}")


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def _refuse_constant(name: str) -> NoReturn:
    raise Malformed(f"{name} is not JSON")


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
        if isinstance(expected, list):
            wrong = [fault for item in expected if (fault := _text_fault(item))]
            if not expected:
                bad.append("'expected' is an empty list, give a text or a list of texts")
            elif wrong:
                bad.append(f"'expected' is a list in which one {wrong[0]}")
        elif fault := _column_fault(row, "expected"):
            bad.append(fault)
        faults += [f"{EXAM}:{line}: {b}" for b in bad]
        if not bad:
            accepted: list[Any] = expected if isinstance(expected, list) else [expected]
            yield ExamRow(line=line, prompt=row["prompt"], expected=tuple(accepted))


def _column_fault(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        have = ", ".join(repr(printable(key, 30)) for key in list(row)[:5]) or "no column at all"
        return f"no column {column!r}, only {have}"
    fault = _text_fault(row[column])
    return f"{column!r} {fault}" if fault else ""


def _text_fault(value: object) -> str:
    """Why this is no text to ask or answer; empty where it is one."""
    if not isinstance(value, str):
        # What is nested is not shown: its depth and size may be anything.
        nested = "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else ""
        return f"is {nested or json.dumps(value)[:60]}, give a text"
    try:
        value.encode()
    except UnicodeEncodeError:  # from an escape such as \\ud800
        return "holds half of a surrogate pair, which is no character"
    return "" if value.strip() else f"is {json.dumps(value)[:60]}, give a text that is not empty"


def _leaks(training: Iterable[TrainingRow], exam: Iterable[ExamRow]) -> list[str]:
    seen = {" ".join(r.prompt.casefold().split()): r.line for r in training}
    leaks = [
        f"{EXAM}:{row.line} asks what {TRAINING}:{seen[key]} trains on"
        for row in exam
        if (key := " ".join(row.prompt.casefold().split())) in seen
    ]
    return shown(leaks, SHOWN_WARNINGS)
