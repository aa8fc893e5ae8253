"""Random interleavings of several runs keep DESIGN's rules of a state; where a rule is broken on purpose, they show it.

`SPILL_INTERLEAVINGS=15000` makes that many. A seed is one history: `World(seed).play()` within `simulated()`.
"""

import os
from collections import Counter
from collections.abc import Callable

import pytest

from spill.claim import Claim
from spill.records import Commit, Plan, Run
from spill.state import Head, log_name
from spill.stores import Exists, Store
from spill.testing.memory_store import MemoryStore
from tests.core.interleavings import World, simulated
from tests.core.witness import PROMISES, RULES, Rule, Violation

SEEDS = range(int(os.environ.get("SPILL_INTERLEAVINGS", "150")))


def test_every_rule_holds_in_random_interleavings() -> None:
    tally: Counter[str] = Counter()
    with simulated():
        for seed in SEEDS:
            tally += World(seed).play()
    # What was meant to happen did: a check of runs that never meet would find nothing.
    wanted = ["commits", "claims", "deleted", "held", "done", "kills", "sleeps", "late", "damage"]
    assert all(tally[what] >= len(SEEDS) // 2 for what in (*wanted, "lost replies")), tally
    assert tally["went back"] >= len(SEEDS) // 10, tally


def test_a_seed_is_one_history() -> None:
    histories = []
    for _ in range(2):
        with simulated():
            world = World(7)
            world.play()
            histories.append((world.trace, dict(world.backing.objects)))
    assert histories[0] == histories[1]
    assert len(histories[0][0]) > 50


# ---- rules broken on purpose


def delete_log_entries(patch: pytest.MonkeyPatch) -> None:
    """Retention removes the entries as well that are older than what it keeps."""
    retain = Claim._retain

    def broken(claim: Claim, last: Commit) -> None:
        retain(claim, last)
        for number in range(1, min(commit.number for commit in (claim.commit, *claim._kept))):
            claim._store.delete(log_name(number))

    patch.setattr(Claim, "_retain", broken)


def delete_by_listing(patch: pytest.MonkeyPatch) -> None:
    """Retention removes every object that there is and that no kept commit names, whoever wrote it."""
    retain = Claim._retain

    def broken(claim: Claim, last: Commit) -> None:
        retain(claim, last)
        needed = {name for commit in (claim.commit, *claim._kept) for name in commit.objects}
        for entry in claim._store.list("data/"):
            if entry.name not in needed:
                claim._store.delete(entry.name)

    patch.setattr(Claim, "_retain", broken)


def keep_one_state(patch: pytest.MonkeyPatch) -> None:
    """Retention keeps what the newest commit names, and nothing else."""
    patch.setattr("spill.state.KEPT_STATES", 1)
    patch.setattr("spill.claim.KEPT_STATES", 1)


def skip_the_claim(patch: pytest.MonkeyPatch) -> None:
    """A run goes on from the newest commit under the claim that there is."""
    begin = Claim.begin

    def broken(store: Store, head: Head | None, plan: Plan, run: Run, state: str) -> Claim:
        if head is None:
            return begin(store, head, plan, run, state)
        return Claim(store, head.entry, run.nonce, head.commit.runs[-1].claim)

    patch.setattr(Claim, "begin", broken)


def overwrite_on_create(patch: pytest.MonkeyPatch) -> None:
    """The store ignores the condition of a create; not for the same bytes, or the proof after a claim would see it."""

    def broken(store: MemoryStore, name: str, data: bytes) -> None:
        stored = store.backing.objects.get(name)
        if stored is not None and stored.data == data:
            raise Exists(name)
        store.write(name, [data])

    patch.setattr(MemoryStore, "create", broken)


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], Rule] = {
    delete_log_entries: Rule.LOG_KEPT,
    delete_by_listing: Rule.FOLDERS,
    keep_one_state: Rule.TWO_STATES,
    skip_the_claim: Rule.CLAIM,
    overwrite_on_create: Rule.LOG_KEPT,
}


def first_violation(ignored: frozenset[Rule] = frozenset()) -> Violation:
    for seed in SEEDS:
        try:
            World(seed, ignored).play()
        except Violation as violation:
            return violation
    raise AssertionError(f"{len(SEEDS)} interleavings did not show it")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_rule_broken_on_purpose_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with simulated(), pytest.MonkeyPatch.context() as patch:
        broken(patch)
        assert first_violation().rule is BROKEN[broken]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_rule_broken_on_purpose_costs_what_is_promised(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    """Nobody watches the rules here, so that what is found is the harm: the rule is needed."""
    with simulated(), pytest.MonkeyPatch.context() as patch:
        broken(patch)
        assert first_violation(ignored=RULES).rule in PROMISES
