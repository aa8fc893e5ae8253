"""What a tune computes: the order of rows, the learning rate, the adapter's first values. Pure functions of the plan.

All draws come from Philox keyed by (seed, purpose, index), so no generator's state is ever saved, and from its raw
64-bit words, which no version of numpy changes.
"""

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from spill.engine import AdapterSpec, Float32, TrainingState, Update
from spill.records import Plan

WARMUP_SHARE = 0.06
# AdamW's. It divides a gradient by its own size, so one that is nothing but rounding (some 1e-9 here) becomes a step
# like any other where epsilon is as small as PyTorch's 1e-8, and another one on every engine. docs/continuity.md has
# figures.
EPSILON = 1e-5


def raw_words(seed: int, purpose: str, index: int, count: int) -> NDArray[np.uint64]:
    """`count` random 64-bit words, uint64 (count,). The key is the start of sha256 of `seed:purpose:index`."""
    digest = hashlib.sha256(f"{seed}:{purpose}:{index}".encode()).digest()
    words: NDArray[np.uint64] = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(count)
    return words


def steps_per_epoch(rows: int, batch: int) -> int:
    return -(-rows // batch)


def total_steps(rows: int, batch: int, epochs: int) -> int:
    return steps_per_epoch(rows, batch) * epochs


def batch_rows(seed: int, step: int, rows: int, batch: int) -> list[int]:
    """Indexes of the rows of a step (from 1). Every epoch has an order of its own and uses each row once; its last
    batch may be smaller."""
    epoch, place = divmod(step - 1, steps_per_epoch(rows, batch))
    order = np.argsort(raw_words(seed, "order", epoch, rows), kind="stable")
    return [int(i) for i in order[place * batch : (place + 1) * batch]]


def warmup_steps(steps: int) -> int:
    return math.ceil(steps * WARMUP_SHARE)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear from peak / warmup to the peak, then half a cosine that would reach 0 one step after the last.

    Rounded to nine significant digits, since cosines of different C libraries differ in the last bit.
    """
    if step <= warmup:
        rate = peak * step / warmup
    else:
        rate = peak * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup + 1)))
    return float(f"{rate:.9g}")


def update_for(plan: Plan, step: int, steps: int) -> Update:
    """The update of one step of this plan."""
    return Update(
        step=step,
        learning_rate=learning_rate(step, steps, plan.warmup_steps, plan.learning_rate),
        beta1=plan.beta1,
        beta2=plan.beta2,
        epsilon=plan.epsilon,
        weight_decay=plan.weight_decay,
        clip_norm=plan.clip_norm,
    )


def initial_state(spec: AdapterSpec, seed: int) -> TrainingState:
    """A uniform in (-1/sqrt(in), 1/sqrt(in)) as PEFT draws it (kaiming with a = sqrt 5), B and the moments zero."""
    adapter: dict[str, Float32] = {}
    for index, target in enumerate(spec.targets):
        count = spec.rank * target.in_features
        unit = (raw_words(seed, "lora_A", index, count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        bound = np.float32(1.0 / math.sqrt(target.in_features))
        first = ((unit * np.float32(2.0) - np.float32(1.0)) * bound).reshape(spec.rank, target.in_features)
        adapter[f"{target.name}.lora_A"] = first
        adapter[f"{target.name}.lora_B"] = np.zeros((target.out_features, spec.rank), np.float32)
    zeros = {name: np.zeros_like(array) for name, array in adapter.items()}
    return TrainingState(adapter=adapter, first_moment=zeros, second_moment={n: z.copy() for n, z in zeros.items()})
