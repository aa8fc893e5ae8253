"""Handover checks: whether this engine computes the function that the one before did, by losses of two fixed rows."""

import math
from collections.abc import Callable, Sequence

from spill.engine import Float32, Row
from spill.errors import NumericsError

DRIFT_LIMIT = 1e-3  # nats; two instruction sets differ by 2e-5 in float32, an adapter scaled by 1.02 by 3e-2
PROBE_LENGTH = 512
LOSS_LIMIT = 1e6  # nats; above it no model's loss lies, but integers that no float can hold

Losses = Sequence[Sequence[float]]


def probe_rows(rows: Sequence[Row]) -> list[int]:
    """Indexes of the two rows: the longest of at most 512 tokens (else the shortest), and the median by length."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].tokens), i))
    fitting = [i for i in order if len(rows[i].tokens) <= PROBE_LENGTH]
    return [(fitting or order[:1])[-1], order[len(order) // 2]]


def rounded_losses(losses: Sequence[Float32]) -> list[list[float]]:
    """Losses as JSON numbers with six significant digits: finer than any comparison, and short."""
    return [[float(f"{float(x):.6g}") for x in row] for row in losses]


def fits(losses: object, rows: Sequence[Row]) -> bool:
    """Whether losses read from a state can be those of the rows: numbers, one for every answer token."""
    if not isinstance(losses, list | tuple) or len(losses) != len(rows):
        return False
    return all(
        isinstance(of_row, list | tuple)
        and len(of_row) == int(row.mask.sum())
        and all(type(x) in (int, float) and abs(x) < LOSS_LIMIT for x in of_row)
        for of_row, row in zip(losses, rows, strict=True)
    )


def check_drift(
    where: str,
    before: str,
    expected: Losses,
    found: Sequence[Float32],
    *,
    accept: bool,
    note: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Refuse to go on where the losses differ by more than DRIFT_LIMIT on any token.

    Args:
        where: what is compared, such as "the base model" or "step 20".
        before: who computed `expected`, in words.
        expected, found: losses in nats, one for every answer token of every probe row.
        accept: go on in spite of a difference, after `note`.

    Raises:
        NumericsError: naming the worst token's loss on both sides.
    """
    worst, pair = 0.0, (0.0, 0.0)
    for theirs, ours in zip(expected, found, strict=True):
        for a, b in zip(theirs, ours.tolist(), strict=True):
            distance = abs(a - b) if math.isfinite(b) else math.inf
            if distance >= worst:
                worst, pair = distance, (a, b)
    if worst <= DRIFT_LIMIT:
        say(f"handover from {before}: the same function at {where}, within {worst:.1e} nats a token")
        return
    text = (
        f"at {where} a token's loss was {pair[0]:.6f} with {before} and is {pair[1]:.6f} here, "
        f"{worst:.1e} nats apart (at most {DRIFT_LIMIT:.0e})"
    )
    if not accept:
        raise NumericsError(
            f"this engine computes another function: {text}; nothing was changed: resume on the engine before, or use "
            "--accept-drift to go on and record it"
        )
    note(f"drift accepted at {where}: {worst:.1e} nats")
    say(f"drift accepted: {text}")
