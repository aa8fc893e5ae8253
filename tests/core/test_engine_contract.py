"""The engine suite itself: every fault that an engine may have is caught, by the test that is named for it."""

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from spill.adamw import global_norm, reference_step
from spill.engine import Completion, Facts, Int32, Row, StepResult, TrainingState, Update
from spill.testing import EngineContract
from spill.testing.engine_cases import Bench, Interrupted
from spill.testing.models import tiny_model
from spill.testing.numpy_engine import NumpyEngine
from spill.testing.numpy_engine import open_engine as open_numpy
from spill.testing.numpy_llama import Adapter, Llama

Faulty = type[NumpyEngine] | type[Llama]
FAULTS: list[tuple[str, Faulty, tuple[Any, ...]]] = []


def caught_by(test: str, *arguments: Any) -> Callable[[Any], Any]:
    """Register a faulty engine, or a faulty llama for the numpy engine, with the test that must fail on it."""

    def register(faulty: Any) -> Any:
        FAULTS.append((test, faulty, arguments))
        return faulty

    return register


@caught_by("test_nll_is_the_loss_of_every_answer_token")
class ScalesByAlphaAlone(NumpyEngine):
    def _adapter(self, wanted: bool) -> Adapter | None:
        return Adapter(arrays=self._state.adapter, scale=self._spec.alpha) if wanted else None


@caught_by("test_scale_is_alpha_by_rank")
class HasAScaleOfItsOwn(NumpyEngine):
    def _adapter(self, wanted: bool) -> Adapter | None:
        return Adapter(arrays=self._state.adapter, scale=3.0) if wanted else None


@caught_by("test_nll_is_the_loss_of_every_answer_token")
@caught_by("test_without_the_adapter_it_is_the_base")
class OverlooksTheRotaryBase(Llama):
    def _rotary(self, past: int, n: int) -> Any:
        angles = np.arange(past, past + n, dtype=np.float32)[:, None] * np.float32(10000) ** -(np.arange(4) / 4)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@caught_by("test_other_models_of_the_same_kind", {"tied": False})
class TiesEveryHead(Llama):
    def _linear(self, name: str, *rest: Any) -> Any:
        return super()._linear(name.replace("lm_head", "model.embed_tokens"), *rest)


def shifted(row: Row, by: int) -> Row:
    return Row(tokens=row.tokens, mask=np.roll(row.mask, by))


@caught_by("test_nll_is_the_loss_of_every_answer_token")
@caught_by("test_step_answers_the_summed_loss_and_the_count")
class ShiftsTheMask(Llama):
    def losses(self, row: Row, *rest: Any, **more: Any) -> Any:
        return super().losses(shifted(row, -1) if len(row.tokens) > 2 else row, *rest, **more)


@caught_by("test_masked_tokens_after_the_last_answer_token_are_inert")
class LearnsMaskedTails(Llama):
    def losses(self, row: Row, *rest: Any, **more: Any) -> Any:
        mask = row.mask.copy()
        mask[int(mask.argmax()) :] = 1
        return super().losses(Row(tokens=row.tokens, mask=mask), *rest, **more)


@caught_by("test_masked_tokens_before_the_answer_condition_it")
class ReadsTheAnswerAlone(Llama):
    def losses(self, row: Row, *rest: Any, **more: Any) -> Any:
        start = int(row.mask.argmax()) - 1
        return super().losses(Row(tokens=row.tokens[start:], mask=row.mask[start:]), *rest, **more)


@caught_by("test_rows_of_very_different_lengths_do_not_disturb_each_other")
class LetsPaddingBeSeen(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        longest = max(len(row.tokens) for row in batch)
        padded = []
        for row in batch:
            room = longest - len(row.tokens)  # in front, where every later token attends to it
            padded.append(Row(tokens=np.pad(row.tokens, (room, 0)), mask=np.pad(row.mask, (room, 0))))
        return super().step(padded, update)


@caught_by("test_nll_of_a_row_is_the_same_alone_and_among_others")
class RoundsByTheBatch(NumpyEngine):
    def nll(self, rows: Sequence[Row], adapter: bool = True) -> Any:
        return [losses * np.float32(1 + 1e-7 * len(rows)) for losses in super().nll(rows, adapter)]


@caught_by("test_nll_is_the_loss_of_every_answer_token")
class AnswersFloat64(NumpyEngine):
    def nll(self, rows: Sequence[Row], adapter: bool = True) -> Any:
        return [losses.astype(np.float64) for losses in super().nll(rows, adapter)]


@caught_by("test_step_answers_the_summed_loss_and_the_count")
class AnswersTheMean(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        result = super().step(batch, update)
        return evolve(result, loss_sum=result.loss_sum / result.count)


@caught_by("test_a_row_with_a_single_answer_token")
class NeedsTwoAnswerTokens(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        return evolve(super().step(batch, update), count=max(2, sum(int(row.mask.sum()) for row in batch)))


@caught_by("test_gradient_is_the_slope_of_nll")
@caught_by("test_gradient_of_every_array_is_the_models")
class ForgetsTheGradientThroughA(Llama):
    def _linear_back(self, name: str, by_y: Any, adapter: Adapter, tape: Any, gradient: Any) -> Any:
        by_x = super()._linear_back(name, by_y, adapter, tape, gradient)
        return by_y @ self._weights[name] if "v_proj" in name else by_x


@caught_by("test_gradient_of_every_array_is_the_models")
class LosesOneLayersGradient(Llama):
    def losses(self, row: Row, adapter: Adapter | None, gradient: Any = None) -> Any:
        found = super().losses(row, adapter, gradient)
        if gradient is not None:
            gradient["model.layers.1.mlp.up_proj.lora_A"][...] = 0
        return found


class Rewritten(NumpyEngine):
    """The numpy engine's step in the open, for faults of the update. Each hook is one of its parts."""

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        count = sum(int(row.mask.sum()) for row in batch)
        gradient, loss_sum = self._zeros(), 0.0
        with np.errstate(all="ignore"):
            for rows in self._micro_batches(batch):
                self._tick()
                part = self._zeros()
                loss_sum += sum(float(self._llama.losses(row, self._adapter(True), part).sum()) for row in rows)
                for name, array in self.part(part, rows, count, update).items():
                    gradient[name] += array
            norm = global_norm(gradient)
            if np.isfinite([loss_sum, norm]).all():
                self._state = self.updated(gradient, update)
        return StepResult(loss_sum=loss_sum, count=count, gradient_norm=norm)

    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        return {name: array / count for name, array in part.items()}

    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return reference_step(self._state, gradient, update)


@caught_by("test_micro_batch_size_changes_only_rounding", 1)
class AveragesMicroBatches(Rewritten):
    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        own = sum(int(row.mask.sum()) for row in rows)
        return {name: array / own / 9 for name, array in part.items()}


@caught_by("test_losses_and_gradients_add_up_over_splits")
class DividesByRows(Rewritten):
    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        return {name: array / len(rows) for name, array in part.items()}


@caught_by("test_the_gradient_is_clipped_once_by_its_global_norm")
class ClipsEveryMicroBatch(Rewritten):
    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        mean = super().part(part, rows, count, update)
        factor = min(1.0, update.clip_norm / global_norm(mean))
        return {name: array * factor for name, array in mean.items()}


@caught_by("test_the_order_of_rows_changes_only_rounding")
class WeighsTheFirstRow(Rewritten):
    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        self._llama.losses(rows[0], self._adapter(True), part)
        return super().part(part, rows, count, update)


@caught_by("test_the_gradient_is_clipped_once_by_its_global_norm")
@caught_by("test_updates_are_adamws_over_twenty_steps")
class NeverClips(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return reference_step(self._state, gradient, evolve(update, clip_norm=1e30))


@caught_by("test_the_gradient_is_clipped_once_by_its_global_norm")
class ClipsEveryArray(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        norms = {name: float(np.linalg.norm(array)) for name, array in gradient.items()}
        clipped = {name: a * min(1.0, update.clip_norm / (norms[name] + 1e-6)) for name, a in gradient.items()}
        return reference_step(self._state, clipped, evolve(update, clip_norm=1e30))


@caught_by("test_updates_are_adamws_over_twenty_steps")
class CorrectsNoBias(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return reference_step(self._state, gradient, evolve(update, step=100_000))


@caught_by("test_updates_are_adamws_over_twenty_steps")
class CountsItsOwnSteps(Rewritten):
    count = 0

    def updated(self, gradient: Any, update: Update) -> TrainingState:
        self.count += 1
        return reference_step(self._state, gradient, evolve(update, step=self.count))


@caught_by("test_updates_are_adamws_over_twenty_steps")
class DecaysThroughTheGradient(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        decayed = {name: by + update.weight_decay * self._state.adapter[name] for name, by in gradient.items()}
        return reference_step(self._state, decayed, evolve(update, weight_decay=0.0))


@caught_by("test_updates_are_adamws_over_twenty_steps")
class UsesAnEpsilonOfItsOwn(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return reference_step(self._state, gradient, evolve(update, epsilon=1e-8))


@caught_by("test_updates_are_adamws_over_twenty_steps")
class IgnoresTheBetas(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return reference_step(self._state, gradient, evolve(update, beta2=0.999))


def rounded(arrays: Any) -> Any:
    """As bfloat16 would keep them."""
    return {name: (array.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, array in arrays.items()}


@caught_by("test_learning_rate_zero_changes_moments_alone")
class KeepsTheAdapterInBfloat16(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        state = super().updated(gradient, update)
        return evolve(state, adapter=rounded(state.adapter))


@caught_by("test_learning_rate_zero_changes_moments_alone")
class SkipsStepsThatLearnNothing(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        return super().updated(gradient, update) if update.learning_rate else self._state


@caught_by("test_what_is_not_finite_changes_nothing", np.inf)
@caught_by("test_what_is_not_finite_changes_nothing", np.nan)
@caught_by("test_what_is_not_finite_changes_nothing", 1e30)
class UpdatesWithNaN(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        result = super().step(batch, update)
        if not np.isfinite(result.loss_sum):
            self._state = evolve(self._state, first_moment=self._zeros())
        return result


@caught_by("test_a_fresh_engine_holds_zeros")
class StartsFromNoise(NumpyEngine):
    def export_state(self) -> TrainingState:
        state = super().export_state()
        return evolve(state, adapter={name: array + np.float32(1e-9) for name, array in state.adapter.items()})


@caught_by("test_exported_arrays_are_float32_contiguous_and_of_the_specs_shapes")
class ExportsTransposed(NumpyEngine):
    def export_state(self) -> TrainingState:
        state = super().export_state()
        return evolve(state, adapter={name: np.asfortranarray(array) for name, array in state.adapter.items()})


@caught_by("test_state_out_in_and_out_again_is_the_same")
class ImportsBfloat16(NumpyEngine):
    def import_state(self, state: TrainingState) -> None:
        super().import_state(evolve(state, second_moment=rounded(state.second_moment)))


@caught_by("test_exported_arrays_are_copies")
class ExportsViews(NumpyEngine):
    def export_state(self) -> TrainingState:
        return self._state


@caught_by("test_imported_arrays_are_copied")
class KeepsWhatItIsGiven(NumpyEngine):
    def import_state(self, state: TrainingState) -> None:
        super().import_state(state)
        self._state = state


@caught_by("test_what_is_given_is_only_read")
class ShiftsRowsInPlace(NumpyEngine):
    def nll(self, rows: Sequence[Row], adapter: bool = True) -> Any:
        for row in rows:
            row.tokens[:] = row.tokens + 0
        return super().nll(rows, adapter)


@caught_by("test_the_same_steps_twice_are_the_same_bits")
@caught_by("test_a_step_after_import_into_a_fresh_engine_is_the_same_bits")
class IsNeverTheSame(Rewritten):
    def updated(self, gradient: Any, update: Update) -> TrainingState:
        noise = np.float32(1 + 1e-3 * np.random.default_rng().random())
        return super().updated({name: by * noise for name, by in gradient.items()}, update)


@caught_by("test_a_step_after_import_into_a_fresh_engine_is_the_same_bits")
class RemembersMoreThanItsState(Rewritten):
    momentum = 0.0

    def updated(self, gradient: Any, update: Update) -> TrainingState:
        self.momentum = 0.5 * self.momentum + 1e-3
        return super().updated({name: by * (1 + self.momentum) for name, by in gradient.items()}, update)


class ImportsAnything(NumpyEngine):
    def import_state(self, state: TrainingState) -> None:
        groups = {}
        for group, arrays in state.groups().items():
            own = self._state.groups()[group]
            groups[group] = {n: np.float32(arrays.get(n, own[n])).reshape(own[n].shape) for n in own}
        self._state = TrainingState(**groups)


for fault in ("missing", "unknown", "renamed", "shape", "flat", "float64", "float16"):
    caught_by("test_a_state_that_does_not_fit_is_refused_whole", "first_moment", fault)(ImportsAnything)


@caught_by("test_a_state_that_does_not_fit_is_refused_whole", "second_moment", "shape")
class ImportsHalf(NumpyEngine):
    def import_state(self, state: TrainingState) -> None:
        self._state = evolve(self._state, adapter={name: array.copy() for name, array in state.adapter.items()})
        super().import_state(state)


@caught_by("test_a_raise_anywhere_in_a_step_changes_nothing")
class KeepsHalfAStep(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        try:
            return super().step(batch, update)
        except Interrupted:
            self._state.first_moment["model.layers.1.mlp.up_proj.lora_A"][0, 0] += 1  # type: ignore[index]
            raise


@caught_by("test_a_raise_anywhere_in_a_step_changes_nothing")
class KeepsGradientsOfAnInterruptedStep(Rewritten):
    left: Any = None

    def part(self, part: Any, rows: list[Row], count: int, update: Update) -> Any:
        kept, self.left = self.left, {name: array * np.float32(1e-3) for name, array in part.items()}
        return {name: array / count + (0 if kept is None else kept[name]) for name, array in part.items()}

    def updated(self, gradient: Any, update: Update) -> TrainingState:
        self.left = None
        return super().updated(gradient, update)


@caught_by("test_a_raise_anywhere_in_a_step_changes_nothing")
class SwallowsTheRaise(NumpyEngine):
    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        try:
            return super().step(batch, update)
        except Interrupted:
            return StepResult(loss_sum=0.0, count=0, gradient_norm=0.0)


@caught_by("test_a_raise_anywhere_else_changes_nothing", "nll")
class TrainsWhenInterrupted(NumpyEngine):
    def nll(self, rows: Sequence[Row], adapter: bool = True) -> Any:
        try:
            return super().nll(rows, adapter)
        except Interrupted:
            self._state = evolve(self._state, adapter=self._zeros())
            raise


@caught_by("test_tick_is_called_between_tokens")
@caught_by("test_a_raise_anywhere_else_changes_nothing", "generate")
class TicksOncePerPrompt(NumpyEngine):
    def _complete(self, index: int, prompt: Int32, *rest: Any) -> Completion:
        tick, self._tick = self._tick, lambda: None
        try:
            return super()._complete(index, prompt, *rest)
        finally:
            self._tick = tick


@caught_by("test_tick_is_called_between_micro_batches")
class TicksOncePerStep(NumpyEngine):
    def _micro_batches(self, batch: Sequence[Row]) -> Iterator[list[Row]]:
        yield list(batch)


@caught_by("test_facts_are_complete")
@caught_by("test_asked_micro_batches_are_followed_or_a_note_says_why_not", 64)
class ChoosesSilently(NumpyEngine):
    def facts(self) -> Facts:
        facts = super().facts()
        return evolve(facts, numerics=evolve(facts.numerics, micro_batch_tokens=0))


@caught_by("test_answered_numerics_are_followed")
class ChangesItsMind(NumpyEngine):
    def facts(self) -> Facts:
        facts = super().facts()
        return evolve(facts, numerics=evolve(facts.numerics, micro_batch_tokens=2 * facts.numerics.micro_batch_tokens))


@caught_by("test_nothing_is_left_behind_in_the_process")
class SeedsPython(NumpyEngine):
    def close(self) -> None:
        random.seed(1)


@caught_by("test_nothing_is_left_behind_in_the_process")
class DrawsFromNumpy(NumpyEngine):
    def close(self) -> None:
        np.random.standard_normal()


@caught_by("test_nothing_is_left_behind_in_the_process")
class TakesTheSignal(NumpyEngine):
    def close(self) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)


@caught_by("test_generation_is_greedy", True)
class ForgetsTheCachesPositions(Llama):
    def _rotary(self, past: int, n: int) -> Any:
        return super()._rotary(0, n)


@caught_by("test_generation_is_greedy", False)
@caught_by("test_without_the_adapter_it_is_the_base")
class NeverIsTheBase(NumpyEngine):
    def _adapter(self, wanted: bool) -> Adapter | None:
        return super()._adapter(True)


@caught_by("test_an_adapter_of_zeros_is_the_base_and_another_is_not")
class AlwaysIsTheBase(NumpyEngine):
    def _adapter(self, wanted: bool) -> Adapter | None:
        return None


@caught_by("test_an_adapter_on_some_layers_only")
class ScalesByRankFour(NumpyEngine):
    def _adapter(self, wanted: bool) -> Adapter | None:
        return Adapter(arrays=self._state.adapter, scale=self._spec.alpha / 4) if wanted else None


class Regenerates(NumpyEngine):
    """For faults of generation: `changed` sees the arguments, `answered` every completion."""

    def generate(self, prompts: Any, max_new_tokens: int, stop_ids: Any, adapter: bool = True) -> Any:
        for completion in super().generate(*self.changed(prompts, max_new_tokens, stop_ids), adapter=adapter):
            yield from self.answered(completion, prompts, stop_ids)

    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts, max_new_tokens, stop_ids

    def answered(self, completion: Completion, prompts: Any, stop_ids: Any) -> Any:
        yield completion


@caught_by("test_every_stop_id_stops_and_none_is_returned")
class KnowsOneStopId(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts, max_new_tokens, stop_ids[:1]


@caught_by("test_every_stop_id_stops_and_none_is_returned")
@caught_by("test_a_stop_id_that_comes_first_gives_no_tokens")
class ReturnsTheStopId(Regenerates):
    def answered(self, completion: Completion, prompts: Any, stop_ids: Any) -> Any:
        if completion.reason == "stop":
            completion = evolve(completion, tokens=np.append(completion.tokens, np.int32(stop_ids[0])))
        yield completion


@caught_by("test_max_new_tokens_is_exact")
class GivesOneMore(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts, max_new_tokens + 1, stop_ids


@caught_by("test_a_stop_id_counts_as_a_new_token")
class LooksOneAhead(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts, max_new_tokens + (1 if stop_ids else 0), stop_ids


@caught_by("test_how_many_prompts_come_together_changes_nothing", 40)
class ForgetsPromptsBeyondABatch(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts[:32], max_new_tokens, stop_ids


@caught_by("test_how_many_prompts_come_together_changes_nothing", 2)
class SwapsIndices(Regenerates):
    def answered(self, completion: Completion, prompts: Any, stop_ids: Any) -> Any:
        yield evolve(completion, index=len(prompts) - 1 - completion.index)


@caught_by("test_how_many_prompts_come_together_changes_nothing", 8)
class CutsLongPromptsInABatch(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        shortest = min(map(len, prompts))
        return [prompt[-shortest:] for prompt in prompts], max_new_tokens, stop_ids


@caught_by("test_no_prompts_give_nothing")
class CompletesNothing(Regenerates):
    def changed(self, prompts: Any, max_new_tokens: int, stop_ids: Any) -> Any:
        return prompts or [np.array([1], np.int32)], max_new_tokens, stop_ids


@caught_by("test_closing_the_iterator_stops_the_work")
class IsNoGenerator(NumpyEngine):
    def generate(self, *arguments: Any, **more: Any) -> Any:
        return iter(list(super().generate(*arguments, **more)))


@caught_by("test_generating_leaves_the_training_state")
class LosesMomentsWhenGenerating(Regenerates):
    def answered(self, completion: Completion, prompts: Any, stop_ids: Any) -> Any:
        self._state = evolve(self._state, second_moment=self._zeros())
        yield completion


def open_faulty(faulty: Faulty) -> Any:
    def open_engine(**arguments: Any) -> NumpyEngine:
        engine = open_numpy(**arguments)
        (engine._llama if issubclass(faulty, Llama) else engine).__class__ = faulty  # type: ignore[assignment]
        return engine

    return open_engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("test", "faulty", "arguments"), FAULTS, ids=[f"{f[1].__name__}-{f[0]}" for f in FAULTS])
def test_a_faulty_engine_is_caught(
    model_dir: Path, tmp_path: Path, test: str, faulty: Faulty, arguments: tuple[Any, ...]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    other = (ValueError,) if faulty is ShiftsRowsInPlace else ()
    bench = Bench.at(open_faulty(faulty), model_dir, "float32")
    first = (bench.opener, tmp_path) if test == "test_other_models_of_the_same_kind" else (bench,)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception, *other)):
            getattr(EngineContract(), test)(*first, *arguments)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_every_test_of_the_suite_catches_a_fault() -> None:
    tests = {name for name in dir(EngineContract) if name.startswith("test_")}
    elsewhere = {
        "test_tick_is_called_while_opening_and_its_raise_passes_through",
        "test_an_unknown_layer_is_refused_by_name",
    }
    assert tests - {test for test, _, _ in FAULTS} == elsewhere


def test_opening_without_ticks_is_caught(model_dir: Path) -> None:
    bench = Bench.at(lambda **arguments: open_numpy(**arguments | {"tick": lambda: None}), model_dir, "float32")
    with pytest.raises(AssertionError, match="never called tick"):
        EngineContract().test_tick_is_called_while_opening_and_its_raise_passes_through(bench)


def test_opening_with_any_layer_is_caught(model_dir: Path) -> None:
    def open_engine(**arguments: Any) -> NumpyEngine:
        known = [target for target in arguments["adapter"].targets if "z_proj" not in target.name]
        return open_numpy(**arguments | {"adapter": evolve(arguments["adapter"], targets=tuple(known))})

    bench = Bench.at(open_engine, model_dir, "float32")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        EngineContract().test_an_unknown_layer_is_refused_by_name(bench)
