"""How the rows of a batch are laid out: what they share once, then the rest of each, padded on the right."""

from collections.abc import Iterator, Sequence

import numpy as np
from attrs import frozen

from spill.engine import Int32, Row

LAYOUT = "shared-prefix"


@frozen(kw_only=True, eq=False)
class Laid:
    """Rows as the model takes them.

    Attributes:
        prefix: int32 (shared,), the tokens that all rows start with, maybe none.
        ids: int32 (rows, tokens), what follows the prefix in each row; 0 where a row has ended.
        positions: int32 (answers,), into the flattened `ids`: where an answer token is predicted. Each once.
        targets: int32 (answers,), the token predicted there; row by row, in the order of the rows.
    """

    prefix: Int32
    ids: Int32
    positions: Int32
    targets: Int32


def lay(rows: Sequence[Row]) -> Laid:
    """Lay out rows that each have an answer token. Tokens from the last answer token on predict nothing that counts,
    and are left out."""
    inputs = [_inputs(row) for row in rows]
    shared = _shared(rows, inputs)
    ids = padded([tokens[shared:] for tokens in inputs])
    answers = [np.flatnonzero(row.mask) for row in rows]
    positions = [index * ids.shape[1] + found - 1 - shared for index, found in enumerate(answers)]
    targets = [row.tokens[found] for row, found in zip(rows, answers, strict=True)]
    return Laid(
        prefix=inputs[0][:shared],
        ids=ids,
        positions=np.concatenate(positions).astype(np.int32),
        targets=np.concatenate(targets),
    )


def micro_batches(batch: Sequence[Row], bound: int) -> Iterator[list[Row]]:
    """Rows in order, as many at a time as `bound` tokens hold, shared ones counted once and padding too; a longer row
    is alone. Rows without an answer are left out."""
    rows: list[Row] = []
    for row in batch:
        if not row.mask.any():
            continue
        if rows and _size([*rows, row]) > bound:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def common_prefix(token_rows: Sequence[Int32], longest: int) -> int:
    """How many first tokens all rows share, at most `longest`."""
    shared = longest
    for tokens in token_rows[1:]:
        length = min(shared, len(tokens))
        differs = np.flatnonzero(token_rows[0][:length] != tokens[:length])
        shared = int(differs[0]) if len(differs) else length
    return shared


def padded(token_rows: Sequence[Int32]) -> Int32:
    """Rows of tokens as int32 (rows, longest), 0 where a row has ended."""
    ids = np.zeros((len(token_rows), max(len(tokens) for tokens in token_rows)), dtype=np.int32)
    for index, tokens in enumerate(token_rows):
        ids[index, : len(tokens)] = tokens
    return ids


def _inputs(row: Row) -> Int32:
    return row.tokens[: np.flatnonzero(row.mask)[-1]]


def _shared(rows: Sequence[Row], inputs: Sequence[Int32]) -> int:
    """The length of the prefix. It ends before the first position that predicts an answer token, so that every such
    position belongs to one row; a single row has none."""
    if len(rows) == 1:
        return 0
    return common_prefix(inputs, min(int(np.flatnonzero(row.mask)[0]) - 1 for row in rows))


def _size(rows: Sequence[Row]) -> int:
    inputs = [_inputs(row) for row in rows]
    shared = _shared(rows, inputs)
    return shared + len(rows) * (max(len(tokens) for tokens in inputs) - shared)
