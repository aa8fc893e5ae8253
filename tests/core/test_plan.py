"""Changed inputs: what a resume refuses, naming each difference with both values, and what may change."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from attrs import evolve

from spill.cli import run
from spill.errors import InputError
from spill.folder import parse
from spill.models import stop_ids
from spill.models.directory import read_directory
from spill.opening import remembered_flags
from spill.plan import prepare
from spill.signals import StopRequest
from spill.testing.models import tiny_model
from tests.conftest import Outcome, Spill, write_folder
from tests.core.builds import files, head

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def begun(site: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose build stopped at step 2 of the tune, after eval:base."""
    folder = write_folder(tmp_path_factory.mktemp("begun") / "folder", model, learning_rate=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("SPILL_HOME", str(folder.parent / "home"))
        patch.setenv("SPILL_MACHINE", "alpha")
        with contextlib.redirect_stdout(io.StringIO()):
            assert run(StopRequest(), ["build", str(folder), "--stop-after", "tune:2"]) == 0
    return folder


@pytest.fixture
def stopped(begun: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(begun, tmp_path / "stopped"))


def set_key(folder: Path, key: str, value: object) -> None:
    """Give a key of spill.toml another value, or take it away with None."""
    path = folder / "spill.toml"
    lines = [line for line in path.read_text().splitlines() if not line.startswith(f"{key} =")]
    lines += [] if value is None else [f"{key} = {json.dumps(value)}"]
    path.write_text("\n".join(lines) + "\n")


def refused(spill: Spill, folder: Path, *arguments: object) -> list[str]:
    """The differences that a resume names; nothing may have been written."""
    before = files(folder)
    done = spill("resume", folder, *arguments)
    assert done.code == 1, done.out
    assert files(folder) == before, "a refusal wrote something"
    assert "built from something else; undo the change, or build at another --state" in done.err.splitlines()[0]
    assert done.out == ""
    return [line.strip() for line in done.err.splitlines()[1:]]


CHANGES: dict[str, tuple[object, str]] = {
    "learning_rate": (0.02, "learning_rate was 0.01, is 0.02"),
    "batch": (5, "batch was 4, is 5"),
    "epochs": (3, "epochs was 2, is 3"),
    "seed": (1, "seed was 0, is 1"),
    "rank": (8, "rank was 16, is 8"),
    "alpha": (16.0, "alpha was 32.0, is 16.0"),
    "max_length": (512, "max_length was 1024, is 512"),
    "stages": (["tune", "eval:tuned"], "stages was eval:base, tune, eval:tuned, is tune, eval:tuned"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_another_value_by_flag_is_refused_with_both(spill: Spill, stopped: Path, key: str) -> None:
    value, line = CHANGES[key]
    text = ",".join(value) if isinstance(value, list) else value
    assert refused(spill, stopped, f"--{key.replace('_', '-')}", text) == [line]


@pytest.mark.parametrize("key", CHANGES)
def test_another_value_in_the_file_is_refused_with_both(spill: Spill, stopped: Path, key: str) -> None:
    value, line = CHANGES[key]
    set_key(stopped, key, value)
    assert refused(spill, stopped) == [line]


def test_several_changes_are_named_together(spill: Spill, stopped: Path) -> None:
    set_key(stopped, "epochs", 5)
    (stopped / "instructions.txt").unlink()
    lines = refused(spill, stopped, "--seed", 9)
    assert lines[0].startswith("instructions.txt: sha256 was ")
    assert lines[0].endswith(", is no such file")
    assert lines[1:] == ["seed was 0, is 9", "epochs was 2, is 5"]


def test_a_key_that_is_taken_away_counts_as_a_change(spill: Spill, stopped: Path) -> None:
    before = files(stopped)
    set_key(stopped, "learning_rate", None)
    done = spill("resume", stopped)
    assert done.code == 1
    assert done.err.splitlines()[1:] == ["  learning_rate was 0.01, is 0.002"]
    assert files(stopped / ".spill") == {n[7:]: d for n, d in before.items() if n.startswith(".spill/")}


def test_another_dtype_in_the_file_is_refused(spill: Spill, stopped: Path) -> None:
    set_key(stopped, "dtype", "bfloat16")
    assert refused(spill, stopped) == ["dtype was float32, is bfloat16"]


def test_the_state_alone_refuses_flags_too(spill: Spill, stopped: Path, model: Path) -> None:
    lines = refused(spill, stopped / ".spill" / "state", "--student", model, "--engine", "numpy", "--epochs", 3)
    assert lines == ["epochs was 2, is 3"]


def test_flags_equal_to_the_plan_are_no_change(spill: Spill, stopped: Path) -> None:
    done = spill("resume", stopped, "--epochs", 2, "--learning-rate", "1e-2", "--alpha", 32, "--stop-after", "tune:3")
    assert done.code == 0, done.err


def test_flags_given_at_the_start_are_remembered(spill: Spill, folder: Path) -> None:
    flags = ["--epochs", 1, "--batch", 5, "--learning-rate", "0.02", "--stages", "tune,eval:tuned", "--seed", 4]
    assert spill("build", folder, *flags, "--stop-after", "tune:1").code == 0
    done = spill("resume", folder)
    assert done.code == 0, done.err
    plan = head(folder / ".spill" / "state").plan
    assert (plan.epochs, plan.batch, plan.learning_rate, plan.seed) == (1, 5, 0.02, 4)
    assert plan.stages == ("tune", "eval:tuned")
    assert spill("build", folder, "--epochs", 2).err.splitlines()[1:] == ["  epochs was 1, is 2"]


# ---- files


def change_one_character(path: Path) -> None:
    path.write_text(path.read_text().replace("say 7", "say 8"))


def reverse(path: Path) -> None:
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))


def add_a_blank_line(path: Path) -> None:
    path.write_text(path.read_text() + "\n")


def swap_with_the_same_size_and_time(path: Path) -> None:
    before = path.stat()
    path.write_text(path.read_text().replace("yes", "YES"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("change", [change_one_character, reverse, add_a_blank_line, swap_with_the_same_size_and_time])
def test_changed_training_rows_are_refused_by_file(spill: Spill, stopped: Path, change: object) -> None:
    assert callable(change)
    change(stopped / "train.jsonl")
    (line,) = refused(spill, stopped)
    assert line.startswith("train.jsonl: sha256 was ")


@pytest.mark.parametrize("change", [reverse, swap_with_the_same_size_and_time])
def test_changed_exam_rows_are_refused_by_file(spill: Spill, stopped: Path, change: object) -> None:
    assert callable(change)
    change(stopped / "evals.jsonl")
    (line,) = refused(spill, stopped)
    assert line.startswith("evals.jsonl: sha256 was ")


def test_changed_instructions_are_refused(spill: Spill, stopped: Path) -> None:
    (stopped / "instructions.txt").write_text("Say something else.\n")
    (line,) = refused(spill, stopped)
    assert line.startswith("instructions.txt: sha256 was ")


def test_instructions_that_were_not_there_are_refused(spill: Spill, folder: Path) -> None:
    (folder / "instructions.txt").unlink()
    assert spill("build", folder, "--stop-after", "eval:base:1").code == 0
    (folder / "instructions.txt").write_text("Say yes.\n")
    (line,) = refused(spill, folder)
    assert line.startswith("instructions.txt: sha256 was no such file, is ")


def test_the_state_of_another_folder_is_refused(spill: Spill, stopped: Path, tmp_path: Path, model: Path) -> None:
    other = write_folder(tmp_path / "other", model, rows=4, learning_rate=0.01)
    before = files(stopped)
    done = spill("build", other, "--state", stopped / ".spill" / "state")
    assert done.code == 1
    assert [line.split(":")[0].strip() for line in done.err.splitlines()[1:]] == ["train.jsonl"]
    assert files(stopped) == before


# ---- the model


def other_weights(directory: Path, like: Path) -> None:
    """Other weights under every name, of the same size and with the same times."""
    times = {path.name: path.stat() for path in like.iterdir()}
    tiny_model(directory, seed=1)
    for path in directory.iterdir():
        before = times[path.name]
        assert path.stat().st_size == before.st_size
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def model_line(done: Outcome) -> str:
    assert done.code == 1, done.out
    (line,) = done.err.splitlines()[1:]
    return line.strip()


def test_other_weights_under_the_same_path_are_refused(spill: Spill, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    folder = write_folder(tmp_path / "folder", path)
    assert spill("build", folder, "--stop-after", "eval:base").code == 0
    before = files(folder)
    other_weights(path, path)
    line = model_line(spill("resume", folder))
    assert line.startswith("model was local with sha256:")
    assert ", is local with sha256:" in line
    assert files(folder) == before


def test_a_finished_build_is_not_reused_for_other_weights(spill: Spill, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    folder = write_folder(tmp_path / "folder", path)
    assert spill("build", folder).code == 0
    before = files(folder)
    other_weights(path, path)
    assert model_line(spill("build", folder)).startswith("model was local with sha256:")
    done = spill("ask", folder, "say 1")
    assert (done.code, "this build was made from sha256:" in done.err) == (1, True)
    assert spill("export", folder, "--out", tmp_path / "out").code == 1
    assert not (tmp_path / "out").exists()
    assert files(folder) == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"])
def test_a_changed_file_beside_the_weights_is_another_model(spill: Spill, tmp_path: Path, name: str) -> None:
    path = tiny_model(tmp_path / "model")
    folder = write_folder(tmp_path / "folder", path)
    assert spill("build", folder, "--stop-after", "eval:base:1").code == 0
    (path / name).write_text((path / name).read_text() + " ")
    assert model_line(spill("resume", folder)).startswith("model was local with sha256:")


def test_the_same_model_under_another_path_is_no_change(
    spill: Spill, stopped: Path, model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    done = spill("resume", stopped, "--student", copy, "--stop-after", "tune:3")
    assert done.code == 0, done.err
    assert head(stopped / ".spill" / "state").plan.student == "local"


# ---- what may change


@pytest.mark.usefixtures("other_engines")
def test_engine_and_machine_may_change(spill: Spill, stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    done = spill("resume", stopped, "--engine", "other")
    assert done.code == 0, done.err
    assert "2 tune        numpy -> other  alpha -> beta  " in done.out


def test_reference_and_engine_in_the_file_may_change(spill: Spill, stopped: Path) -> None:
    set_key(stopped, "reference", str(stopped / "nowhere"))
    set_key(stopped, "engine", None)
    assert spill("resume", stopped, "--engine", "numpy", "--stop-after", "tune:3").code == 0


@pytest.mark.usefixtures("other_engines")
def test_another_dtype_by_flag_is_accepted_and_recorded(spill: Spill, stopped: Path) -> None:
    state = stopped / ".spill" / "state"
    done = spill("resume", stopped, "--engine", "other", "--dtype", "bfloat16", "--stop-after", "tune:3")
    assert done.code == 0, done.err
    commit = head(state)
    assert commit.plan.dtype == "bfloat16"
    assert commit.runs[-1].notes[0] == "dtype float32 -> bfloat16"
    assert commit.runs[-1].numerics is not None
    assert commit.runs[-1].numerics.dtype == "bfloat16"
    done = spill("resume", stopped, "--engine", "other", "--stop-after", "tune:4")
    assert done.code == 0, done.err
    assert head(state).plan.dtype == "bfloat16", "every later engine follows"
    assert head(state).runs[-1].notes == ()


@pytest.mark.usefixtures("other_engines")
def test_a_dtype_asked_for_on_resume_outlives_the_one_of_the_start(spill: Spill, folder: Path) -> None:
    assert spill("build", folder, "--dtype", "float32", "--stop-after", "tune:1").code == 0
    hop = ["resume", folder, "--engine", "other", "--dtype", "bfloat16", "--stop-after", "tune:2"]
    assert spill(*hop).code == 0
    done = spill("resume", folder, "--engine", "other", "--stop-after", "tune:3")
    assert done.code == 0, done.err


def test_a_dtype_that_the_engine_refuses_leaves_the_plan_as_it_was(spill: Spill, stopped: Path) -> None:
    done = spill("resume", stopped, "--dtype", "bfloat16")
    assert done.code == 1
    assert "float32 only" in done.err
    done = spill("resume", stopped, "--stop-after", "tune:3")
    assert done.code == 0, done.err


# ---- rows against the model


def prepared(path: Path, *, rows: bytes = b"", exam: bytes = b"", **settings: object) -> None:
    contents = {
        "train.jsonl": rows or b'{"prompt": "a", "answer": "b"}\n',
        "evals.jsonl": exam or b'{"prompt": "a", "expected": "b"}\n',
    }
    made = parse(contents, "F")
    model = read_directory(path, student="local", tick=lambda: None)
    prepare(model, stop_ids(model), made, made.settings(settings), lambda: None)


def row(prompt: str, answer: str, column: str = "answer") -> bytes:
    return json.dumps({"prompt": prompt, column: answer}).encode() + b"\n"


def test_rows_that_are_too_long_are_named_by_line(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", max_positions=100)
    rows = row("x" * 200, "b") + b"\n" + row("a", "b") + row("x", "y" * 90)
    with pytest.raises(InputError, match=r"^3 rows do not fit the model; shorten what is too long") as caught:
        prepared(path, rows=rows, exam=row("z" * 80, "b", "expected"), max_length=150)
    lines = caught.value.details
    assert lines[0].startswith("train.jsonl:1: 2")
    assert lines[0].endswith(" tokens, max_length is 150")
    assert lines[1].startswith("train.jsonl:4: 1")
    assert lines[1].endswith(" tokens, the model reads 100")
    assert lines[2].startswith("evals.jsonl:1: 99")
    assert lines[2].endswith(" tokens and 6 for the answer, the model reads 100")


def test_a_row_of_exactly_the_limit_fits(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    with pytest.raises(InputError) as caught:
        prepared(path, rows=row("a", "b"), max_length=2)
    needed = int(caught.value.details[0].split()[1])
    prepared(path, rows=row("a", "b"), max_length=needed)
    with pytest.raises(InputError, match="1 row does not fit"):
        prepared(path, rows=row("a", "b"), max_length=needed - 1)


def test_an_answer_that_holds_an_end_token_is_named_by_line(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, ord(".")]}))
    with pytest.raises(InputError) as caught:
        prepared(path, rows=row("a", "b") + row("a", "the end."), exam=row("a", "no.", "expected"))
    assert caught.value.details == (
        "train.jsonl:2: the answer 'the end.' holds an end token of this model; take it out",
        "evals.jsonl:1: the answer 'no.' holds an end token of this model; take it out",
    )


def test_a_rank_above_a_layers_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank is 17, but .* has only 16 x 32 weights: give a lower --rank"):
        prepared(tiny_model(tmp_path / "model"), rank=17)


def test_a_state_may_remember_a_student_but_never_a_path_or_an_engine(stopped: Path) -> None:
    plan = head(stopped / ".spill" / "state").plan
    flags = {"seed": 0, "engine": "x", "student": "/tmp/m", "reference": "/tmp/r"}
    assert remembered_flags(evolve(plan, flags=flags)) == {"seed": 0}
    flags = {"student": "smollm2:135m"}
    assert remembered_flags(evolve(plan, flags=flags)) == flags
