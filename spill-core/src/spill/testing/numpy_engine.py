"""A complete engine in numpy, for tests: small, deterministic, and without state outside its objects."""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from attrs import evolve

from spill.adamw import global_norm, reference_step
from spill.engine import (
    AdapterSpec,
    Arrays,
    Completion,
    Facts,
    Float32,
    Int32,
    Numerics,
    Row,
    StepResult,
    Tick,
    TrainingState,
    Update,
)
from spill.errors import ModelError, NumericsError
from spill.testing.numpy_llama import Adapter, Cache, Llama

LAYOUT = "rows"
MICRO_BATCH_TOKENS = 512


def open_engine(*, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> "NumpyEngine":
    """Open a llama of `model_dir` (config.json, model.safetensors) on the CPU, in float32.

    Raises:
        NumericsError: another dtype than float32 is asked for.
        ModelError: the model is damaged or no plain llama, or has no such layer as the adapter names.
    """
    if numerics.dtype != "float32":
        raise NumericsError(f"the numpy engine computes in float32 only, not {numerics.dtype}: choose another engine")
    notes = []
    if numerics.layout not in ("", LAYOUT):
        notes.append(f"layout {numerics.layout!r} is unknown to the numpy engine, {LAYOUT!r} is used")
    used = evolve(numerics, layout=LAYOUT, micro_batch_tokens=numerics.micro_batch_tokens or MICRO_BATCH_TOKENS)
    llama = Llama(model_dir, tick)
    linears = llama.linears()
    for target in adapter.targets:
        sizes = (target.out_features, target.in_features)
        if linears.get(target.name) != sizes:
            found = "is not there" if target.name not in linears else f"is {linears[target.name]}"
            raise ModelError(
                f"the adapter names a linear layer {target.name!r} of (out, in) {sizes}, which {found} in {model_dir}: "
                "take names and sizes from the header of model.safetensors"
            )
    return NumpyEngine(llama, adapter, used, tuple(notes), tick)


class NumpyEngine:
    """See `spill.engine.Engine`. Rows are computed one at a time, so nothing depends on how a batch is cut."""

    def __init__(self, llama: Llama, spec: AdapterSpec, numerics: Numerics, notes: tuple[str, ...], tick: Tick) -> None:
        self._llama = llama
        self._spec = spec
        self._numerics = numerics
        self._notes = notes
        self._tick = tick
        self._state = TrainingState(adapter=self._zeros(), first_moment=self._zeros(), second_moment=self._zeros())

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        """See `Engine.step`.

        Raises:
            ValueError: the batch holds no answer token, so that the objective is not defined.
        """
        count = sum(int(row.mask.sum()) for row in batch)
        if not count:
            raise ValueError(f"a batch of {len(batch)} rows holds no answer token to learn from")
        gradient = self._zeros()
        loss_sum = 0.0
        with np.errstate(all="ignore"):
            for micro_batch in self._micro_batches(batch):
                self._tick()
                for row in micro_batch:
                    losses = self._llama.losses(row, self._adapter(True), gradient)
                    loss_sum += float(losses.sum(dtype=np.float64))
            for array in gradient.values():
                array /= count
            norm = global_norm(gradient)
            if math.isfinite(loss_sum) and math.isfinite(norm):
                self._state = reference_step(self._state, gradient, update)
        return StepResult(loss_sum=loss_sum, count=count, gradient_norm=norm)

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        """See `Engine.nll`."""
        answers: list[Float32] = []
        for row in rows:
            self._tick()
            with np.errstate(all="ignore"):
                answers.append(self._llama.losses(row, self._adapter(adapter)))
        return answers

    def generate(
        self, prompts: Sequence[Int32], max_new_tokens: int, stop_ids: Sequence[int], adapter: bool = True
    ) -> Iterator[Completion]:
        """See `Engine.generate`."""
        for index, prompt in enumerate(prompts):
            yield self._complete(index, prompt, max_new_tokens, frozenset(stop_ids), self._adapter(adapter))

    def _complete(
        self, index: int, prompt: Int32, max_new_tokens: int, stop_ids: frozenset[int], adapter: Adapter | None
    ) -> Completion:
        cache = Cache(keys={}, values={})
        tokens: list[int] = []
        ahead = prompt
        while len(tokens) < max_new_tokens:
            self._tick()
            with np.errstate(all="ignore"):
                token = int(self._llama.next_logits(ahead, adapter, cache).argmax())
            if token in stop_ids:
                return Completion(index=index, tokens=np.array(tokens, np.int32), reason="stop")
            tokens.append(token)
            ahead = np.array([token], np.int32)
        return Completion(index=index, tokens=np.array(tokens, np.int32), reason="length")

    def export_state(self) -> TrainingState:
        """See `Engine.export_state`."""
        groups = self._state.groups()
        return TrainingState(**{group: _copies(arrays) for group, arrays in groups.items()})

    def import_state(self, state: TrainingState) -> None:
        """See `Engine.import_state`."""
        shapes = self._spec.shapes()
        for group, arrays in state.groups().items():
            missing, extra = sorted(shapes.keys() - arrays.keys()), sorted(arrays.keys() - shapes.keys())
            if missing or extra:
                raise ValueError(f"{group} does not fit the adapter: missing {missing}, unknown {extra}")
            for name, array in arrays.items():
                if array.dtype != np.float32 or array.shape != shapes[name]:
                    found = f"{array.dtype} {array.shape}"
                    raise ValueError(f"{group} {name!r} is {found}, the adapter has float32 {shapes[name]}")
        self._state = TrainingState(**{group: _copies(arrays) for group, arrays in state.groups().items()})

    def facts(self) -> Facts:
        """See `Engine.facts`. `threads` is the most that numpy's BLAS takes where nothing limits it."""
        return Facts(
            device="cpu",
            hardware=platform.machine(),
            threads=os.cpu_count() or 1,
            numerics=self._numerics,
            versions={"numpy": np.__version__},
            notes=self._notes,
        )

    def close(self) -> None:
        """Nothing to do: the memory goes with the object."""

    def _zeros(self) -> dict[str, Float32]:
        return {name: np.zeros(shape, np.float32) for name, shape in self._spec.shapes().items()}

    def _adapter(self, wanted: bool) -> Adapter | None:
        return Adapter(arrays=self._state.adapter, scale=self._spec.scale) if wanted else None

    def _micro_batches(self, batch: Sequence[Row]) -> Iterator[list[Row]]:
        """The rows in order, cut so that none holds more tokens than asked, except by a single row."""
        rows: list[Row] = []
        for row in batch:
            if rows and sum(len(r.tokens) for r in [*rows, row]) > self._numerics.micro_batch_tokens:
                yield rows
                rows = []
            rows.append(row)
        yield rows


def _copies(arrays: Arrays) -> dict[str, Float32]:
    return {name: np.array(array, dtype=np.float32, order="C") for name, array in arrays.items()}
