"""A causal language model of transformers, opened without code or pickles, with its layers replaced for training."""

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from spill.engine import Target, Tick
from spill.errors import ModelError
from spill_engine_torch.layout import Laid
from spill_engine_torch.lora import InputEmbedding, Linear, Mode, SelectingHead


class CausalModel:
    """Frozen weights on a device, in their own dtype or answering in float32, with or without adapters."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, tick: Tick) -> None:
        """Load the base, calling `tick` before it, and before every tensor is read.

        Raises:
            ModelError: the files cannot be read as a causal language model, or lack weights that it needs.
        """
        tick()
        model = _load(model_dir, dtype)
        if dtype != torch.float32 and any(buffer.dtype == dtype for buffer in model.buffers()):
            # Constants of the family, such as gemma's embedding scale, were rounded too; only weights should be.
            model = _load(model_dir, torch.float32)
        self._model = model.eval().requires_grad_(False)
        for parameter in self._model.parameters():
            tick()
            # Loaded tensors are views of the mapped file. A copy survives what happens to the file, and begins on a
            # cache line wherever the file's header ends: matrix products round by how their factors are aligned.
            parameter.data = parameter.data.to(device, dtype, copy=True)
        self._model.to(device)
        self.dtype = dtype
        self.device = device
        self.config = self._model.config.get_text_config(decoder=True)
        self._mode = Mode()
        self._linears = _replace_linears(self._model, self._mode)
        self._head = _replace_ends(self._model, self._mode)
        replaced = {id(p) for linear in self._linears.values() for p in linear.parameters()}
        replaced.add(id(self._model.get_input_embeddings().weight))
        self._other_parameters = [p for p in self._model.parameters() if id(p) not in replaced]
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        # Families differ in what they take, and transformers 5.24 renamed the cache.
        arguments = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"
        self._takes_positions = "position_ids" in arguments

    def linear(self, target: Target) -> Linear:
        """The linear layer that a safetensors name means.

        Raises:
            ValueError: there is none of this name, or its sizes differ.
        """
        prefix = self._model.base_model_prefix
        # Files saved from a bare base model lack the prefix, and some bare models read files that have it.
        candidates = (target.name, f"{prefix}.{target.name}", target.name.removeprefix(f"{prefix}."))
        layer = next((self._linears[name] for name in candidates if name in self._linears), None)
        if layer is None:
            raise ValueError(f"no linear layer {target.name!r} in {type(self._model).__name__}: it cannot be adapted")
        if (layer.in_features, layer.out_features) != (target.in_features, target.out_features):
            raise ValueError(
                f"linear layer {target.name!r} maps {layer.in_features} to {layer.out_features} features, "
                f"but the adapter {target.in_features} to {target.out_features}"
            )
        return layer

    @property
    def attends_to_all(self) -> bool:
        """Whether the config says that every layer is full attention with rotary positions: no windows or chunks,
        no recurrence, no biases by distance."""
        config = self.config
        layer_types = getattr(config, "layer_types", None) or ["full_attention"]
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "alibi"))
        rotary = getattr(config, "rope_parameters", None)
        return bool(rotary) and not any(windows) and set(layer_types) == {"full_attention"}

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kinds of layers that the config lists."""
        return DynamicCache(config=self._model.config)

    def logits(
        self,
        ids: Tensor,
        positions: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        adapter: bool = True,
        float32: bool = False,
    ) -> Tensor:
        """Logits (positions, vocabulary) at `positions` of the flattened `ids` (rows, tokens).

        `mask` is what `Laid.mask` is; with a cache, int64 (rows, cached + new tokens). `float32` computes all of it
        in float32 from the weights as they are.
        """
        if mask is not None and mask.dim() == 4:
            lowest = torch.finfo(torch.float32 if float32 else self.dtype).min
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, lowest)
            mask = mask if float32 else mask.to(self.dtype)
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": cache is not None}
        if self._takes_positions:
            arguments["position_ids"] = position_ids
        if cache is not None:
            arguments[self._cache_argument] = cache
        with self._switched(positions, adapter, float32):
            return self._model(**arguments).logits

    def laid_logits(self, laid: Laid, *, adapter: bool = True, float32: bool = False) -> Tensor:
        """Logits (answers, vocabulary) of rows as a layout made them."""
        return self.logits(
            laid.ids,
            laid.positions,
            position_ids=laid.position_ids,
            mask=laid.mask,
            adapter=adapter,
            float32=float32,
        )

    @contextmanager
    def _switched(self, positions: Tensor, adapter: bool, float32: bool) -> Iterator[None]:
        low = [p.data for p in self._other_parameters]
        self._head.positions = positions
        self._mode.adapter, self._mode.float32 = adapter, float32
        try:
            if float32:
                for parameter in self._other_parameters:
                    parameter.data = parameter.data.float()
            yield
        finally:
            for parameter, data in zip(self._other_parameters, low, strict=True):
                parameter.data = data
            self._head.positions = None
            self._mode.adapter, self._mode.float32 = True, False


def _load(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
            model, info = AutoModelForCausalLM.from_pretrained(
                model_dir,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=_attention(config),
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            cause = " ".join(str(error).split())
            raise ModelError(f"transformers cannot load {model_dir}: {type(error).__name__}: {cause}") from error
    lacking = sorted(itertools.chain(info["missing_keys"], (str(key) for key in info["mismatched_keys"])))
    if lacking:
        # transformers would go on with random numbers in their place.
        raise ModelError(f"{model_dir} lacks weights of {type(model).__name__}", lacking)
    return model


def _attention(config: PreTrainedConfig) -> str | None:
    """Eager where attention scores are capped, which sdpa cannot do; else sdpa where the family has it."""
    return "eager" if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines below errors and no progress bars of transformers, for a while."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _replace_linears(model: PreTrainedModel, mode: Mode) -> dict[str, Linear]:
    """Put a `Linear` in the place of every `nn.Linear`, and return them by name."""
    replaced: dict[str, Linear] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, attribute = name.rpartition(".")
            replaced[name] = Linear(module, mode)
            setattr(model.get_submodule(parent), attribute, replaced[name])
    return replaced


def _replace_ends(model: PreTrainedModel, mode: Mode) -> SelectingHead:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, Linear):
        raise ModelError(f"{type(model).__name__} has no token embedding or no linear head: it is not supported")
    selecting = SelectingHead(head)
    model.set_input_embeddings(InputEmbedding(embedding, mode))
    model.set_output_embeddings(selecting)
    return selecting
