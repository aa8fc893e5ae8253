"""The suite that holds a stage to `spill.stages`: inherit `StageContract` and give it one fixture.

    class TestMine(StageContract):
        @pytest.fixture
        def stage(self):
            return "my_stage.stage:open_mine"

The stage runs in a build of a few short rows on the numpy engine, after `eval:base` and `tune` have finished there.
"""

import importlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import frozen

from spill.engine import Engine, Numerics, Tick
from spill.errors import SpillError, Stopped
from spill.folder import parse
from spill.models import stop_ids
from spill.models.directory import read_directory
from spill.plan import make_plan, prepare
from spill.plugins import Plugin, Registry, StageSpec
from spill.records import Malformed, from_json, to_json
from spill.stages import Progress, Saved, Stage, Work
from spill.stages.evaluate import open_base
from spill.stages.tune import open_tune
from spill.testing.models import tiny_model
from spill.testing.numpy_engine import open_engine

BUILT_IN: Mapping[str, Callable[[Work], Stage]] = {"eval:base": open_base, "tune": open_tune}
ROLE = re.compile(r"[a-z0-9][a-z0-9._-]{0,60}")
ROLES_LIMIT = 16  # a commit names at most 64 objects, of all stages together
SUMMARY_LIMIT = 8 * 1024  # a commit has at most 64 KiB, for all stages and runs together
PLACES = 8

OpenStage = Callable[[Work], Stage]


class Ticker:
    """A tick that counts, and raises `Stopped` once, at call number `at`."""

    def __init__(self, at: int = 0) -> None:
        self.calls = 0
        self._at = at

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self._at:
            raise Stopped("stopped by the suite", 75)


@frozen(kw_only=True)
class Kept:
    """A snapshot as a store would keep it: every role's bytes, and the summary after its way through JSON."""

    position: int
    total: int
    objects: Mapping[str, bytes]
    summary: Mapping[str, Any]

    def saved(self) -> Saved:
        return Saved(
            position=self.position,
            total=self.total,
            finished=self.position == self.total,
            summary=self.summary,
            roles=tuple(sorted(self.objects)),
            read=lambda role: self.objects[role],
        )


class StageBench:
    """A tiny build to run one stage in: 6 training rows in batches of 2 over 2 epochs, and 4 exam rows."""

    def __init__(self, target: OpenStage, name: str, directory: Path) -> None:
        self._target = target
        self._name = name
        rows = "".join(f'{{"prompt": "say {i}", "answer": "{"yes" if i % 2 else "no"}"}}\n' for i in range(6))
        exam = "".join(f'{{"prompt": "tell {i}", "expected": ["yes", "no"]}}\n' for i in range(4))
        contents = {"train.jsonl": rows.encode(), "evals.jsonl": exam.encode(), "instructions.txt": b"Say yes or no."}
        order = [*BUILT_IN, *([] if name in (*BUILT_IN, "eval:tuned") else [name]), "eval:tuned"]
        self._folder = parse(contents, "the suite's folder")
        settings = self._folder.settings({"batch": 2, "rank": 2, "learning_rate": 0.01, "stages": order})
        tiny_model(directory, hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, max_positions=128)
        model = read_directory(directory, student="local", tick=lambda: None)
        self._directory = directory
        self._student = prepare(model, stop_ids(model), self._folder, settings, lambda: None)
        self._plan = make_plan(self._folder, settings, self._student, "float32", _registry(order), {}, "local", None)
        self._others: dict[str, Saved] = {}
        for other in order[: order.index(name)]:
            self._others[other] = self.finish(BUILT_IN[other](self._work(other, None, Ticker()))).saved()

    def open(self, kept: Kept | None = None, tick: Tick | None = None) -> Stage:
        """The stage at its start, or on a snapshot; always on a fresh engine."""
        return self._target(self._work(self._name, kept.saved() if kept else None, tick or Ticker()))

    def finish(self, stage: Stage, before: Kept | None = None) -> Kept:
        """Advance to the end, and keep a snapshot of it."""
        for _ in stage.advance(stage.total):
            pass
        return self.keep(stage, before)

    def keep(self, stage: Stage, before: Kept | None) -> Kept:
        """Take a snapshot, hold it to what a commit can hold, and keep it as a store would."""
        snapshot = stage.snapshot()
        old = before.objects if before else {}
        unknown = sorted(set(snapshot.kept) - set(old))
        assert not unknown, f"`kept` names {unknown}, which the snapshot before did not hold"
        both = sorted(set(snapshot.kept) & set(snapshot.objects))
        assert not both, f"{both} are both in `kept` and in `objects`; a role is one of them"
        objects = {role: old[role] for role in snapshot.kept}
        for role, parts in snapshot.objects.items():
            objects[role] = b"".join(bytes(part) for part in parts)
        bad = [role for role in objects if not ROLE.fullmatch(role)]
        assert not bad, f"{bad} cannot be part of an object's name: lower-case ASCII letters, digits and . _ - only"
        assert len(objects) <= ROLES_LIMIT, f"a snapshot of {len(objects)} roles; merge them to {ROLES_LIMIT} at most"
        return Kept(
            position=stage.position,
            total=stage.total,
            objects=objects,
            summary=_checked_summary(snapshot.summary),
        )

    def _work(self, name: str, saved: Saved | None, tick: Tick) -> Work:
        opened: list[Engine] = []

        def engine() -> Engine:
            if not opened:
                numerics = Numerics(dtype="float32")
                opened.append(
                    open_engine(model_dir=self._directory, adapter=self._student.adapter, numerics=numerics, tick=tick)
                )
            return opened[0]

        return Work(
            name=name,
            plan=self._plan,
            folder=self._folder,
            text=self._student.text,
            rows=self._student.rows,
            adapter=self._student.adapter,
            engine=engine,
            saved=saved,
            others=dict(self._others),
            taken_over=lambda: "",
            accept_drift=False,
            note=lambda text: None,
            say=lambda line: None,
        )


class StageContract:
    """Attributes:
    name: the name under which the stage is registered.
    """

    name: str = "mine"

    @pytest.fixture
    def stage(self) -> str | OpenStage:
        """The stage's target, `package.module:callable`, or the callable itself."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `stage` that returns the stage's target")

    @pytest.fixture
    def bench(self, stage: str | OpenStage, tmp_path: Path) -> StageBench:
        return StageBench(_loaded(stage), self.name, tmp_path / "model")

    def test_it_begins_at_nothing_done(self, bench: StageBench) -> None:
        stage = bench.open()
        assert re.fullmatch(r"[a-z]+", stage.unit), f"unit is {stage.unit!r}, not a word such as row"
        assert type(stage.total) is int, f"total is {stage.total!r}, not a number of units"
        assert stage.total >= 1, "total is 0: a stage with nothing to do never finishes"
        assert stage.position == 0, f"position is {stage.position} before any unit was done"

    def test_it_advances_unit_by_unit_and_no_further_than_asked(self, bench: StageBench) -> None:
        total = bench.open().total
        for limits in ([total], _places(total)):
            stage, expected = bench.open(), 0
            for limit in limits:
                for progress in stage.advance(limit):
                    expected += 1
                    assert isinstance(progress, Progress), f"advance yielded {type(progress).__name__}, not Progress"
                    assert progress.position == stage.position == expected, "one Progress after every unit, in order"
                    assert stage.total == total, "total changed on the way"
                assert stage.position == limit, f"advance({limit}) ended at {stage.position}"
            assert list(stage.advance(total)) == [], "a finished stage did another unit"

    def test_a_stop_after_any_unit_changes_nothing(self, bench: StageBench) -> None:
        whole = bench.finish(bench.open())
        for place in _places(whole.total)[:-1]:
            first = bench.open()
            for _ in first.advance(place):
                pass
            kept = bench.keep(first, None)
            second = bench.open(kept)
            assert (second.position, second.total) == (place, whole.total), f"reopened at {place} of {whole.total}"
            assert not (fault := _difference(bench.finish(second, kept), whole)), f"stopped after unit {place}: {fault}"

    def test_a_snapshot_after_every_unit_changes_nothing(self, bench: StageBench) -> None:
        whole = bench.finish(bench.open())
        stage = bench.open()
        kept = None
        for _ in stage.advance(stage.total):
            kept = bench.keep(stage, kept)
        again = bench.keep(stage, kept)
        assert not (fault := _difference(again, whole)), f"with a snapshot after every unit, and one more: {fault}"

    def test_a_stop_after_every_unit_changes_nothing(self, bench: StageBench) -> None:
        whole = bench.finish(bench.open())
        kept = None
        for place in _places(whole.total):
            stage = bench.open(kept)
            for _ in stage.advance(place):
                pass
            kept = bench.keep(stage, kept)
        assert kept is not None
        assert not (fault := _difference(kept, whole)), f"reopened after every unit: {fault}"

    def test_a_raise_in_the_middle_leaves_the_last_unit(self, bench: StageBench) -> None:
        counter = Ticker()
        stage = bench.open(tick=counter)
        for _ in stage.advance(stage.total):
            pass
        calls = counter.calls
        if not calls:
            pytest.skip("the stage never calls the engine, so no stop can come in the middle of a unit")
        whole = bench.keep(stage, None)
        for at in _places(calls):
            stage = bench.open(tick=Ticker(at))
            done = _stopped_after(stage)
            assert stage.position == done, f"position is {stage.position} after a raise, {done} units were yielded"
            kept = bench.keep(stage, None) if done else None
            fault = _difference(bench.finish(bench.open(kept), kept), whole)
            assert not fault, f"a raise at tick {at} of {calls}, after {done} units: {fault}"

    def test_damaged_objects_are_said_to_be_damaged(self, bench: StageBench) -> None:
        stage = bench.open()
        for _ in stage.advance(max(1, stage.total // 2)):
            pass
        kept = bench.keep(stage, None)
        for role in kept.objects:
            for damage in (b"", b"\x00\xff", b"[1]", b'{"a": 1}'):
                spoilt = Kept(
                    position=kept.position,
                    total=kept.total,
                    objects={**kept.objects, role: damage},
                    summary=kept.summary,
                )
                try:
                    bench.finish(bench.open(spoilt), spoilt)
                except SpillError:
                    continue
                except Exception as error:
                    pytest.fail(f"role {role!r} holding {damage!r} raised {type(error).__name__}, not a SpillError")

    def test_it_writes_nowhere_itself(self, bench: StageBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = tmp_path / "empty"
        empty.mkdir()
        monkeypatch.chdir(empty)
        bench.finish(bench.open())
        assert list(empty.iterdir()) == [], "the stage wrote files; what it makes belongs into its snapshot"


def _loaded(stage: str | OpenStage) -> OpenStage:
    if not isinstance(stage, str):
        return stage
    module, _, attribute = stage.partition(":")
    return cast(OpenStage, getattr(importlib.import_module(module), attribute))


def _registry(names: list[str]) -> Registry:
    specs = [StageSpec(name=name, target="nothing:loaded", contract=1, summary="") for name in names]
    plugin = Plugin(name="suite", distribution="suite", version="1", specs=tuple(("stage", spec) for spec in specs))
    return Registry([plugin])


def _stopped_after(stage: Stage) -> int:
    """How many units the stage yields until its tick raises."""
    done = 0
    try:
        for progress in stage.advance(stage.total):
            done = progress.position
    except Stopped:
        return done
    pytest.fail("what tick raised did not pass through: nothing could stop this stage")


def _places(total: int) -> list[int]:
    """Positions to stop at, ascending, the last one `total`: all of them, or `PLACES` spread over many."""
    count = min(total, PLACES)
    return sorted({1 + (total - 1) * i // max(1, count - 1) for i in range(count)} | {total})


def _checked_summary(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        data = to_json(dict(summary))
        plain = from_json(data)
    except (TypeError, ValueError, Malformed) as error:
        pytest.fail(f"the summary is not JSON: {error}")
    assert len(data) <= SUMMARY_LIMIT, f"the summary has {len(data)} bytes of JSON, keep it below {SUMMARY_LIMIT}"
    score, truncated = plain.get("score", 0), plain.get("truncated", 0)
    assert type(score) in (int, float), f"score is {score!r}, not a number"
    assert 0 <= score <= 1, f"score is {score!r}, not a share from 0 to 1"
    assert type(truncated) is int, f"truncated is {truncated!r}, not a count of rows"
    return cast(Mapping[str, Any], plain)


def _difference(found: Kept, whole: Kept) -> str:
    """What differs from an uninterrupted run; empty where nothing does."""
    if (found.position, found.total) != (whole.position, whole.total):
        return f"ended at {found.position} of {found.total}, uninterrupted at {whole.position} of {whole.total}"
    if set(found.objects) != set(whole.objects):
        return f"roles are {sorted(found.objects)}, uninterrupted {sorted(whole.objects)}"
    for role in sorted(whole.objects):
        if found.objects[role] != whole.objects[role]:
            return f"role {role!r} holds other bytes than uninterrupted"
    if found.summary != whole.summary:
        return f"the summary is {dict(found.summary)!r}, uninterrupted {dict(whole.summary)!r}"
    return ""
