"""Greedy decoding in batches: prompts of similar length together, their common prefix computed once."""

from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np
from attrs import frozen

from spill.engine import Completion, Int32, Tick
from spill_engine_mlx.layout import common_prefix, padded
from spill_engine_mlx.model import HIDDEN, Cache, CausalModel, Mask, Past

# Room for so many more tokens is made at a time.
_GROWTH = 32


@frozen(kw_only=True)
class BatchLimits:
    """The most rows decoded together, and the most tokens that their caches may come to."""

    rows: int
    tokens: int


def decode(
    model: CausalModel,
    prompts: Sequence[Int32],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    adapters: Mapping[str, mx.array] | None,
    limits: BatchLimits,
    tick: Tick,
) -> Iterator[Completion]:
    """The completions of `prompts`, as they end. Calls `tick` before every pass through the model."""
    if max_new_tokens < 1:
        for index in range(len(prompts)):
            yield Completion(index=index, tokens=np.zeros(0, dtype=np.int32), reason="length")
        return
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    for indices in _batches(order, prompts, max_new_tokens, limits):
        batch = _Batch(model, [prompts[index] for index in indices], indices, adapters, tick)
        while True:
            yield from batch.take_ended(max_new_tokens, stop_ids)
            if not batch.alive:
                break
            tick()
            batch.advance()


def _batches(
    order: Sequence[int], prompts: Sequence[Int32], max_new_tokens: int, limits: BatchLimits
) -> Iterator[list[int]]:
    """Prompts from short to long, cut where a batch would pass its limits."""
    indices: list[int] = []
    for index in order:
        tokens = (len(indices) + 1) * (len(prompts[index]) + max_new_tokens)
        if indices and (len(indices) == limits.rows or tokens > limits.tokens):
            yield indices
            indices = []
        indices.append(index)
    if indices:
        yield indices


class _Grown:
    """A layer's keys and values with room for tokens to come, one at a time, so that appending one copies none."""

    def __init__(self, held: Sequence[mx.array]) -> None:
        self.offset: int | mx.array = 0
        self.held = list(held)
        self._length = held[0].shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        end = self._length + 1
        if self._length == self.held[0].shape[2]:
            self.held = [_widened(array) for array in self.held]
        for array, new in zip(self.held, (keys, values), strict=True):
            array[:, :, self._length : end] = new
        self._length = end
        return self.held[0][:, :, :end], self.held[1][:, :, :end]

    def keep(self, rows: mx.array) -> None:
        self.held = [array[rows] for array in self.held]


class _Batch:
    """Rows that are decoded together. Their prompts are padded on the right, so every row's next token goes to the same
    place in the cache, and masks go by positions. Rows that ended are taken out."""

    def __init__(
        self,
        model: CausalModel,
        prompts: Sequence[Int32],
        indices: Sequence[int],
        adapters: Mapping[str, mx.array] | None,
        tick: Tick,
    ) -> None:
        """Compute the prompts."""
        self._model, self._adapters = model, adapters
        self._indices = list(indices)
        self._tokens: list[list[int]] = [[] for _ in indices]
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
        shared = common_prefix(prompts, int(lengths.min()) - 1) if len(prompts) > 1 else 0
        past = model.new_past()
        tick()
        if shared:
            places = mx.arange(shared)[None]
            model.states(mx.array(prompts[0][None, :shared]), past, Mask(places, places), adapters, model.dtype)
            mx.eval([layer.held for layer in past])
            past = [Past(shared, layer.held) for layer in past]
            tick()
        own = padded([prompt[shared:] for prompt in prompts])
        width = own.shape[1]
        places = mx.arange(shared + width)[None]
        last = (np.arange(len(prompts)) * width + lengths - 1 - shared).astype(np.int32)
        self._next = self._choose(mx.array(own), past, Mask(places[:, shared:], places), mx.array(last))
        self._past = [_Grown(layer.held) for layer in past]
        # The position of each row's next token, and of every key in the cache.
        self._positions = lengths
        columns = np.arange(shared + width, dtype=np.int32)[None]
        self._keys = np.where(columns < lengths[:, None], columns, HIDDEN).astype(np.int32)

    @property
    def alive(self) -> bool:
        return bool(self._indices)

    def advance(self) -> None:
        """One more token for every row."""
        ids = mx.array([[tokens[-1]] for tokens in self._tokens])
        queries = self._positions[:, None]
        self._keys = np.concatenate([self._keys, queries], axis=1)
        offset = mx.array(self._positions)
        for layer in self._past:
            layer.offset = offset
        mask = Mask(mx.array(queries), mx.array(self._keys))
        self._next = self._choose(ids, self._past, mask, mx.arange(len(self._tokens)))
        self._positions = self._positions + 1

    def take_ended(self, max_new_tokens: int, stop_ids: frozenset[int]) -> Iterator[Completion]:
        """Take in the tokens just chosen, drop the rows that end with them, and yield those."""
        kept: list[int] = []
        ended: list[Completion] = []
        for row, token in enumerate(self._next):
            stopped = token in stop_ids
            if not stopped:
                self._tokens[row].append(token)
            if stopped or len(self._tokens[row]) == max_new_tokens:
                tokens = np.array(self._tokens[row], dtype=np.int32)
                index = self._indices[row]
                ended.append(Completion(index=index, tokens=tokens, reason="stop" if stopped else "length"))
            else:
                kept.append(row)
        if ended:
            self._keep(kept)
        yield from ended

    def _keep(self, rows: list[int]) -> None:
        self._indices = [self._indices[row] for row in rows]
        self._tokens = [self._tokens[row] for row in rows]
        self._positions, self._keys = self._positions[rows], self._keys[rows]
        if rows:
            for layer in self._past:
                layer.keep(mx.array(rows))

    def _choose(self, ids: mx.array, past: Sequence[Cache], mask: Mask, positions: mx.array) -> list[int]:
        """Run `ids` (rows, tokens) through the model; the likeliest token at `positions`, the first on ties."""
        states = self._model.states(ids, past, mask, self._adapters, self._model.dtype)
        chosen = self._model.logits(states, positions).astype(mx.float32).argmax(axis=-1)
        return chosen.tolist()


def _widened(array: mx.array) -> mx.array:
    rows, heads, _, size = array.shape
    return mx.concatenate([array, mx.zeros((rows, heads, _GROWTH, size), dtype=array.dtype)], axis=2)
