"""The engine mlx: `spill.engine.Engine` on the device that MLX computes on."""

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import mlx.core as mx
import numpy as np

from spill.engine import (
    AdapterSpec,
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
from spill_engine_mlx.decode import BatchLimits, decode
from spill_engine_mlx.layout import LAYOUT, Laid, lay, micro_batches
from spill_engine_mlx.model import CausalModel, Mask, Past
from spill_engine_mlx.opening import Host
from spill_engine_mlx.state import DeviceState, global_norm

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_MICRO_BATCH_TOKENS = {"cpu": 2048, "metal": 4096, "cuda": 8192}
# On a CPU a pass costs about as much as reading the weights up to some 32 tokens.
_DECODE_LIMITS = {
    "cpu": BatchLimits(rows=32, tokens=8192),
    "metal": BatchLimits(rows=64, tokens=32768),
    "cuda": BatchLimits(rows=256, tokens=65536),
}
_SUM_WIDTH = 256


class MlxEngine:
    """See `spill.engine.Engine`. Nothing of MLX that belongs to the process is changed: device, streams, randomness."""

    def __init__(self, host: Host, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> None:
        if numerics.dtype not in _DTYPES:
            raise ValueError(f"compute dtype {numerics.dtype!r} is unknown; known: {', '.join(_DTYPES)}")
        self._host = host
        self._tick = tick
        self._numerics, self._notes = _settle(numerics, host)
        self._model = CausalModel(model_dir, _DTYPES[numerics.dtype], adapter.scale, tick)
        for target in adapter.targets:
            self._model.adapt(target)
        self._state = DeviceState(adapter)

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        """See `Engine.step`.

        Raises:
            ValueError: the batch holds no answer token, so that the objective is not defined, or tokens out of range.
        """
        self._check_rows(batch)
        count = sum(int(np.count_nonzero(row.mask)) for row in batch)
        if count == 0:
            raise ValueError(f"step {update.step} was given {len(batch)} rows without an answer token")

        def objective(parameters: Mapping[str, mx.array], laid: Laid) -> tuple[mx.array, mx.array]:
            summed = self._losses(laid, parameters, self._model.dtype).sum()
            return summed / count, summed

        parameters, gradient, loss_sum = self._state.parameters(), self._state.flat_zeros(), 0.0
        for rows in micro_batches(batch, self._numerics.micro_batch_tokens):
            self._tick()
            (_, summed), by = mx.value_and_grad(objective)(parameters, lay(rows))
            gradient = gradient + self._state.flat(by)
            mx.eval(gradient, summed)
            loss_sum += summed.item()
        self._tick()
        norm = global_norm(gradient)
        if math.isfinite(loss_sum) and math.isfinite(norm):
            self._state.apply(gradient, update, norm)
        return StepResult(loss_sum=loss_sum, count=count, gradient_norm=norm)

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        """See `Engine.nll`."""
        self._check_rows(rows)
        parameters = self._state.parameters() if adapter else None
        losses: list[Float32] = []
        for row in rows:
            self._tick()
            if row.mask.any():
                losses.append(np.array(self._losses(lay([row]), parameters, mx.float32)))
            else:
                losses.append(np.zeros(0, dtype=np.float32))
        return losses

    def generate(
        self, prompts: Sequence[Int32], max_new_tokens: int, stop_ids: Sequence[int], adapter: bool = True
    ) -> Iterator[Completion]:
        """See `Engine.generate`."""
        self._check_tokens(prompts)
        return decode(
            self._model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(int(token) for token in stop_ids),
            adapters=self._state.parameters() if adapter else None,
            limits=_DECODE_LIMITS[self._host.device],
            tick=self._tick,
        )

    def export_state(self) -> TrainingState:
        """See `Engine.export_state`."""
        return self._state.export()

    def import_state(self, state: TrainingState) -> None:
        """See `Engine.import_state`."""
        self._state.load(state)

    def facts(self) -> Facts:
        """See `Engine.facts`. `threads` are those of matrix products on a CPU; MLX computes the rest on one."""
        versions = {name: metadata.version(name) for name in ("mlx", "mlx-lm", "numpy", "transformers")}
        if self._host.blas:
            versions["blas"] = self._host.blas
        on_cpu = mx.default_device() == mx.cpu
        # OpenBLAS shares products out by the number of threads, and that shows in the last bits.
        processor = f"{platform.machine()} {self._host.kernels}".strip() + f" x{self._host.threads}"
        return Facts(
            device="cpu" if on_cpu else self._host.device,
            hardware=processor if on_cpu else str(mx.device_info()["device_name"]),
            threads=self._host.threads,
            numerics=self._numerics,
            versions=versions,
            notes=self._notes,
        )

    def close(self) -> None:
        """See `Engine.close`."""
        del self._model, self._state
        mx.clear_cache()

    def _losses(self, laid: Laid, adapters: Mapping[str, mx.array] | None, dtype: mx.Dtype) -> mx.array:
        """`-log softmax(logits)[target]` of every answer token, float32 (answers,), not yet computed."""
        model, shared = self._model, len(laid.prefix)
        places = mx.arange(shared + laid.ids.shape[1])[None]
        past = model.new_past()
        if shared:
            own = Mask(places[:, :shared], places[:, :shared])
            model.states(mx.array(laid.prefix[None]), past, own, adapters, dtype)
            past = [Past(shared, layer.held) for layer in past]
        states = model.states(mx.array(laid.ids), past, Mask(places[:, shared:], places), adapters, dtype)
        logits = model.logits(states, mx.array(laid.positions)).astype(mx.float32)
        chosen = mx.take_along_axis(logits, mx.array(laid.targets)[:, None], axis=-1)[:, 0]
        return _log_sum_exp(logits) - chosen

    def _check_rows(self, rows: Sequence[Row]) -> None:
        for index, row in enumerate(rows):
            if row.tokens.shape != row.mask.shape or row.mask[:1].any():
                raise ValueError(f"row {index}: mask {row.mask.shape} does not fit, or its first token is an answer")
        self._check_tokens([row.tokens for row in rows])

    def _check_tokens(self, token_rows: Sequence[Int32]) -> None:
        # MLX looks nothing up out of bounds, and says nothing either.
        for index, tokens in enumerate(token_rows):
            if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= self._model.vocabulary:
                raise ValueError(f"row {index} is empty or has tokens outside 0 to {self._model.vocabulary - 1}")


def _log_sum_exp(logits: mx.array) -> mx.array:
    """Over the last axis of (answers, vocabulary), in two stages: on a CPU MLX adds one term after the other, which
    over a vocabulary of 49152 is off by 5e-5, always to the same side."""
    answers, vocabulary = logits.shape
    short = -vocabulary % _SUM_WIDTH
    if short:
        logits = mx.pad(logits, [(0, 0), (0, short)], constant_values=-mx.inf)
    parts = mx.logsumexp(logits.reshape(answers, -1, _SUM_WIDTH), axis=-1)
    return mx.logsumexp(parts, axis=-1)


def _settle(asked: Numerics, host: Host) -> tuple[Numerics, tuple[str, ...]]:
    """What is used, and notes where it is not what was asked for."""
    notes = list(host.notes)
    tokens = asked.micro_batch_tokens
    if tokens <= 0:
        tokens = _MICRO_BATCH_TOKENS[host.device]
    if asked.layout not in ("", LAYOUT):
        notes.append(f"layout {asked.layout!r} is unknown to the engine mlx: {LAYOUT!r} is used instead")
    if asked.micro_batch_tokens < 0:
        notes.append(f"{asked.micro_batch_tokens} tokens per micro-batch were asked for: {tokens} are used")
    return Numerics(dtype=asked.dtype, layout=LAYOUT, micro_batch_tokens=tokens), tuple(notes)
