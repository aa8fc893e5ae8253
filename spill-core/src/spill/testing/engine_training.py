"""The engine suite on training: losses, gradients, and the update."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from spill.adamw import global_norm, reference_step
from spill.engine import AdapterSpec, Arrays, Numerics, OpenEngine, Row, TrainingState, Update
from spill.testing.engine_base import EngineBase
from spill.testing.engine_cases import (
    PROBE,
    Bench,
    adapter,
    different_bits,
    generator,
    mixed_rows,
    relative_difference,
    row,
    trained,
    training_rows,
    untrained,
    weighted_sum,
)
from spill.testing.models import tiny_model


class TrainingContract(EngineBase):
    """Losses, gradients, updates."""

    def assert_gradients(self, found: Arrays, expected: dict[str, Any], what: str, tolerance: float = 0.0) -> None:
        difference, name = relative_difference(found, expected)
        assert difference <= (tolerance or self.gradient_tolerance), (
            f"{what}: the gradient of {name!r} is off by {difference:.2g} of its norm"
        )

    def assert_close(self, found: float, expected: float, what: str) -> None:
        assert abs(found - expected) <= self.step_tolerance * abs(expected), f"{what}: {found!r}, expected {expected!r}"

    # Losses

    def test_nll_is_the_loss_of_every_answer_token(self, bench: Bench) -> None:
        arrays, rows = adapter(bench.spec, 1), mixed_rows()
        losses = bench.open(untrained(bench.spec, arrays)).nll(rows)
        assert len(losses) == len(rows), f"nll answered {len(losses)} arrays for {len(rows)} rows"
        for index, (found, one) in enumerate(zip(losses, rows, strict=True)):
            count = int(one.mask.sum())
            assert found.dtype == np.float32, f"nll of row {index} is {found.dtype}, not float32"
            assert found.shape == (count,), f"nll of row {index} has shape {found.shape} for {count} answer tokens"
            worst = float(np.abs(found - bench.reference.losses(one, bench.spec, arrays)).max())
            assert worst <= self.nll_tolerance, (
                f"nll of row {index} ({len(one.tokens)} tokens) is off by {worst:g} nats: look at positions, the "
                "mask's shift, rope_theta, the adapter's scale alpha / rank and orientation A (rank, in), B (out, rank)"
            )

    @pytest.mark.parametrize(
        "sizes",
        [{"tied": False}, {"kv_heads": 4}, {"kv_heads": 1, "heads": 2}, {"vocabulary": 320, "layers": 3, "hidden": 48}],
        ids=["untied head", "no shared heads", "one key-value head", "larger"],
    )
    def test_other_models_of_the_same_kind(
        self, open_engine: OpenEngine, tmp_path: Path, sizes: dict[str, Any]
    ) -> None:
        bench = Bench.at(open_engine, tiny_model(tmp_path / "other", seed=1, **sizes), self.dtype)
        arrays, rows = adapter(bench.spec, 20), mixed_rows()[:3]
        for found, one in zip(bench.open(untrained(bench.spec, arrays)).nll(rows), rows, strict=True):
            worst = float(np.abs(found - bench.reference.losses(one, bench.spec, arrays)).max())
            assert worst <= self.nll_tolerance, f"nll of a llama with {sizes} is off by {worst:g} nats"
        bench.close()

    def test_nll_of_a_row_is_the_same_alone_and_among_others(self, bench: Bench) -> None:
        rows = mixed_rows()
        engine = bench.open(untrained(bench.spec, adapter(bench.spec, 2)))
        for index, (among, one) in enumerate(zip(engine.nll(rows), rows, strict=True)):
            alone = engine.nll([one])[0]
            assert among.tobytes() == alone.tobytes(), (
                f"nll of row {index} depends on the other rows; take one at a time"
            )

    def test_step_answers_the_summed_loss_and_the_count(self, bench: Bench) -> None:
        arrays, rows = adapter(bench.spec, 3), mixed_rows()
        engine = bench.open(untrained(bench.spec, arrays))
        expected = sum(float(bench.reference.losses(one, bench.spec, arrays).sum()) for one in rows)
        result = engine.step(rows, Update(step=1, learning_rate=0.1))
        assert result.count == sum(int(one.mask.sum()) for one in rows), "count is the number of answer tokens"
        self.assert_close(result.loss_sum, expected, "loss_sum is the sum over answer tokens, before the update")
        engine.import_state(untrained(bench.spec, arrays))
        summed = sum(float(losses.sum(dtype=np.float64)) for losses in engine.nll(rows))
        self.assert_close(result.loss_sum, summed, "loss_sum of a step against the sum of nll")

    def test_a_row_with_a_single_answer_token(self, bench: Bench) -> None:
        arrays = adapter(bench.spec, 4)
        for one in (row(11, 2, 1), row(12, 15, 1), row(13, 15, 1, after=4)):
            engine = bench.open(untrained(bench.spec, arrays))
            expected = bench.reference.losses(one, bench.spec, arrays)
            assert np.abs(engine.nll([one])[0] - expected).max() <= self.nll_tolerance, "nll of a single answer token"
            result = engine.step([one], PROBE)
            assert result.count == 1, f"one answer token was counted as {result.count}"
            self.assert_close(result.loss_sum, float(expected[0]), "loss of a single answer token")

    def test_rows_of_very_different_lengths_do_not_disturb_each_other(self, bench: Bench) -> None:
        state = untrained(bench.spec, adapter(bench.spec, 5))
        short, long = row(14, 3, 1), row(15, 120, 30)
        alone = [bench.open(state).step([one], PROBE).loss_sum for one in (short, long)]
        for rows in ([short, long], [long, short], [short, long, short]):
            expected = sum(alone[0] if one is short else alone[1] for one in rows)
            found = bench.open(state).step(rows, PROBE).loss_sum
            self.assert_close(found, expected, "loss_sum of a short row beside a long one (is padding attended to?)")

    def test_masked_tokens_after_the_last_answer_token_are_inert(self, bench: Bench) -> None:
        plain = row(16, 14, 5)
        arrays, engine = adapter(bench.spec, 6), bench.open()
        losses, gradient = [], []
        for tail in ([], [7], [200], [3, 77, 12, 250, 9, 31, 5, 5, 5]):
            tokens = np.concatenate([plain.tokens, np.array(tail, np.int32)])
            changed = Row(tokens=tokens, mask=np.concatenate([plain.mask, np.zeros(len(tail), np.int32)]))
            gradient.append(bench.gradient(engine, arrays, [changed]))
            losses.append(engine.nll([changed])[0])
        for loss, by in zip(losses[1:], gradient[1:], strict=True):
            assert loss.shape == losses[0].shape, "a masked token got a loss"
            assert np.abs(loss - losses[0]).max() <= self.nll_tolerance, "a masked token after the answers changed nll"
            self.assert_gradients(by, dict(gradient[0]), "a masked token after the answers changed the step")

    def test_masked_tokens_before_the_answer_condition_it(self, bench: Bench) -> None:
        plain = row(17, 14, 5)
        other = Row(tokens=plain.tokens.copy(), mask=plain.mask)
        other.tokens[2] ^= 1
        first, second = bench.open().nll([plain, other])
        assert np.abs(first - second).max() > 10 * self.nll_tolerance, "a changed prompt token changed no answer's loss"

    # Gradients

    def test_gradient_is_the_slope_of_nll(self, bench: Bench) -> None:
        arrays, rows = adapter(bench.spec, 7), mixed_rows()[:4]
        engine = bench.open()
        gradient = bench.gradient(engine, arrays, rows)
        count = sum(int(one.mask.sum()) for one in rows)

        def objective(moved: Arrays) -> float:
            engine.import_state(untrained(bench.spec, moved))
            return sum(float(losses.sum(dtype=np.float64)) for losses in engine.nll(rows)) / count

        for name in list(arrays)[:: max(1, len(arrays) // 9)]:  # both A and B, of several layers
            direction = _direction(gradient[name], name)
            ahead, behind = (
                {**arrays, name: (arrays[name] + s * direction).astype(np.float32)} for s in (0.005, -0.005)
            )
            slope = (objective(ahead) - objective(behind)) / 0.01
            claimed = float((gradient[name] * direction).sum(dtype=np.float64))
            norm = float(np.linalg.norm(gradient[name]))
            assert abs(slope - claimed) <= max(20 * self.gradient_tolerance, 0.01) * norm, (
                f"along a direction of {name!r} nll rises by {slope:g} per unit, the first moment says {claimed:g}"
            )

    def test_gradient_of_every_array_is_the_models(self, bench: Bench) -> None:
        arrays, rows = adapter(bench.spec, 8), mixed_rows()[5:8]
        gradient = bench.gradient(bench.open(), arrays, rows)
        count = sum(int(one.mask.sum()) for one in rows)

        def objective(moved: dict[str, Any]) -> float:
            return sum(float(bench.reference.losses(one, bench.spec, moved).sum()) for one in rows) / count

        for name, array in arrays.items():
            direction = _direction(gradient[name], name)
            ahead, behind = ({**arrays, name: array + s * direction} for s in (1e-4, -1e-4))
            slope = (objective(ahead) - objective(behind)) / 2e-4
            claimed = float((gradient[name] * direction).sum(dtype=np.float64))
            norm = float(np.linalg.norm(gradient[name]))
            assert abs(slope - claimed) <= 2 * self.gradient_tolerance * norm, (
                f"the gradient of {name!r} along a direction is {claimed:g}, the model's is {slope:g}"
            )

    def test_losses_and_gradients_add_up_over_splits(self, bench: Bench) -> None:
        arrays, rows, engine = adapter(bench.spec, 9), mixed_rows(), bench.open()
        engine.import_state(untrained(bench.spec, arrays))
        whole = engine.step(rows, PROBE)
        gradient = bench.gradient(engine, arrays, rows)
        for cut in (1, 4, len(rows) - 1):
            parts = [rows[:cut], rows[cut:]]
            by = [bench.gradient(engine, arrays, part) for part in parts]
            engine.import_state(untrained(bench.spec, arrays))
            results = [engine.step(part, PROBE) for part in parts]
            self.assert_close(sum(r.loss_sum for r in results), whole.loss_sum, f"loss_sum of rows cut at {cut}")
            assert sum(r.count for r in results) == whole.count, "counts of a cut batch do not add up"
            expected = weighted_sum(by, [r.count / whole.count for r in results])
            self.assert_gradients(gradient, expected, "a batch against its halves, each weighted by its answer tokens")

    @pytest.mark.parametrize("tokens", [1, 40, 4096])
    def test_micro_batch_size_changes_only_rounding(self, bench: Bench, tokens: int) -> None:
        arrays, rows = adapter(bench.spec, 10), mixed_rows()
        expected = bench.gradient(bench.open(), arrays, rows)
        engine = bench.open(numerics=Numerics(dtype=self.dtype, micro_batch_tokens=tokens))
        found = bench.gradient(engine, arrays, rows)
        self.assert_gradients(
            found, dict(expected), f"micro-batches of {tokens} tokens (clip and divide once, at the end)"
        )

    def test_the_order_of_rows_changes_only_rounding(self, bench: Bench) -> None:
        arrays, rows, engine = adapter(bench.spec, 11), mixed_rows(), bench.open()
        expected = bench.gradient(engine, arrays, rows)
        for order in (list(reversed(rows)), [rows[i] for i in generator(5).permutation(len(rows))]):
            found = bench.gradient(engine, arrays, order)
            self.assert_gradients(found, dict(expected), "the same rows in another order")

    def test_scale_is_alpha_by_rank(self, bench: Bench) -> None:
        rows, arrays = mixed_rows()[:3], adapter(bench.spec, 12)
        doubled = {name: array * (2 if name.endswith("lora_B") else 1) for name, array in arrays.items()}
        twice = evolve(bench.spec, alpha=2 * bench.spec.alpha)
        plain = bench.open(untrained(bench.spec, doubled)).nll(rows)
        scaled = bench.open(untrained(bench.spec, arrays), spec=twice).nll(rows)
        for found, expected in zip(scaled, plain, strict=True):
            worst = float(np.abs(found - expected).max())
            assert worst <= self.nll_tolerance, f"twice the alpha is not twice B: {worst:g} nats apart"

    def test_an_adapter_on_some_layers_only(self, bench: Bench) -> None:
        some = AdapterSpec(rank=2, alpha=5.0, targets=bench.spec.targets[1:9:3])
        arrays, rows = adapter(some, 13, deviation=0.2), mixed_rows()[:3]
        engine = bench.open(untrained(some, arrays), spec=some)
        for found, one in zip(engine.nll(rows), rows, strict=True):
            worst = float(np.abs(found - bench.reference.losses(one, some, arrays)).max())
            assert worst <= self.nll_tolerance, f"an adapter on three layers of rank 2 is off by {worst:g} nats"
        engine.step(rows, Update(step=1, learning_rate=0.01))
        assert engine.export_state().adapter.keys() == some.shapes().keys(), "a step changed the set of arrays"

    # Updates

    def test_updates_are_adamws_over_twenty_steps(self, bench: Bench) -> None:
        probe, engine = bench.open(), bench.open(trained(bench.spec, 14))
        for count in range(20):
            rows, before = training_rows(count), engine.export_state()
            update = Update(
                step=5 + count,  # as after a resume: the number counts, not how often the engine was called
                learning_rate=0.01 * (1 + count % 4),
                beta1=0.8,
                beta2=0.95,
                epsilon=1e-6,
                weight_decay=0.3 if count % 3 else 0.0,
                clip_norm=0.05 if count % 2 else 1e6,
            )
            gradient = bench.gradient(probe, before.adapter, rows)
            result = engine.step(rows, update)
            assert abs(result.gradient_norm / global_norm(gradient) - 1) <= 1e-4, (
                f"gradient_norm {result.gradient_norm:g} is not that before clipping, {global_norm(gradient):g}"
            )
            expected = reference_step(before, gradient, update)
            fault = _update_fault(engine.export_state(), expected, update.learning_rate)
            assert not fault, f"step {update.step} of {update} is not AdamW's: {fault}"

    def test_the_gradient_is_clipped_once_by_its_global_norm(self, bench: Bench) -> None:
        arrays, rows = adapter(bench.spec, 15), mixed_rows()
        gradient = bench.gradient(bench.open(), arrays, rows)
        norm = global_norm(gradient)
        for clip in (norm / 7, norm * 7):
            # Micro-batches of few tokens: clipping each of them would give another gradient.
            engine = bench.open(untrained(bench.spec, arrays), numerics=bench.small_micro_batches())
            result = engine.step(rows, evolve(PROBE, clip_norm=clip))
            clipped = {name: 2 * moment for name, moment in engine.export_state().first_moment.items()}
            expected = min(norm, clip)
            assert abs(result.gradient_norm / norm - 1) <= 2 * self.gradient_tolerance, (
                "gradient_norm is before clipping"
            )
            assert abs(global_norm(clipped) / expected - 1) <= 2 * self.gradient_tolerance, (
                f"a gradient of norm {norm:g} has {global_norm(clipped):g} after clipping to {clip:g}"
            )
            factor = expected / norm
            self.assert_gradients(clipped, weighted_sum([gradient], [factor]), "clipping changes the length alone")

    def test_learning_rate_zero_changes_moments_alone(self, bench: Bench) -> None:
        before = trained(bench.spec, 16)
        engine = bench.open(before)
        engine.step(mixed_rows(), Update(step=3, learning_rate=0.0, weight_decay=0.5))
        after = engine.export_state()
        kept = evolve(after, first_moment=before.first_moment, second_moment=before.second_moment)
        assert not (fault := different_bits(kept, before)), f"learning rate 0 changed the adapter: {fault}"
        assert different_bits(after, before), "a step at learning rate 0 left the moments as they were"

    @pytest.mark.parametrize("value", [np.inf, np.nan, 1e30], ids=["infinity", "nan", "overflow"])
    def test_what_is_not_finite_changes_nothing(self, bench: Bench, value: float) -> None:
        good = trained(bench.spec, 17)
        bad = {name: np.full_like(array, value) for name, array in good.adapter.items()}
        broken = evolve(good, adapter=bad)
        engine = bench.open(broken)
        result = engine.step(mixed_rows(), Update(step=2, learning_rate=0.1, weight_decay=0.1))
        assert not np.isfinite([result.loss_sum, result.gradient_norm]).all(), f"an adapter of {value} gave {result}"
        fault = different_bits(engine.export_state(), broken)
        assert not fault, f"a step whose loss or gradient is not finite changed the state: {fault}"
        engine.import_state(good)
        again = engine.step(mixed_rows(), Update(step=2, learning_rate=0.1))
        assert np.isfinite([again.loss_sum, again.gradient_norm]).all(), "the engine did not recover from NaN"
        fresh = bench.open(good)
        fresh.step(mixed_rows(), Update(step=2, learning_rate=0.1))
        fault = different_bits(engine.export_state(), fresh.export_state())
        assert not fault, f"a step after one that was not finite differs from the same step alone: {fault}"


def _direction(gradient: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """A unit direction: half along the gradient, for a large slope, half random, so that a missing part shows."""
    random = generator(6, len(name)).standard_normal(gradient.shape)
    mixed = gradient / (np.linalg.norm(gradient) + 1e-30) + random / np.linalg.norm(random)
    direction: np.ndarray[Any, Any] = mixed / np.linalg.norm(mixed)
    return direction


def _update_fault(found: TrainingState, expected: TrainingState, learning_rate: float) -> str:
    """Empty where a state is the expected one within float32's rounding."""
    for group, arrays in expected.groups().items():
        for name, array in arrays.items():
            slack = 2e-4 * learning_rate if group == "adapter" else 2e-6 * float(np.abs(array).max())
            off = np.abs(found.groups()[group][name] - array) - 2e-6 * np.abs(array) - slack
            if off.max() > 0 or not np.isfinite(off).all():
                place = np.unravel_index(int(off.argmax()), array.shape)
                return f"{group} {name!r} is {found.groups()[group][name][place]!r}, expected {array[place]!r}"
    return ""
