"""States that somebody tampered with: refused in one line, or gone back from; never obeyed, never a traceback.

Whoever can write to a state can write a consistent false one, so every hash here is right unless damage is meant.
"""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill import arrays
from tests.conftest import Spill, write_folder
from tests.core.builds import everything, files, log_numbers, newest_entry, one_line, replace_object, rewrite

pytestmark = pytest.mark.usefixtures("quick")
HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\u202e\r\n[bold red]"
Plain = dict[str, Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small: Path, build_once: Callable[..., None]) -> Path:
    """A folder whose build stopped at step 2 of 4, with every commit so far."""
    directory = tmp_path_factory.mktemp("saved") / "folder"
    folder = write_folder(directory, small, rows=2, exam=2, epochs=2, batch=1, rank=2)
    build_once("build", folder, "--stop-after", "tune:2", "--commit-every", "0")
    return folder


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture
def half(folder: Path) -> Path:
    """The state of the folder."""
    return folder / ".spill" / "state"


@pytest.fixture
def outside(tmp_path: Path, small: Path) -> Iterator[Path]:
    """A place that no state may lead to; it must not change and nothing of it may be read."""
    place = tmp_path / "outside"
    shutil.copytree(small, place / "student")
    (place / "secret").write_text("a secret of some length, not to be shown")
    before = files(place)
    yield place
    assert files(place) == before
    # Python's own removal of a tree recurses, and would fail on the deepest one below.
    subprocess.run(["rm", "-rf", str(tmp_path / "folder")], check=True)


def unharmed(spill: Spill, half: Path, small: Path) -> list[str]:
    """Run every command that reads the state, on the folder and on the state alone; what each printed.

    A command may end well, or with one readable line. Nothing printed moves a terminal or shows a secret.
    """
    folder = half.parent.parent
    alone = ("--student", small, "--engine", "numpy")
    printed = []
    for arguments in (
        ("table", folder),
        ("state", "history", folder),
        ("resume", folder, "--takeover", "--stop-after", "tune:3"),
        ("resume", half, *alone, "--takeover"),
        ("export", half, "--student", small, "--out", folder.parent / "adapter"),
    ):
        done = spill(*arguments)
        text = done.out + done.err
        assert done.code in (0, 1), (arguments, text)
        assert done.code == 0 or one_line(done.error), (arguments, text)
        assert not any(sign in text for sign in ("\x1b", "\x07", "\u202e", "\r", "a secret of some length")), arguments
        printed.append(text)
    return printed


# ---- the log entry


def put(*path: str | int, value: object) -> Callable[[Plain], None]:
    """A change that puts a value at a place of the newest log entry."""

    def change(plain: Plain) -> None:
        inner: Any = plain
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


def rename_object(name: str) -> Callable[[Plain], None]:
    """A change that gives the arrays of the tune another object name, consistently."""

    def change(plain: Plain) -> None:
        old = plain["stages"]["tune"]["objects"]["state.safetensors"]
        plain["objects"][name] = plain["objects"].pop(old)
        plain["stages"]["tune"]["objects"]["state.safetensors"] = name

    return change


def each_object(**changes: object) -> Callable[[Plain], None]:
    def change(plain: Plain) -> None:
        for record in plain["objects"].values():
            record.update(changes)

    return change


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


ENTRIES: dict[str, Callable[[Plain], object]] = {
    "name with dots": rename_object("data/1-0123456789abcdef/../../../../outside/secret"),
    "absolute name": rename_object("/etc/passwd"),
    "name of a log entry": rename_object("log/1.json"),
    "name with a backslash": rename_object("data/1-0123456789abcdef/..\\..\\outside"),
    "name with a zero": rename_object("data/1-0123456789abcdef/a\0b"),
    "endless name": rename_object("data/1-0123456789abcdef/" + "a" * 5000),
    "empty name": rename_object(""),
    "size below zero": each_object(size=-1),
    "size of 64 GiB": each_object(size=64 * 1024**3),
    "size beyond all": each_object(size=10**30),
    "size with a point": each_object(size=1e3),
    "size true": each_object(size=True),
    "hash of letters": each_object(sha256="z" * 64),
    "hash empty": each_object(sha256=""),
    "extra key": put("extra", value=1),
    "extra key in the plan": put("plan", "command", value="rm -rf ."),
    "extra key in a run": put("runs", 0, "environment", value={"PATH": "."}),
    "missing key": lambda plain: plain.pop("plan"),
    "text for a number": put("plan", "epochs", value="2"),
    "true for a number": put("plan", "epochs", value=True),
    "text for a list": put("runs", value="runs"),
    "number of a thousand digits": put("plan", "seed", value=10**1000),
    "machine that moves the terminal": put("runs", 0, "machine", value=HOSTILE),
    "engine that moves the terminal": put("runs", 0, "engine", value=HOSTILE),
    "system that moves the terminal": put("runs", 0, "system", value=HOSTILE),
    "start that moves the terminal": put("runs", 0, "started", value=HOSTILE),
    "note that moves the terminal": put("runs", 0, "notes", value=[HOSTILE]),
    "hardware that moves the terminal": put("runs", 0, "hardware", value=HOSTILE),
    "half a letter": put("runs", 0, "machine", value="\ud800"),
    "nonce that leads elsewhere": lambda p: (put("runs", 0, "nonce", value="../../../../outside/secret")(p),
                                             put("run", value="../../../../outside/secret")(p)),
    "nonce empty": lambda p: (put("runs", 0, "nonce", value="")(p), put("run", value="")(p)),
    "nonce with a zero": lambda p: (put("runs", 0, "nonce", value="\0")(p), put("run", value="\0")(p)),
    "claim below zero": put("runs", 0, "claim", value=-5),
    "claim beyond all": put("runs", 0, "claim", value=10**1000),
    "no runs": put("runs", value=[]),
    "work of an unknown stage": put("runs", 0, "work", value={HOSTILE: [0, 1]}),
    "layout that moves the terminal": put("runs", 0, "numerics", value={"dtype": "float32", "layout": HOSTILE,
                                                                         "micro_batch_tokens": -1}),
    "position beyond the total": put("stages", "tune", "position", value=50),
    "stage finished at 1 of 1": lambda p: p["stages"]["tune"].update(position=1, total=1, finished=True),
    "stage at its end but not finished": lambda p: p["stages"]["tune"].update(position=4, total=4),
    "stage of another name": lambda p: p["stages"].update({HOSTILE: p["stages"].pop("tune")}),
    "role that leads elsewhere": lambda p: p["stages"]["tune"]["objects"].update({"../../x": p["folder"]}),
    "role of a journal out of order": lambda p: p["stages"]["tune"]["objects"].update(
        {"journal-000000007.json": p["folder"]}),
    "arrays are missing": lambda p: p["stages"]["tune"]["objects"].pop("state.safetensors"),
    "arrays are the folder": lambda p: p["stages"]["tune"]["objects"].update({"state.safetensors": p["folder"]}),
    "folder is the arrays": lambda p: p.update(folder=p["stages"]["tune"]["objects"]["state.safetensors"]),
    "no folder": put("folder", value=""),
    "summary nested 300 deep": put("stages", "tune", "summary", "deep", value=nested(300)),
    "summary nested 900 deep": put("stages", "tune", "summary", "deep", value=nested(900)),
    "score beyond all": put("stages", "eval:base", "summary", "score", value=10**1000),
    "score of text": put("stages", "eval:base", "summary", "score", value=HOSTILE),
    "truncated beyond all": put("stages", "eval:base", "summary", "truncated", value=10**1000),
    "probe beyond all": put("stages", "tune", "summary", "probe", value=[[10**1000] * 4] * 2),
    "probe of texts": put("stages", "tune", "summary", "probe", value=[["a"], ["b"]]),
    "probe of another shape": put("stages", "tune", "summary", "probe", value=[[1.0]]),
    "base probe of other rows": put("probe", "rows", value=[-1, 10**9]),
    "base probe of another shape": put("probe", "losses", value=[[], []]),
    "parent below zero": put("parent", "number", value=-1),
    "parent beyond all": put("parent", "number", value=10**1000),
    "parent ahead": put("parent", "number", value=999),
    "number of another entry": put("number", value=1),
    "number of 0": put("number", value=0),
    "state id of letters": put("state", value="Z" * 32),
    "format 0": put("format", value=0),
    "format of text": put("format", value="1"),
    "format beyond all": put("format", value=10**1000),
    "batch 0": put("plan", "batch", value=0),
    "batch beyond all": put("plan", "batch", value=10**1000),
    "epochs 0": put("plan", "epochs", value=0),
    "epochs beyond all": put("plan", "epochs", value=10**15),
    "rank beyond all": put("plan", "rank", value=10**8),
    "rank 0": put("plan", "rank", value=0),
    "max_length beyond all": put("plan", "max_length", value=10**30),
    "max_new_tokens beyond all": put("plan", "max_new_tokens", value=10**30),
    "learning rate beyond all": put("plan", "learning_rate", value=1e300),
    "beta2 of 1": put("plan", "beta2", value=1.0),
    "warmup below zero": put("plan", "warmup_steps", value=-5),
    "an epsilon of nothing": put("plan", "epsilon", value=0.0),
    "a beta that forgets nothing": put("plan", "beta2", value=1.0),
    "a clip of nothing": put("plan", "clip_norm", value=0.0),
    "no stages": put("plan", "stages", value=[]),
    "stages twice": put("plan", "stages", value=["tune", "tune", "eval:base"]),
    "unknown stage that moves the terminal": put("plan", "stages", value=["eval:base", "tune", HOSTILE]),
    "file elsewhere": put("plan", "files", value={"../../outside/secret": "0" * 64}),
    "file that moves the terminal": put("plan", "files", HOSTILE, value="0" * 64),
    "model that moves the terminal": put("plan", "model", value=HOSTILE),
    "student that moves the terminal": put("plan", "student", value=HOSTILE),
    "flag unknown": put("plan", "flags", value={HOSTILE: HOSTILE}),
    "flag of the wrong kind": put("plan", "flags", value={"epochs": ["a"]}),
    "flag beyond all": put("plan", "flags", value={"epochs": 10**1000}),
    "dtype of another name": put("plan", "dtype", value="float16"),
    "plugin that moves the terminal": put("plan", "plugins", value={"tune": HOSTILE}),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_a_consistent_false_entry_is_refused_or_changes_nothing(
    spill: Spill, half: Path, outside: Path, small: Path, case: str
) -> None:
    rewrite(half, ENTRIES[case])
    unharmed(spill, half, small)
    assert not list(half.parent.parent.parent.rglob("owned*"))


def test_a_finished_stage_of_another_length_than_the_plans_is_not_taken(spill: Spill, half: Path, small: Path) -> None:
    """The tune's four steps are two in a forged state that calls itself finished."""
    rewrite(half, lambda p: p["stages"]["tune"].update(position=2, total=2, finished=True))
    done = spill("resume", half.parent.parent)
    assert done.code == 1 or newest_entry(half)["stages"]["tune"]["position"] == 4


TEXTS: dict[str, bytes] = {
    "deep lists": b"[" * 60_000,
    "deep objects": b'{"a":' * 10_000,
    "doubled key": b'{"format":1,"format":1}',
    "not a number": b'{"format":NaN}',
    "infinity": b'{"format":-Infinity}',
    "1e999": b'{"format":1e999}',
    "a number of 60,000 digits": b'{"format":' + b"9" * 60_000 + b"}",
    "zeros": b"\0" * 2000,
    "utf-16": '{"format":1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"format":1}',
    "half a letter": b'{"format":"\xed\xa0\x80"}',
    "a list": b"[]",
    "a number": b"1",
    "a pickle": pickle.dumps({"format": 1}),
}


def test_a_newest_entry_of_any_bytes_is_passed_over(spill: Spill, half: Path, folder: Path, outside: Path) -> None:
    newest_path = half / "log" / f"{log_numbers(half)[-1]}.json"
    whole = newest_path.read_bytes()
    for case, data in TEXTS.items():
        newest_path.write_bytes(data)
        done = spill("table", folder)
        assert done.code == 0, case
        assert f"commit {newest_path.stem} is damaged" in done.err
        assert f"going back to commit {int(newest_path.stem) - 1}" in done.err
        assert "\0" not in done.err
    newest_path.write_bytes(whole)
    assert spill("table", folder).err == ""


# ---- objects


class Trap:
    """Unpickling it would leave a file behind."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("owned",))


def false_arrays(half: Path) -> dict[str, bytes]:
    path = half / newest_entry(half)["stages"]["tune"]["objects"]["state.safetensors"]
    whole = path.read_bytes()
    infos = arrays.read_header(path)
    good = arrays.read(whole, expect={n: (np.float32, i.shape) for n, i in infos.items()})
    first = next(iter(good))

    def made(changed: dict[str, Any]) -> bytes:
        return b"".join(bytes(part) for part in arrays.write_parts(changed))

    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    shifted = {**header, first: {**header[first], "data_offsets": [0, 2**62]}}
    text = json.dumps(shifted).encode()
    return {
        "pickle": pickle.dumps(Trap()),
        "nothing": b"",
        "header beyond all": b"\xff" * 8 + whole[8:],
        "header of nothing": bytes(8),
        "offsets beyond all": len(text).to_bytes(8, "little") + text + whole[8 + length :],
        "not a number": made({**good, first: good[first] * np.float32("nan")}),
        "infinite": made({**good, first: np.full_like(good[first], np.inf)}),
        "another shape": made({**good, first: good[first].reshape(-1)}),
        "one array less": made({n: a for n, a in good.items() if n != first}),
        "one array more": made({**good, HOSTILE: good[first]}),
        "integers": made({**good, first: good[first].astype(np.int32)}),
        "cut": whole[:-1],
        "longer": whole + b"\0",
    }


def test_false_arrays_are_refused_before_a_step_and_no_pickle_is_ever_opened(
    spill: Spill, half: Path, folder: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = saved / ".spill" / "state"
    for case, data in false_arrays(half).items():
        shutil.rmtree(half)
        shutil.copytree(whole, half)
        replace_object(half, "tune", "state.safetensors", data)
        done = spill("resume", folder)
        assert done.code == 1, case
        assert one_line(done.error), done.err
        assert "the state's arrays cannot be used" in done.error, case
        assert newest_entry(half)["stages"]["tune"]["position"] == 2
    assert not (tmp_path / "owned").exists()


JOURNALS: dict[str, Any] = {
    "not a list": {"a": 1},
    "a list of numbers": [1, 2],
    "nested": [[[[]]]],
    "one record less": lambda records: records[:-1],
    "one record more": lambda records: [*records, records[-1]],
    "another step": lambda records: [{**records[0], "step": 2}, *records[1:]],
    "step true": lambda records: [{**records[0], "step": True}, *records[1:]],
    "empty records": lambda records: [{} for _ in records],
    "row below zero": lambda records: [{**records[0], "row": -1}, *records[1:]],
    "row beyond all": lambda records: [{**records[0], "row": 10**30}, *records[1:]],
    "a row twice": lambda records: [records[0], *records[:-1]],
    "right of text": lambda records: [{**records[0], "right": HOSTILE}, *records[1:]],
    "no end": lambda records: [{k: v for k, v in r.items() if k != "ended"} for r in records],
    "ended in another way": lambda records: [{**records[0], "ended": HOSTILE}, *records[1:]],
    "output that moves the terminal": lambda records: [{**records[0], "output": HOSTILE}, *records[1:]],
    "loss of text": lambda records: [{**records[0], "loss": HOSTILE}, *records[1:]],
    "bytes": b"[" * 60_000,
}


@pytest.mark.parametrize("stage", ["eval:base", "tune"])
def test_a_false_journal_is_refused_or_changes_nothing(
    spill: Spill, folder: Path, half: Path, tmp_path: Path, small: Path, outside: Path, stage: str
) -> None:
    whole = tmp_path / "state"
    stop = "eval:base:1" if stage == "eval:base" else "tune:2"
    assert spill("build", folder, "--state", whole, "--stop-after", stop, "--commit-every", "0").code == 0
    segment = "journal-000000000.json"
    for change in JOURNALS.values():
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(whole, half)
        records = json.loads((half / newest_entry(half)["stages"][stage]["objects"][segment]).read_bytes())
        value = change(records) if callable(change) else change
        replace_object(half, stage, segment, value if isinstance(value, bytes) else json.dumps(value).encode())
        unharmed(spill, half, small)
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)


FOLDERS: dict[str, Any] = {
    "a file elsewhere": lambda kept: {**kept, "../../outside/secret": "owned"},
    "settings": lambda kept: {**kept, "spill.toml": 'engine = "evil"\n'},
    "a number": lambda kept: {**kept, "train.jsonl": 1},
    "a list": lambda kept: [kept],
    "half a letter": lambda kept: {**kept, "train.jsonl": "\ud800"},
    "other rows": lambda kept: {**kept, "train.jsonl": kept["train.jsonl"] * 2},
    "nothing": lambda kept: {},
    "rows that move the terminal": lambda kept: {**kept, "train.jsonl": json.dumps({HOSTILE: HOSTILE}) + "\n"},
}


def test_a_false_folder_in_a_state_is_refused(
    spill: Spill, half: Path, small: Path, outside: Path, saved: Path
) -> None:
    whole = saved / ".spill" / "state"
    for case, change in FOLDERS.items():
        shutil.rmtree(half)
        shutil.copytree(whole, half)
        name = newest_entry(half)["folder"]
        data = json.dumps(change(json.loads((half / name).read_bytes()))).encode()
        (half / name).write_bytes(data)
        record = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        rewrite(half, put("objects", name, value=record))
        done = spill("resume", half, "--student", small, "--engine", "numpy")
        assert done.code == 1, case
        assert one_line(done.error), done.err
        assert "\x1b" not in done.err


# ---- what a state must not name


def test_a_models_path_comes_from_the_command_line_and_never_from_a_state(
    spill: Spill, half: Path, folder: Path, outside: Path
) -> None:
    rewrite(half, put("plan", "student", value=str(outside / "student")))
    for arguments in (("resume", half, "--engine", "numpy"), ("ask", half, "say", "--base", "--engine", "numpy")):
        done = spill(*arguments)
        assert done.code == 1, done.out
        assert "--student" in done.error
    done = spill("export", half, "--out", folder.parent / "adapter")
    assert done.code == 1
    assert "--student" in done.error


def test_flags_in_a_state_choose_neither_model_nor_engine_nor_reference(
    spill: Spill, half: Path, folder: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"student": str(outside / "student"), "engine": "evil", "reference": str(outside)}
    rewrite(half, put("plan", "flags", value=flags))
    asked: list[str] = []
    from spill import models

    resolve = models.resolve
    monkeypatch.setattr("spill.models.resolve", lambda student, **k: (asked.append(student), resolve(student, **k))[1])
    done = spill("resume", folder)
    assert "evil" not in done.err
    assert str(outside / "student") not in asked


# ---- the file system


def outside_log(half: Path, outside: Path) -> None:
    shutil.move(half / "log", outside.parent / "moved")
    (half / "log").symlink_to(outside.parent / "moved")


def outside_data(half: Path, outside: Path) -> None:
    shutil.move(half / "data", outside.parent / "moved")
    (half / "data").symlink_to(outside.parent / "moved")


def linked_object(half: Path, outside: Path) -> None:
    path = half / newest_entry(half)["stages"]["tune"]["objects"]["state.safetensors"]
    shutil.move(path, outside.parent / "moved")
    path.symlink_to(outside.parent / "moved")


def deep_folders(half: Path, outside: Path) -> None:
    place = os.open(half / "data", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)


def odd_names(half: Path, outside: Path) -> None:
    for folder in (half / "log", half / "alive", half / "data" / "1-0123456789abcdef"):
        folder.mkdir(exist_ok=True)
        for name in (b"1-a\\b", b"\xff\xfe", b"1-\x1b[2J", "1-é".encode(), b"01.json", b"-1.json", b"1.json\n"):
            (folder / os.fsdecode(name)).write_bytes(b"x")


def fake_alive(half: Path, outside: Path) -> None:
    run = newest_entry(half)["runs"][-1]
    (half / "alive").mkdir(exist_ok=True)
    (half / "alive" / f"{run['claim']}-{run['nonce']}").write_text(json.dumps({"beat": 1, "at": HOSTILE}))


def alive_pipe(half: Path, outside: Path) -> None:
    run = newest_entry(half)["runs"][-1]
    (half / "alive").mkdir(exist_ok=True)
    os.mkfifo(half / "alive" / f"{run['claim']}-{run['nonce']}")


def a_file_for(name: str) -> Callable[[Path, Path], None]:
    def change(half: Path, outside: Path) -> None:
        shutil.rmtree(half / name, ignore_errors=True)
        (half / name).write_bytes(b"x")

    return change


DISKS: dict[str, Callable[[Path, Path], object]] = {
    "log is a link": outside_log,
    "data is a link": outside_data,
    "alive is a link": lambda half, outside: (shutil.rmtree(half / "alive", ignore_errors=True),
                                              (half / "alive").symlink_to(outside)),
    "an object is a link": linked_object,
    "log is a file": a_file_for("log"),
    "data is a file": a_file_for("data"),
    "alive is a file": a_file_for("alive"),
    "an entry far ahead": lambda half, outside: (half / "log" / "999999999999.json").write_bytes(b"{}"),
    "entry 0": lambda half, outside: shutil.copy(half / "log" / "1.json", half / "log" / "0.json"),
    "folders 1,500 deep": deep_folders,
    "odd names": odd_names,
    "alive that moves the terminal": fake_alive,
    "alive is a pipe": alive_pipe,
    "alive of 1 MB": lambda half, outside: ((half / "alive").mkdir(exist_ok=True),
                                            (half / "alive" / "1-x").write_bytes(b" " * 10**6)),
}  # fmt: skip


def test_an_object_too_large_for_this_machine_is_one_line_and_no_damage(half: Path, folder: Path, site: Path) -> None:
    """A file of holes is as large as its author likes, at no cost to him."""
    size = 16 * 1024**3
    rewrite(half, each_object(size=size))
    for name in newest_entry(half)["objects"]:
        os.truncate(half / name, size)
    program = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**32, 2**32)); from spill.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "resume", folder],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert one_line(done.stderr.splitlines()[-1])
    assert f"{size:,} bytes, for which this machine has no memory" in done.stderr
    assert "going back" not in done.stderr


@pytest.mark.parametrize("case", DISKS)
def test_links_pipes_and_odd_names_lead_nowhere(
    spill: Spill, half: Path, outside: Path, small: Path, case: str
) -> None:
    DISKS[case](half, outside)
    moved = outside.parent / "moved"
    before = files(moved) if moved.is_dir() else {}
    unharmed(spill, half, small)
    assert before == (files(moved) if moved.is_dir() else {})


def test_a_state_reached_through_a_link_that_the_user_named_works(spill: Spill, half: Path, folder: Path) -> None:
    disk = folder.parent / "disk"
    half.rename(disk)
    half.symlink_to(disk)
    done = spill("resume", folder)
    assert done.code == 0, done.err
    assert spill("build", folder, "--state", folder.parent / "whole").code == 0
    assert everything(disk) == everything(folder.parent / "whole")
