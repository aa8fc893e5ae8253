"""The engine suite on generation, and on the base model without its adapter."""

from collections.abc import Sequence

import numpy as np
import pytest

from spill.engine import Completion, Engine, Int32, Update
from spill.testing.engine_base import EngineBase
from spill.testing.engine_cases import (
    Bench,
    Ticker,
    adapter,
    close_early,
    different_bits,
    mixed_rows,
    prompts_of,
    trained,
    training_rows,
    untrained,
    zeros,
)

COUNT = 8


class GenerationContract(EngineBase):
    """Greedy decoding, and `adapter=False`."""

    def completed(
        self,
        engine: Engine,
        prompts: Sequence[Int32],
        count: int = COUNT,
        stop_ids: Sequence[int] = (),
        adapter: bool = True,
    ) -> list[tuple[list[int], str]]:
        """Tokens and reason of every prompt, after checks that hold for any call."""
        found: dict[int, Completion] = {}
        for completion in engine.generate(prompts, count, stop_ids, adapter=adapter):
            assert completion.index not in found, f"prompt {completion.index} was completed twice"
            assert completion.tokens.dtype == np.int32, f"tokens are {completion.tokens.dtype}, not int32"
            assert completion.tokens.ndim == 1, f"tokens have shape {completion.tokens.shape}"
            found[completion.index] = completion
        assert sorted(found) == list(range(len(prompts))), f"{len(prompts)} prompts, completed were {sorted(found)}"
        return [(found[i].tokens.tolist(), found[i].reason) for i in range(len(prompts))]

    @pytest.mark.parametrize("with_adapter", [True, False], ids=["adapter", "base"])
    def test_generation_is_greedy(self, bench: Bench, with_adapter: bool) -> None:
        arrays = adapter(bench.spec, 1)
        cases = bench.greedy(1 if with_adapter else None, COUNT, self.generation_margin)
        engine = bench.open(untrained(bench.spec, arrays))
        found = self.completed(engine, prompts_of(cases), adapter=with_adapter)
        for case, (tokens, reason) in zip(cases, found, strict=True):
            assert tokens == case.tokens, f"after {len(case.prompt)} tokens came {tokens}, greedy is {case.tokens}"
            assert reason == "length", f"nothing stops this row, and it ended by {reason!r}"

    def test_every_stop_id_stops_and_none_is_returned(self, bench: Bench) -> None:
        arrays = adapter(bench.spec, 1)
        cases = bench.greedy(1, COUNT, self.generation_margin)
        engine = bench.open(untrained(bench.spec, arrays))
        stop_ids = sorted({case.tokens[1 + index] for index, case in enumerate(cases)})
        assert len(stop_ids) > 1, "the suite needs several stop ids"
        found = self.completed(engine, prompts_of(cases), stop_ids=stop_ids)
        for case, (tokens, reason) in zip(cases, found, strict=True):
            ends = [place for place, token in enumerate(case.tokens) if token in stop_ids]
            assert tokens == case.tokens[: ends[0]], f"{case.tokens} with stop ids {stop_ids} came as {tokens}"
            assert reason == "stop", f"{case.tokens} was stopped by {stop_ids}, the reason is {reason!r}"

    def test_a_stop_id_that_comes_first_gives_no_tokens(self, bench: Bench) -> None:
        case = bench.greedy(None, COUNT, self.generation_margin)[0]
        found = self.completed(bench.open(), [case.prompt], stop_ids=[case.tokens[0]])
        assert found == [([], "stop")], f"the first token is a stop id, and it gave {found}"

    def test_max_new_tokens_is_exact(self, bench: Bench) -> None:
        cases = bench.greedy(None, COUNT, self.generation_margin)
        engine = bench.open()
        for count in (1, 2, COUNT):
            for case, (tokens, reason) in zip(cases, self.completed(engine, prompts_of(cases), count), strict=True):
                assert (tokens, reason) == (case.tokens[:count], "length"), (
                    f"max_new_tokens {count}: {tokens}, {reason}"
                )

    def test_a_stop_id_counts_as_a_new_token(self, bench: Bench) -> None:
        cases = [c for c in bench.greedy(None, COUNT, self.generation_margin) if c.tokens[2] not in c.tokens[:2]]
        assert cases, "the suite needs a prompt whose third token is new"
        engine = bench.open()
        for case in cases:
            stop = [case.tokens[2]]
            found = self.completed(engine, [case.prompt], 3, stop) + self.completed(engine, [case.prompt], 2, stop)
            expected = [(case.tokens[:2], "stop"), (case.tokens[:2], "length")]
            assert found == expected, f"a stop id as the third token, within 3 and within 2 new tokens: {found}"

    @pytest.mark.parametrize("size", [1, 2, 8, 40])
    def test_how_many_prompts_come_together_changes_nothing(self, bench: Bench, size: int) -> None:
        arrays = adapter(bench.spec, 1)
        cases = bench.greedy(1, COUNT, self.generation_margin)
        engine = bench.open(untrained(bench.spec, arrays))
        stop_ids = [cases[0].tokens[3]]
        alone = [self.completed(engine, [case.prompt], stop_ids=stop_ids)[0] for case in cases]
        together = self.completed(engine, [cases[i % len(cases)].prompt for i in range(size)], stop_ids=stop_ids)
        for index, found in enumerate(together):
            expected = alone[index % len(cases)]
            assert found == expected, f"prompt {index} of {size} gave {found}, alone it gives {expected}"

    def test_no_prompts_give_nothing(self, bench: Bench) -> None:
        assert self.completed(bench.open(), []) == [], "an empty list of prompts has no completions"

    def test_closing_the_iterator_stops_the_work(self, bench: Bench) -> None:
        state, ticker = trained(bench.spec, 1), Ticker()
        cases = bench.greedy(1, COUNT, self.generation_margin)
        engine = bench.open(state, tick=ticker)
        prompts = prompts_of(cases) * 4
        whole = self.completed(engine, prompts)
        running = engine.generate(prompts, COUNT, ())
        next(running)
        close_early(running)
        ticker.rewind()
        assert not list(running), "a closed iterator still gave completions"
        assert ticker.calls == 0, "work went on after the iterator was closed"
        fault = different_bits(engine.export_state(), state)
        assert not fault, f"a generation that was closed early changed the training state: {fault}"
        assert self.completed(engine, prompts) == whole, "after an iterator was closed early, generation differs"
        result = engine.step(training_rows(0), Update(step=1, learning_rate=0.01))
        assert np.isfinite(result.loss_sum), "no step works after an iterator was closed early"

    def test_tick_is_called_between_tokens(self, bench: Bench) -> None:
        ticker = Ticker()
        engine = bench.open(tick=ticker)
        ticker.rewind()
        self.completed(engine, [mixed_rows()[0].tokens], 12)
        assert ticker.calls >= 11, f"tick was called {ticker.calls} times for 12 tokens of one row"

    def test_generating_leaves_the_training_state(self, bench: Bench) -> None:
        state = trained(bench.spec, 5)
        engine = bench.open(state)
        for with_adapter in (True, False):
            self.completed(engine, [one.tokens for one in mixed_rows()], 3, adapter=with_adapter)
            engine.nll(mixed_rows(), adapter=with_adapter)
        fault = different_bits(engine.export_state(), state)
        assert not fault, f"generate or nll changed the training state: {fault}"

    # The base

    def test_without_the_adapter_it_is_the_base(self, bench: Bench) -> None:
        rows, base = mixed_rows(), bench.open()
        engine = bench.open(trained(bench.spec, 6))
        prompts = prompts_of(bench.greedy(None, COUNT, self.generation_margin))
        pairs = zip(engine.nll(rows, adapter=False), base.nll(rows, adapter=False), rows, strict=True)
        for index, (found, expected, one) in enumerate(pairs):
            assert found.tobytes() == expected.tobytes(), f"the base's nll of row {index} depends on the adapter"
            worst = float(np.abs(found - bench.reference.losses(one, bench.spec, None)).max())
            assert worst <= self.nll_tolerance, f"the base's nll of row {index} is off by {worst:g} nats"
        assert self.completed(engine, prompts, adapter=False) == self.completed(base, prompts, adapter=False), (
            "what the base generates depends on the adapter"
        )

    def test_an_adapter_of_zeros_is_the_base_and_another_is_not(self, bench: Bench) -> None:
        rows = mixed_rows()
        prompts = prompts_of(bench.greedy(None, COUNT, self.generation_margin))
        half = {name: a if name.endswith("lora_A") else 0 * a for name, a in adapter(bench.spec, 7).items()}
        for arrays in (zeros(bench.spec), half):
            engine = bench.open(untrained(bench.spec, arrays))
            for found, expected in zip(engine.nll(rows), engine.nll(rows, adapter=False), strict=True):
                worst = float(np.abs(found - expected).max())
                assert worst <= self.nll_tolerance, f"B of zeros changes nll by {worst:g} nats"
            assert self.completed(engine, prompts) == self.completed(engine, prompts, adapter=False), (
                "B of zeros changes what is generated"
            )
        engine = bench.open(untrained(bench.spec, adapter(bench.spec, 7)))
        for found, expected in zip(engine.nll(rows), engine.nll(rows, adapter=False), strict=True):
            assert np.abs(found - expected).max() > 10 * self.nll_tolerance, "a random adapter changes no loss"
        assert self.completed(engine, prompts) != self.completed(engine, prompts, adapter=False), (
            "a random adapter changes nothing that is generated"
        )
