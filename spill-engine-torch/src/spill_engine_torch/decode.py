"""Greedy decoding in batches: prompts of similar length together, their common prefix computed once."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from spill.engine import Completion, Int32, Tick
from spill_engine_torch.layout import common_prefix
from spill_engine_torch.model import CausalModel


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
    adapter: bool,
    limits: BatchLimits,
    share_prefix: bool,
    tick: Tick,
) -> Iterator[Completion]:
    """The completions of `prompts`, as they end. Calls `tick` before every pass through the model.

    Args:
        share_prefix: whether a gap of padding between a shared prefix and a row's own tokens is harmless, which it
            is not where windows count it.
    """
    if max_new_tokens < 1:
        for index in range(len(prompts)):
            yield Completion(index=index, tokens=np.zeros(0, dtype=np.int32), reason="length")
        return
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    for indices in _batches(order, prompts, max_new_tokens, limits):
        batch = _Batch(model, [prompts[index] for index in indices], indices, adapter)
        tick()
        shared = batch.prefill_prefix() if share_prefix and len(indices) > 1 else 0
        if shared:
            tick()
        batch.prefill(shared)
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


class _Batch:
    """Rows that are decoded together, with their cache. Rows that ended are taken out of it."""

    def __init__(self, model: CausalModel, prompts: Sequence[Int32], indices: Sequence[int], adapter: bool) -> None:
        self._model = model
        self._adapter = adapter
        self._prompts = prompts
        self._indices = list(indices)
        self._tokens: list[list[int]] = [[] for _ in indices]
        self._cache = model.new_cache()
        self._next: list[int] = []
        # Set by prefill: the position of each row's next token, and which cached tokens are real (None: all are).
        self._positions = torch.empty(0)
        self._real: Tensor | None = None

    @property
    def alive(self) -> bool:
        return bool(self._indices)

    def prefill_prefix(self) -> int:
        """Compute the tokens that all prompts start with, leaving each at least one of its own; their number."""
        shared = common_prefix(self._prompts, min(len(prompt) for prompt in self._prompts) - 1)
        if shared:
            ids = torch.from_numpy(self._prompts[0][None, :shared].astype(np.int64))
            self._pass(ids, torch.tensor([shared - 1]), None, None)
            with torch.no_grad():
                self._cache.batch_repeat_interleave(len(self._prompts))
        return shared

    def prefill(self, shared: int) -> None:
        """Compute what follows the first `shared` tokens of every prompt, padded on the left."""
        own = [prompt[shared:] for prompt in self._prompts]
        width = max(len(tokens) for tokens in own)
        ids = np.zeros((len(own), width), dtype=np.int64)
        real = np.ones((len(own), shared + width), dtype=np.int64)
        for row, tokens in enumerate(own):
            ids[row, width - len(tokens) :] = tokens
            real[row, shared : shared + width - len(tokens)] = 0
        device = self._model.device
        lengths = torch.tensor([len(prompt) for prompt in self._prompts], device=device)
        self._real = None if real.all() else torch.from_numpy(real).to(device)
        position_ids = None
        if self._real is not None or shared:
            back = torch.arange(width - 1, -1, -1, device=device)
            position_ids = (lengths[:, None] - 1 - back[None, :]).clamp_(min=0)
        last = torch.arange(1, len(own) + 1) * width - 1
        self._next = self._pass(torch.from_numpy(ids), last, position_ids, self._real)
        self._positions = lengths

    def advance(self) -> None:
        """One more token for every row."""
        ids = torch.tensor([tokens[-1] for tokens in self._tokens])[:, None]
        if self._real is not None:
            self._real = torch.cat([self._real, self._real.new_ones(len(self._indices), 1)], dim=1)
        self._next = self._pass(ids, torch.arange(len(self._indices)), self._positions[:, None], self._real)
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
        if not rows:
            return
        chosen = torch.tensor(rows, device=self._model.device)
        # Every pass copies the cache to append to it, so leaving rows out pays at once.
        with torch.no_grad():
            self._cache.batch_select_indices(chosen)
        self._positions = self._positions[chosen]
        self._real = None if self._real is None else self._real[chosen]

    @torch.no_grad()
    def _pass(self, ids: Tensor, positions: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> list[int]:
        """Run `ids` (rows, tokens) through the model; the likeliest token at `positions`, the first on ties."""
        logits = self._model.logits(
            ids.to(self._model.device),
            positions.to(self._model.device),
            position_ids=position_ids,
            mask=mask,
            cache=self._cache,
            adapter=self._adapter,
        )
        return logits.float().argmax(dim=-1).tolist()
