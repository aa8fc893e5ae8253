"""Two runs that meet at one state: who goes on, who is told what, and what a run says that has lost it."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spill import holding, runner
from spill.cli import run
from spill.signals import StopRequest
from spill.stores.local import LocalStore
from spill.testing.faulty_store import ERROR, TRUNCATED, Call, Fault
from tests.building import put_between
from tests.conftest import Spill, write_folder
from tests.core.builds import everything, head, newest_entry, one_line, position

pytestmark = pytest.mark.usefixtures("quick")
OFTEN = ("--commit-every", "0")
Between = Callable[[Callable[[], object]], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small: Path, build_once: Callable[..., None]) -> Path:
    """A folder whose build stopped at step 4 of 8."""
    folder = write_folder(tmp_path_factory.mktemp("saved") / "folder", small, rows=8, exam=2, epochs=1, batch=1, rank=2)
    build_once("build", folder, "--stop-after", "tune:4", *OFTEN)
    return folder


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture
def state(folder: Path) -> Path:
    return folder / ".spill" / "state"


@pytest.fixture
def whole(spill: Spill, folder: Path, tmp_path: Path) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        assert spill("build", folder, "--state", tmp_path / "whole").code == 0
        return everything(tmp_path / "whole")

    return make


@pytest.fixture
def while_preparing(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Does something the first time that a run prepares its rows: after it has read the state, before it claims."""

    def arrange(work: Callable[[], object]) -> None:
        real, done = runner.prepare, []

        def prepare(*arguments: Any) -> Any:
            if not done:
                done.append("once")
                work()
            return real(*arguments)

        monkeypatch.setattr(runner, "prepare", prepare)

    return arrange


@pytest.fixture
def other(spill: Spill, folder: Path) -> Callable[..., None]:
    """Another machine's run on the same state."""

    def work(*options: object, machine: str = "beta", **elsewhere: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SPILL_MACHINE", machine)
            patch.setattr("spill.stores.load_target", lambda spec: LocalStore)
            done = spill("resume", elsewhere.get("folder", folder), *options, *OFTEN)
        assert done.code == 0, done.err

    return work


def keep_alive(state: Path, at: str = "tune step 6 of 8") -> Path:
    """The object of whoever holds the state now."""
    row = newest_entry(state)["runs"][-1]
    path = state / "alive" / f"{row['claim']}-{row['nonce']}"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"at":"{at}","beat":1}}')
    return path


def test_of_two_that_watched_a_dead_holder_the_slower_watches_the_quicker(
    spill: Spill, folder: Path, state: Path, other: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = keep_alive(state)
    now, renewed = [0.0], []

    def sleep(duration: float) -> None:
        now[0] += 5.0
        if now[0] > 20 and not renewed:
            dead.unlink()
            other("--stop-after", "tune:5")
            renewed.append(keep_alive(state, "tune step 6 of 8"))
        elif renewed:
            renewed[0].write_text(f'{{"at":"tune step 7 of 8","beat":{len(renewed)}}}')
            renewed.append(renewed[0])

    monkeypatch.setattr("spill.environment.seconds", lambda: now[0])
    monkeypatch.setattr("spill.environment.sleep", sleep)
    done = spill("resume", folder)
    assert done.code == 76
    assert "is held by beta (numpy) at tune step 7 of 8" in done.err
    assert position(state, "tune") == 5


def test_a_run_that_was_slower_than_one_that_has_died_goes_on_after_it(
    spill: Spill, folder: Path, state: Path, other: Callable[..., None], while_preparing: Between
) -> None:
    def quicker() -> None:
        other("--stop-after", "tune:5")
        long_ago = time.time() - 600
        os.utime(keep_alive(state), (long_ago, long_ago))

    while_preparing(quicker)
    done = spill("resume", folder)
    assert done.code == 0, done.err
    assert "beta (numpy) has not been alive for 6" in done.out
    assert "going on from commit " in done.out
    assert head(state).runs[-1].notes == ("took over from beta (numpy), silent, at tune step 6 of 8",)


def test_a_takeover_that_somebody_else_made_is_not_ones_own(
    spill: Spill, folder: Path, state: Path, other: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_ago = time.time() - 600
    os.utime(keep_alive(state), (long_ago, long_ago))
    real, opened = holding.open_build, []

    def open_build(*arguments: Any) -> Any:
        opened.append(arguments)
        if len(opened) == 2:  # after the watch, before it is read anew
            shutil.rmtree(state / "alive")
            other("--stop-after", "tune:5")
        return real(*arguments)

    monkeypatch.setattr(holding, "open_build", open_build)
    done = spill("resume", folder)
    assert done.code == 0, done.err
    assert head(state).runs[-1].machine == "alpha"
    assert head(state).runs[-1].notes == ()


def test_a_takeover_claims_over_a_holder_that_commits_meanwhile(
    spill: Spill,
    folder: Path,
    state: Path,
    other: Callable[..., None],
    while_preparing: Between,
    whole: Callable[[], object],
) -> None:
    expected = whole()
    keep_alive(state)

    def holder() -> None:
        shutil.rmtree(state / "alive")
        other("--stop-after", "tune:6")
        keep_alive(state)

    while_preparing(holder)
    done = spill("resume", folder, "--takeover")
    assert done.code == 0, done.err
    assert everything(state) == expected
    rows = {row.machine: row.work for row in head(state).runs}
    assert rows["beta"]["tune"] == (4, 6)
    assert head(state).runs[-1].work["tune"] == (6, 8)


def test_a_run_that_was_slower_to_claim_is_told_all_there_is_to_know(
    spill: Spill,
    folder: Path,
    state: Path,
    other: Callable[..., None],
    while_preparing: Between,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def quicker() -> None:
        other("--stop-after", "tune:5")
        alive = keep_alive(state)
        renewed = '{"at":"tune step 6 of 8","beat":2}'
        monkeypatch.setattr("spill.environment.sleep", lambda duration: alive.write_text(renewed))

    while_preparing(quicker)
    done = spill("resume", folder)
    assert done.code == 76
    assert one_line(done.error)
    for part in (
        "is held by beta (numpy) at tune step 6 of 8, alive 0 s ago",
        f"spill resume {folder} --takeover",
        f"it loses what is not committed since commit {head(state).number} (tune 5/8)",
    ):
        assert part in done.error
    assert [path.name for path in (state / "alive").iterdir()] == [
        f"{newest_entry(state)['runs'][-1]['claim']}-{newest_entry(state)['run']}"
    ]


def test_a_run_that_was_slower_than_one_that_has_ended_goes_on_after_it(
    spill: Spill,
    folder: Path,
    state: Path,
    other: Callable[..., None],
    while_preparing: Between,
    whole: Callable[[], object],
) -> None:
    expected = whole()
    while_preparing(lambda: other("--stop-after", "tune:5"))
    done = spill("resume", folder)
    assert done.code == 0, done.err
    assert everything(state) == expected
    assert [row.work["tune"] for row in head(state).runs] == [(0, 4), (4, 5), (5, 8)]


def test_a_build_that_somebody_else_began_meanwhile_is_not_begun_again(
    spill: Spill, folder: Path, other: Callable[..., None], while_preparing: Between, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    while_preparing(lambda: spill("build", folder, "--state", place, "--stop-after", "eval:base"))
    done = spill("build", folder, "--state", place)
    assert done.code == 76
    assert "others were quicker" in done.error
    assert spill("build", folder, "--state", place).code == 0


def test_a_claim_that_loses_to_the_last_commit_prints_the_finished_table(
    spill: Spill, folder: Path, state: Path, other: Callable[..., None], while_preparing: Between
) -> None:
    while_preparing(lambda: other())
    done = spill("resume", folder)
    assert done.code == 0, done.err
    assert "3 eval:tuned" in done.out
    assert "done; next: spill ask" in done.out
    assert head(state).runs[-1].machine == "beta"


def test_a_finished_build_of_another_folder_is_refused_and_not_shown(
    spill: Spill, folder: Path, small: Path, tmp_path: Path, while_preparing: Between, other: Callable[..., None]
) -> None:
    """Both began at an empty place; the other was quicker, and is done by now."""
    mine = write_folder(tmp_path / "mine", small, rows=4, exam=2, epochs=1, batch=1, rank=2, seed=7)
    place = tmp_path / "place"

    def quicker() -> None:
        assert spill("build", folder, "--state", place).code == 0

    while_preparing(quicker)
    done = spill("build", mine, "--state", place)
    assert done.code == 1
    assert "eval:tuned" not in done.out.partition("done; next")[2]
    assert "seed was 0, is 7" in done.err


def test_a_run_whose_object_was_swept_while_it_slept_in_a_write_stops_with_76(
    spill: Spill, folder: Path, state: Path, other: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace
    slept: list[str] = []

    def replace(source: Any, target: Any) -> None:
        if "tune-state" in str(target) and not slept:
            slept.append("once")
            other("--takeover", "--stop-after", "tune:7")
            assert not os.path.exists(source), "the new holder sweeps what it finds of earlier claims"
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    done = spill("resume", folder, *OFTEN)
    assert done.code == 76, done.err
    assert "taken over by beta (numpy) at commit " in done.error
    assert "its step 5 is discarded" in done.error


def test_a_right_to_delete_that_is_missing_costs_room_and_nothing_else(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch, whole: Callable[[], object]
) -> None:
    expected = whole()
    refused: list[str] = []

    def plan(call: Call) -> Fault | None:
        if call.verb == "delete" and call.name.startswith("data/"):
            refused.append(call.name)
            return ERROR
        return None

    put_between(monkeypatch, plan)
    done = spill("resume", folder, *OFTEN)
    assert done.code == 0, done.err
    assert everything(state) == expected
    assert len(refused) > 2
    assert (done.out + done.err).count("what older commits named is kept until it can be removed") == 1
    assert all((state / name).exists() for name in refused)


def test_what_a_killed_writer_left_is_swept_once_the_store_lists_it(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = state / "data" / "1-0123456789abcdef" / "000001-tune-state.safetensors"
    left.parent.mkdir()
    left.write_bytes(b"x")
    failed: list[str] = []

    def plan(call: Call) -> Fault | None:
        if call.verb == "list" and call.name == "data/" and not failed:
            failed.append(call.name)
            return ERROR
        return None

    put_between(monkeypatch, plan)
    done = spill("resume", folder, *OFTEN)
    assert done.code == 0, done.err
    assert failed
    assert not left.exists()


def test_a_reply_that_was_cut_short_once_is_no_damage(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = head(state).number
    cut: list[str] = []

    def plan(call: Call) -> Fault | None:
        if call.verb == "read" and "tune-state" in call.name and not cut:
            cut.append(call.name)
            return TRUNCATED
        return None

    put_between(monkeypatch, plan)
    done = spill("resume", folder, "--stop-after", "tune:5")
    assert done.code == 0, done.err
    assert cut
    assert "damaged" not in done.out + done.err
    assert f"resuming from commit {before}" in done.out


def test_a_finished_build_is_done_whatever_signal_comes(
    spill: Spill, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert spill("resume", folder).code == 0
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "another"))  # where the model's hash is not known yet
    stop = StopRequest()
    stop.asked = signal.SIGTERM
    assert run(stop, ["build", str(folder)]) == 0
