"""Looking after a state: verify, history, copy and gc, also beside a run that goes on meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spill.stores.local import LocalStore
from spill.testing.faulty_store import CONFLICT, DIE_BEFORE, DROPPED, LOST, Call, Died, Fault, at
from tests.building import contents, put_between
from tests.conftest import Outcome, Spill, write_folder
from tests.core.builds import entry, everything, files, head, log_numbers, newest_entry, one_line, open_local

pytestmark = pytest.mark.usefixtures("quick")
OFTEN = ("--commit-every", "0")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, small: Path, build_once: Callable[..., None]) -> Path:
    """A folder whose build stopped at step 4 of 6, with every commit so far."""
    folder = write_folder(tmp_path_factory.mktemp("saved") / "folder", small, rows=6, exam=2, epochs=1, batch=1, rank=2)
    build_once("build", folder, "--stop-after", "tune:4", *OFTEN)
    return folder


@pytest.fixture
def folder(tmp_path: Path, saved: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "folder"))


@pytest.fixture
def state(folder: Path) -> Path:
    return folder / ".spill" / "state"


def fine(done: Outcome) -> str:
    assert done.code == 0, done.err
    return done.out


def refused(done: Outcome, *words: str) -> None:
    assert done.code == 1
    assert one_line(done.error)
    for word in words:
        assert word in done.error


def tune_object(state: Path, numbers_back: int = 0) -> Path:
    """The arrays that the newest entry, or one before it, names."""
    plain = entry(state, log_numbers(state)[-1 - numbers_back])
    return state / plain["stages"]["tune"]["objects"]["state.safetensors"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- reading


def test_commands_that_read_write_nothing(
    spill: Spill, folder: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine(spill("resume", folder))
    calls: list[Call] = []

    def noted(call: Call) -> Fault | None:
        calls.append(call)
        return None

    put_between(monkeypatch, noted)
    before = files(state)
    fine(spill("table", folder))
    fine(spill("state", "verify", folder))
    fine(spill("state", "history", folder))
    fine(spill("export", folder, "--out", tmp_path / "adapter"))
    fine(spill("ask", folder, "hello"))
    fine(spill("state", "copy", state, tmp_path / "copy"))
    assert files(state) == before
    changing = [c for c in calls if c.verb in ("create", "write", "delete")]
    assert {c.verb for c in changing} == {"create", "write"}, "the copy's own, elsewhere"
    assert calls


def test_verify_names_the_states_that_are_whole_and_what_is_damaged(spill: Spill, folder: Path, state: Path) -> None:
    last = log_numbers(state)[-1]
    out = fine(spill("state", "verify", folder))
    assert f"commit {last}: whole, " in out
    assert f"commit {last - 1}: whole, " in out
    flip(tune_object(state))
    done = spill("state", "verify", folder)
    refused(done, f"commit {last} is damaged; a resume goes on from commit {last - 1}", "spill resume")
    assert f"commit {last - 1}: whole" in done.out


def test_verify_names_a_damaged_second_state_and_says_that_the_newest_is_whole(
    spill: Spill, folder: Path, state: Path
) -> None:
    last = log_numbers(state)[-1]
    flip(tune_object(state, 1))
    done = spill("state", "verify", folder)
    refused(done, f"commit {last - 1} is damaged", "has another sha256", f"whole: {last} and 4")
    assert f"commit {last}: whole" in done.out
    assert "at tune 4/6" in fine(spill("resume", folder, "--stop-after", "tune:6"))
    assert fine(spill("state", "verify", folder)).count("whole") == 2


def test_verify_beside_a_run_that_goes_on_is_of_a_later_commit(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, second = log_numbers(state)[-1], tune_object(state, 1)
    done: list[str] = []

    def go_on(call: Call) -> Fault | None:
        if call.verb == "read" and call.name.endswith(second.name) and not done:
            with monkeypatch.context() as patch:
                patch.setattr("spill.stores.load_target", lambda spec: LocalStore)
                done.append(fine(spill("resume", folder, *OFTEN)))
        return None

    put_between(monkeypatch, go_on)
    out = fine(spill("state", "verify", folder))
    assert done
    assert not second.exists()
    assert f"commit {log_numbers(state)[-1]}: whole" in out
    assert f"commit {last}: whole" not in out


def test_history_tells_machines_hops_and_takeovers(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch, other_engines: None
) -> None:
    row = newest_entry(state)["runs"][-1]
    (state / "alive").mkdir(exist_ok=True)
    (state / "alive" / f"{row['claim']}-{row['nonce']}").write_text('{"at":"tune step 5 of 6","beat":3}')
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    fine(spill("resume", folder, "--takeover", "--stop-after", "tune:5"))
    monkeypatch.setenv("SPILL_MACHINE", "gamma")
    fine(spill("resume", folder, "--engine", "other"))
    lines = fine(spill("state", "history", folder)).splitlines()
    alpha, beta, gamma = lines[1:4]
    assert "  alpha  numpy  " in alpha
    assert "eval:base 0-2, tune 0-4" in alpha
    assert "  beta  numpy  " in beta
    assert "tune 4-5" in beta
    assert "[took over from alpha (numpy) at tune step 5 of 6]" in beta
    assert "tune 5-6, eval:tuned 0-2" in gamma
    assert "[hop from numpy]" in gamma
    assert "took over" not in gamma


# ---- copy


def test_a_copy_holds_the_same_state_and_nothing_alive(spill: Spill, state: Path, tmp_path: Path) -> None:
    (state / "alive").mkdir(exist_ok=True)
    (state / "alive" / "1-x").write_bytes(b"x")
    out = fine(spill("state", "copy", state, tmp_path / "copy"))
    assert f"copied {state} to {tmp_path / 'copy'}: {len(log_numbers(state))} commits, " in out
    assert "continue one of the two copies only" in out
    assert not (tmp_path / "copy" / "alive").exists()
    assert head(tmp_path / "copy") == head(state)
    assert contents(open_local(tmp_path / "copy")).items() <= contents(open_local(state)).items()


def test_an_older_copy_is_brought_up_to_date_with_what_it_lacks_alone(
    spill: Spill, folder: Path, state: Path, tmp_path: Path
) -> None:
    fine(spill("state", "copy", state, tmp_path / "copy"))
    fine(spill("resume", folder))
    fine(spill("state", "copy", state, tmp_path / "copy"))
    assert everything(tmp_path / "copy") == everything(state)
    assert ", 0 bytes of data" in fine(spill("state", "copy", state, tmp_path / "copy"))


def test_a_copy_continued_by_itself_and_another_state_are_not_overwritten(
    spill: Spill, folder: Path, state: Path, tmp_path: Path
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    fine(spill("state", "copy", state, copy))
    fine(spill("resume", folder, "--state", copy))
    fine(spill("build", folder, "--state", other, "--stop-after", "eval:base"))
    before = files(copy), files(other)
    refused(spill("state", "copy", state, copy), "it was continued by itself", "copy the other way")
    refused(spill("state", "copy", state, other), "holds another state", "copy to another place")
    assert (files(copy), files(other)) == before


def test_two_copies_that_are_both_continued_are_two_whole_states(
    spill: Spill, folder: Path, state: Path, tmp_path: Path
) -> None:
    fine(spill("state", "copy", state, tmp_path / "copy"))
    fine(spill("resume", folder))
    fine(spill("resume", folder, "--state", tmp_path / "copy"))
    assert everything(tmp_path / "copy") == everything(state)
    for place in (state, tmp_path / "copy"):
        fine(spill("state", "verify", folder, "--state", place))


@pytest.mark.parametrize("numbers_back", [0, 1])
def test_what_is_damaged_in_a_copy_is_sent_again(spill: Spill, state: Path, tmp_path: Path, numbers_back: int) -> None:
    """The size is right, so only reading finds it."""
    copy = tmp_path / "copy"
    fine(spill("state", "copy", state, copy))
    flip(tune_object(copy, numbers_back))
    fine(spill("state", "copy", state, copy))
    assert files(copy) == {name: data for name, data in files(state).items() if not name.startswith("alive")}


def test_a_damaged_old_entry_is_no_reason_to_refuse_a_second_copy(
    spill: Spill, folder: Path, state: Path, tmp_path: Path
) -> None:
    flip(state / "log" / "3.json")
    fine(spill("state", "copy", state, tmp_path / "copy"))
    fine(spill("state", "copy", state, tmp_path / "copy"))
    fine(spill("resume", folder))
    fine(spill("state", "copy", state, tmp_path / "copy"))
    assert everything(tmp_path / "copy") == everything(state)


def test_an_older_copy_that_has_what_is_damaged_here_is_brought_up_to_date(
    spill: Spill, folder: Path, state: Path, tmp_path: Path
) -> None:
    fine(spill("state", "copy", state, tmp_path / "copy"))
    fine(spill("resume", folder, "--stop-after", "tune:5"))
    flip(tune_object(state, 2))  # of step 4, the second newest
    fine(spill("state", "copy", state, tmp_path / "copy"))
    assert head(tmp_path / "copy") == head(state)
    assert fine(spill("state", "verify", folder, "--state", tmp_path / "copy")).count("whole") == 2


def test_a_copy_says_that_it_goes_back(spill: Spill, state: Path, tmp_path: Path) -> None:
    last = log_numbers(state)[-1]
    flip(tune_object(state))
    out = fine(spill("state", "copy", state, tmp_path / "copy"))
    assert f"warning: commit {last} is damaged" in out
    assert f"warning: going back to commit {last - 1}" in out


@pytest.mark.parametrize("fault", [DROPPED, LOST, CONFLICT])
def test_a_copys_entry_without_an_answer_is_settled_by_reading_back(
    spill: Spill, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    met: list[str] = []

    def plan(call: Call) -> Fault | None:
        if call.verb == "create" and call.name not in met:
            met.append(call.name)
            return fault
        return None

    put_between(monkeypatch, plan)
    fine(spill("state", "copy", state, tmp_path / "copy"))
    assert head(tmp_path / "copy") == head(state)
    assert len(met) == len(log_numbers(state))


def test_a_copy_that_is_cut_off_anywhere_is_no_newer_state_and_goes_on(
    spill: Spill, folder: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    fine(spill("state", "copy", state, copy))
    fine(spill("resume", folder))
    old, new = head(copy), head(state)
    for index in range(1, 200):
        place = tmp_path / str(index)
        shutil.copytree(copy, place)
        with monkeypatch.context() as patch:
            put_between(patch, at({index: DIE_BEFORE}))
            try:
                done = spill("state", "copy", state, place)
            except Died:
                pass
            else:
                fine(done)
                break
        assert old.number <= head(place).number <= new.number
        fine(spill("state", "copy", state, place))
        assert head(place) == new
    assert index > 20


def test_a_copy_beside_a_run_that_goes_on_is_of_a_later_commit(
    spill: Spill, folder: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run sweeps away what is being copied."""
    copy = tmp_path / "copy"
    first = head(state).number
    done: list[str] = []

    def go_on(call: Call) -> Fault | None:
        if call.verb == "write" and not done:
            done.append("begun")
            with monkeypatch.context() as patch:
                patch.setattr("spill.stores.load_target", lambda spec: LocalStore)
                done.append(fine(spill("resume", folder, *OFTEN)))
        return None

    with monkeypatch.context() as patch:
        put_between(patch, go_on)
        fine(spill("state", "copy", state, copy))
    assert len(done) == 2
    assert head(copy).number > first
    assert everything(copy) == everything(state)


# ---- gc


def test_gc_frees_what_killed_writers_left_and_names_itself_in_the_history(
    spill: Spill, folder: Path, state: Path
) -> None:
    before = contents(open_local(state))
    left = state / "data" / "1-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "000001-tune-state.safetensors").write_bytes(b"x" * 1000)
    kept = {name for name in before if name.startswith("data/")}
    out = fine(spill("state", "gc", folder))
    assert "removed 1 objects, 1,000 bytes; 2 states kept" in out
    after = contents(open_local(state))
    assert {name for name in after if name.startswith("data/")} == kept
    assert before.items() <= after.items()
    assert "nothing committed  [freed unnamed objects]" in fine(spill("state", "history", folder))
    fine(spill("resume", folder))


def test_gc_frees_nothing_that_a_damaged_commit_names(spill: Spill, folder: Path, state: Path) -> None:
    last = log_numbers(state)[-1]
    flip(tune_object(state))
    before = contents(open_local(state))
    refused(
        spill("state", "gc", folder), f"commit {last} is damaged", f"go back to commit {last - 1} first: spill resume"
    )
    assert contents(open_local(state)) == before


def alive_of(state: Path) -> Path:
    row = newest_entry(state)["runs"][-1]
    path = state / "alive" / f"{row['claim']}-{row['nonce']}"
    path.parent.mkdir(exist_ok=True)
    return path


def test_gc_is_refused_while_a_run_holds_the_state(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = alive_of(state)
    alive.write_bytes(b'{"beat":1}')
    monkeypatch.setattr("spill.environment.sleep", lambda duration: alive.write_bytes(b'{"beat":2}'))
    before = contents(open_local(state))
    done = spill("state", "gc", folder)
    assert done.code == 76
    assert "is held by alpha (numpy)" in done.err
    assert contents(open_local(state)) == before
    out = fine(spill("state", "gc", folder, "--takeover"))
    assert "taking over from alpha (numpy)" in out


def test_gc_waits_for_a_holder_to_end_and_goes_on_from_what_it_committed(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = alive_of(state)
    alive.write_bytes(b'{"beat":1}')

    def holder_ends(duration: float) -> None:
        if alive.exists():
            alive.unlink()
            with monkeypatch.context() as patch:
                patch.setattr("spill.environment.sleep", lambda duration: pytest.fail("the holder waits for nobody"))
                shutil.rmtree(state / "alive")
                fine(spill("resume", folder))

    monkeypatch.setattr("spill.environment.sleep", holder_ends)
    out = fine(spill("state", "gc", folder))
    assert "states kept" in out
    assert head(state).stages["eval:tuned"].finished


def test_gc_that_loses_its_claim_to_a_run_that_ends_goes_on_after_it(
    spill: Spill, folder: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(open_local(state))
    real = spill

    def overtake(call: Call) -> Fault | None:
        if call.verb == "create" and call.name == f"log/{head(state).number + 1}.json" and not taken:
            taken.append(call)
            with monkeypatch.context() as patch:
                patch.setattr("spill.stores.load_target", lambda spec: LocalStore)
                fine(real("resume", folder, "--stop-after", "tune:5"))
        return None

    taken: list[Call] = []
    with monkeypatch.context() as patch:
        put_between(patch, overtake)
        done = spill("state", "gc", folder)
    assert taken
    assert "2 states kept" in fine(done)
    kept = {name for name in before if name.startswith("log/")}
    assert kept <= set(contents(open_local(state)))
    assert head(state).stages["tune"].position == 5
    assert fine(spill("state", "verify", folder)).count("whole") == 2
