"""Who holds a state: a newcomer judges by the store's clock alone, watches a minute at most, and says what it saw."""

from collections.abc import Callable, Iterator

import pytest
from attrs import define, evolve, field

from spill.alive import DEAD_SECONDS, RENEW_SECONDS, Watched, watch
from spill.claim import Claim
from spill.errors import HeldError
from spill.state import Head, newest
from spill.testing.memory_store import Backing, MemoryStore
from tests.core.builds import make_plan, make_run, step_record

AGAIN = "s3://bucket/run"


@define(eq=False)
class Scene:
    """A state of `holder` at step 7 in a store whose clock and the newcomer's run on together as the newcomer sleeps;
    `then` is done after each sleep."""

    backing: Backing
    said: list[str] = field(factory=list)
    now: float = 0.0
    then: Callable[[float], None] = lambda now: None

    @property
    def alive(self) -> str:
        run = make_run("holder")
        return f"alive/1-{run.nonce}"

    def beat(self, number: int) -> None:
        MemoryStore(self.backing).write(self.alive, [b'{"at":"tune step 9 of 1000","beat":%d}' % number])

    def head(self) -> Head:
        head = newest(MemoryStore(self.backing))
        assert head is not None
        return head

    def watch(self, takeover: bool = False) -> Watched:
        store = MemoryStore(self.backing, AGAIN)
        return watch(
            store,
            self.head(),
            takeover=takeover,
            command=f"spill resume {AGAIN}",
            tick=lambda: None,
            say=self.said.append,
        )


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(Backing())
    made.backing.clock = lambda: 1000.0 + made.now

    def sleep(duration: float) -> None:
        made.now += duration
        made.then(made.now)

    monkeypatch.setattr("spill.environment.seconds", lambda: made.now)
    monkeypatch.setattr("spill.environment.sleep", sleep)
    run = make_run("holder")
    claim = Claim.begin(MemoryStore(made.backing), None, make_plan(), run, "a" * 32)
    claim.write(
        run=evolve(run, claim=1, work={"tune": (0, 7)}),
        stages={"tune": step_record(7)},
        new={("tune", "state"): [b"arrays"]},
    )
    made.beat(1)
    yield made
    left = [entry.name for entry in MemoryStore(made.backing).list("alive/") if entry.name != made.alive]
    assert left == []  # the newcomer's own


def test_a_holder_that_renews_keeps_the_state_and_the_refusal_says_all_there_is_to_know(scene: Scene) -> None:
    scene.then = lambda now: scene.beat(2) if now >= 12 else None
    with pytest.raises(HeldError) as held:
        scene.watch()
    message = held.value.message
    for part in ("held by holder (numpy)", "at tune step 9 of 1000", "alive 0 s ago", "tune 7/1000"):
        assert part in message
    assert f"spill resume {AGAIN} --takeover" in message
    assert "\n" not in message
    assert scene.now < RENEW_SECONDS


def test_a_holder_that_died_just_now_is_watched_for_a_minute_and_no_longer(scene: Scene) -> None:
    scene.now = 6.0  # a requeued job starts so soon after its own death
    assert scene.watch() == Watched(anew=True, note="took over from holder (numpy), silent, at tune step 9 of 1000")
    assert DEAD_SECONDS <= scene.now <= DEAD_SECONDS + 10
    assert "alive 6 s ago; watching for up to 60 s" in scene.said[0]
    assert "done again" in scene.said[1]


def test_a_holder_that_was_silent_for_over_a_minute_is_not_watched(scene: Scene) -> None:
    scene.now = DEAD_SECONDS + 1
    assert scene.watch().anew
    assert scene.now == DEAD_SECONDS + 1


def test_a_holder_that_ends_while_it_is_watched_leaves_the_state(scene: Scene) -> None:
    def then(now: float) -> None:
        if now >= 5:
            MemoryStore(scene.backing).delete(scene.alive)

    scene.then = then
    assert scene.watch() == Watched(anew=True)
    assert scene.now < 10


def test_a_holder_that_ended_is_not_asked_for(scene: Scene) -> None:
    MemoryStore(scene.backing).delete(scene.alive)
    assert scene.watch() == Watched()
    assert scene.now == 0
    assert scene.said == []


def test_a_takeover_claims_at_once_and_says_from_whom(scene: Scene) -> None:
    assert scene.watch(takeover=True) == Watched(note="took over from holder (numpy) at tune step 9 of 1000")
    assert scene.now == 0
    assert "taking over from holder (numpy), which was at tune step 9 of 1000" in scene.said[0]


@pytest.mark.parametrize("minutes", [-45, 45])
def test_a_clock_that_is_off_steals_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0 + scene.now + minutes * 60)
    monkeypatch.setattr("spill.environment.utc_now", lambda: "2030-01-01T00:00:00Z")
    scene.then = lambda now: scene.beat(int(now)) if now >= 12 else None
    with pytest.raises(HeldError):
        scene.watch()


def test_a_newcomer_of_the_same_name_and_pid_is_another_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two containers with one host name, each with pid 1."""
    monkeypatch.setenv("SPILL_MACHINE", "holder")
    monkeypatch.setattr("os.getpid", lambda: 1)
    scene.then = lambda now: scene.beat(2) if now >= 12 else None
    with pytest.raises(HeldError):
        scene.watch()
