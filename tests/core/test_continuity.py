"""Resuming changes nothing: rows, learning rates, losses and arrays of stopped builds beside an uninterrupted one."""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill import arrays
from spill.cli import run
from spill.signals import StopRequest
from spill.stores.local import LocalStore
from tests.conftest import Spill, write_folder
from tests.core.builds import everything, head, journal, newest_entry, position, replace_object, training_state

pytestmark = pytest.mark.usefixtures("quick", "other_engines")

Build = Callable[..., Path]


@pytest.fixture
def build(spill: Spill, model: Path, tmp_path: Path) -> Build:
    """Build a folder, stopping where asked and resuming; its state."""

    def make(name: str, *stops: str, options: tuple[str, ...] = (), **settings: Any) -> Path:
        folder = write_folder(tmp_path / "folder", model, **settings)
        state = tmp_path / name
        for command, stop in zip(("build", *["resume"] * len(stops)), (*stops, None), strict=True):
            stopping = ("--stop-after", stop) if stop else ()
            done = spill(command, folder, "--state", state, *stopping, *options)
            assert done.code == 0, done.err
        return state

    return make


# ---- rows, order, learning rate, loss


def test_three_epochs_stopped_at_each_end_have_three_orders_and_those_of_an_unbroken_build(build: Build) -> None:
    whole = build("whole", epochs=3)
    stopped = build("stopped", "tune:3", "tune:6", epochs=3)
    assert everything(stopped) == everything(whole)
    steps = journal(whole, "tune")
    orders = [[row for step in steps[e * 3 : e * 3 + 3] for row in step["rows"]] for e in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_rows_one_by_one_are_each_used_once_when_stopped_at_twenty_of_sixty_four(build: Build) -> None:
    """With a commit after every step the journal's segments are merged several times on the way."""
    settings: dict[str, Any] = {"rows": 64, "batch": 1, "epochs": 1, "exam": 1, "stages": ["tune"]}
    whole = build("whole", **settings)
    stopped = build("stopped", "tune:20", options=("--commit-every", "0"), **settings)
    assert sorted(row for step in journal(stopped, "tune") for row in step["rows"]) == list(range(64))
    assert everything(stopped) == everything(whole)


def test_around_the_end_of_an_epoch_and_within_the_second_the_rest_is_what_it_was(build: Build) -> None:
    whole = build("whole", exam=1)
    for stop in (2, 3, 4, 5):
        stopped = build(f"stopped at {stop}", f"tune:{stop}", exam=1)
        assert journal(stopped, "tune") == journal(whole, "tune")
        assert [len(step["rows"]) for step in journal(stopped, "tune")] == [4, 4, 2] * 2
        assert everything(stopped) == everything(whole)


def test_a_build_stopped_after_every_step_and_every_row_equals_an_unbroken_one(build: Build) -> None:
    rows = [f"eval:base:{n}" for n in (1, 2)]
    steps = [f"tune:{n}" for n in range(1, 6)]
    stopped = build("stopped", *rows, "eval:base", *steps, "tune", "eval:tuned:1", exam=3)
    assert everything(stopped) == everything(build("whole", exam=3))


def test_a_finished_stage_is_finished_only_at_the_last_step_of_the_plan(build: Build) -> None:
    state = build("stopped", "tune:5")
    commits = [json.loads(path.read_bytes()) for path in (state / "log").glob("*.json")]
    records = [c["stages"]["tune"] for c in commits if "tune" in c["stages"]]
    assert {r["finished"] for r in records if r["position"] < 6} == {False}
    assert {r["finished"] for r in records if r["position"] == 6} == {True}


def test_four_micro_batches_a_step_stopped_at_step_three_go_on_at_the_right_row(
    spill: Spill, folder: Path, tmp_path: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for command, state, *stop in (
        ("build", whole),
        ("build", stopped, "--stop-after", "tune:3"),
        ("resume", stopped),
    ):
        assert spill(command, folder, "--state", state, "--engine", "other", *stop).code == 0
    assert newest_entry(whole)["runs"][0]["numerics"]["micro_batch_tokens"] == 1
    assert everything(stopped) == everything(whole)


class StopAtTick(StopRequest):
    """Gets a SIGTERM in front of the n-th tick."""

    def __init__(self, tick: int) -> None:
        super().__init__()
        self.left = tick

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.asked = signal.SIGTERM
        super().tick()


def test_a_stop_at_any_tick_is_exit_75_and_the_rest_is_what_it_was(
    spill: Spill, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ticks come while loading, between tokens, and between the micro-batches of a step, of one row each here."""
    folder = write_folder(tmp_path / "folder", model, engine="other", rows=3, batch=2, epochs=2, exam=1)
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    counter = StopAtTick(10**9)
    assert run(counter, ["build", str(folder), "--state", str(tmp_path / "counted")]) == 0
    ticks = 10**9 - counter.left
    assert ticks > 40
    whole = everything(tmp_path / "whole")
    places, saved = set(), set()
    for tick in range(3, ticks, 3):
        state = tmp_path / f"stopped at {tick}"
        code = run(StopAtTick(tick), ["build", str(folder), "--state", str(state)])
        out, error = capsys.readouterr()
        assert code in (0, 75)
        if code == 75:
            assert error.startswith("spill: stopped by SIGTERM")
            assert error.count("\n") == 1
            if told := re.search(r" at (\S+) (?:step|row) (\d+) of \d+; saved: commit \d+$", error.strip()):
                assert position(state, told[1]) == int(told[2])
                places.add((told[1], told[2]))
            saved |= set(
                re.findall(r"SIGTERM: saving tune step (\d) of 4, (\d\.\d) MB; a kill now loses steps 1 to (\d)", out)
            )
        assert run(StopRequest(), ["build", str(folder), "--state", str(state)]) == 0
        assert everything(state) == whole, f"stopped at tick {tick} of {ticks}"
        shutil.rmtree(state)
    assert len(places) > 4
    # Three times the adapter in float32, and the journal; nothing was committed within the tune before.
    arrays = (tmp_path / "whole").glob("data/*/*state.safetensors")
    size = f"{max(path.stat().st_size for path in arrays) / 1e6:.1f}"
    assert len(saved) > 1
    assert saved <= {(step, size, step) for step in "234"}


def test_learning_rates_of_ten_steps_stopped_at_five_are_exactly_those_of_an_unbroken_build(build: Build) -> None:
    settings: dict[str, Any] = {"rows": 20, "batch": 4, "epochs": 2, "exam": 1, "stages": ["tune"]}
    whole, stopped = build("whole", **settings), build("stopped", "tune:5", **settings)
    rates = [step["learning_rate"] for step in journal(whole, "tune")]
    assert [step["learning_rate"] for step in journal(stopped, "tune")] == rates
    assert len(rates) == 10
    assert rates[0] == max(rates)
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < rates[0] / 10


def test_the_step_after_a_resume_uses_the_saved_moments_and_not_cold_ones(build: Build, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rows": 20, "batch": 2, "epochs": 2, "exam": 1, "stages": ["tune"]}
    continued = build("continued", "tune:12", **settings)
    resumed = build("resumed", "tune:10", "tune:11", "tune:12", **settings)
    half = tmp_path / "half"
    folder = tmp_path / "folder"

    def go(*arguments: object) -> None:
        assert run(StopRequest(), [str(a) for a in (*arguments, folder, "--state", half)]) == 0

    go("build", "--stop-after", "tune:10")
    spec = {n: (np.float32, tuple(i.shape)) for n, i in arrays.read_header(_object(half)).items()}
    saved = arrays.read(training_state(half), expect=spec)
    cold = {n: a * 0 if "moment/" in n else a for n, a in saved.items()}
    replace_object(half, "tune", "state.safetensors", b"".join(bytes(p) for p in arrays.write_parts(cold)))
    go("resume")
    assert journal(resumed, "tune") == journal(continued, "tune")
    assert training_state(resumed) == training_state(continued)
    assert journal(half, "tune")[10] == journal(continued, "tune")[10]  # its loss is from before the update
    assert journal(half, "tune")[11]["loss"] != journal(continued, "tune")[11]["loss"]


def _object(state: Path) -> Path:
    return state / head(state).stages["tune"].objects["state.safetensors"]


def test_a_learning_rate_of_zero_leaves_the_adapter_as_it_was_across_a_resume(build: Build) -> None:
    state = build("still", "tune:2", "tune:3", learning_rate=0.0)
    info = arrays.read_header(_object(state))
    after = arrays.read(training_state(state), expect={n: (np.float32, i.shape) for n, i in info.items()})
    assert all(not array.any() for name, array in after.items() if name.endswith("lora_B") and name.startswith("adap"))
    first = build("one", "tune:1", learning_rate=0.0)
    before = arrays.read(training_state(first), expect={n: (np.float32, i.shape) for n, i in info.items()})
    assert all(np.array_equal(before[n], after[n]) for n in info if n.startswith("adapter/"))


def test_every_commit_through_a_slow_store_holds_the_arrays_of_the_step_it_names(
    spill: Spill, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "folder", model, stages=["tune"], exam=1)
    expected = {}
    for step in range(1, 7):
        assert spill("build", folder, "--state", tmp_path / "one by one", "--stop-after", f"tune:{step}").code == 0
        expected[step] = training_state(tmp_path / "one by one")
    slow = tmp_path / "slow"
    write, create = LocalStore.write, LocalStore.create
    seen: dict[int, bytes] = {}

    def create_and_look(store: LocalStore, name: str, data: bytes) -> None:
        create(store, name, data)
        tune = json.loads(data)["stages"].get("tune")
        if tune:
            seen[tune["position"]] = (slow / tune["objects"]["state.safetensors"]).read_bytes()

    monkeypatch.setattr(LocalStore, "write", lambda *a: (time.sleep(0.03), write(*a))[1])
    monkeypatch.setattr(LocalStore, "create", create_and_look)
    assert spill("build", folder, "--state", slow, "--commit-every", "0").code == 0
    assert seen == expected


# ---- the state moved


@pytest.mark.parametrize("name", ["with space", "é", "#hash", "a%40b", "[x]", "semi;colon", "$HOME", "quote'd"])
def test_a_state_of_any_name_is_found_again_by_the_command_that_is_printed(
    spill: Spill, model: Path, tmp_path: Path, name: str
) -> None:
    folder = write_folder(tmp_path / name / "folder", model, exam=2, rows=4, epochs=1)
    done = spill("build", folder, "--state", tmp_path / name / "state", "--stop-after", "eval:base:1")
    command = shlex.split(done.out.splitlines()[-1].partition("next: ")[2])
    assert command[:2] == ["spill", "resume"]
    done = spill(*command[1:])
    assert done.code == 0, done.err
    assert position(tmp_path / name / "state", "eval:tuned") == 2


@pytest.mark.parametrize("written", ["{}/", "{}//", "/{}", "file://{}", "file://{}/", "{}/../s"])
def test_a_state_is_the_same_with_and_without_a_slash(spill: Spill, folder: Path, tmp_path: Path, written: str) -> None:
    state = tmp_path / "s"
    assert spill("build", folder, "--state", state, "--stop-after", "eval:base:1").code == 0
    done = spill("resume", folder, "--state", written.format(state), "--stop-after", "eval:base:3")
    assert done.code == 0, done.err
    assert position(state, "eval:base") == 3


def test_a_state_resumes_where_folder_and_state_were_moved_and_the_first_place_is_gone(
    spill: Spill, model: Path, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    folder = write_folder(here / "folder", model)
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    assert spill("build", folder, "--stop-after", "tune:3").code == 0
    here.rename(there)
    done = spill("resume", there / "folder")
    assert done.code == 0, done.err
    assert spill("table", there / "folder").code == 0
    assert everything(there / "folder" / ".spill" / "state") == everything(tmp_path / "whole")


@pytest.mark.parametrize("tool", ["copytree", "tar", "zip"])
def test_a_copy_by_ordinary_tools_with_their_litter_resumes(
    spill: Spill, folder: Path, tmp_path: Path, tool: str
) -> None:
    state, copy = tmp_path / "s", tmp_path / "copy"
    assert spill("build", folder, "--state", state, "--stop-after", "tune:3").code == 0
    if tool == "copytree":
        shutil.copytree(state, copy, copy_function=shutil.copyfile)
    else:
        archive = shutil.make_archive(str(tmp_path / "packed"), tool, state)
        shutil.unpack_archive(archive, copy)
    for litter in ("", "log", "data"):
        (copy / litter / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
        (copy / litter / "Thumbs.db").write_bytes(b"")
        (copy / litter / "1.json (conflicted copy)").write_bytes(b"{}")
    shutil.rmtree(state)
    done = spill("resume", folder, "--state", copy)
    assert done.code == 0, done.err
    assert "damaged" not in done.out + done.err
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    assert everything(copy) == everything(tmp_path / "whole")


def test_answers_cut_at_the_limit_are_counted_in_the_table(spill: Spill, folder: Path, tmp_path: Path) -> None:
    done = spill("build", folder, "--state", tmp_path / "s", "--stages", "eval:base", "--table")
    assert done.code == 0, done.err
    cut = sum(row["ended"] == "length" for row in journal(tmp_path / "s", "eval:base"))
    assert cut > 0
    assert f"eval:base: {cut} of 5 answers were cut at " in done.out
