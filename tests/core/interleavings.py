"""Runs of spill that take turns, one request to the store at a time, in an order drawn from a seed; and what must hold.

Each run is a thread of the real code (`newest`, `watch`, `Claim`, `collect`) on a store in memory. It stops before
every request until a `World` lets it go on, so that one seed is one history. Between any two requests a run may be
killed, fall asleep for long, or be joined by another; replies get lost; damage falls on the state.
After every request a `Witness`, which shares no code with spill, looks at the store.
"""

import contextlib
import hashlib
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from attrs import evolve

from spill.alive import watch
from spill.claim import Claim
from spill.errors import HeldError, SpillError, StoreError
from spill.plugins import Registry
from spill.records import Commit
from spill.state import newest, read_object
from spill.stores import Store
from spill.testing.faulty_store import CONFLICT, DIE_AFTER, DIE_BEFORE, DROPPED, LOST, Call, Died, Fault, FaultyStore
from spill.testing.memory_store import Backing, MemoryStore
from spill.upkeep import collect
from tests.core.builds import make_plan, make_run, step_record
from tests.core.witness import TOTAL, Record, Rule, Witness, unit

SEGMENTS = 3
RUNS = 7
RUNS_AT_ONCE = 4
STEPS = (60, 400)
URI = "memory://state"


def is_finished(commit: Commit) -> bool:
    return "tune" in commit.stages and commit.stages["tune"].finished


# ---- runs


class Actor(threading.Thread):
    """A run: its thread works only between `step` and the next request it makes, which is then `pending`."""

    def __init__(self, world: "World", name: str, body: "Callable[[Actor], None]", takeover: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.world = world
        self.row = make_run(f"{world.seed} {name}")
        self.takeover = takeover
        self.nonces = {self.row.nonce}
        self.store: Store = FaultyStore(MemoryStore(world.backing, URI), self._wait_for_turn)
        self.claim: Claim | None = None
        self.pending: Call | None = None
        self.asleep_until = 0
        self.highest_before = max(world.witness.log, default=0)
        self.over = False
        self.ended_by: BaseException | None = None
        self._body = body
        self._fault: Fault | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self.start()

    def step(self, fault: Fault | None = None) -> None:
        """Let the pending request happen, with this fault, and the run go on until its next one or its end."""
        self._fault = fault
        self._go.release()
        self._back.acquire()

    def new_nonce(self) -> str:
        nonce = hashlib.sha256(f"{self.world.seed} {self.name} {len(self.nonces)}".encode()).hexdigest()[:16]
        self.nonces.add(nonce)
        return nonce

    def run(self) -> None:
        self._go.acquire()
        try:
            self._body(self)
        except BaseException as error:  # the world looks at it
            self.ended_by = error
        self.over = True
        self._back.release()

    def _wait_for_turn(self, call: Call) -> Fault | None:
        self.pending = call
        self._back.release()
        self._go.acquire()
        return self._fault


def build(actor: Actor) -> None:
    """A run of `spill build`, as the runner does it: read, watch, announce itself, claim, commit after every step."""
    head = newest(actor.store)
    if head and is_finished(head.commit):
        return
    while head:
        quietly = {"tick": lambda: None, "say": lambda line: None}
        if not watch(actor.store, head, takeover=actor.takeover, command=URI, **quietly).anew:
            break
        watched, head = head.commit.run, newest(actor.store)
        if head and is_finished(head.commit):
            return
        if head and head.commit.run == watched:
            break
    alive = f"alive/{head.highest + 1 if head else 1}-{actor.row.nonce}"
    actor.store.write(alive, [b"0"])
    claim = actor.claim = Claim.begin(actor.store, head, make_plan(), actor.row, "a" * 32)
    if not claim.commit.folder:
        claim.write(run=evolve(actor.row, claim=claim.number), folder=[b"the folder"])
    record = claim.commit.stages.get("tune", step_record(0, TOTAL))
    content = read_object(actor.store, claim.commit, record.objects["state"]).decode() if record.position else ""
    for position in range(record.position + 1, TOTAL + 1):
        with contextlib.suppress(StoreError):
            actor.store.write(alive, [str(position).encode()])
        content = unit(content, position)
        write_step(actor, claim, position, content)
    with contextlib.suppress(StoreError):
        actor.store.delete(alive)


def write_step(actor: Actor, claim: Claim, position: int, content: str) -> None:
    """Commit a step: its content, and a journal in segments, of which older ones are named again or merged."""
    before = claim.commit.stages["tune"].objects if "tune" in claim.commit.stages else {}
    segments = sorted(role for role in before if role.startswith("journal-"))
    record = step_record(position, TOTAL)
    if len(segments) < SEGMENTS:
        role, rows = f"journal-{position:03d}", [position]
        record = evolve(record, objects={role: before[role] for role in segments})
    else:
        role = f"journal-{1:03d}"
        earlier = [json.loads(read_object(actor.store, claim.commit, before[name])) for name in segments]
        rows = [*(row for part in earlier for row in part), position]
    claim.write(
        run=evolve(actor.row, claim=claim.number, work={"tune": (0, position)}),
        stages={"tune": record},
        new={("tune", "state"): [content.encode()], ("tune", role): [json.dumps(rows).encode()]},
    )


def free(actor: Actor) -> None:
    """A run of `spill state gc`."""
    list(collect(URI, None, actor.takeover, Registry(()), lambda: None, lambda line: None))


# ---- the order in which things happen


class World:
    """One history: who goes on next, and what goes wrong, drawn from a seed."""

    def __init__(self, seed: int, ignored: frozenset[Rule] = frozenset()) -> None:
        self.seed = seed
        self.now = 0.0
        self.backing = Backing(clock=lambda: self.now)
        self.witness = Witness(self.backing, ignored)
        self.tally = self.witness.tally
        self.actors: list[Actor] = []
        self.trace: list[str] = []
        self._random = random.Random(seed)
        self._steps = 0

    def play(self) -> Counter[str]:
        """Let it all happen; then a last run alone, and whoever slept until after it. Answers what there was.

        Raises:
            Violation: a rule does not hold. Its notes are the seed and all that happened.
        """
        end = self._random.randrange(*STEPS)
        try:
            while self._steps < end and self._go_on():
                pass
            self._settle()
        except Exception as error:
            error.add_note("\n".join((f"seed {self.seed}", *self.trace)))
            raise
        finally:
            for actor in self._living():
                while not actor.over:
                    actor.step(DIE_BEFORE)
                actor.join()
        return self.tally

    def _living(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.over]

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _go_on(self) -> bool:
        """One event, if anybody is left to do something."""
        living = self._living()
        if len(self.actors) < RUNS and len(living) < RUNS_AT_ONCE and (not living or self._chance(0.03)):
            frees = bool(self.witness.log) and self._chance(0.15)
            self._start(free if frees else build, takeover=self._chance(0.7))
        if self._chance(0.03):
            self._damage()
        living = self._living()
        if not living:
            return len(self.actors) < RUNS
        awake = [actor for actor in living if actor.asleep_until <= self._steps] or living
        actor = self._random.choice(awake)
        assert actor.pending is not None
        touchy = actor.pending.verb in ("create", "delete") or actor.pending.name == "data/"
        if self._chance(0.1 if touchy else 0.02):
            actor.asleep_until = self._steps + self._random.randrange(20, 250)
            self.tally["sleeps"] += 1
            return True
        self._step(actor, self._fault(actor.pending))
        return True

    def _start(self, body: Callable[[Actor], None], takeover: bool) -> Actor:
        actor = Actor(self, f"{body.__name__}-{len(self.actors) + 1}", body, takeover)
        self.actors.append(actor)
        actor.step()  # to its first request
        return actor

    def _fault(self, call: Call) -> Fault | None:
        changing = call.verb in ("create", "write", "delete")
        if self._chance(0.03 if changing else 0.003):
            self.tally["kills"] += 1
            return self._random.choice((DIE_BEFORE, DIE_AFTER))
        if self._chance({"create": 0.15, "delete": 0.02, "write": 0.01}.get(call.verb, 0.0)):
            self.tally["lost replies"] += 1
            return self._random.choice((LOST, DROPPED, CONFLICT) if call.verb == "create" else (LOST, DROPPED))
        return None

    def _step(self, actor: Actor, fault: Fault | None = None) -> None:
        call = actor.pending
        assert call is not None
        self._steps += 1
        self.now += 1.0
        self.trace.append(f"{actor.name}: {call.verb} {call.name}{f' {fault.kind.name}' if fault else ''}")
        actor.step(fault)
        self.witness.after_request(actor, call)
        self.witness.one_holder(self._living())
        if actor.over:
            self._look_at_end(actor)

    def _look_at_end(self, actor: Actor) -> None:
        error = actor.ended_by
        self.trace.append(f"{actor.name}: ended{f' by {error}' if error else ''}")
        if error is not None and not isinstance(error, SpillError | Died):
            raise error
        if isinstance(error, SpillError) and "no commit of this state is whole" in error.message:
            self.witness.refuse(Rule.LOADABLE, f"{actor.name} was told that no commit is whole")
        self.tally["held"] += isinstance(error, HeldError)
        self.tally["done"] += error is None

    def _damage(self) -> None:
        """Damage an object or entry of one of the newest two states, while both are whole.

        An object is only what one of them needs, since nothing could survive the loss of both. The newest entry is
        never removed, which would make it a commit that nobody made; nor one whose number a run alive may still want,
        which would remove a fence.
        """
        two = self.witness.newest_two()
        if len(two) < 2 or two[1].position == 0:
            return
        newer = [record for number, record in self.witness.log.items() if number >= two[1].number]
        if any(self.witness.is_damaged(record) for record in newer):
            return
        removable = True
        if self._chance(0.3):
            number = self._random.choice(newer).number
            name = f"log/{number}.json"
            highest = max(self.witness.log)
            removable = number < highest and all(number <= actor.highest_before for actor in self._living())
        else:
            name = self._random.choice(sorted(self._of_one_state(*two)))
        stored = self.backing.objects.get(name)
        if stored is None:  # where a broken rule took it before
            return
        if removable and self._chance(0.5):
            del self.backing.objects[name]
        else:
            place = self._random.randrange(len(stored.data))
            bit = 1 << self._random.randrange(8)
            flipped = bytes(byte ^ (bit if at == place else 0) for at, byte in enumerate(stored.data))
            self.backing.objects[name] = evolve(stored, data=flipped)
        self.tally["damage"] += 1
        self.trace.append(f"damage: {name} {'flipped' if name in self.backing.objects else 'removed'}")
        self.witness.after_damage(name)

    def _of_one_state(self, newer: Record, older: Record) -> frozenset[str]:
        """Objects that only one state needs. While a run is alive its next commit may name again what the newest does,
        all but the content, and so carry damage on into every state to come, whatever is kept."""
        own = newer.names - older.names
        if self._living():
            own &= {newer.roles["state"]}
        return own | (older.names - newer.names)

    def _settle(self) -> None:
        """A last run, undisturbed, finishes; then those who slept go on, one after another."""
        sleepers = self._living()
        self.tally["late"] += len(sleepers)
        last = self._start(build, takeover=True)
        for actor in (last, *self._random.sample(sleepers, len(sleepers))):
            while not actor.over:
                self._step(actor)
            self.witness.finished()
        if last.ended_by is not None:
            self.witness.refuse(Rule.FINISHED, f"the last run ended with: {last.ended_by}")


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it, time and randomness of a run are those of its world, and `collect` opens the run's own store."""

    def current() -> Actor:
        return cast(Actor, threading.current_thread())

    def sleep(duration: float) -> None:
        current().world.now += duration

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spill.environment.seconds", lambda: current().world.now)
        patch.setattr("spill.environment.sleep", sleep)
        patch.setattr("spill.environment.nonce", lambda: current().new_nonce())
        patch.setattr("spill.environment.utc_now", lambda: "2026-01-01T00:00:00Z")
        patch.setattr("spill.alive.WATCH_SECONDS", 15.0)  # a round is three requests, which tell little after the first
        patch.setattr("spill.opening.open_store", lambda uri, registry: current().store)
        yield
