"""Whole builds on real servers: killed at every request, raced for, put to sleep, disturbed, robbed of their bucket,
and moved between machines and stores. What is made is always bit for bit what an uninterrupted build makes.

Here one kill in nine or fifteen is tried and each race run once. All of them, with figures printed as they come:

    SPILL_EVERY_KILL=1 SPILL_RACES=50 pytest tests/cloud/test_builds.py -k "kill or race"

A run that died or sleeps is watched here for three seconds instead of a minute; with SPILL_WAITS=1 for the minute.
"""

import functools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spill import plugins
from spill.records import Commit
from spill.state import read_entry
from spill.stores import Store
from spill.stores.local import LocalStore
from spill.testing.faulty_store import ERROR, Call, Fault
from spill.testing.memory_store import MemoryStore
from spill.testing.models import tiny_model
from tests.building import Site, contents, each_unit_once, everything, head, put, put_between, taken
from tests.cloud.buckets import bucket_of
from tests.cloud.relay import DROP, LOSE, Answer, Relay, Request, Rule
from tests.cloud.servers import AZURE_KEY, BUCKET, SECRET, Server
from tests.cloud.test_refusals import azure_error, google_error, s3_error
from tests.conftest import Outcome, Spill, write_folder
from tests.killing import Child, Nursery, Trap, nursery

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

EVERY_KILL = bool(os.environ.get("SPILL_EVERY_KILL"))
RACES = int(os.environ.get("SPILL_RACES", "1"))
WAITS = bool(os.environ.get("SPILL_WAITS"))
OFTEN = ("--commit-every", "0")
Reach = Callable[..., Callable[..., Any]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fsync, and plugins looked for once."""
    monkeypatch.setattr("spill.stores.local._sync", lambda handle: None)
    monkeypatch.setattr("spill.plugins.discover", functools.cache(plugins.discover))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest student, so that a build takes a tenth of a second."""
    directory = tmp_path_factory.mktemp("small") / "student"
    return tiny_model(directory, hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, max_positions=128)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Iterator[Nursery]:
    environment = {"SPILL_HOME": str(tmp_path_factory.mktemp("home")), "SPILL_MACHINE": "alpha", "OMP_NUM_THREADS": "1"}
    directory = tmp_path_factory.mktemp("children")
    with nursery(directory, (site,), preload=("tests.cloud.warm",), **environment) as made:
        yield made


def site_at(server: Server, reach: Reach) -> Site:
    opener = reach(server)
    top = opener().uri.removeprefix(f"{server.scheme}://{BUCKET}/")
    return Site(
        name=server.scheme,
        open=lambda state: opener(folder=f"{top}/{state}"),
        environment=server.environment(server.url),
    )


def local_site(directory: Path) -> Site:
    return Site(name="local", open=lambda state: LocalStore(str(directory / state)), environment={})


@pytest.fixture
def place(request: pytest.FixtureRequest, reach: Reach, tmp_path: Path) -> Site:
    """A place to build in: a folder, or a server's bucket."""
    if request.param == "local":
        return local_site(tmp_path)
    return site_at(request.getfixturevalue(request.param), reach)


def places(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("place", names, indirect=True)


@pytest.fixture
def six_rows(tmp_path: Path, small: Path) -> Path:
    """Six steps, two exam rows."""
    return write_folder(tmp_path / "folder", small, rows=6, exam=2, epochs=1, batch=1, rank=2)


@pytest.fixture
def whole(spill: Spill, tmp_path: Path) -> Callable[[Path], dict[str, Any]]:
    """What an uninterrupted build of a folder makes."""

    def make(folder: Path) -> dict[str, Any]:
        assert spill("build", folder, "--state", tmp_path / "whole").code == 0
        return everything(LocalStore(str(tmp_path / "whole")))

    return make


@pytest.fixture
def figures(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints, where all was asked for."""

    def tell(line: str) -> None:
        if EVERY_KILL or RACES > 1 or WAITS:
            with capsys.disabled():
                print(f"\n{line}", flush=True)

    return tell


def fine(done: Outcome) -> str:
    assert done.code == 0, done.err
    return done.out


def one_line(error: str, *words: str) -> None:
    assert error.startswith("spill: ")
    assert error.count("\n") == 1, error
    assert "unexpected" not in error
    for word in words:
        assert word in error


def last_commit(store: Store) -> Commit | None:
    """What the newest entry says, without a look at what it names."""
    numbers = [int(Path(entry.name).stem) for entry in store.list("log/")]
    return read_entry(store, max(numbers)).commit if numbers else None


def position(commit: Commit | None, stage: str) -> int:
    return commit.stages[stage].position if commit and stage in commit.stages else 0


# ---- SIGKILL


@places("local", "moto", "fake_gcs")
def test_a_kill_before_or_after_any_request_costs_at_most_the_unit_at_work(
    spill: Spill,
    children: Nursery,
    small: Path,
    tmp_path: Path,
    place: Site,
    whole: Callable[[Path], object],
    figures: Callable[[str], None],
) -> None:
    folder = write_folder(tmp_path / "folder", small, rows=2, exam=1, epochs=1, batch=1, rank=2)
    expected = whole(folder)
    log = tmp_path / "requests"
    child = children.start(
        "build", folder, "--state", place.uri("counted"), *OFTEN, trap=Trap(requests=log), **place.environment
    )
    assert child.end() == 0, child.err
    requests = log.read_text().splitlines()
    assert len(requests) > 20
    begun = time.monotonic()
    resumed = 0
    turns = range(0, 2 * len(requests), 1 if EVERY_KILL else 15 if place.name == "s3" else 9)
    for turn in turns:
        number, after = turn // 2 + 1, turn % 2 == 1
        uri, store = place.uri(f"killed-{turn}"), place.open(f"killed-{turn}")
        trap = Trap(die_after=number) if after else Trap(die_before=number)
        child = children.start("build", folder, "--state", uri, *OFTEN, trap=trap, **place.environment)
        assert child.end() == -signal.SIGKILL
        left = last_commit(store)
        out = fine(spill("build", folder, "--state", uri, "--takeover"))
        what = f"{'after' if after else 'before'} request {number}, {requests[number - 1]}"
        made = taken(store)
        assert everything(made) == expected, what
        commit = each_unit_once(made)
        if left and commit.number > left.number:
            resumed += 1
            assert f"resuming from commit {left.number} of alpha (numpy, " in out, what
            assert "taking over from alpha (numpy), which was at " in out, what
            for stage, (start, _) in commit.runs[-1].work.items():
                assert start == position(left, stage), what
    figures(
        f"{place.name}: {len(requests)} requests, killed {len(turns)} times, "
        f"{resumed} went on from a commit, {time.monotonic() - begun:.0f} s"
    )


# ---- two runs


@pytest.mark.parametrize("takeover", [False, True], ids=["watching", "takeover"])
@places("local", "moto", "seaweed", "fake_gcs", "azurite")
def test_a_race_of_two_resumes_has_one_winner_and_no_step_is_made_twice(
    spill: Spill,
    children: Nursery,
    small: Path,
    tmp_path: Path,
    place: Site,
    whole: Callable[[Path], object],
    figures: Callable[[str], None],
    takeover: bool,
) -> None:
    folder = write_folder(tmp_path / "folder", small, rows=16, epochs=1, batch=1, rank=2, stages=["tune"])
    expected = whole(folder)
    fine(spill("build", folder, "--state", tmp_path / "stopped", "--stop-after", "tune:1"))
    stopped = contents(LocalStore(str(tmp_path / "stopped")))
    chance = random.Random(f"{place.name} {takeover}")
    seen: Counter[str] = Counter()
    begun = time.monotonic()
    for race in range(RACES):
        uri, store = place.uri(f"race-{race}"), place.open(f"race-{race}")
        put(store, stopped)
        go = tmp_path / f"go-{race}"
        runs = {}
        for machine in chance.sample(["beta", "gamma"], 2):
            trap = Trap(go=go, lag=chance.uniform(0.0, 0.01), delay=0.02, renew=0.3)
            runs[machine] = children.start(
                "resume",
                folder,
                "--state",
                uri,
                *OFTEN,
                *(["--takeover"] if takeover else []),
                trap=trap,
                SPILL_MACHINE=machine,
                **place.environment,
            )
        for child in runs.values():
            child.wait_ready()
        go.touch()
        codes = {machine: child.end() for machine, child in runs.items()}
        made = taken(store)
        commit = each_unit_once(made)
        seen[_outcome(runs, codes, {run.machine for run in commit.runs})] += 1
        assert everything(made) == expected
        log = {name: data for name, data in stopped.items() if name.startswith("log/")}
        assert log.items() <= contents(made).items()
    kind = "--takeover" if takeover else "watching"
    outcomes = ", ".join(f"{count} {what}" for what, count in seen.most_common())
    figures(f"{place.name} ({kind}): {RACES} races in {time.monotonic() - begun:.0f} s: {outcomes}")


def _outcome(runs: dict[str, Child], codes: dict[str, int], claimed: set[str]) -> str:
    """Who won, and how the other was told."""
    told = {m: (codes[m], c.out, c.err) for m, c in runs.items()}
    assert set(codes.values()) <= {0, 76}, told
    losers = [m for m, code in codes.items() if code == 76] or [m for m in runs if m not in claimed]
    assert len(losers) == 1, told
    (winner,) = set(runs) - set(losers)
    assert "done; next: " in runs[winner].out
    lost = runs[losers[0]]
    if codes[losers[0]] == 0:  # it came when all was done, never claimed, and has no share in it
        assert "done; next: " in lost.out
        return "second finds it finished, exit 0"
    one_line(lost.err, f" by {winner} (numpy) at ")
    assert "taken over by" in lost.err or re.search(r", alive \d+ s ago; .* --takeover \(it loses what ", lost.err)
    how = "taken over" if "taken over by" in lost.err else "held"
    return f"second {how}, {'with work discarded, ' if 'discarded' in lost.err else ''}exit 76"


@pytest.fixture
def minute(monkeypatch: pytest.MonkeyPatch) -> float:
    """How many seconds a silent run is watched. A store's timestamps may be whole seconds."""
    if WAITS:
        return 60.0
    monkeypatch.setattr("spill.alive.DEAD_SECONDS", 3.0)
    monkeypatch.setattr("spill.alive.WATCH_SECONDS", 0.2)
    return 3.0


@places("local", "moto", "fake_gcs", "azurite")
def test_a_job_that_starts_soon_after_its_own_death_gets_in_by_watching(
    spill: Spill,
    children: Nursery,
    six_rows: Path,
    tmp_path: Path,
    place: Site,
    minute: float,
    whole: Callable[[Path], object],
    figures: Callable[[str], None],
) -> None:
    expected = whole(six_rows)
    uri, store = place.uri("requeued"), place.open("requeued")
    log = tmp_path / "requests"
    trap = Trap(delay=0.03, requests=log, renew=minute / 10)
    child = children.start("build", six_rows, "--state", uri, *OFTEN, trap=trap, **place.environment)
    child.wait_for(lambda: log.exists() and "create log/6.json" in log.read_text())
    child.signal(signal.SIGKILL)
    child.end()
    time.sleep(minute / 10)
    begun = time.monotonic()
    out = fine(spill("resume", six_rows, "--state", uri))
    waited = time.monotonic() - begun
    assert re.search(r"alpha \(numpy\) was alive \d+ s ago; watching for up to ", out)
    assert waited < minute + 15
    assert everything(store) == expected
    each_unit_once(store)
    figures(f"{place.name}: a job {minute / 10:.0f} s after its own death was done after {waited:.0f} s")


@places("local", "moto")
def test_a_sleeper_is_watched_until_it_counts_as_gone_and_stops_with_76_when_it_wakes(
    spill: Spill,
    children: Nursery,
    six_rows: Path,
    tmp_path: Path,
    place: Site,
    monkeypatch: pytest.MonkeyPatch,
    minute: float,
    whole: Callable[[Path], object],
) -> None:
    expected = whole(six_rows)
    uri, store = place.uri("slept"), place.open("slept")
    log = tmp_path / "requests"
    trap = Trap(delay=0.03, requests=log)
    child = children.start("build", six_rows, "--state", uri, *OFTEN, trap=trap, **place.environment)
    child.wait_for(lambda: log.exists() and "create log/6.json" in log.read_text())
    child.signal(signal.SIGSTOP)
    monkeypatch.setenv("SPILL_MACHINE", "beta")
    out = fine(spill("resume", six_rows, "--state", uri))
    assert re.search(r"alpha \(numpy\) (was alive|has not been alive for) ", out)
    assert "has not been alive for" in out
    assert "is done again" in out
    made = contents(store)
    child.signal(signal.SIGCONT)
    assert child.end() == 76
    one_line(child.err, f"spill: {uri}: taken over by beta (numpy) at commit ", "this run was at tune step ")
    assert re.search(r"; its steps? \d+( is| to \d+ are) discarded, commit \d+ was its last\n", child.err)
    assert made.items() <= contents(store).items()
    assert everything(store) == expected
    each_unit_once(store)


def test_a_run_whose_objects_the_new_holder_swept_away_is_told_of_the_takeover_and_not_of_damage(
    spill: Spill, children: Nursery, six_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    fine(spill("build", six_rows, "--state", state, "--stop-after", "tune:3"))
    claimed = False

    def plan(call: Call) -> Fault | None:
        nonlocal claimed
        if claimed and call.verb == "read" and call.name.endswith("tune-state.safetensors"):
            claimed = False
            child = children.start("resume", six_rows, "--state", state, "--takeover", *OFTEN, SPILL_MACHINE="beta")
            assert child.end() == 0, child.err
        claimed |= call.verb == "create"
        return None

    put_between(monkeypatch, plan)
    done = spill("resume", six_rows, "--state", state)
    assert done.code == 76
    one_line(done.err, "taken over by beta (numpy) at commit 6 ", "at tune step 3 of 6, nothing of it is discarded")
    each_unit_once(LocalStore(str(state)))


# ---- errors


def at_random(seed: int, share: float) -> Rule:
    """A share of all requests is answered 503, or lost, or its reply is."""
    chance = random.Random(seed)

    def rule(request: Request) -> Answer | str | None:
        drawn = chance.random()
        return (Answer(503), DROP, LOSE)[int(drawn / share * 3)] if drawn < share else None

    return rule


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_build_through_a_bad_network_finishes_and_is_the_same(
    spill: Spill,
    server: Server,
    relay: Relay,
    reach: Reach,
    six_rows: Path,
    whole: Callable[[Path], object],
    no_sleep: list[float],
    share: float,
) -> None:
    expected = whole(six_rows)
    store: Store = reach(server, relay.url)(folder=f"tests/bad-network-{share}")
    relay.order(at_random(1, share))
    fine(spill("build", six_rows, "--state", store.uri, *OFTEN))
    assert len(no_sleep) > share * 30
    relay.order(lambda request: None)
    assert everything(store) == expected
    each_unit_once(store)


@pytest.mark.parametrize(
    ("share", "verbs"),
    [(0.1, ("create", "write", "read", "list", "delete")), (0.5, ("create", "write", "delete"))],
    ids=["a tenth of all", "half of what changes something"],
)
def test_a_failing_disk_needs_only_to_be_tried_again(
    spill: Spill,
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Callable[[Path], object],
    figures: Callable[[str], None],
    share: float,
    verbs: tuple[str, ...],
) -> None:
    """A disk is not asked again by itself: each error is one line, and the same command goes on. With half of all
    requests failing no run would live through the twenty that it takes to read a state, claim it and commit once; with
    half of those that change something it takes some two hundred starts."""
    folder = write_folder(tmp_path / "folder", small, rows=2, exam=1, epochs=1, batch=1, rank=2)
    expected = whole(folder)
    chance = random.Random(3)
    state = tmp_path / "state"
    with monkeypatch.context() as patch:
        put_between(patch, lambda call: ERROR if call.verb in verbs and chance.random() < share else None)
        attempt, done = 0, None
        while done is None or done.code:
            attempt += 1
            done = spill("build", folder, "--state", state, *OFTEN, "--takeover")
            assert done.code in (0, 1)
            if done.code:
                one_line(done.err, "a fault was injected")
    assert attempt > 3
    figures(f"local, {share:.0%} of {'/'.join(verbs)}: done at start {attempt}")
    assert everything(LocalStore(str(state))) == expected
    each_unit_once(LocalStore(str(state)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_state_goes_up_to_a_bucket_says_saved_only_once_the_store_has_it(
    spill: Spill,
    children: Nursery,
    server: Server,
    reach: Reach,
    six_rows: Path,
    tmp_path: Path,
    whole: Callable[[Path], object],
    number: signal.Signals,
) -> None:
    expected = whole(six_rows)
    place = site_at(server, reach)
    uri, store, log = place.uri("signalled"), place.open("signalled"), tmp_path / "requests"
    trap = Trap(delay=0.1, requests=log)
    child = children.start("build", six_rows, "--state", uri, *OFTEN, trap=trap, **place.environment)
    child.wait_for(lambda: log.exists() and re.search("write data/.*tune-state", log.read_text()))
    child.signal(number)
    assert child.end() == (75 if number == signal.SIGTERM else 130)
    saving, stopped = child.err.splitlines()
    assert saving == f"spill: stopping by {number.name}: saving tune step 1 of 6, 0.0 MB; a kill now loses step 1"
    left = head(store)
    assert stopped == f"spill: stopped by {number.name} at tune step 1 of 6; saved: commit {left.number}"
    assert position(left, "tune") == 1
    fine(spill("resume", six_rows, "--state", uri))
    assert everything(store) == expected


# ---- rights and buckets that go


@pytest.mark.parametrize("name", ["seaweed", "azurite"])
def test_a_wrong_key_is_one_line_and_never_a_state_that_is_not_there(
    spill: Spill,
    request: pytest.FixtureRequest,
    reach: Reach,
    six_rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    server: Server = request.getfixturevalue(name)
    store: Store = reach(server)(folder="tests/wrong-key")
    fine(spill("build", six_rows, "--state", store.uri, "--stop-after", "tune:3"))
    before = contents(store)
    with monkeypatch.context() as patch:
        for variable, value in server.environment(server.url).items():
            wrong = value.replace(SECRET, "hunter2").replace(AZURE_KEY, "aHVudGVyMg==")
            patch.setenv(variable, wrong)
        for command in (("build", six_rows, "--state"), ("resume", six_rows, "--state"), ("resume",), ("table",)):
            done = spill(*command, store.uri)
            assert done.code == 1
            one_line(done.err, "the credentials are wrong")
            assert not any(secret in done.err for secret in (SECRET, AZURE_KEY, "hunter2", "aHVudGVyMg"))
    assert contents(store) == before
    fine(spill("resume", six_rows, "--state", store.uri))


NO_RIGHT = {
    "s3": (s3_error(403, "AccessDenied", "Access Denied"), "s3:PutObject"),
    "gs": (google_error(403, "x@y does not have storage.objects.create access"), "roles/storage.objectUser"),
    "az": (azure_error(403, "AuthorizationPermissionMismatch", "Not authorized."), "Storage Blob Data Contributor"),
}


def test_a_right_that_is_lost_mid_way_is_one_line_and_a_resume_goes_on_once_it_is_back(
    spill: Spill,
    server: Server,
    relay: Relay,
    reach: Reach,
    six_rows: Path,
    whole: Callable[[Path], object],
) -> None:
    expected = whole(six_rows)
    answer, role = NO_RIGHT[server.scheme]
    store: Store = reach(server, relay.url)(folder="tests/right-lost")
    relay.order(lambda request: answer if request.method in ("PUT", "POST") and request.index > 30 else None)
    done = spill("build", six_rows, "--state", store.uri, *OFTEN)
    assert done.code == 1
    one_line(done.err, f"spill: cannot write {store.uri}/", "no right to do that", role)
    relay.order(lambda request: None)
    left = head(store)
    assert 0 < position(left, "tune") < 6
    assert f"resuming from commit {left.number} of alpha" in fine(spill("resume", six_rows, "--state", store.uri))
    assert everything(store) == expected
    each_unit_once(store)


def empty(store: Store) -> None:
    for entry in store.list(""):
        store.delete(entry.name)


@pytest.mark.parametrize("emptied", [False, True], ids=["deleted", "emptied"])
def test_a_bucket_that_goes_mid_way_is_one_line_and_a_resume_goes_on_once_it_is_restored(
    spill: Spill,
    server: Server,
    reach: Reach,
    six_rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Callable[[Path], object],
    emptied: bool,
) -> None:
    expected = whole(six_rows)
    saved: dict[str, bytes] = {}
    with bucket_of(server, "soon-gone") as bucket:
        store: Store = reach(server)(bucket="soon-gone", folder="relay")

        def plan(call: Call) -> Fault | None:
            if call.verb == "write" and "tune-state" in call.name and call.name.split("/")[-1] > "000007" and not saved:
                saved.update(contents(store))
                empty(store)
                if not emptied:
                    bucket.delete()
            return None

        with monkeypatch.context() as patch:
            put_between(patch, plan)
            done = spill("build", six_rows, "--state", store.uri, *OFTEN)
        assert done.code == 1
        if emptied:
            one_line(done.err, f"spill: {store.uri}: the state has vanished", "nothing was committed: restore it")
            assert not store.list("log/")
            empty(store)
        else:
            one_line(done.err, "there is no ", " 'soon-gone' at ", "create it, or correct --state")
            bucket.make()
        put(store, saved)
        left = head(store)
        assert 0 < position(left, "tune") < 6
        assert f"resuming from commit {left.number} of alpha" in fine(spill("resume", six_rows, "--state", store.uri))
        assert everything(store) == expected
        each_unit_once(store)
        empty(store)
        bucket.delete()


def test_a_state_folder_that_goes_mid_way_has_vanished(
    spill: Spill, six_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"

    def plan(call: Call) -> Fault | None:
        if call.verb == "write" and "000007" in call.name:
            shutil.rmtree(state)
        return None

    put_between(monkeypatch, plan)
    done = spill("build", six_rows, "--state", state, *OFTEN)
    assert done.code == 1
    one_line(done.err, f"spill: {state}: the state has vanished", "restore it, or build anew")
    assert not (state / "log").exists()


# ---- moving


def test_a_build_is_finished_on_another_machine_from_its_uri_alone(
    spill: Spill,
    children: Nursery,
    server: Server,
    reach: Reach,
    six_rows: Path,
    small: Path,
    tmp_path: Path,
    whole: Callable[[Path], object],
) -> None:
    expected = whole(six_rows)
    place = site_at(server, reach)
    uri, store = place.uri("relay"), place.open("relay")
    out = fine(spill("build", six_rows, "--state", uri, "--stop-after", "tune:3"))
    assert out.endswith(f"stopped as asked at tune 3/6; next: spill resume {six_rows} --state {uri}\n")
    child = children.start("resume", uri, SPILL_MACHINE="beta", SPILL_HOME=str(tmp_path / "beta"), **place.environment)
    assert child.end() == 1
    one_line(child.err, "this build's student was a directory: give one of equal content with --student PATH")
    given = ("--student", small, "--engine", "numpy")
    child = children.start(
        "resume", uri, *given, SPILL_MACHINE="beta", SPILL_HOME=str(tmp_path / "beta"), **place.environment
    )
    assert child.end() == 0, child.err
    assert "at tune 3/6" in child.out
    assert "alpha -> beta" in child.out
    assert not list(child.here.iterdir())
    assert everything(store) == expected
    each_unit_once(store)
    before = contents(store)
    table = fine(spill("table", uri))
    assert re.search(r"2 tune +numpy +alpha -> beta ", table)
    verified = fine(spill("state", "verify", uri))
    assert f"commit {head(store).number}: whole, " in verified
    history = fine(spill("state", "history", uri))
    assert re.search(r"alpha +numpy .* eval:base 0-2, tune 0-3\n", history)
    assert re.search(r"beta +numpy .* tune 3-6, eval:tuned 0-2\n", history)
    assert contents(store) == before


def test_a_state_is_copied_from_store_to_store_and_goes_on_after_the_last(
    spill: Spill,
    moto: Server,
    fake_gcs: Server,
    azurite: Server,
    reach: Reach,
    six_rows: Path,
    tmp_path: Path,
    whole: Callable[[Path], object],
) -> None:
    expected = whole(six_rows)
    s3, gs, az = (site_at(server, reach) for server in (moto, fake_gcs, azurite))
    local = local_site(tmp_path)
    fine(spill("build", six_rows, "--state", s3.uri("first"), "--stop-after", "tune:3", *OFTEN))
    way = [s3.open("first"), local.open("second"), gs.open("third"), az.open("fourth"), s3.open("back")]
    for source, target in pairwise(way):
        out = fine(spill("state", "copy", source.uri, target.uri))
        assert f"copied {source.uri} to {target.uri}: {head(source).number} commits, " in out
        assert head(target) == head(source)
    for store in way[1:3] + way[-1:]:
        assert "at tune 3/6" in fine(spill("resume", six_rows, "--state", store.uri))
        assert everything(store) == expected
        each_unit_once(store)
    continued = spill("state", "copy", way[0].uri, way[-1].uri)
    assert continued.code == 1
    one_line(continued.err, "it was continued by itself; copy the other way, or to another place")
    fine(spill("state", "copy", way[-1].uri, way[0].uri))
    assert everything(way[0]) == expected


def test_a_state_goes_to_a_bucket_and_back_with_an_ordinary_client_and_resumes_on_each(
    spill: Spill, server: Server, reach: Reach, six_rows: Path, tmp_path: Path, whole: Callable[[Path], object]
) -> None:
    expected = whole(six_rows)
    here, store = tmp_path / "here", reach(server)(folder=f"tests/{tmp_path.name}")
    fine(spill("build", six_rows, "--state", here, "--stop-after", "tune:2"))
    client = pytest.importorskip("fsspec").filesystem(
        server.scheme, **({"token": "anon"} if server.scheme == "gs" else {})
    )
    there = store.uri.partition("://")[2]
    client.put(f"{here}/", there, recursive=True)
    assert contents(store) == contents(LocalStore(str(here)))
    assert "at tune 2/6" in fine(spill("resume", six_rows, "--state", store.uri, "--stop-after", "tune:4"))
    client.invalidate_cache()
    client.get(there, str(tmp_path / "back"), recursive=True)
    assert "at tune 4/6" in fine(spill("resume", six_rows, "--state", tmp_path / "back"))
    assert everything(LocalStore(str(tmp_path / "back"))) == expected
    each_unit_once(LocalStore(str(tmp_path / "back")))


# ---- what a commit costs


class Meter(MemoryStore):
    """Counts bytes from one commit to the next: `spent` holds (name of the entry, bytes with the entry's own)."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: list[tuple[str, int]] = []
        self._bytes = 0

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        self.spent.append((name, self._bytes + len(data)))
        self._bytes = 0

    def write(self, name: str, parts: Any) -> None:
        super().write(name, parts)
        self._bytes += sum(memoryview(part).nbytes for part in parts)


def test_a_commit_writes_little_beside_adapter_and_moments(
    spill: Spill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tiny_model(tmp_path / "student", hidden=64, layers=4, heads=4, kv_heads=2, intermediate=128)
    folder = write_folder(tmp_path / "folder", student, rows=40, epochs=1, batch=1, rank=32, stages=["tune"])
    meter = Meter()
    monkeypatch.setattr("spill.stores.load_target", lambda spec: lambda uri: meter)
    fine(spill("build", folder, "--state", tmp_path / "anywhere", *OFTEN))
    commit = head(meter)
    arrays = commit.objects[commit.stages["tune"].objects["state.safetensors"]].size
    assert arrays > 1_000_000
    tuned = [spent for name, spent in meter.spent if name not in ("log/1.json", "log/2.json")]
    assert len(tuned) == 40
    assert max(tuned) <= 1.02 * arrays + 64 * 1024
