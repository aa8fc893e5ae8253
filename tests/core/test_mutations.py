"""Two thousand random mutations of a tiny state, each read and resumed like a build would, in this process; as many as
SPILL_MUTATIONS says where that is set.

A state may be refused with a SpillError or work; nothing else may happen, and nothing outside its folder may change.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from spill import models, upkeep
from spill.alive import watch
from spill.claim import Claim
from spill.engine import Engine, Numerics
from spill.errors import SpillError
from spill.opening import Request, open_build, saved_stage
from spill.plan import Student, prepare
from spill.plugins import Registry, discover
from spill.records import StageRecord
from spill.runner import open_engine
from spill.stages import Stage, Work
from spill.stages.evaluate import open_base, open_tuned
from spill.stages.tune import open_tune, parse_state
from spill.stores import Store
from spill.table import render
from tests.conftest import Spill, write_folder
from tests.core.builds import files, make_run, sealed

pytestmark = pytest.mark.usefixtures("quick")
MUTATIONS = int(os.environ.get("SPILL_MUTATIONS", "2000"))
SEED = 20260101

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**12, 10**400, 0.5, -0.0, 1e300, 5e-324, "", "0", "a", "tune",
    "../../outside/secret", "/etc/passwd", "\x1b[2J", "\0", "é", "\u202e", "0" * 16, "0" * 32, "0" * 64, "a" * 70_000,
    [], [[]], [1], ["tune"], {}, {"a": 1}, {"": ""}, [[1.0, 2.0], [3.0]],
)  # fmt: skip


class Reading:
    """Everything that a build does with a state that it reads, with one open engine for all."""

    def __init__(self, folder: Path, student: Path) -> None:
        self.folder = folder
        self.registry: Registry = discover()
        model = models.resolve(str(student), tick=lambda: None, say=lambda line: None)
        assert model is not None
        opened = open_build(Request(target=str(folder)), self.registry)
        self.student: Student = prepare(model, models.stop_ids(model), opened.folder, opened.settings, lambda: None)
        how = Numerics(dtype="float32")
        self.engine: Engine = open_engine(
            self.registry.engine("numpy"), model.directory, self.student.adapter, how, lambda: None
        )

    def alone(self, state: Path) -> None:
        """What a command reads that is given the state and no folder. Raises SpillError where it is refused."""
        opened = open_build(Request(target=str(state), flags={"student": "x"}), self.registry)
        self._check("\n".join(upkeep.history(str(state), None, self.registry)))
        assert opened.folder.training

    def resume(self, state: Path, *, work: bool) -> bool:
        """A claim, the stages opened as they were saved, and with `work` a step or row more. Raises SpillError where
        the state is refused."""
        opened = open_build(Request(target=str(self.folder), state=str(state), resume=True), self.registry)
        assert opened.head is not None
        commit = opened.head.commit
        lines = [render(commit, commit), *opened.head.notes]
        watch(opened.store, opened.head, takeover=True, command="", tick=lambda: None, say=lines.append)
        self._check("\n".join(lines))
        claim = Claim.begin(opened.store, opened.head, commit.plan, make_run("beta"), "0" * 32)
        for name, opener in (("eval:base", open_base), ("tune", open_tune), ("eval:tuned", open_tuned)):
            record = commit.stages.get(name)
            stage = opener(self._work(name, opened.store, claim, opened.folder))
            if record and "state.safetensors" in record.objects:
                parse_state(saved_stage(opened.store, commit, record).read("state.safetensors"), self.student.adapter)
            if work and not (record and record.finished):
                for _ in stage.advance(min(stage.position + 1, stage.total)):
                    self._commit(claim, name, stage)
                break
        return True

    @staticmethod
    def _commit(claim: Claim, name: str, stage: Stage) -> None:
        before, snapshot = claim.commit.stages.get(name), stage.snapshot()
        record = StageRecord(
            position=stage.position,
            total=stage.total,
            finished=stage.position == stage.total,
            objects={role: before.objects[role] for role in snapshot.kept} if before else {},
            summary=dict(snapshot.summary),
        )
        run = evolve(claim.commit.runs[-1], claim=claim.number)
        claim.write(
            run=run, stages={name: record}, new={(name, role): parts for role, parts in snapshot.objects.items()}
        )

    @staticmethod
    def _check(text: str) -> None:
        text.encode()
        assert not any(sign in text for sign in "\x1b\0\u202e"), text

    def _work(self, name: str, store: Store, claim: Claim, folder: Any) -> Work:
        commit = claim.commit
        saved = {stage: saved_stage(store, commit, record) for stage, record in commit.stages.items()}
        return Work(
            name=name,
            plan=commit.plan,
            folder=folder,
            text=self.student.text,
            rows=self.student.rows,
            adapter=self.student.adapter,
            engine=lambda: self.engine,
            saved=saved.get(name),
            others={stage: s for stage, s in saved.items() if stage != name},
            taken_over=lambda: "alpha",
            accept_drift=False,
            note=lambda text: None,
            say=lambda line: None,
        )


# ---- mutations


def of_a_value(chance: random.Random, top: Any) -> Any:
    """One value somewhere in JSON replaced, removed, doubled or added."""
    inner, key = top, None
    places = []
    stack = [top]
    while stack:
        value = stack.pop()
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        places += [(value, k) for k in keys]
        stack += [value[k] for k in keys]
    if not places or chance.random() < 0.01:
        return chance.choice(NASTY)
    inner, key = chance.choice(places)
    what = chance.randrange(6)
    if what == 0:
        del inner[key]
    elif what == 1 and isinstance(inner, dict):
        inner[chance.choice(["extra", "", "tune", "../x", "\x1b[2J"])] = chance.choice(NASTY)
    elif what == 1:
        inner.insert(key, chance.choice(NASTY))
    elif what == 2:
        other, other_key = chance.choice(places)
        inner[key] = json.loads(json.dumps(other[other_key]))
    elif what == 3 and isinstance(inner[key], int | float):
        inner[key] = inner[key] + chance.choice([-1, 1, 10, -1000, 0.25])
    else:
        inner[key] = chance.choice(NASTY)
    return top


def of_bytes(chance: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut, put in, doubled or moved."""
    changed = bytearray(data or b"x")
    for _ in range(chance.choice([1, 1, 1, 5])):
        place = chance.randrange(len(changed) + 1)
        end = min(len(changed), place + chance.choice([1, 1, 2, 8, 100]))
        what = chance.randrange(5)
        if what == 0 and place < len(changed):
            changed[place] = chance.randrange(256)
        elif what == 1:
            del changed[place:end]
        elif what == 2:
            changed[place:place] = chance.randbytes(chance.choice([1, 8]))
        elif what == 3:
            changed[place:place] = changed[place:end]
        elif what == 4:
            del changed[place:]
    return bytes(changed)


def mutated(chance: random.Random, original: dict[str, bytes]) -> dict[str, bytes]:
    """One mutation. Three of four are made consistent: sizes and hashes fit, and no older commit is left to go to."""
    state = dict(original)
    if chance.random() < 0.25:
        name, other = chance.sample(sorted(state), 2)
        state[name] = state[other] if chance.random() < 0.2 else of_bytes(chance, state[name])
        return state
    entries = sorted((name for name in state if name.startswith("log/")), key=lambda name: int(name[4:-5]))
    newest = entries[-1]
    plain = json.loads(state[newest])
    state = {name: data for name, data in state.items() if name == newest or name in plain["objects"]}
    if chance.random() < 0.5:
        changed = of_a_value(chance, plain)
        state[newest] = sealed(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
        return state
    name = chance.choice(sorted(plain["objects"]))
    data = state[name]
    if name.endswith(".json") and chance.random() < 0.8:
        data = json.dumps(of_a_value(chance, json.loads(data))).encode()
    else:
        data = of_bytes(chance, data)
    plain["objects"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return {**state, name: data, newest: sealed(plain)}


def lay_out(state: Path, contents: dict[str, bytes]) -> None:
    shutil.rmtree(state, ignore_errors=True)
    for name, data in contents.items():
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def reading(spill: Spill, tmp_path: Path, small: Path) -> Reading:
    folder = write_folder(tmp_path / "folder", small, rows=2, exam=2, epochs=2, batch=1, rank=2)
    return Reading(folder, small)


def test_no_mutation_of_a_state_leads_to_anything_but_a_refusal_or_work(
    spill: Spill, reading: Reading, tmp_path: Path, memory: Path
) -> None:
    originals = []
    for stop in ("eval:base:1", "tune:2", "tune"):
        state = tmp_path / stop
        done = spill("build", reading.folder, "--state", state, "--stop-after", stop, "--commit-every", "0")
        assert done.code == 0, done.err
        originals.append(files(state))
    state = memory / "state"
    good = 0
    told: list[tuple[int, str]] = []
    before = files(tmp_path)
    for number in range(MUTATIONS):
        chance = random.Random(SEED + number)
        lay_out(state, mutated(chance, originals[number % 3]))
        try:
            if number % 4 == 3:
                reading.alone(state)
            good += reading.resume(state, work=number % 5 == 0)
        except SpillError as error:
            told.append((number, "\n".join([error.message, *error.details])))
        except Exception as error:
            raise AssertionError(f"mutation {number} led to {type(error).__name__}: {error}") from error
        assert os.listdir(memory) == ["state"], number
    assert files(tmp_path) == before
    assert good > MUTATIONS / 20
    assert len(told) > MUTATIONS / 3
    assert [pair for pair in told if not pair[1] or any(sign in pair[1] for sign in "\x1b\0\u202e\ud800")] == []
