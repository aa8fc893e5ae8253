"""The engines torch-cpu, torch-cuda and torch-mps: one class on one device, and the three callables that open it."""

import math
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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
from spill.errors import PluginError
from spill_engine_torch.decode import BatchLimits, decode
from spill_engine_torch.layout import LAYOUTS, PACKED, PADDED, Layout, micro_batches
from spill_engine_torch.model import CausalModel
from spill_engine_torch.state import DeviceState

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192, "mps": 2048}
# On a CPU a pass costs about as much as reading the weights up to some 32 tokens.
_DECODE_LIMITS = {
    "cpu": BatchLimits(rows=32, tokens=8192),
    "cuda": BatchLimits(rows=256, tokens=65536),
    "mps": BatchLimits(rows=32, tokens=8192),
}
# Packed and alone, a right model differs by rounding (1e-7), one that ignores masks or positions by 1e-2 and more.
_PACKED_TOLERANCE = 1e-3


def open_cpu(*, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> "TorchEngine":
    """Open `torch-cpu`: see `spill.engine.OpenEngine`."""
    return TorchEngine(torch.device("cpu"), model_dir, adapter, numerics, tick)


def open_cuda(*, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> "TorchEngine":
    """Open `torch-cuda` on the first visible GPU. Never run by its authors: no such device was at hand.

    Sets CUBLAS_WORKSPACE_CONFIG where it is unset: cuBLAS reads it once, and is deterministic only with it.

    Raises:
        PluginError: torch sees no device.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not torch.cuda.is_available():
        raise PluginError("torch-cuda was chosen but torch sees no CUDA device: check nvidia-smi, or use torch-cpu")
    return TorchEngine(torch.device("cuda", 0), model_dir, adapter, numerics, tick)


def open_mps(*, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> "TorchEngine":
    """Open `torch-mps`. Never run by its authors: no such device was at hand.

    Raises:
        PluginError: torch sees no Metal device.
    """
    if not torch.backends.mps.is_available():
        raise PluginError("torch-mps was chosen but torch sees no Metal device: use torch-cpu")
    return TorchEngine(torch.device("mps", 0), model_dir, adapter, numerics, tick)


class TorchEngine:
    """`spill.engine.Engine` on PyTorch."""

    def __init__(
        self, device: torch.device, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick
    ) -> None:
        if numerics.dtype not in _DTYPES:
            raise ValueError(f"compute dtype {numerics.dtype!r} is unknown; known: {', '.join(_DTYPES)}")
        self._device = device
        self._tick = tick
        self._model = CausalModel(model_dir, _DTYPES[numerics.dtype], device, tick)
        self._state = DeviceState(adapter, device)
        for target in adapter.targets:
            a, b = (self._state.parameters[f"{target.name}.lora_{side}"] for side in "AB")
            self._model.linear(target).adapt(a, b, adapter.scale)
        self._can_pack = self._model.attends_to_all and self._packs_right()
        tick()
        self._layout, self._numerics, self._notes = self._settle(numerics)

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        self._check_rows(batch)
        count = sum(int(row.mask.sum()) for row in batch)
        if count == 0:
            raise ValueError(f"step {update.step} was given {len(batch)} rows without an answer token")
        self._state.zero_gradient()
        loss_sum = 0.0
        with _deterministic(self._device), torch.enable_grad():
            for rows in micro_batches(self._layout, batch, self._numerics.micro_batch_tokens):
                self._tick()
                laid = self._layout.lay(rows, self._device)
                loss = _losses(self._model.laid_logits(laid), laid.targets).sum()
                (loss / count).backward()
                loss_sum += loss.item()
            self._tick()
            norm = self._state.gradient_norm()
            if math.isfinite(loss_sum) and math.isfinite(norm):
                self._state.apply(update, norm)
        return StepResult(loss_sum=loss_sum, count=count, gradient_norm=norm)

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        self._check_rows(rows)
        losses: list[Float32] = []
        for row in rows:
            self._tick()
            losses.append(self._row_nll(row, adapter) if row.mask.any() else np.zeros(0, dtype=np.float32))
        return losses

    def generate(
        self, prompts: Sequence[Int32], max_new_tokens: int, stop_ids: Sequence[int], adapter: bool = True
    ) -> Iterator[Completion]:
        self._check_tokens(prompts)
        return decode(
            self._model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(int(token) for token in stop_ids),
            adapter=adapter,
            limits=_DECODE_LIMITS[self._device.type],
            share_prefix=self._can_pack,
            tick=self._tick,
        )

    def export_state(self) -> TrainingState:
        return self._state.export()

    def import_state(self, state: TrainingState) -> None:
        self._state.load(state)

    def facts(self) -> Facts:
        kind = self._device.type
        return Facts(
            device="cpu" if kind == "cpu" else f"{kind}:{self._device.index}",
            hardware=torch.cuda.get_device_name(self._device) if kind == "cuda" else _processor(kind),
            threads=torch.get_num_threads(),
            numerics=self._numerics,
            versions={
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
            },
            notes=self._notes,
        )

    def close(self) -> None:
        del self._model, self._state
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _row_nll(self, row: Row, adapter: bool) -> Float32:
        laid = PADDED.lay([row], self._device)
        with _deterministic(self._device):
            logits = self._model.laid_logits(laid, adapter=adapter, float32=True)
        return _losses(logits, laid.targets).cpu().numpy().copy()

    @torch.no_grad()
    def _packs_right(self) -> bool:
        """Whether two short rows have the same losses packed behind a shared prefix as alone."""
        rows = [_probe_row(first, self._model.vocabulary) for first in (21, 34)]
        laid = PACKED.lay(rows, self._device)
        packed = _losses(self._model.laid_logits(laid, adapter=False, float32=True), laid.targets)
        alone = np.concatenate([self._row_nll(row, False) for row in rows])
        return bool(np.abs(packed.cpu().numpy() - alone).max() < _PACKED_TOLERANCE)

    def _settle(self, asked: Numerics) -> tuple[Layout, Numerics, tuple[str, ...]]:
        """The layout and micro-batch to use, and a note where they are not the ones asked for."""
        own = PACKED if self._can_pack else PADDED
        layout = LAYOUTS.get(asked.layout, own)
        if layout is PACKED and not self._can_pack:
            layout = own
        tokens = asked.micro_batch_tokens
        if tokens <= 0:
            tokens = _MICRO_BATCH_TOKENS[self._device.type]
        notes = []
        if self._model.attends_to_all and not self._can_pack:
            notes.append(f"packed rows have other losses than rows alone here: {layout.name!r} is used")
        if asked.layout not in ("", layout.name):
            notes.append(f"layout {asked.layout!r} cannot be used here: {layout.name!r} is used instead")
        if asked.micro_batch_tokens < 0:
            notes.append(f"{asked.micro_batch_tokens} tokens per micro-batch were asked for: {tokens} are used")
        used = Numerics(dtype=asked.dtype, layout=layout.name, micro_batch_tokens=tokens)
        return layout, used, tuple(notes)

    def _check_rows(self, rows: Sequence[Row]) -> None:
        for index, row in enumerate(rows):
            if row.tokens.shape != row.mask.shape or row.mask[:1].any():
                raise ValueError(f"row {index}: mask {row.mask.shape} does not fit, or its first token is an answer")
        self._check_tokens([row.tokens for row in rows])

    def _check_tokens(self, token_rows: Sequence[Int32]) -> None:
        # On a GPU a token out of range would end the process, far from here.
        for index, tokens in enumerate(token_rows):
            if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= self._model.vocabulary:
                raise ValueError(f"row {index} is empty or has tokens outside 0 to {self._model.vocabulary - 1}")


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """`-log softmax(logits)[target]` in float32, (answers,)."""
    wide = logits.float()
    return torch.logsumexp(wide, dim=-1) - wide.gather(1, targets[:, None])[:, 0]


def _probe_row(first: int, vocabulary: int) -> Row:
    """Nine tokens: six that every probe row shares, three of its own, the last two of them answers."""
    tokens = np.array([1, 2, 3, 5, 8, 13, first, first + 1, first + 2], dtype=np.int32) % vocabulary
    return Row(tokens=tokens, mask=np.array([0] * 7 + [1] * 2, dtype=np.int32))


def _processor(kind: str) -> str:
    capability = torch.backends.cpu.get_cpu_capability() if kind == "cpu" else kind
    return f"{platform.machine()} {capability}"


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On CUDA: kernels that add in a fixed order, float32 products without TF32, all of it undone afterwards.

    Of the attention kernels only the memory-efficient one is both deterministic in this mode and able to take a mask;
    the plain one stands in where it cannot. A CPU needs nothing: the operations used here have one order there.
    """
    if device.type != "cuda":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.set_float32_matmul_precision("highest")
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.set_float32_matmul_precision(precision)
