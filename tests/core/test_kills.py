"""Kills, signals and full disks: a build that is stopped by force at any moment goes on as if nothing had happened."""

import importlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spill.signals import StopRequest
from spill.testing.plugins import install_plugin
from tests.conftest import Outcome, Spill, write_folder
from tests.core.builds import entry, everything, files, head, loadable, log_numbers, newest_entry, one_line, position
from tests.killing import KILLED, Child, Nursery, Trap, nursery

pytestmark = pytest.mark.usefixtures("quick")
OFTEN = ("--commit-every", "0")


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory, site: Path, engines_site: Path) -> Iterator[Nursery]:
    home = tmp_path_factory.mktemp("home")
    path = (site, engines_site)
    environment = {"SPILL_HOME": str(home), "SPILL_MACHINE": "alpha", "OMP_NUM_THREADS": "1"}
    with nursery(tmp_path_factory.mktemp("children"), path, **environment) as made:
        yield made


@pytest.fixture
def two_rows(tmp_path: Path, small: Path) -> Path:
    """Two training rows, one epoch of two steps, one exam row."""
    return write_folder(tmp_path / "folder", small, rows=2, exam=1, epochs=1, batch=1, rank=2)


@pytest.fixture
def ten_rows(tmp_path: Path, small: Path) -> Path:
    return write_folder(tmp_path / "folder", small, exam=2, rank=2, batch=1, epochs=1)


@pytest.fixture
def whole(spill: Spill, tmp_path: Path) -> Callable[[Path], object]:
    """What an uninterrupted build of a folder makes."""

    def make(folder: Path) -> object:
        assert spill("build", folder, "--state", tmp_path / "whole").code == 0
        return everything(tmp_path / "whole")

    return make


def two_states_stand(state: Path) -> None:
    """As many distinct states can be loaded as were committed, up to two."""
    committed = {frozenset(entry(state, n)["objects"]) for n in log_numbers(state)} - {frozenset()}
    assert len(loadable(state)) >= min(2, len(committed))


# ---- SIGKILL


def test_a_kill_before_any_change_on_disk_costs_at_most_the_unit_at_work(
    spill: Spill, children: Nursery, two_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    expected = whole(two_rows)

    def start(change: int) -> Child:
        place = tmp_path / f"killed before {change}"
        trap = Trap(kill_before=change, log=tmp_path / f"changes {change}")
        return children.start("build", two_rows, "--state", place, *OFTEN, trap=trap)

    following = start(1)
    for change in range(1, 1000):
        child, following = following, start(change + 1)
        code = child.end()
        if code == 0:
            break
        assert code == KILLED
        state = tmp_path / f"killed before {change}"
        last = (tmp_path / f"changes {change}").read_text().splitlines()[-1]
        two_states_stand(state)
        before = log_numbers(state)
        done = spill("build", two_rows, "--state", state, "--takeover")
        assert done.code == 0, f"{last}: {done.err}"
        assert "damaged" not in done.out
        if "resuming" in done.out:
            assert f"resuming from commit {before[-1]} of alpha (numpy, " in done.out
        assert everything(state) == expected, last
        two_states_stand(state)
    following.end()
    assert change > 30


def _commits(state: Path) -> int:
    return len(log_numbers(state)) if (state / "log").is_dir() else 0


def _hit(child: Child, state: Path, number: int, chance: random.Random) -> None:
    """Send a signal at a random moment: in the first milliseconds, or around the next commits."""
    child.wait_ready()
    target = _commits(state) + chance.choice([0, 2, 3, 4])
    child.wait_or_end(lambda: _commits(state) >= target)
    time.sleep(chance.uniform(0.0, 0.03))
    child.signal(number)


def test_kills_at_random_moments_until_it_is_done_change_nothing(
    children: Nursery, ten_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    chance = random.Random(1)
    expected = whole(ten_rows)
    state = tmp_path / "s"
    killed = 0
    code = None
    while code != 0:
        child = children.start("build", ten_rows, "--state", state, *OFTEN, "--takeover", trap=Trap(slow=0.003))
        _hit(child, state, signal.SIGKILL, chance)
        code = child.end()
        assert code in (0, -signal.SIGKILL), child.err
        killed += code != 0
        if _commits(state):
            two_states_stand(state)
    assert killed >= 3
    assert everything(state) == expected


def test_a_resume_killed_five_times_while_it_starts_works_the_sixth_time(
    spill: Spill, children: Nursery, two_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    state = tmp_path / "s"
    assert spill("build", two_rows, "--state", state, "--stop-after", "tune:1").code == 0
    arrays = head(state).objects
    for change in (1, 2, 3, 7, 8):
        child = children.start("resume", two_rows, "--state", state, "--takeover", trap=Trap(kill_before=change))
        assert child.end() == KILLED
        assert head(state).objects == arrays
    assert spill("resume", two_rows, "--state", state, "--takeover").code == 0
    assert everything(state) == whole(two_rows)


# ---- signals


def test_a_sigterm_at_random_moments_saves_and_is_exit_75(
    children: Nursery, ten_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    """SPILL_SIGTERMS=200 in the environment sends as many; each build that is done is followed by another."""
    chance = random.Random(2)
    expected = whole(ten_rows)
    state, stopped, builds = tmp_path / "0", 0, 0
    while stopped < int(os.environ.get("SPILL_SIGTERMS", "8")):
        child = children.start("build", ten_rows, "--state", state, *OFTEN, trap=Trap(slow=0.003))
        _hit(child, state, signal.SIGTERM, chance)
        code = child.end()
        if code == 0:
            assert everything(state) == expected
            builds += 1
            state = tmp_path / str(builds)
            continue
        assert code == 75, child.err
        saving(child, "SIGTERM")
        if "saved: commit" in child.err:
            assert head(state).number == int(child.err.split()[-1])
        stopped += 1
    assert children.start("build", ten_rows, "--state", state, *OFTEN).end() == 0
    assert everything(state) == expected


def saving(child: Child, name: str) -> str:
    """What a stopped child said it was saving when the signal came, if anything; and its last line, checked."""
    *earlier, last = child.err.splitlines()
    assert last.startswith(f"spill: stopped by {name}")
    assert len(earlier) < 2
    return earlier[0].removeprefix(f"spill: stopping by {name}: ") if earlier else ""


def _saving(state: Path) -> Callable[[], object]:
    """Whether an object of the tune is being written."""
    return lambda: list(state.glob("data/*/.*tune*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_save_through_a_slow_store_says_saved_only_once_it_is(
    children: Nursery, ten_rows: Path, tmp_path: Path, number: signal.Signals
) -> None:
    state = tmp_path / "s"
    child = children.start("build", ten_rows, "--state", state, *OFTEN, "--stages", "tune", trap=Trap(slow=0.15))
    child.wait_for(_saving(state))
    child.signal(number)
    assert child.end() == 75
    commit = head(state)
    steps = commit.stages["tune"].position
    saved = f"spill: stopped by {number.name} at tune step {steps} of 10; saved: commit {commit.number}"
    assert child.err.splitlines()[-1] == saved
    assert steps >= 1
    assert saving(child, number.name) == f"saving tune step {steps} of 10, 0.0 MB; a kill now loses step {steps}"


def test_a_sigkill_after_a_sigterm_loses_at_most_what_was_not_committed(
    children: Nursery, ten_rows: Path, tmp_path: Path
) -> None:
    state = tmp_path / "s"
    child = children.start("build", ten_rows, "--state", state, *OFTEN, "--stages", "tune", trap=Trap(slow=0.1))
    child.wait_for(lambda: (state / "log/3.json").exists())
    child.wait_for(_saving(state))
    committed = log_numbers(state)
    child.signal(signal.SIGTERM)
    time.sleep(0.05)
    child.signal(signal.SIGKILL)
    assert child.end() == -signal.SIGKILL
    assert head(state).number >= committed[-1]
    two_states_stand(state)


def test_a_ctrl_c_saves_and_is_exit_130_and_a_second_leaves_at_once(
    children: Nursery, ten_rows: Path, tmp_path: Path
) -> None:
    for again in (False, True):
        state = tmp_path / f"again {again}"
        child = children.start("build", ten_rows, "--state", state, *OFTEN, "--stages", "tune", trap=Trap(slow=0.25))
        child.wait_for(_saving(state))
        before = log_numbers(state)
        child.signal(signal.SIGINT)
        if again:
            time.sleep(0.02)
            child.signal(signal.SIGINT)
        assert child.end() == 130
        if again:
            assert child.err.splitlines()[-1] == "spill: stopped at once; the last commit stands"
            assert log_numbers(state) == before
        else:
            assert saving(child, "SIGINT") == "saving tune step 1 of 10, 0.0 MB; a kill now loses step 1"
            assert "saved: commit" in child.err
            assert len(log_numbers(state)) == len(before) + 1
        assert head(state).number == log_numbers(state)[-1]


def test_a_process_that_reaches_no_place_to_stop_leaves_in_bounded_time(
    children: Nursery, ten_rows: Path, tmp_path: Path
) -> None:
    state = tmp_path / "s"
    child = children.start("build", ten_rows, "--state", state, "--engine", "stuck", trap=Trap(grace=0.3))
    child.wait_for(lambda: (state / "log/3.json").exists())
    time.sleep(0.1)
    begun = time.monotonic()
    child.signal(signal.SIGTERM)
    assert child.end() == 75
    assert 0.2 < time.monotonic() - begun < 12
    assert "no place to stop was reached in time; the last commit stands" in child.err
    assert head(state).stages["eval:base"].finished


@pytest.mark.parametrize(
    ("gaps", "bound"),
    [([1, 1, 1], 15), ([1, 900, 1], 15), ([900, 40, 1], 40), ([1, 40, 40, 30], 40)],
    ids=["short steps", "one long gap", "a load and long steps", "long steps"],
)
def test_a_stop_waits_for_a_micro_batch_as_long_as_they_take_here(
    monkeypatch: pytest.MonkeyPatch, gaps: list[int], bound: int
) -> None:
    """The longest time but one between two places to stop: a single one is a model that was loaded, or a sleep."""
    now, slept = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = StopRequest()
    stop.tick()
    for gap in gaps:
        now[0] += gap
        with stop.saving():
            now[0] += 500  # a slow store is no micro-batch
    ears, bell = os.pipe()
    os.write(bell, b"!")
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("spill.signals._leave", lambda text, code: None)
    stop._watch(ears)
    assert slept == [bound]


SITECUSTOMIZE = """
import sys, time

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            open({marker!r}, "x").close()
            time.sleep(0.2)

sys.meta_path.insert(0, Slow)
"""


@pytest.mark.parametrize("module", ["spill.cli", "tokenizers", "spill.testing.numpy_engine"])
def test_a_sigterm_while_a_real_process_imports_something_is_exit_75(
    spill_process: Callable[..., "subprocess.Popen[str]"], ten_rows: Path, tmp_path: Path, module: str
) -> None:
    marker = tmp_path / "importing"
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE.format(module=module, marker=str(marker)))
    process = spill_process("build", ten_rows, *OFTEN, path=[tmp_path])
    begun = time.monotonic()
    while not marker.exists():
        assert process.poll() is None
        assert time.monotonic() - begun < 60
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.startswith("spill: stopped by SIGTERM")
    assert err.count("\n") == 1
    state = ten_rows / ".spill" / "state"
    assert not state.exists() or not head(state).stages


# ---- two runs


def test_a_sleeper_that_wakes_after_a_takeover_stops_with_76_and_names_the_new_holder(
    spill: Spill,
    children: Nursery,
    ten_rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Callable[[Path], object],
) -> None:
    expected = whole(ten_rows)
    state = tmp_path / "s"
    child = children.start("build", ten_rows, "--state", state, *OFTEN, trap=Trap(slow=0.03))
    child.wait_for(lambda: (state / "log/9.json").exists())
    child.signal(signal.SIGSTOP)
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    done = spill("resume", ten_rows, "--state", state, "--takeover")
    assert done.code == 0, done.err
    assert "taking over from alpha (numpy)" in done.out
    before = files(state)
    child.signal(signal.SIGCONT)
    assert child.end() == 76
    assert child.err.startswith(f"spill: {state}: taken over by beta (numpy) at commit ")
    assert child.err.count("\n") == 1
    assert before.items() <= files(state).items()
    assert everything(state) == expected


def test_of_two_resumes_at_once_one_goes_on_and_no_step_is_made_twice(
    spill: Spill, children: Nursery, ten_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    expected = whole(ten_rows)
    for attempt in range(3):
        state = tmp_path / f"attempt {attempt}"
        assert spill("build", ten_rows, "--state", state, "--stop-after", "tune:5").code == 0
        both = [children.start("resume", ten_rows, "--state", state, SPILL_MACHINE=m) for m in ("beta", "gamma")]
        codes = [child.end() for child in both]
        assert 0 in codes
        assert set(codes) <= {0, 76}, [child.err for child in both]
        for child in both:
            if child.end() == 76:
                assert "held by " in child.err or "taken over by " in child.err
        assert everything(state) == expected


def test_a_newcomer_that_waited_for_a_holder_to_end_goes_on_from_what_it_committed(
    spill: Spill, children: Nursery, ten_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    expected = whole(ten_rows)
    state = tmp_path / "s"
    first = children.start("build", ten_rows, "--state", state, *OFTEN, trap=Trap(slow=0.05))
    first.wait_for(lambda: (state / "log/9.json").exists())
    second = children.start("resume", ten_rows, "--state", state, SPILL_MACHINE="beta")
    second.wait_for(lambda: "watching" in second.out)
    first.signal(signal.SIGTERM)
    assert first.end() == 75
    assert second.end() == 0, second.err
    assert everything(state) == expected


# ---- no room, no right


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 5 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=5m,mode=755", "spill-test", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs root with the right to mount a tmpfs: the test of a full disk did not run")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


def _fill(disk: Path, left: int) -> Path:
    found = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(found.f_bavail * found.f_frsize - left))
    return filler


def test_a_full_disk_is_one_line_with_the_bytes_needed_and_a_resume_works_once_there_is_room(
    spill: Spill, folder: Path, small_disk: Path, tmp_path: Path
) -> None:
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    state = small_disk / "state"
    assert spill("build", folder, "--state", state, "--stop-after", "tune:2").code == 0
    commit = head(state)
    for left in (0, 60_000):
        filler = _fill(small_disk, left)
        done = spill("resume", folder, "--state", state, "--takeover", *OFTEN)
        assert done.code == 1
        assert one_line(done.error)
        assert "no room to write" in done.error
        assert "bytes are needed" in done.error
        assert int(done.error.partition(": ")[2].split(": ")[1].split()[0].replace(",", "")) > 0
        assert head(state).objects == commit.objects
        assert not list(state.rglob(".*"))
        filler.unlink()
    done = spill("resume", folder, "--state", state)
    assert done.code == 0, done.err
    assert everything(state) == everything(tmp_path / "whole")


@pytest.fixture
def nobody() -> Iterator[int]:
    """Another user without rights; the test runs as this user after `os.seteuid`."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user: the tests of rights did not run")
    yield 65534
    os.seteuid(0)


@pytest.fixture
def foreign(spill: Spill, public: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose state was made by root, where everybody may read and only root may write."""
    student = public / "student"
    shutil.copytree(model, student)
    (public / "site").mkdir()
    install_plugin(public / "site", distribution="spill-engine-numpy", module="spill.testing.numpy_plugin")
    monkeypatch.syspath_prepend(str(public / "site"))
    monkeypatch.setenv("SPILL_HOME", str(public / "home"))
    importlib.import_module("spill.use")  # now: another user may not be able to read where Python lies
    folder = write_folder(public / "folder", student)
    assert spill("build", folder, "--stop-after", "tune:2").code == 0
    return folder


def _told(done: Outcome, path: Path) -> None:
    assert done.code == 1, done.out
    assert one_line(done.error), done.err
    assert str(path) in done.error
    assert "belongs to user 0, you are 65534" in done.error
    assert "change the owner or the mode, or give another --state" in done.error


def test_a_state_of_another_user_is_told_with_path_and_owner_before_a_model_is_loaded(
    spill: Spill, foreign: Path, nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = foreign / ".spill" / "state"
    before = files(state)
    loaded: list[str] = []
    monkeypatch.setattr("spill.runner.open_engine", lambda spec, *rest: loaded.append(spec.name))
    os.seteuid(nobody)
    done = spill("resume", foreign)
    os.seteuid(0)
    _told(done, state)
    assert not loaded
    assert files(state) == before


def test_a_state_that_may_not_even_be_read_is_told_and_never_taken_for_no_state(
    spill: Spill, foreign: Path, nobody: int
) -> None:
    state = foreign / ".spill" / "state"
    state.chmod(0o700)
    for target in (foreign, state):
        for command in ("build", "resume", "table"):
            os.seteuid(nobody)
            done = spill(command, target)
            os.seteuid(0)
            _told(done, state)


def test_an_object_that_may_not_be_read_stops_the_build_and_is_never_taken_for_damage(
    spill: Spill, foreign: Path, nobody: int
) -> None:
    state = foreign / ".spill" / "state"
    path = state / newest_entry(state)["stages"]["tune"]["objects"]["state.safetensors"]
    path.chmod(0o600)
    os.seteuid(nobody)
    done = spill("resume", foreign)
    os.seteuid(0)
    _told(done, path)
    assert "damaged" not in done.err + done.out


def test_a_read_only_state_can_be_looked_at_and_asked_but_not_resumed(spill: Spill, foreign: Path, nobody: int) -> None:
    os.seteuid(nobody)
    assert spill("table", foreign).code == 0
    assert spill("resume", foreign).code == 1
    os.seteuid(0)
    assert position(foreign / ".spill" / "state", "tune") == 2
    assert spill("resume", foreign).code == 0
    os.seteuid(nobody)
    assert spill("ask", foreign, "say 1", "--engine", "numpy").code == 0
    again = spill("build", foreign)
    os.seteuid(0)
    assert again.code == 0
    assert "done; next:" in again.out
