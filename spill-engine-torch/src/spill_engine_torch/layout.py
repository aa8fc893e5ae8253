"""How the rows of a batch become tensors: `packed` into one sequence behind their common prefix, or `padded`."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from spill.engine import Int32, Row


@frozen(kw_only=True, eq=False)
class Laid:
    """Rows as a model takes them.

    Attributes:
        ids: int64 (rows, tokens), or (1, tokens) when packed.
        position_ids: int64, the shape of `ids`; None for 0, 1, 2, ... in every row.
        mask: None (causal alone), int64 (rows, tokens) with 0 at padding, or bool (1, 1, tokens, tokens), True where
            a query (third axis) sees a key.
        positions: int64 (answers,), into the flattened `ids`: where an answer token is predicted. Each once.
        targets: int64 (answers,), the token predicted there; row by row, in the order of the rows.
    """

    ids: Tensor
    position_ids: Tensor | None
    mask: Tensor | None
    positions: Tensor
    targets: Tensor


@frozen(kw_only=True)
class Layout:
    """A way to lay rows out. `size(lengths)` is the most tokens that `lay(rows, device)` makes of rows that long."""

    name: str
    size: Callable[[Sequence[int]], int]
    lay: Callable[[Sequence[Row], torch.device], Laid]


def micro_batches(layout: Layout, batch: Sequence[Row], bound: int) -> Iterator[list[Row]]:
    """Rows in order, as many at a time as `bound` tokens hold; a longer row is alone. Rows without an answer are
    left out."""
    rows: list[Row] = []
    lengths: list[int] = []
    for row in batch:
        if not row.mask.any():
            continue
        length = len(_inputs(row))
        if rows and layout.size([*lengths, length]) > bound:
            yield rows
            rows, lengths = [], []
        rows.append(row)
        lengths.append(length)
    if rows:
        yield rows


def common_prefix(token_rows: Sequence[NDArray[np.int32]], longest: int) -> int:
    """How many first tokens all rows share, at most `longest`."""
    first = token_rows[0][:longest]
    for tokens in token_rows[1:]:
        length = min(len(first), len(tokens))
        differs = np.flatnonzero(first[:length] != tokens[:length])
        first = first[: differs[0] if len(differs) else length]
    return len(first)


def _inputs(row: Row) -> Int32:
    """The tokens a model must read: what lies before the last answer token. The rest predicts nothing that counts."""
    return row.tokens[: np.flatnonzero(row.mask)[-1]]


def _answers(row: Row) -> NDArray[np.int64]:
    return np.flatnonzero(row.mask)


def _tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _shared(rows: Sequence[Row]) -> int:
    """The length of the prefix to compute once. It ends before the first position that predicts an answer token,
    so that every such position belongs to one row."""
    if len(rows) == 1:
        return 0
    first_prediction = min(int(_answers(row)[0]) - 1 for row in rows)
    return common_prefix([_inputs(row) for row in rows], first_prediction)


def _lay_packed(rows: Sequence[Row], device: torch.device) -> Laid:
    if len(rows) == 1:
        return _lay_padded(rows, device)
    shared = _shared(rows)
    own = [_inputs(row)[shared:] for row in rows]
    ids = np.concatenate([rows[0].tokens[:shared], *own]).astype(np.int64)
    position_ids = np.concatenate([np.arange(shared), *(shared + np.arange(len(tokens)) for tokens in own)])
    owner = np.repeat(np.arange(-1, len(own)), [shared, *(len(tokens) for tokens in own)])
    starts = shared + np.cumsum([0, *(len(tokens) for tokens in own)])[:-1]
    positions = [start - shared + _answers(row) - 1 for start, row in zip(starts, rows, strict=True)]
    targets = [row.tokens[_answers(row)] for row in rows]
    order = torch.arange(len(ids), device=device)
    owners = _tensor(owner, device)
    same_row_or_prefix = (owners[:, None] == owners[None, :]) | (owners[None, :] == -1)
    mask = same_row_or_prefix & (order[:, None] >= order[None, :])
    return Laid(
        ids=_tensor(ids[None], device),
        position_ids=_tensor(position_ids[None].astype(np.int64), device),
        mask=mask[None, None],
        positions=_tensor(np.concatenate(positions), device),
        targets=_tensor(np.concatenate(targets).astype(np.int64), device),
    )


def _lay_padded(rows: Sequence[Row], device: torch.device) -> Laid:
    inputs = [_inputs(row) for row in rows]
    width = max(len(tokens) for tokens in inputs)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    real = np.zeros((len(rows), width), dtype=np.int64)
    for index, tokens in enumerate(inputs):
        ids[index, : len(tokens)] = tokens
        real[index, : len(tokens)] = 1
    positions = [index * width + _answers(row) - 1 for index, row in enumerate(rows)]
    targets = [row.tokens[_answers(row)] for row in rows]
    return Laid(
        ids=_tensor(ids, device),
        position_ids=None,
        mask=None if real.all() else _tensor(real, device),
        positions=_tensor(np.concatenate(positions), device),
        targets=_tensor(np.concatenate(targets).astype(np.int64), device),
    )


PADDED = Layout(name="padded", size=lambda lengths: len(lengths) * max(lengths), lay=_lay_padded)
PACKED = Layout(name="packed", size=sum, lay=_lay_packed)
LAYOUTS = {layout.name: layout for layout in (PACKED, PADDED)}
