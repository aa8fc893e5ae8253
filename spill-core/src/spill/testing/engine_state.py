"""The engine suite on state: export, import, repetition, interruption, facts, and what is left behind."""

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from spill.engine import AdapterSpec, Numerics, StepResult, Target, TrainingState, Update
from spill.errors import SpillError
from spill.testing.engine_base import EngineBase
from spill.testing.engine_cases import (
    PROBE,
    Bench,
    Ticker,
    adapter,
    close_early,
    different_bits,
    interrupted,
    mixed_rows,
    row,
    trained,
    training_rows,
    untrained,
    zeros,
)

UPDATE = Update(step=4, learning_rate=0.02, weight_decay=0.1)
MANY_TICKS = 5000


class StateContract(EngineBase):
    """State and surroundings."""

    def test_a_fresh_engine_holds_zeros(self, bench: Bench) -> None:
        fault = different_bits(bench.open().export_state(), untrained(bench.spec, zeros(bench.spec)))
        assert not fault, f"right after opening, adapter and moments are zeros: {fault}"

    def test_exported_arrays_are_float32_contiguous_and_of_the_specs_shapes(self, bench: Bench) -> None:
        engine = bench.open(trained(bench.spec, 1))
        engine.step(training_rows(0), UPDATE)
        for group, arrays in engine.export_state().groups().items():
            assert {name: array.shape for name, array in arrays.items()} == bench.spec.shapes(), (
                f"keys, shapes of {group}"
            )
            for name, array in arrays.items():
                assert type(array) is np.ndarray, f"{group} {name!r} is a {type(array).__name__}, not a numpy array"
                assert array.dtype == np.float32, f"{group} {name!r} is {array.dtype}, not float32"
                assert array.flags.c_contiguous, f"{group} {name!r} is not C-contiguous"

    def test_state_out_in_and_out_again_is_the_same(self, bench: Bench) -> None:
        first = trained(bench.spec, 2)
        engine = bench.open(first)
        assert not (fault := different_bits(engine.export_state(), first)), (
            f"an imported state came out changed: {fault}"
        )
        engine.step(training_rows(1), UPDATE)
        second = engine.export_state()
        fault = different_bits(bench.open(second).export_state(), second)
        assert not fault, f"a state changed on its way into a fresh engine: {fault}"

    def test_exported_arrays_are_copies(self, bench: Bench) -> None:
        engine, other = bench.open(trained(bench.spec, 3)), bench.open(trained(bench.spec, 3))
        kept, exported = engine.export_state(), engine.export_state()
        for arrays in exported.groups().values():
            for array in arrays.values():
                array[...] = 7
        fault = different_bits(engine.export_state(), kept)
        assert not fault, f"writing into exported arrays changed the engine: {fault}"
        earlier = engine.export_state()
        for step in (engine, other):
            step.step(training_rows(2), UPDATE)
        assert not (fault := different_bits(earlier, kept)), f"a step changed arrays exported before it: {fault}"
        fault = different_bits(engine.export_state(), other.export_state())
        assert not fault, f"a step after writing into exported arrays differs: {fault}"

    def test_imported_arrays_are_copied(self, bench: Bench) -> None:
        given, kept = trained(bench.spec, 4), trained(bench.spec, 4)
        engine = bench.open(given)
        for arrays in given.groups().values():
            for array in arrays.values():
                array[...] = 7
        fault = different_bits(engine.export_state(), kept)
        assert not fault, f"writing into imported arrays changed the engine: {fault}"
        engine.import_state(again := trained(bench.spec, 4))
        engine.step(training_rows(3), UPDATE)
        assert not (fault := different_bits(again, kept)), f"a step wrote into the arrays it was given: {fault}"

    def test_what_is_given_is_only_read(self, bench: Bench) -> None:
        state, rows = trained(bench.spec, 12), mixed_rows()[:3]
        given: list[Any] = [array for arrays in state.groups().values() for array in arrays.values()]
        given += [array for one in rows for array in (one.tokens, one.mask)]
        before = [array.tobytes() for array in given]
        for array in given:
            array.flags.writeable = False  # an engine that writes fails here, or below where it went around numpy
        engine = bench.open(state)
        engine.step(rows, UPDATE)
        engine.nll(rows)
        list(engine.generate([one.tokens for one in rows], 3, []))
        assert [array.tobytes() for array in given] == before, "the engine wrote into rows or state that it was given"

    def test_the_same_steps_twice_are_the_same_bits(self, bench: Bench) -> None:
        ends = []
        for _ in range(2):
            engine = bench.open(untrained(bench.spec, adapter(bench.spec, 5)))
            results = [engine.step(training_rows(s), evolve(UPDATE, step=s + 1)) for s in range(4)]
            ends.append((results, engine.export_state()))
        assert ends[0][0] == ends[1][0], f"the same steps answered {ends[0][0]} and {ends[1][0]}"
        fault = different_bits(ends[1][1], ends[0][1])
        assert not fault, f"the same steps in two fresh engines ended differently: {fault}"

    def test_a_step_after_import_into_a_fresh_engine_is_the_same_bits(self, bench: Bench) -> None:
        engine = bench.open(untrained(bench.spec, adapter(bench.spec, 6)))
        for step in range(3):
            engine.step(training_rows(step), evolve(UPDATE, step=step + 1))
        moved = bench.open(engine.export_state())
        results = [e.step(training_rows(3), evolve(UPDATE, step=4)) for e in (engine, moved)]
        assert results[0] == results[1], f"a continued engine answered {results[0]}, a resumed one {results[1]}"
        fault = different_bits(moved.export_state(), engine.export_state())
        assert not fault, f"a resumed engine goes on differently: {fault}"

    @pytest.mark.parametrize("group", ["adapter", "first_moment", "second_moment"])
    @pytest.mark.parametrize("fault", ["missing", "unknown", "renamed", "shape", "flat", "float64", "float16"])
    def test_a_state_that_does_not_fit_is_refused_whole(self, bench: Bench, group: str, fault: str) -> None:
        before, other = trained(bench.spec, 7), trained(bench.spec, 8)
        arrays: dict[str, Any] = dict(other.groups()[group])
        name = list(arrays)[-1]  # the last, so that an engine that copies while it checks is caught
        array = arrays.pop(name)
        arrays |= {
            "missing": {},
            "unknown": {name: array, "model.layers.0.extra.lora_A": array},
            "renamed": {f"{name}.weight": array},
            "shape": {name: np.ascontiguousarray(array.T)},
            "flat": {name: array.reshape(-1)},
            "float64": {name: array.astype(np.float64)},
            "float16": {name: array.astype(np.float16)},
        }[fault]
        engine = bench.open(before)
        with pytest.raises(ValueError):
            engine.import_state(TrainingState(**{**other.groups(), group: arrays}))
        changed = different_bits(engine.export_state(), before)
        assert not changed, f"a refused import ({group}: {fault}) changed the state: {changed}"

    # Interruption

    def test_tick_is_called_while_opening_and_its_raise_passes_through(self, bench: Bench) -> None:
        ticker = Ticker()
        bench.open(tick=ticker)
        assert ticker.calls > 0, "open_engine never called tick while it loaded the base"
        for raise_at in sorted({1, (ticker.calls + 1) // 2, ticker.calls}):
            assert interrupted(ticker, raise_at, lambda: bench.open(tick=ticker)), (
                "opening went on after a raise of tick"
            )

    def test_tick_is_called_between_micro_batches(self, bench: Bench) -> None:
        rows, ticker = [row(30 + i, 12, 4) for i in range(6)], Ticker()
        engine = bench.open(tick=ticker, numerics=bench.small_micro_batches())
        used = engine.facts().numerics.micro_batch_tokens
        between = -(-sum(len(one.tokens) for one in rows) // max(used, 12)) - 1
        ticker.rewind()
        engine.step(rows, PROBE)
        assert ticker.calls >= max(1, between), (
            f"step called tick {ticker.calls} times, expected {max(1, between)} or more"
        )
        ticker.rewind()
        engine.nll(rows)
        assert ticker.calls >= len(rows) - 1, f"nll called tick {ticker.calls} times for {len(rows)} rows"

    def test_a_raise_anywhere_in_a_step_changes_nothing(self, bench: Bench) -> None:
        rows, before, numerics = mixed_rows(), trained(bench.spec, 9), bench.small_micro_batches()
        undisturbed = bench.open(before, numerics=numerics)
        expected = undisturbed.step(rows, UPDATE)
        ticker = Ticker()
        engine = bench.open(before, tick=ticker, numerics=numerics)
        results: list[StepResult] = []
        for raise_at in range(1, MANY_TICKS):
            if not interrupted(ticker, raise_at, lambda: results.append(engine.step(rows, UPDATE))):
                break
            fault = different_bits(engine.export_state(), before)
            assert not fault, f"a step interrupted at tick {raise_at} left a changed state: {fault}"
        ticker.rewind()
        assert results == [expected], f"a step after interrupted ones answered {results}, alone it answers {expected}"
        fault = different_bits(engine.export_state(), undisturbed.export_state())
        assert not fault, f"a step after interrupted ones ended differently: {fault}"

    @pytest.mark.parametrize("method", ["nll", "generate"])
    def test_a_raise_anywhere_else_changes_nothing(self, bench: Bench, method: str) -> None:
        rows, before, ticker = mixed_rows(), trained(bench.spec, 10), Ticker()
        engine, undisturbed = bench.open(before, tick=ticker), bench.open(before)

        def work() -> object:
            if method == "nll":
                return engine.nll(rows)
            return list(engine.generate([one.tokens for one in rows[:3]], 4, [], adapter=True))

        raised = 0
        while interrupted(ticker, raised + 1, work):
            raised += 1
            assert raised < MANY_TICKS, f"{method} still calls tick after {raised} calls"
        ticker.rewind()
        assert raised > 0, f"{method} never called tick"
        fault = different_bits(engine.export_state(), before)
        assert not fault, f"an interrupted {method} changed the training state: {fault}"
        assert engine.step(rows, UPDATE) == undisturbed.step(rows, UPDATE), f"a step after {method} answers differently"
        fault = different_bits(engine.export_state(), undisturbed.export_state())
        assert not fault, f"a step after an interrupted {method} ended differently: {fault}"

    # Opening and facts

    def test_an_unknown_layer_is_refused_by_name(self, bench: Bench) -> None:
        wrong = Target(name="model.layers.0.self_attn.z_proj", in_features=32, out_features=32)
        for targets in ((wrong,), (*bench.spec.targets, wrong)):
            with pytest.raises((ValueError, SpillError)) as caught:
                bench.open(spec=AdapterSpec(rank=2, alpha=4.0, targets=targets))
            assert "z_proj" in str(caught.value), f"the refusal does not name the layer: {caught.value}"

    def test_facts_are_complete(self, bench: Bench) -> None:
        facts = bench.open().facts()
        for name in ("device", "hardware"):
            assert getattr(facts, name), f"facts().{name} is empty"
        assert facts.threads > 0, f"facts().threads is {facts.threads}"
        assert facts.numerics.dtype == self.dtype, f"asked for {self.dtype}, facts say {facts.numerics.dtype}"
        assert facts.numerics.layout, "facts().numerics.layout is empty: the engine chooses a layout and names it"
        assert facts.numerics.micro_batch_tokens > 0, "facts().numerics.micro_batch_tokens is not filled in"
        assert facts.versions, "facts().versions names no library"
        assert all(isinstance(v, str) and v for v in facts.versions.values()), f"versions are texts: {facts.versions}"
        assert all("\n" not in note for note in facts.notes), "a note has more than one line"

    def test_answered_numerics_are_followed(self, bench: Bench) -> None:
        first = bench.open().facts()
        again = bench.open(numerics=first.numerics).facts()
        assert again == first, f"reopened with the answered numerics, facts changed from {first} to {again}"

    @pytest.mark.parametrize("tokens", [64, 100_000])
    def test_asked_micro_batches_are_followed_or_a_note_says_why_not(self, bench: Bench, tokens: int) -> None:
        facts = bench.open(numerics=Numerics(dtype=self.dtype, micro_batch_tokens=tokens)).facts()
        followed = facts.numerics.micro_batch_tokens == tokens
        assert followed or facts.notes, f"asked for {tokens} tokens, {facts.numerics} is used, and no note says so"

    def test_nothing_is_left_behind_in_the_process(self, bench: Bench) -> None:
        self.stir_generators()
        environment, before = dict(os.environ), self._surroundings()
        engine = bench.open(trained(bench.spec, 11))
        engine.step(training_rows(4), UPDATE)
        engine.nll(mixed_rows()[:2])
        list(engine.generate([mixed_rows()[0].tokens], 3, []))
        running = engine.generate([one.tokens for one in mixed_rows()], 3, [])
        next(running)
        close_early(running)
        engine.import_state(engine.export_state())
        bench.close()
        for name, value in self._surroundings().items():
            assert value == before[name], (
                f"the engine left another {name} behind: {value!r} instead of {before[name]!r}"
            )
        changed = [name for name, value in environment.items() if os.environ.get(name) != value]
        assert not changed, f"the engine changed environment variables: {changed}"

    def _surroundings(self) -> dict[str, object]:
        """What belongs to the process. Variables of the environment are compared apart: new ones are allowed."""
        numpy_state = np.random.get_state(legacy=False)
        assert isinstance(numpy_state, dict)
        return {
            "state of random": random.getstate(),
            "state of numpy.random": repr(numpy_state),
            "numpy error handling": np.geterr(),
            "working folder": os.getcwd(),
            "handler of SIGINT": signal.getsignal(signal.SIGINT),
            "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
            "global_probe()": self.global_probe(),
        }
