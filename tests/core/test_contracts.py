"""The suites for stages and plugins: our own and a third party's pass them, and whoever breaks a rule fails them."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import spill.testing
from spill.errors import PluginError, Stopped
from spill.stages import Progress, Snapshot, Work
from spill.testing import PluginContract, StageContract
from spill.testing.stage_contract import StageBench
from tests.core.third_party import Audit, open_audit


class TestBase(StageContract):
    name = "eval:base"

    @pytest.fixture
    def stage(self) -> str:
        return "spill.stages.evaluate:open_base"


class TestTune(StageContract):
    name = "tune"

    @pytest.fixture
    def stage(self) -> str:
        return "spill.stages.tune:open_tune"


class TestTuned(StageContract):
    name = "eval:tuned"

    @pytest.fixture
    def stage(self) -> str:
        return "spill.stages.evaluate:open_tuned"


class TestAudit(StageContract):
    name = "audit"

    @pytest.fixture
    def stage(self) -> Callable[[Work], Audit]:
        return open_audit


class TestBuiltIns(PluginContract):
    @pytest.fixture
    def plugin(self) -> str:
        return "spill.plugin"


class TestNumpyEngine(PluginContract):
    @pytest.fixture
    def plugin(self) -> str:
        return "spill.testing.numpy_plugin"


def test_the_suites_are_public() -> None:
    assert set(spill.testing.__all__) >= {"EngineContract", "PluginContract", "StageContract"}
    with pytest.raises(AttributeError, match="NoSuchContract"):
        _ = spill.testing.NoSuchContract


# ---- stages that break a rule


class Forgets(Audit):
    """Starts anew when it is reopened."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.journal.records = []


class Overshoots(Audit):
    """Does everything, whatever the limit."""

    def advance(self, limit: int) -> Iterator[Progress]:
        return super().advance(self.total)


class Silent(Audit):
    """Yields once for all units."""

    def advance(self, limit: int) -> Iterator[Progress]:
        yield list(super().advance(limit))[-1]


class Hasty(Audit):
    """Counts a unit before it is done."""

    def advance(self, limit: int) -> Iterator[Progress]:
        engine = self.work.engine()
        for index in range(self.position, limit):
            record = {"row": index, "loss": 0.0}
            self.journal.add(record)
            record["loss"] = float(engine.nll([self.work.rows[index]])[0].mean())
            yield Progress(position=self.position)


class Swallows(Audit):
    """Takes a stop for a reason to try again."""

    def advance(self, limit: int) -> Iterator[Progress]:
        while self.position < limit:
            try:
                yield from super().advance(limit)
            except Stopped:
                continue


class Drifts(Audit):
    """Its result depends on how often it was asked for one."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.asked = itertools.count()

    def snapshot(self) -> Snapshot:
        made = super().snapshot()
        return Snapshot(objects=made.objects, kept=made.kept, summary={"asked": next(self.asked)})


class Clock(Audit):
    """Writes the time into what it made."""

    def snapshot(self) -> Snapshot:
        made = super().snapshot()
        return Snapshot(objects={**made.objects, "time": [repr(time.perf_counter_ns()).encode()]}, kept=made.kept)


class BadRole(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(objects={"../Report": [b"x"]})


class ManyRoles(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(objects={f"row-{index}": [b"x"] for index in range(40)})


class KeepsNothing(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(kept=frozenset({"never-written"}))


class LargeSummary(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(summary={"outputs": ["x" * 100] * 100})


class NoJson(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(summary={"loss": float("nan")})


class Percent(Audit):
    def snapshot(self) -> Snapshot:
        return Snapshot(summary={"score": 95.0})


class Trusting(Audit):
    """Reads what a state holds as if it had written it itself."""

    def __init__(self, work: Work) -> None:
        self.first = int(work.saved.read("first")) if work.saved else 0
        super().__init__(work)

    def snapshot(self) -> Snapshot:
        made = super().snapshot()
        return Snapshot(objects={**made.objects, "first": [b"7"]}, kept=made.kept, summary=made.summary)


class Writes(Audit):
    def snapshot(self) -> Snapshot:
        Path("report.txt").write_text("done", encoding="utf-8")
        return super().snapshot()


class NeverReady(Audit):
    total = 0  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("stage", "test", "fault"),
    [
        (Forgets, "a_stop_after_any_unit_changes_nothing", "reopened at 1 of 6"),
        (Overshoots, "it_advances_unit_by_unit_and_no_further_than_asked", r"advance\(1\) ended at 6"),
        (Silent, "it_advances_unit_by_unit_and_no_further_than_asked", "one Progress after every unit"),
        (
            Hasty,
            "a_raise_in_the_middle_leaves_the_last_unit",
            r"position is (\d) after a raise, (?!\1)\d units were yielded",
        ),
        (Swallows, "a_raise_in_the_middle_leaves_the_last_unit", "nothing could stop this stage"),
        (Drifts, "a_snapshot_after_every_unit_changes_nothing", "the summary is {'asked': 6}"),
        (Clock, "a_stop_after_any_unit_changes_nothing", "role 'time' holds other bytes"),
        (BadRole, "a_stop_after_every_unit_changes_nothing", "cannot be part of an object's name"),
        (ManyRoles, "a_stop_after_every_unit_changes_nothing", "a snapshot of 40 roles"),
        (KeepsNothing, "a_stop_after_every_unit_changes_nothing", "which the snapshot before did not hold"),
        (LargeSummary, "a_stop_after_every_unit_changes_nothing", "the summary has 10"),
        (NoJson, "a_stop_after_every_unit_changes_nothing", "the summary is not JSON"),
        (Percent, "a_stop_after_every_unit_changes_nothing", "score is 95.0, not a share"),
        (Trusting, "damaged_objects_are_said_to_be_damaged", "raised ValueError, not a SpillError"),
        (NeverReady, "it_begins_at_nothing_done", "total is 0"),
    ],
)
def test_a_stage_that_breaks_a_rule_fails_the_suite(stage: type[Audit], test: str, fault: str, tmp_path: Path) -> None:
    bench = StageBench(stage, "audit", tmp_path / "model")
    with pytest.raises((AssertionError, pytest.fail.Exception), match=fault):
        getattr(StageContract(), f"test_{test}")(bench)


def test_a_stage_that_writes_files_fails_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = StageBench(Writes, "audit", tmp_path / "model")
    with pytest.raises(AssertionError, match="the stage wrote files"):
        StageContract().test_it_writes_nowhere_itself(bench, tmp_path, monkeypatch)


# ---- plugins that break a rule

PLUGIN = """
from spill.plugins import Detection, EngineSpec, hookimpl
{top}

def detect():
    {detect}

@hookimpl
def spill_engines():
    for name in {names}:
        yield EngineSpec(name=name, target="{target}", contract={contract}, summary="{summary}", detect=detect)
"""
GOOD: Mapping[str, object] = {
    "top": "",
    "detect": "return Detection(available=True, rank=1, reason='always')",
    "names": ["mine"],
    "target": "spill.testing.numpy_engine:open_engine",
    "contract": "1",
    "summary": "mine",
}
BROKEN: list[tuple[dict[str, object], str, str]] = [
    ({"top": "import numpy"}, "looking_at_it_loads_nothing_heavy", "loads numpy"),
    ({"detect": "import spill.arrays; return 1 / 0"}, "looking_at_it_loads_nothing_heavy", "detect loads numpy"),
    ({"top": "print('hello')"}, "looking_at_it_loads_nothing_heavy", r"prints 'hello\\n'"),
    ({"detect": "raise SystemExit(3)"}, "detect_answers_quickly_and_anywhere", "raised SystemExit"),
    ({"detect": "import time; time.sleep(0.3)"}, "detect_answers_quickly_and_anywhere", r"took \d+\.\d s"),
    ({"detect": "return None"}, "detect_answers_a_detection", "it answered None"),
    ({"names": ["mine", "mine"]}, "it_claims_no_name_twice", "engine mine"),
    ({"contract": "2"}, "it_speaks_the_contracts_of_this_core", "upgrade spill-core"),
    (
        {"top": "from spill.plugins import ENGINE_CONTRACT", "contract": "ENGINE_CONTRACT"},
        "its_contract_numbers_are_literals",
        "write the contract as a number",
    ),
    ({"summary": ""}, "its_summaries_are_short", "has 0 signs"),
    ({"target": "spill.testing.numpy_engine:missing"}, "its_targets_are_there", "cannot be loaded"),
    ({"target": "nowhere"}, "it_loads_and_its_records_are_well_formed", "not package.module:callable"),
    ({"names": []}, "it_loads_and_its_records_are_well_formed", "nothing is registered"),
]


@pytest.mark.parametrize("number", range(len(BROKEN)), ids=[test for _, test, _ in BROKEN])
def test_a_plugin_that_breaks_a_rule_fails_the_suite(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, test, fault = BROKEN[number]
    name = f"broken_plugin_{number}"
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(**{**GOOD, **change}), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Suite(PluginContract):
        detect_seconds = 0.25

    suite = Suite()
    parts = {"plugin": name, "loaded": PluginContract.loaded.__wrapped__(suite, name), "tmp_path": tmp_path}
    method = getattr(suite, f"test_{test}")
    wanted = method.__code__.co_varnames[1 : method.__code__.co_argcount]
    try:
        with pytest.raises((AssertionError, PluginError), match=fault):
            method(**{key: parts[key] for key in wanted})
    finally:
        sys.modules.pop(name, None)
