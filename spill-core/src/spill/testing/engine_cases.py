"""What the engine suite works with: rows, adapters, engines opened and closed, interruptions, and comparisons."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import define, evolve, field
from numpy.typing import NDArray

from spill.engine import (
    AdapterSpec,
    Arrays,
    Completion,
    Engine,
    Float32,
    Int32,
    Numerics,
    OpenEngine,
    Row,
    Tick,
    TrainingState,
    Update,
)
from spill.testing.models import VOCABULARY, block_targets
from spill.testing.reference import Greedy, Reference

# Nothing is learned and nothing clipped, and the first moment from zero is half the gradient, exactly.
PROBE = Update(step=1, learning_rate=0.0, beta1=0.5, clip_norm=1e30)


def generator(*key: int) -> np.random.Generator:
    """Draws that depend on the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def row(seed: int, length: int, answers: int, after: int = 0, prefix: Sequence[int] = ()) -> Row:
    """A row of random tokens that starts with `prefix`, with `answers` answer tokens before `after` masked ones."""
    tokens = generator(1, seed).integers(0, VOCABULARY, length).astype(np.int32)
    tokens[: len(prefix)] = prefix
    mask = np.zeros(length, np.int32)
    mask[length - after - answers : length - after] = 1
    return Row(tokens=tokens, mask=mask)


def turns(seed: int, length: int) -> Row:
    """A row whose answer tokens lie in two stretches, with a question between and one masked token at the end."""
    plain = row(seed, length, 0)
    plain.mask[length // 4 : length // 3] = 1
    plain.mask[2 * length // 3 : -1] = 1
    return plain


def mixed_rows() -> list[Row]:
    """Rows of very different lengths, of one answer token and of many, with and without a common start."""
    start = generator(2).integers(0, VOCABULARY, 12).tolist()
    return [
        row(1, 9, 4),
        row(2, 48, 20, after=1),
        row(3, 2, 1),
        row(4, 20, 5, prefix=start),
        row(5, 17, 3, prefix=start),
        row(6, 17, 14, after=1, prefix=start),  # its answer starts inside the common part
        row(4, 20, 5, prefix=start),  # a row twice
        turns(7, 36),
        row(8, 13, 1),
    ]


def training_rows(step: int) -> list[Row]:
    """A small batch for a step, other rows for every step."""
    return [row(100 + 3 * step + i, 8 + 5 * i + step % 3, 3 + i) for i in range(3)]


def adapter(spec: AdapterSpec, seed: int, deviation: float = 0.1) -> dict[str, Float32]:
    """Random A and B, none of them zero, large enough to change what the model says."""
    draw = generator(3, seed)
    return {
        name: (draw.standard_normal(shape) * (deviation if name.endswith("B") else 3 * deviation)).astype(np.float32)
        for name, shape in spec.shapes().items()
    }


def zeros(spec: AdapterSpec) -> dict[str, Float32]:
    return {name: np.zeros(shape, np.float32) for name, shape in spec.shapes().items()}


def untrained(spec: AdapterSpec, arrays: Arrays) -> TrainingState:
    """An adapter with moments of zero."""
    return TrainingState(adapter=arrays, first_moment=zeros(spec), second_moment=zeros(spec))


def trained(spec: AdapterSpec, seed: int) -> TrainingState:
    """A state as it may be after some steps: no array is zero, second moments are positive."""
    draw = generator(4, seed)
    first = {name: (draw.standard_normal(shape) * 0.05).astype(np.float32) for name, shape in spec.shapes().items()}
    second = {name: (draw.random(shape) * 0.01 + 1e-6).astype(np.float32) for name, shape in spec.shapes().items()}
    return TrainingState(adapter=adapter(spec, seed), first_moment=first, second_moment=second)


class Interrupted(Exception):
    """What a `Ticker` raises."""


@define
class Ticker:
    """A `tick` that counts, and raises at the count it is told."""

    calls: int = 0
    raise_at: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.raise_at:
            raise Interrupted(f"tick {self.calls}")

    def rewind(self, raise_at: int = 0) -> None:
        self.calls, self.raise_at = 0, raise_at


@define(kw_only=True, eq=False)
class Bench:
    """One engine under test on one tiny model. What it opens is closed with it."""

    opener: OpenEngine
    model_dir: Path
    dtype: Literal["float32", "bfloat16"]
    spec: AdapterSpec
    reference: Reference
    opened: list[Engine] = field(factory=list)

    @classmethod
    def at(cls, opener: OpenEngine, model_dir: Path, dtype: Literal["float32", "bfloat16"]) -> "Bench":
        spec = AdapterSpec(rank=4, alpha=12.0, targets=block_targets(model_dir))
        return cls(opener=opener, model_dir=model_dir, dtype=dtype, spec=spec, reference=_reference(model_dir))

    def open(
        self,
        state: TrainingState | None = None,
        *,
        tick: Tick = lambda: None,
        spec: AdapterSpec | None = None,
        numerics: Numerics | None = None,
    ) -> Engine:
        """An engine with `state` imported, or as it is right after opening."""
        engine = self.opener(
            model_dir=self.model_dir,
            adapter=spec or self.spec,
            numerics=numerics or Numerics(dtype=self.dtype),
            tick=tick,
        )
        self.opened.append(engine)
        if state is not None:
            engine.import_state(state)
        return engine

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def gradient(self, engine: Engine, arrays: Arrays, rows: Sequence[Row]) -> dict[str, Float32]:
        """The gradient of the objective at `arrays`, read off the first moment. The engine's state is replaced."""
        engine.import_state(untrained(self.spec, arrays))
        engine.step(rows, PROBE)
        return {name: moment * np.float32(2) for name, moment in engine.export_state().first_moment.items()}

    def greedy(self, seed: int | None, count: int, margin: float) -> tuple[Greedy, ...]:
        """Five prompts of different lengths whose next `count` tokens win by at least `margin` logits, so that rounding
        cannot change them, and are at least three different ones. `seed` is that of `adapter`; None is the base."""
        return _greedy(self.model_dir, self.spec, seed, count, margin)

    def small_micro_batches(self) -> Numerics:
        """So few tokens per micro-batch that most rows of `mixed_rows` come alone."""
        return evolve(Numerics(dtype=self.dtype), micro_batch_tokens=16)


@functools.lru_cache(maxsize=8)
def _reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@functools.lru_cache(maxsize=32)
def _greedy(model_dir: Path, spec: AdapterSpec, seed: int | None, count: int, margin: float) -> tuple[Greedy, ...]:
    arrays = None if seed is None else adapter(spec, seed)
    found: list[Greedy] = []
    for candidate in range(1000):
        prompt = row(1000 + candidate, 2 + 5 * len(found) + candidate % 3, 0).tokens
        greedy = _reference(model_dir).greedy(prompt, count, margin, spec, arrays)
        if greedy is not None and len(set(greedy.tokens)) >= 3:
            found.append(greedy)
        if len(found) == 5:
            return tuple(found)
    raise AssertionError(f"1000 prompts hold too few whose tokens win by {margin} logits: lower generation_margin")


def weighted_sum(parts: Sequence[Arrays], weights: Sequence[float]) -> dict[str, NDArray[np.float64]]:
    """The combination of several mappings of the same keys, in float64."""
    return {
        name: np.sum([w * part[name].astype(np.float64) for part, w in zip(parts, weights, strict=True)], axis=0)
        for name in parts[0]
    }


def relative_difference(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> tuple[float, str]:
    """The worst array's L2 distance relative to its expected norm, and its name. An array counts for at least a
    thousandth of the norm of all, so that one that is next to zero does not decide."""
    norms = {name: float(np.linalg.norm(array)) for name, array in expected.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values()))) + 1e-30
    worst = (0.0, "")
    for name, array in expected.items():
        difference = float(np.linalg.norm(found[name] - array)) / max(norms[name], floor)
        worst = max(worst, (np.inf if np.isnan(difference) else difference, name))
    return worst


def different_bits(found: TrainingState, expected: TrainingState) -> str:
    """Empty where two states are the same bit for bit; else the first array that differs, and by how much."""
    for (group, arrays), others in zip(found.groups().items(), expected.groups().values(), strict=True):
        if arrays.keys() != others.keys():
            return f"{group} has other keys: {sorted(arrays.keys() ^ others.keys())}"
        for name, array in arrays.items():
            if array.dtype != others[name].dtype or array.shape != others[name].shape:
                return f"{group} {name!r} is {array.dtype} {array.shape}, not {others[name].dtype} {others[name].shape}"
            if array.tobytes() != others[name].tobytes():
                return f"{group} {name!r} differs, at most by {np.abs(array - others[name]).max():g}"
    return ""


def interrupted(ticker: Ticker, raise_at: int, work: Callable[[], object]) -> bool:
    """Whether `work`, with a raise at that call of `tick`, let the raise through (rather than ended before it)."""
    ticker.rewind(raise_at)
    try:
        work()
    except Interrupted:
        return True
    assert ticker.calls < raise_at, f"tick raised at its call {raise_at}, and the engine did not let that through"
    return False


def close_early(running: Iterator[Completion]) -> None:
    """Close what `generate` answered."""
    close = getattr(running, "close", None)
    assert callable(close), f"generate answered a {type(running).__name__} without close(): make it a generator"
    close()


def prompts_of(greedy: Sequence[Greedy]) -> list[Int32]:
    return [case.prompt for case in greedy]
