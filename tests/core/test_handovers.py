"""A build that moves to another engine, and inputs that changed under a state: what is told, refused and recorded."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spill.testing.models import tiny_model
from tests.conftest import Outcome, Spill, write_folder
from tests.core.builds import everything, files, head, journal, newest_entry, one_line, position, rewrite

pytestmark = pytest.mark.usefixtures("quick", "other_engines")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, model: Path, build_once: Callable[..., None]) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("stopped") / "folder", model, learning_rate=0.01, exam=2)
    build_once("build", folder, "--stop-after", "tune:3")
    return folder


@pytest.fixture
def half(tmp_path: Path, stopped: Path) -> Path:
    """A folder whose build on the numpy engine stopped at step 3 of 6, with a rate at which three steps show."""
    return Path(shutil.copytree(stopped, tmp_path / "folder"))


def state_of(folder: Path) -> Path:
    return folder / ".spill" / "state"


def refused(done: Outcome, *parts: str) -> None:
    """The command failed with one readable error that says all of this."""
    assert done.code == 1, done.out
    assert one_line(done.error), done.err
    for part in parts:
        assert part in done.err


# ---- another engine


def test_there_and_back_again_keeps_rows_and_rates_and_stays_within_the_tolerance(
    spill: Spill, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    there = spill("resume", half, "--engine", "other", "--stop-after", "tune:5")
    assert "handover from alpha (numpy, " in there.out
    monkeypatch.setenv("SPILL_MACHINE", "alpha")
    back = spill("resume", half)
    assert back.code == 0, back.err
    assert "handover from beta (other, " in back.out
    assert "2 tune        numpy -> other -> numpy  alpha -> beta -> alpha  " in back.out
    assert spill("build", half, "--state", tmp_path / "whole").code == 0
    moved, whole = journal(state_of(half), "tune"), journal(tmp_path / "whole", "tune")
    exact = ("step", "rows", "learning_rate", "tokens")
    assert [[step[key] for key in exact] for step in moved] == [[step[key] for key in exact] for step in whole]
    assert [step["loss"] for step in moved] == pytest.approx([step["loss"] for step in whole], abs=1e-4)


@pytest.mark.parametrize("engine", ["louder", "transposed", "forgetful", "otherbase"])
def test_an_engine_that_computes_something_else_is_refused_before_its_first_step(
    spill: Spill, half: Path, engine: str
) -> None:
    before = position(state_of(half), "tune")
    done = spill("resume", half, "--engine", engine)
    refused(done, "step 3" if engine != "otherbase" else "the base model")
    assert position(state_of(half), "tune") == before
    done = spill("resume", half)
    assert done.code == 0, done.err
    assert [step["step"] for step in journal(state_of(half), "tune")] == [1, 2, 3, 4, 5, 6]


def test_a_refused_engine_leaves_the_build_bit_identical_on_the_engine_before(
    spill: Spill, half: Path, tmp_path: Path
) -> None:
    assert spill("resume", half, "--engine", "louder").code == 1
    assert spill("resume", half).code == 0
    assert spill("build", half, "--state", tmp_path / "whole").code == 0
    assert everything(state_of(half)) == everything(tmp_path / "whole")


def test_an_accepted_drift_is_recorded_in_the_run(spill: Spill, half: Path) -> None:
    done = spill("resume", half, "--engine", "louder", "--accept-drift", "--stop-after", "tune:4")
    assert done.code == 0, done.err
    assert "drift accepted" in done.out
    assert any("drift accepted at step 3" in note for note in newest_entry(state_of(half))["runs"][-1]["notes"])


def test_the_exam_of_the_tuned_model_is_not_taken_by_an_engine_that_applies_the_adapter_wrongly(
    spill: Spill, half: Path
) -> None:
    assert spill("resume", half, "--stop-after", "tune").code == 0
    refused(spill("resume", half, "--engine", "louder"), "nats")


def test_a_changed_dtype_needs_the_flag_once_and_is_then_the_builds_own(
    spill: Spill, model: Path, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "folder", model, engine="other", exam=1)
    started = spill("build", folder, "--dtype", "bfloat16", "--stop-after", "tune:1")
    assert started.code == 0, started.err
    hop = spill("resume", folder, "--dtype", "float32", "--stop-after", "tune:2")
    assert hop.code == 0, hop.err
    assert "dtype bfloat16 -> float32" in newest_entry(state_of(folder))["runs"][-1]["notes"]
    again = spill("resume", folder, "--stop-after", "tune:3")
    assert again.code == 0, again.err
    assert head(state_of(folder)).plan.dtype == "float32"


# ---- changed inputs


CHANGED_SETTINGS = (
    ("--learning-rate", "0.02", "learning_rate was 0.01, is 0.02"),
    ("--batch", "5", "batch was 4, is 5"),
    ("--epochs", "3", "epochs was 2, is 3"),
    ("--seed", "1", "seed was 0, is 1"),
    ("--rank", "8", "rank was 16, is 8"),
    ("--alpha", "8", "alpha was 32.0, is 8.0"),
    ("--max-length", "256", "max_length was 1024, is 256"),
    ("--stages", "tune", "stages was eval:base, tune, eval:tuned, is tune"),
)


def test_another_setting_is_refused_with_both_values_by_flag_and_in_the_file(spill: Spill, half: Path) -> None:
    before = files(state_of(half))
    settings = half / "spill.toml"
    original = settings.read_text()
    for flag, value, line in CHANGED_SETTINGS:
        refused(spill("resume", half, flag, value), line)
        key, text = flag[2:].replace("-", "_"), '["tune"]' if value == "tune" else value
        kept = "".join(x for x in original.splitlines(keepends=True) if not x.startswith(f"{key} ="))
        settings.write_text(f"{kept}{key} = {text}\n")
        refused(spill("build", half), line)
        settings.write_text(original)
    assert files(state_of(half)) == before


def test_a_changed_character_an_other_order_and_a_swapped_file_are_refused_by_name(spill: Spill, half: Path) -> None:
    before = files(state_of(half))
    changes: list[tuple[str, Any]] = [
        ("train.jsonl", lambda text: text.replace('"say 3"', '"say 4"', 1)),
        ("train.jsonl", lambda text: "".join(reversed(text.splitlines(keepends=True)))),
        ("evals.jsonl", lambda text: text.replace("tell 1", "tell 2")),
        ("instructions.txt", lambda text: text.replace("yes", "no ")),
    ]
    for name, change in changes:
        path = half / name
        original, found = path.read_text(), path.stat()
        path.write_text(change(original))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert path.stat().st_size == found.st_size
        refused(spill("resume", half), f"{name}: sha256 was ")
        path.write_text(original)
    (half / "instructions.txt").unlink()
    refused(spill("resume", half), "instructions.txt: sha256 was ", "no such file")
    assert files(state_of(half)) == before


@pytest.mark.parametrize("stop", ["eval:base", None], ids=["stopped", "finished"])
def test_other_weights_under_the_same_path_are_refused_and_no_finished_stage_is_reused(
    spill: Spill, tmp_path: Path, stop: str | None
) -> None:
    student = tiny_model(tmp_path / "student")
    folder = write_folder(tmp_path / "folder", student, rows=4, exam=1, epochs=1)
    assert spill("build", folder, *(("--stop-after", stop) if stop else ())).code == 0
    before = files(state_of(folder))
    weights = student / "model.safetensors"
    found = weights.stat()
    tiny_model(student, seed=1)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert weights.stat().st_size == found.st_size
    refused(spill("build", folder), "model was local with sha256:")
    assert files(state_of(folder)) == before


def test_a_second_build_at_the_same_place_is_refused(spill: Spill, half: Path, model: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", model, rows=6)
    before = files(state_of(half))
    refused(spill("build", other, "--state", state_of(half)), "was built from something else", "train.jsonl")
    assert files(state_of(half)) == before


def test_resume_starts_nothing(spill: Spill, folder: Path, tmp_path: Path) -> None:
    refused(spill("resume", folder), "there is no state at", "spill build")
    refused(spill("resume", tmp_path / "nothing"), "there is no folder or state")
    assert not state_of(folder).exists()


def test_stage_names_that_differ_only_in_case_are_refused(spill: Spill, folder: Path) -> None:
    done = spill("build", folder, "--stages", "eval:base,tune,Tune")
    assert done.code == 1
    assert "two stages have the same name" in done.err
    assert not state_of(folder).exists()


def test_a_state_that_needs_a_stage_not_installed_names_what_to_install(spill: Spill, half: Path) -> None:
    def change(plain: dict[str, Any]) -> None:
        plain["plan"]["stages"].append("distil")
        plain["plan"]["plugins"]["distil"] = "spill-stage-distil"

    rewrite(state_of(half), change)
    refused(spill("resume", half), "'distil'", "pip install spill-stage-distil")
