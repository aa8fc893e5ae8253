"""The engine contract: what the core hands to an engine and what it gets back. Only numpy and plain records cross.

The core owns *what* is computed (rows, tokens, masks, batches, learning rate, LoRA targets and initialisation, AdamW's
definition, scoring); an engine owns *how*. Arrays that cross are float32 or int32, C-contiguous, and copies: neither
side ever sees the other's memory change. `spill.testing.EngineContract` holds an engine to every sentence here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Arrays = Mapping[str, Float32]
Tick = Callable[[], None]


@frozen(kw_only=True, eq=False)
class Row:
    """One tokenized row.

    Attributes:
        tokens: int32 (n,), the whole row, prompt and answer.
        mask: int32 (n,), 1 where the token is an answer token, whose loss counts: the loss of token `i` is
            `-log p(tokens[i] | tokens[:i])`. `mask[0]` is 0. Masked tokens (0) still condition later ones.
    """

    tokens: Int32
    mask: Int32


@frozen(kw_only=True)
class Update:
    """One AdamW update, as PyTorch defines it: bias-corrected, decoupled decay, in float32.

    `step` counts from 1. The gradient is clipped once, by its global L2 norm over all adapter arrays: where the norm
    exceeds `clip_norm` it is multiplied by `clip_norm / (norm + 1e-6)`, as torch.nn.utils.clip_grad_norm_ does.
    """

    step: int
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0


@frozen(kw_only=True)
class StepResult:
    """What a step answers: `loss_sum` in nats over `count` answer tokens, before the update; the gradient's global
    norm before clipping, of the objective `loss_sum / count`. Where either is not finite nothing was changed."""

    loss_sum: float
    count: int
    gradient_norm: float


@frozen(kw_only=True, eq=False)
class Completion:
    """A generated row: `index` into the prompts, int32 (m,) `tokens` without the stop id, and why it ended."""

    index: int
    tokens: Int32
    reason: Literal["stop", "length"]


@frozen(kw_only=True)
class Target:
    """A linear layer that gets an adapter: its weight's name in the safetensors without `.weight`, and its sizes."""

    name: str
    in_features: int
    out_features: int


@frozen(kw_only=True)
class AdapterSpec:
    """Which layers are adapted and how: `y = W x + (alpha / rank) * B (A x)`, never merged into W."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Every adapter array's name and shape, in order: `{name}.lora_A` (rank, in), `{name}.lora_B` (out, rank)."""
        shapes: dict[str, tuple[int, int]] = {}
        for target in self.targets:
            shapes[f"{target.name}.lora_A"] = (self.rank, target.in_features)
            shapes[f"{target.name}.lora_B"] = (target.out_features, self.rank)
        return shapes


@frozen(kw_only=True, eq=False)
class TrainingState:
    """Adapter, first and second moments: three mappings with the same keys and shapes (`AdapterSpec.shapes`)."""

    adapter: Arrays
    first_moment: Arrays
    second_moment: Arrays

    def groups(self) -> dict[str, Arrays]:
        return {"adapter": self.adapter, "first_moment": self.first_moment, "second_moment": self.second_moment}


@frozen(kw_only=True)
class Numerics:
    """How an engine computes. In a request, an empty layout or 0 tokens leave the choice to the engine; the engine's
    facts say what it uses. The same engine follows a request exactly, or says in `Facts.notes` what it changed.

    Attributes:
        dtype: compute dtype of the frozen base; adapter and optimizer are float32 always.
        layout: the engine's own name for how it lays a batch out.
        micro_batch_tokens: upper bound of tokens per micro-batch; a row is never split.
    """

    dtype: Literal["float32", "bfloat16"]
    layout: str = ""
    micro_batch_tokens: int = 0


@frozen(kw_only=True)
class Facts:
    """What an engine runs on. `hardware` is what bit-identity is promised within: a device's model name, or a CPU's
    architecture and instruction set. `notes` are one-line remarks for the user (slow BLAS, changed layout)."""

    device: str
    hardware: str
    threads: int
    numerics: Numerics
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()


class Engine(Protocol):
    """One open engine. Right after opening, the adapter and both moments are zeros (so the adapter changes nothing).

    Every method calls the `tick` that `OpenEngine` was given between micro-batches and between generated tokens. What
    `tick` raises passes through; a call that raises leaves the training state bit for bit as it was.
    """

    def step(self, batch: Sequence[Row], update: Update) -> StepResult:
        """One optimizer step on the summed loss over the batch's answer tokens, divided by their number.

        Gradients accumulate in float32 over micro-batches and are clipped once. How the batch is laid out (padding,
        packing, micro-batches, shared prefixes) changes only rounding.

        Raises:
            ValueError: no row of the batch has an answer token. Nothing was changed.
        """
        ...

    def nll(self, rows: Sequence[Row], adapter: bool = True) -> list[Float32]:
        """Per row, the loss in nats of every answer token, float32 (answer tokens,), computed in float32 whatever the
        compute dtype is, one row at a time; empty for a row without one. `adapter=False` is the base model."""
        ...

    def generate(
        self, prompts: Sequence[Int32], max_new_tokens: int, stop_ids: Sequence[int], adapter: bool = True
    ) -> Iterator[Completion]:
        """Greedy decoding; completions come as rows end, in any order. Closing the iterator stops the work.

        At most `max_new_tokens` tokens are generated for a row, a stop id among them counted.
        """
        ...

    def export_state(self) -> TrainingState:
        """Copies of adapter and moments."""
        ...

    def import_state(self, state: TrainingState) -> None:
        """Replace adapter and moments.

        Raises:
            ValueError: a key is missing or unknown, or a shape or dtype is not the spec's. Nothing was changed.
        """
        ...

    def facts(self) -> Facts:
        """Device, hardware, threads, numerics, library versions."""
        ...

    def close(self) -> None:
        """Free what `open` took. No method is called afterwards."""
        ...


class OpenEngine(Protocol):
    """The callable that an `EngineSpec.target` names. Loads the base once, calling `tick` while it does.

    Raises ValueError or a SpillError that names the target where the model has no such layer, or one of other sizes.
    """

    def __call__(self, *, model_dir: Path, adapter: AdapterSpec, numerics: Numerics, tick: Tick) -> Engine: ...
