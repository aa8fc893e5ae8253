"""The state at a store: commits, claims and fences, retention, damage, limits, and formats kept."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from spill.claim import Claim
from spill.errors import HeldError, SpillError, StateError
from spill.records import to_json
from spill.state import COMMIT_LIMIT, newest
from spill.stores import Exists, Store, StoreError, Unanswered
from spill.stores.local import LocalStore
from tests.conftest import Spill, write_folder
from tests.core.builds import (
    SECRETS,
    entry,
    everything,
    files,
    head,
    journal,
    loadable,
    log_numbers,
    make_plan,
    make_run,
    newest_entry,
    one_line,
    open_local,
    position,
    rewrite,
    step_record,
)

pytestmark = pytest.mark.usefixtures("quick")
FORMATS = Path(__file__).parent / "states"


class Worker:
    """A run that claims a state and commits steps to it, without a build."""

    def __init__(self, store: Store, name: str, **run: Any) -> None:
        self.store = store
        self.run = make_run(name, **run)
        self.claim = Claim.begin(store, newest(store), make_plan(), self.run, "a" * 32)

    def step(self, number: int) -> None:
        data = f"arrays of step {number} by {self.run.machine}".encode()
        self.claim.write(
            run=evolve(self.run, claim=self.claim.number, work={"tune": (0, number)}),
            stages={"tune": step_record(number)},
            new={("tune", "state.safetensors"): [data[:10], data[10:]]},
        )


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def store(state: Path) -> LocalStore:
    return open_local(state)


class Faulty(LocalStore):
    """A local store whose next calls may be intercepted: `before` and `after` get the verb and the name."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.before: Callable[[str, str], None] = lambda verb, name: None
        self.after: Callable[[str, str], None] = lambda verb, name: None
        self.calls: list[tuple[str, str]] = []

    def _around(self, verb: str, name: str, call: Callable[[], Any]) -> Any:
        self.before(verb, name)
        self.calls.append((verb, name))
        found = call()
        self.after(verb, name)
        return found

    def create(self, name: str, data: bytes) -> None:
        self._around("create", name, lambda: LocalStore.create(self, name, data))

    def write(self, name: str, parts: Sequence[Any]) -> None:
        self._around("write", name, lambda: LocalStore.write(self, name, parts))

    def read(self, name: str, limit: int) -> bytes:
        found: bytes = self._around("read", name, lambda: LocalStore.read(self, name, limit))
        return found

    def delete(self, name: str) -> None:
        self._around("delete", name, lambda: LocalStore.delete(self, name))


# ---- commits and claims


def test_a_claim_names_the_newest_objects_again_and_steps_follow_it(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    before = head(state)
    beta = Worker(store, "beta")
    after = head(state)
    assert (before.number, after.number) == (2, 3)
    assert after.objects == before.objects
    assert [run.machine for run in after.runs] == ["alpha", "beta"]
    assert after.parent is not None
    assert after.parent.sha256 == hashlib.sha256((state / "log" / "2.json").read_bytes()).hexdigest()
    beta.step(2)
    assert position(state, "tune") == 2


def test_an_older_run_is_fenced_by_a_newer_claim_and_told_by_whom(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    beta = Worker(store, "beta", engine="mlx")
    with pytest.raises(HeldError, match=r"taken over by beta \(mlx\) at commit 3 \(tune 1/1000\)") as held:
        alpha.step(2)
    assert held.value.exit_code == 76
    assert newest_entry(state)["run"] == beta.run.nonce
    beta.step(2)
    assert head(state).number == 4
    with pytest.raises(HeldError, match="beta"):
        alpha.step(3)


def test_of_two_claims_from_the_same_head_one_wins(store: LocalStore) -> None:
    Worker(store, "alpha").step(1)
    seen = newest(store)
    Claim.begin(store, seen, make_plan(), make_run("beta"), "")
    with pytest.raises(HeldError, match="taken over by beta"):
        Claim.begin(store, seen, make_plan(), make_run("gamma"), "")


@pytest.mark.parametrize("lost", [Unanswered("no answer"), Exists("log/2.json")], ids=["unanswered", "refused"])
def test_a_lost_reply_to_ones_own_commit_is_settled_by_reading_back(state: Path, lost: Exception) -> None:
    store = Faulty(str(state))
    alpha = Worker(store, "alpha")
    failures = [lost]

    def lose(verb: str, name: str) -> None:
        if verb == "create" and failures:
            raise failures.pop()

    store.after = lose
    alpha.step(1)
    assert not failures
    assert log_numbers(state) == [1, 2]
    alpha.step(2)
    assert head(state).number == 3


def test_an_unanswered_commit_that_was_not_applied_is_sent_again_with_the_same_bytes(state: Path) -> None:
    store = Faulty(str(state))
    alpha = Worker(store, "alpha")
    failures = [Unanswered("no answer"), Unanswered("no answer")]

    def lose(verb: str, name: str) -> None:
        if verb == "create" and failures:
            raise failures.pop()

    store.before = lose
    alpha.step(1)
    assert not failures
    assert head(state).number == 2


def test_a_store_that_never_answers_stops_the_run_and_nothing_is_deleted(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    store = Faulty(str(state))
    alpha = Worker(store, "alpha")
    alpha.step(1)
    before = files(state)

    def refuse(verb: str, name: str) -> None:
        if verb == "create":
            asked.append(name)
            raise Unanswered("no answer")

    store.before = refuse
    with pytest.raises(StoreError, match="did not answer"):
        alpha.step(2)
    assert len(asked) == 5
    monkeypatch.setattr("spill.environment.seconds", lambda: 300.0 * len(asked))
    with pytest.raises(StoreError, match="did not answer"):
        alpha.step(2)
    assert len(asked) == 6, "a store that has tried for five minutes by itself is not asked to do so again"
    assert not [call for call in store.calls if call[0] == "delete"]
    assert before.items() <= files(state).items()
    assert head(state).number == 2


def test_anothers_commit_behind_a_refusal_stops_the_run(state: Path) -> None:
    store = Faulty(str(state))
    alpha = Worker(store, "alpha")
    alpha.step(1)
    intruder: list[Worker] = []

    def intrude(verb: str, name: str) -> None:
        if (verb, name) == ("create", "log/3.json") and not intruder:
            intruder.append(Worker(open_local(state), "beta"))

    store.before = intrude
    with pytest.raises(HeldError, match="taken over by beta"):
        alpha.step(2)
    assert not [call for call in store.calls if call[0] == "delete"]


def test_a_store_that_accepts_the_same_create_twice_holds_no_state(state: Path) -> None:
    class Careless(LocalStore):
        def create(self, name: str, data: bytes) -> None:
            self.write(name, [data])

    with pytest.raises(StateError, match="accepted the same exclusive create twice"):
        Worker(Careless(str(state)), "alpha")


def test_commits_are_numbers_and_not_text(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    for step in range(1, 101):
        alpha.step(step)
        if step in (8, 9, 10, 98, 99, 100):
            assert head(state).number == step + 1
            assert position(state, "tune") == step
            assert len(loadable(state)) == 2
    assert log_numbers(state) == list(range(1, 102))
    beta = Worker(store, "beta")
    assert beta.claim.number == 102
    beta.step(101)
    beta.step(102)
    assert position(state, "tune") == 102
    assert log_numbers(state) == list(range(1, 105))


# ---- damage


@pytest.fixture
def three_steps(store: LocalStore, state: Path) -> Path:
    """Commits 1 (claim) to 4 (step 3); the states of steps 2 and 3 are whole."""
    alpha = Worker(store, "alpha")
    for step in (1, 2, 3):
        alpha.step(step)
    return state


def _object_of(state: Path, number: int) -> Path:
    (name,) = entry(state, number)["objects"]
    return state / str(name)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "entry torn": lambda s: os.truncate(s / "log/4.json", 200),
    "entry empty": lambda s: os.truncate(s / "log/4.json", 0),
    "entry flipped": lambda s: (s / "log/4.json").write_bytes((s / "log/4.json").read_bytes().replace(b"{", b"[", 1)),
    "entry too large": lambda s: (s / "log/4.json").write_bytes(b"{" + b" " * COMMIT_LIMIT + b"}"),
    "entry a folder": lambda s: ((s / "log/4.json").unlink(), (s / "log/4.json").mkdir()),
    "entry a link": lambda s: ((s / "log/4.json").rename(s / "x"), (s / "log/4.json").symlink_to(s / "x")),
    "entry a pipe": lambda s: ((s / "log/4.json").unlink(), os.mkfifo(s / "log/4.json")),
    "entry of another number": lambda s: shutil.copy(s / "log/3.json", s / "log/4.json"),
    "object gone": lambda s: _object_of(s, 4).unlink(),
    "object flipped": lambda s: _flip(_object_of(s, 4)),
    "object cut": lambda s: os.truncate(_object_of(s, 4), 5),
    "object longer": lambda s: os.truncate(_object_of(s, 4), 5000),
    "object a link": lambda s: (_object_of(s, 4).rename(s / "x"), _object_of(s, 4).symlink_to(s / "x")),
    "object a pipe": lambda s: (p := _object_of(s, 4), p.unlink(), os.mkfifo(p)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_commit_is_passed_over_and_named(three_steps: Path, damage: str) -> None:
    DAMAGE[damage](three_steps)
    found = newest(open_local(three_steps))
    assert found is not None
    assert found.commit.number == 3
    assert found.commit.stages["tune"].position == 2
    assert found.notes[0].startswith("commit 4 is damaged (")
    assert found.notes[1] == "going back to commit 3"
    beta = Worker(open_local(three_steps), "beta")
    assert beta.claim.number == 5  # one above the highest entry, damaged or not
    beta.step(3)
    beta.step(4)
    again = newest(open_local(three_steps))
    assert again is not None
    assert again.notes == ()
    assert position(three_steps, "tune") == 4


def test_a_flipped_bit_anywhere_in_the_newest_entry_is_damage(store: LocalStore, state: Path) -> None:
    worker = Worker(store, "alpha")
    worker.step(1)
    worker.step(2)
    path = state / "log" / f"{worker.claim.commit.number}.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        head = newest(store)
        assert head is not None
        assert head.commit.stages["tune"].position == 1, whole[place - 20 : place + 20]
    path.write_bytes(whole)
    assert newest(store).commit.stages["tune"].position == 2  # type: ignore[union-attr]


def test_a_resume_says_that_it_goes_back_and_ends_like_an_unbroken_build(
    spill: Spill, folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "s"
    assert spill("build", folder, "--state", state, "--stop-after", "tune:3", "--commit-every", "0").code == 0
    path = state / head(state).stages["tune"].objects["state.safetensors"]
    _flip(path)
    done = spill("resume", folder, "--state", state)
    assert done.code == 0, done.err
    assert f"{path.relative_to(state)} has another sha256" in done.out
    assert "going back to commit" in done.out
    assert "resuming from commit" in done.out
    assert spill("build", folder, "--state", tmp_path / "whole").code == 0
    assert everything(state) == everything(tmp_path / "whole")


def test_every_command_that_reads_says_that_it_goes_back(spill: Spill, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "s"
    assert spill("build", folder, "--state", state).code == 0
    os.truncate(state / "log" / f"{log_numbers(state)[-1]}.json", 100)
    for command in (
        ("table",),
        ("ask", "say 1", "--engine", "numpy"),
        ("export", "--out", tmp_path / "adapter"),
        ("state", "history"),
    ):
        name, rest = (command[:2], command[2:]) if command[0] == "state" else (command[:1], command[1:])
        done = spill(*name, folder, *rest, "--state", state)
        assert done.code == 0, done.err
        assert "going back to commit" in done.out + done.err, name


def test_where_no_commit_is_whole_it_is_one_line_and_nothing_is_started_anew(
    spill: Spill, folder: Path, tmp_path: Path
) -> None:
    state = tmp_path / "s"
    assert spill("build", folder, "--state", state, "--stop-after", "tune:2").code == 0
    for path in (state / "log").glob("*.json"):
        os.truncate(path, 100)
    before = files(state)
    for command in ("build", "resume", "table"):
        done = spill(command, folder, "--state", state)
        assert done.code == 1
        assert one_line(done.error)
        assert "no commit of this state is whole" in done.error
    assert files(state) == before


def test_a_mix_of_copies_is_reported(three_steps: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    worker = Worker(open_local(other), "beta")
    for step in range(1, 4):
        worker.step(step)
    shutil.copy(other / "log" / "3.json", three_steps / "log" / "3.json")
    found = newest(open_local(three_steps))
    assert found is not None
    assert found.notes == ("commit 4 continues another log/3.json than the one here: this is a mix of copies",)
    (three_steps / "log" / "3.json").unlink()
    found = newest(open_local(three_steps))
    assert found is not None
    assert found.notes == ("commit 4 continues log/3.json, which is missing: this is a mix of copies",)


def test_a_reader_overtaken_by_retention_reads_the_log_again(three_steps: Path) -> None:
    writer = Worker(open_local(three_steps), "beta")
    store = Faulty(str(three_steps))
    pending = [4, 5, 6]

    def overtake(verb: str, name: str) -> None:
        if verb == "read" and name.startswith("data/"):
            while pending:
                writer.step(pending.pop(0))

    store.before = overtake
    found = newest(store)
    assert found is not None
    assert found.commit.stages["tune"].position == 6
    assert found.notes == ()


def test_another_fault_than_damage_stops_and_is_never_taken_for_it(three_steps: Path) -> None:
    store = Faulty(str(three_steps))

    def fail(verb: str, name: str) -> None:
        if name.startswith("data/"):
            raise StoreError("the network is away")

    store.before = fail
    with pytest.raises(StoreError, match="the network is away"):
        newest(store)


# ---- retention


def test_two_distinct_states_can_be_loaded_after_every_operation(state: Path) -> None:
    store = Faulty(str(state))
    seen: list[int] = []

    def look(verb: str, name: str) -> None:
        if verb in ("create", "write", "delete"):
            seen.append(len(loadable(state)))

    store.after = look
    for name in ("alpha", "beta", "gamma"):
        worker = Worker(store, name)
        for step in range(1, 5):
            worker.step(step)
    first = seen.index(2)
    assert all(count >= 2 for count in seen[first:])
    assert any(call[0] == "delete" for call in store.calls)
    assert all(name.startswith("data/") for verb, name in store.calls if verb == "delete")
    assert log_numbers(state) == list(range(1, 16))
    assert len(loadable(state)) == 2


def test_a_later_claims_folder_and_unknown_files_are_never_deleted(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    kept = [
        state / "data" / "9-0123456789abcdef" / "000001-x",
        state / "data" / f"{alpha.claim.number}-0123456789abcdef" / "000001-x",
        state / "data" / "notes.txt",
        state / "elsewhere" / "1-0123456789abcdef" / "x",
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"somebody's")
    for step in range(2, 6):
        alpha.step(step)
    assert all(path.read_bytes() == b"somebody's" for path in kept)


def test_what_killed_writers_left_is_swept_once_two_states_of_the_run_stand(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    folder = state / "data" / f"1-{alpha.run.nonce}"
    orphans = [folder / "000002-tune-state.safetensors", folder / ".000003-x.0123456789abcdef"]
    for path in orphans:
        path.write_bytes(b"killed")
    beta = Worker(store, "beta")
    beta.step(2)
    beta.step(3)
    assert not any(path.exists() for path in orphans)
    assert not folder.exists()
    assert len(loadable(state)) == 2
    assert sorted(p.parent.name for p in (state / "data").rglob("*") if p.is_file()) == [f"3-{beta.run.nonce}"] * 2


def test_a_fenced_run_deletes_nothing_more(state: Path) -> None:
    store = Faulty(str(state))
    alpha = Worker(store, "alpha")
    alpha.step(1)
    alpha.step(2)

    def intrude(verb: str, name: str) -> None:
        if (verb, name) == ("create", "log/4.json"):
            Worker(open_local(state), "beta")

    before = files(state)
    store.after = intrude
    alpha.step(3)
    assert before.items() <= files(state).items()
    with pytest.raises(HeldError):
        alpha.step(4)


def test_a_state_that_vanished_under_a_run_is_said_and_not_gone_on_with(store: LocalStore, state: Path) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    shutil.rmtree(state)
    with pytest.raises(SpillError):
        alpha.step(2)


# ---- limits and formats


@pytest.mark.parametrize("objects", [64, 65], ids=["the most", "one too many"])
def test_a_run_writes_no_commit_that_it_could_not_read(store: LocalStore, state: Path, objects: int) -> None:
    alpha = Worker(store, "alpha")
    alpha.step(1)
    new = {("tune", f"part-{number:02d}"): [b"x"] for number in range(objects - 1)}
    try:
        alpha.claim.write(run=alpha.run, stages={"tune": alpha.claim.commit.stages["tune"]}, new=new)
    except SpillError:
        assert objects == 65
    found = newest(store)
    assert found is not None
    assert found.notes == ()
    assert found.commit.number == log_numbers(state)[-1]


def test_where_hard_links_are_refused_a_create_is_exclusive_all_the_same(
    store: LocalStore, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    alpha = Worker(store, "alpha")
    alpha.step(1)
    Worker(store, "beta").step(2)
    with pytest.raises(HeldError, match="beta"):
        alpha.step(2)
    assert position(state, "tune") == 2
    assert not list(state.rglob(".*"))


MANY_LIBRARIES = {f"library-{number}": "1.2.3+cpu.avx512" for number in range(150)}


def test_rows_of_old_runs_on_one_machine_are_folded_where_a_commit_would_be_too_large(
    store: LocalStore, state: Path
) -> None:
    for number in range(24):
        worker = Worker(store, "alpha", nonce=f"{number:016x}", hardware="a cpu", versions=MANY_LIBRARIES)
        worker.step(number + 1)
        assert (state / "log" / f"{worker.claim.commit.number}.json").stat().st_size <= COMMIT_LIMIT
    commit = head(state)
    assert sum(run.starts for run in commit.runs) == 24
    assert len(commit.runs) < 24
    assert commit.runs[-1].nonce == commit.run
    assert commit.runs[0].work["tune"][0] == 0
    assert commit.runs[-1].work["tune"][1] == 24


def test_machines_that_take_turns_many_times_still_fit_into_a_commit(store: LocalStore, state: Path) -> None:
    for number in range(24):
        name = ("alpha", "beta")[number % 2]
        worker = Worker(store, name, nonce=f"{number:016x}", hardware="a cpu", versions=MANY_LIBRARIES)
        worker.step(number + 1)
    commit = head(state)
    assert sum(run.starts for run in commit.runs) == 24
    assert {run.machine for run in commit.runs} == {"alpha", "beta"}


def test_a_newer_format_is_refused_with_both_numbers_and_left_alone(spill: Spill, folder: Path, tmp_path: Path) -> None:
    state = tmp_path / "s"
    assert spill("build", folder, "--state", state, "--stop-after", "eval:base:1").code == 0
    rewrite(state, lambda plain: plain.update(format=2, tomorrow={"anything": [1]}))
    before = files(state)
    for command in ("build", "resume", "table"):
        done = spill(command, folder, "--state", state)
        assert done.code == 1
        assert one_line(done.error)
        assert "is of state format 2, this spill reads up to 1: upgrade spill-core" in done.error
    assert files(state) == before


def test_no_path_and_no_credential_is_in_any_file_of_a_state(
    spill: Spill, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    folder = write_folder(tmp_path / "a folder of mine", model, exam=1, reference=str(tmp_path / "reference"))
    state = tmp_path / "s"
    given = ("--student", model, "--reference", tmp_path / "reference", "--seed", 3)
    assert spill("build", folder, "--state", state, *given, "--stop-after", "tune:2").code == 0
    monkeypatch.chdir(folder)
    assert spill("resume", ".", "--state", "../s").code == 0
    unwanted = [*SECRETS.values(), str(tmp_path), "a folder of mine", str(Path.home()), os.getcwd(), "/tmp"]
    found = [(name, text) for name, data in files(state).items() for text in unwanted if text.encode() in data]
    assert found == []


def test_names_are_lower_case_ascii_and_numbers_have_no_padding(spill: Spill, folder: Path, tmp_path: Path) -> None:
    import re

    state = tmp_path / "s"
    assert spill("build", folder, "--state", state, "--commit-every", "0").code == 0
    layout = re.compile(r"log/[1-9][0-9]*\.json|data/[1-9][0-9]*-[0-9a-f]{16}/[a-z0-9._-]+")
    assert [name for name in files(state) if not layout.fullmatch(name)] == []
    for number in log_numbers(state):
        data = (state / "log" / f"{number}.json").read_bytes()
        assert len(data) <= COMMIT_LIMIT
        assert data == to_json(json.loads(data))


@pytest.mark.parametrize("number", [1])
def test_a_state_of_every_format_so_far_is_read_and_resumed(
    spill: Spill, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """states/format-N holds a tiny student and a state that the N-th format's first spill stopped at step 3 of 4."""
    kept = FORMATS / f"format-{number}"
    state = tmp_path / "s"
    shutil.copytree(kept / "state", state)
    commit = head(state)
    assert commit.format == number
    assert (commit.stages["eval:base"].finished, commit.stages["tune"].position) == (True, 3)
    table = spill("table", state)
    assert "2 tune        numpy   old      Linux x86_64  3/4" in table.out, table.err
    before = journal(state, "tune")
    done = spill("resume", state, "--student", kept / "student", "--engine", "numpy")
    assert done.code == 0, done.err
    assert head(state).plan.epsilon == commit.plan.epsilon  # as it began, whatever a new build would begin with
    assert journal(state, "tune")[:3] == before
    assert [step["step"] for step in journal(state, "tune")] == [1, 2, 3, 4]
    assert head(state).stages["eval:tuned"].finished
