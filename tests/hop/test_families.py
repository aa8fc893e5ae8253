"""Every family that the engine mlx computes, against transformers itself: losses, gradients, windows, padding, greedy
tokens. The models are tiny and random; transformers computes each row alone, without cache or padding, in float64."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from spill.engine import AdapterSpec, Arrays, Engine, Float32, Int32, Numerics, OpenEngine, Row, Target
from spill.testing.engine_cases import PROBE, adapter, relative_difference, untrained
from spill_engine_mlx.opening import open_engine as open_mlx
from spill_engine_torch.engine import open_cpu as open_torch_cpu

VOCABULARY = 97
WINDOW = 7
KEY_HEADS = 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": KEY_HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL, SLIDING = "full_attention", "sliding_attention"


def rope(kind: str = "default", theta: float = 500.0, **more: Any) -> dict[str, Any]:
    """The base is no family's default, and far from all of them."""
    return {"rope_type": kind, "rope_theta": theta, **more}


def llama(**more: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, "rope_parameters": rope(), **more})


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CONFIGS = {
    "llama": lambda: llama(),
    "llama, tied, biases, wide heads": lambda: llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=20
    ),
    "llama, llama3 positions": lambda: llama(rope_parameters=LLAMA3),
    "llama, linear positions": lambda: llama(rope_parameters=rope("linear", factor=3.0)),
    "mistral": lambda: MistralConfig(**SIZES, rope_parameters=rope(), sliding_window=WINDOW),
    "mistral, no window": lambda: MistralConfig(**SIZES, rope_parameters=rope(), sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SIZES, rope_parameters=rope(), tie_word_embeddings=True),
    "qwen2, windows": lambda: Qwen2Config(**SIZES, rope_parameters=rope(), **QWEN_WINDOWS),
    "qwen2, all windows": lambda: Qwen2Config(
        **SIZES, rope_parameters=rope(), **QWEN_WINDOWS, layer_types=[SLIDING] * 3
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, rope_parameters=rope(), head_dim=20),
    "qwen3, windows": lambda: Qwen3Config(
        **SIZES, rope_parameters=rope(), head_dim=16, **QWEN_WINDOWS, layer_types=[SLIDING, FULL, SLIDING]
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, rope_parameters=rope(), head_dim=16, query_pre_attn_scalar=20, sliding_window=WINDOW
    ),
    "gemma2, a key head for each": lambda: Gemma2Config(
        **{**SIZES, "num_key_value_heads": 6}, rope_parameters=rope(), head_dim=16, sliding_window=WINDOW
    ),
    "gemma2, low caps": lambda: Gemma2Config(
        **SIZES,
        rope_parameters=rope(),
        head_dim=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    "phi3": lambda: Phi3Config(**SIZES, rope_parameters=rope()),
    "phi3, window, part of a head": lambda: Phi3Config(
        **SIZES, rope_parameters=rope(partial_rotary_factor=0.5), sliding_window=WINDOW
    ),
}
ENGINES: dict[str, OpenEngine] = {"mlx": open_mlx, "torch-cpu": open_torch_cpu}


@frozen(kw_only=True, eq=False)
class Family:
    """A random model on disk and in transformers, an adapter on all linear layers of its blocks, and rows."""

    directory: Path
    model: PreTrainedModel
    spec: AdapterSpec
    arrays: Arrays

    def open(self, opener: OpenEngine, *, tokens: int = 0) -> Engine:
        numerics = Numerics(dtype="float32", micro_batch_tokens=tokens)
        engine = opener(model_dir=self.directory, adapter=self.spec, numerics=numerics, tick=lambda: None)
        engine.import_state(untrained(self.spec, self.arrays))
        return engine

    def logits(self, tokens: Int32, arrays: dict[str, torch.Tensor] | None) -> torch.Tensor:
        """float64 (tokens, vocabulary), with the adapter merged into the weights."""
        changed = {}
        for target in self.spec.targets if arrays is not None else ():
            weight = self.model.get_parameter(f"{target.name}.weight")
            product = arrays[f"{target.name}.lora_B"] @ arrays[f"{target.name}.lora_A"]
            changed[f"{target.name}.weight"] = weight + self.spec.scale * product
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return torch.func.functional_call(self.model, changed, kwargs={"input_ids": ids, "use_cache": False}).logits[0]

    def losses(self, row: Row, arrays: dict[str, torch.Tensor] | None) -> torch.Tensor:
        answers = np.flatnonzero(row.mask)
        logits = self.logits(row.tokens, arrays)[answers - 1]
        targets = torch.from_numpy(row.tokens[answers].astype(np.int64))
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).double().requires_grad_(True) for name, array in self.arrays.items()}

    def gradient(self, rows: list[Row]) -> dict[str, NDArray[np.float64]]:
        """Of the summed loss divided by the number of answer tokens."""
        tensors = self.tensors()
        count = sum(int(row.mask.sum()) for row in rows)
        for row in rows:
            (self.losses(row, tensors).sum() / count).backward()
        return {name: tensor.grad.numpy() for name, tensor in tensors.items()}

    @torch.no_grad()
    def greedy(self, prompt: Int32, count: int) -> tuple[list[int], float]:
        """The tokens that follow, and by how many logits the least certain of them won."""
        tokens: list[int] = []
        margin = float("inf")
        for _ in range(count):
            logits = self.logits(np.array([*prompt, *tokens], np.int32), self.tensors())[-1]
            first, second = torch.topk(logits, 2).values.tolist()
            margin = min(margin, first - second)
            tokens.append(int(logits.argmax()))
        return tokens, margin


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    config = CONFIGS[request.param]()
    directory = tmp_path_factory.mktemp("model")
    random_model(config).save_pretrained(directory)
    # Read back, so that transformers' own reading of the files is what counts.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    model.requires_grad_(False)
    spec = AdapterSpec(rank=3, alpha=7.5, targets=targets(model))
    yield Family(directory=directory, model=model, spec=spec, arrays=adapter(spec, 1, deviation=0.08))


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Weights that make the layers matter alike; nothing is at the value that it usually starts from."""
    config.dtype = "float32"
    model = AutoModelForCausalLM.from_config(config)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_((1.3 * parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3) * noise)
    return model


def targets(model: PreTrainedModel) -> tuple[Target, ...]:
    return tuple(
        Target(name=name, in_features=module.in_features, out_features=module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    )


def row(seed: int, length: int, answers: int, prefix: int = 0) -> Row:
    """A row of random tokens; its first `prefix` tokens are the same in all rows."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)
    tokens[:prefix] = np.random.default_rng(0).integers(0, VOCABULARY, 64)[:prefix]
    mask = np.zeros(length, np.int32)
    mask[length - answers :] = 1
    return Row(tokens=tokens, mask=mask)


# Shorter and longer than the window, a shared start shorter and longer than it, and no shared start.
BATCHES = {
    1: [row(1, 40, 11)],
    2: [row(2, 4, 1), row(3, 31, 25)],
    KEY_HEADS: [row(4, 18, 4, prefix=12), row(5, 45, 6, prefix=12), row(6, 15, 2, prefix=12)],
    5: [row(7, 26, 9, prefix=3), row(8, 5, 1, prefix=3), row(9, 12, 5, prefix=3), row(10, 33, 2), row(11, 6, 3)],
}
ROWS = [row for rows in BATCHES.values() for row in rows]


@pytest.mark.parametrize("name", ENGINES)
def test_losses_are_those_of_transformers(family: Family, name: str) -> None:
    engine = family.open(ENGINES[name])
    for with_adapter in (True, False):
        for one, found in zip(ROWS, engine.nll(ROWS, adapter=with_adapter), strict=True):
            expected = family.losses(one, family.tensors() if with_adapter else None).detach().numpy()
            worst = float(np.abs(found - expected).max())
            assert worst < 5e-5, f"{name}: a token of a row of {len(one.tokens)} is off by {worst:g} nats"


@pytest.mark.parametrize("size", BATCHES)
def test_gradients_are_those_of_transformers(family: Family, size: int) -> None:
    rows = BATCHES[size]
    engine = family.open(open_mlx)
    result = engine.step(rows, PROBE)
    expected = sum(float(family.losses(one, family.tensors()).sum().detach()) for one in rows)
    assert abs(result.loss_sum / expected - 1) < 1e-5, f"the summed loss is {result.loss_sum}, not {expected}"
    found = {name: 2 * moment for name, moment in engine.export_state().first_moment.items()}
    difference, where = relative_difference(found, family.gradient(rows))
    assert difference < 2e-4, f"the gradient of {where!r} is off by {difference:g} of its norm"


def test_greedy_tokens_are_those_of_transformers(family: Family) -> None:
    prompts, expected = [], []
    for seed in range(100, 130):  # of very different lengths, some with a shared start, most longer than the window
        prompt = row(seed, 2 + 9 * (len(prompts) % 5), 0, prefix=(seed % 2) * 10).tokens
        tokens, margin = family.greedy(prompt, 12)
        if margin > 1e-3:
            prompts.append(prompt)
            expected.append(tokens)
        if len(prompts) == 7:
            break
    assert len(prompts) == 7, "too few prompts whose greedy tokens are certain"
    engine = family.open(open_mlx)
    for size in (1, 2, KEY_HEADS, 7):
        found = {c.index: c.tokens.tolist() for c in engine.generate(prompts[:size], 12, [])}
        assert [found[i] for i in range(size)] == expected[:size], f"{size} prompts together"
    stop = expected[0][5]
    cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    found = {c.index: c.tokens.tolist() for c in engine.generate(prompts, 12, [stop])}
    assert [found[i] for i in range(7)] == cut, "rows that end early disturb those that go on"


def test_a_config_of_the_older_form_is_read_alike(family: Family, tmp_path: Path) -> None:
    for path in family.directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    positions = config.pop("rope_parameters")
    config["rope_theta"] = positions.pop("rope_theta")
    if "partial_rotary_factor" in positions:
        config["partial_rotary_factor"] = positions.pop("partial_rotary_factor")
    config["rope_scaling"] = positions if positions["rope_type"] != "default" else None
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = family.open(open_mlx).nll(ROWS)
    for found, expected in zip(evolve(family, directory=tmp_path).open(open_mlx).nll(ROWS), before, strict=True):
        assert found.tobytes() == expected.tobytes()


def test_bfloat16_is_near_and_its_nll_is_float32(family: Family) -> None:
    """The base in bfloat16 rounds its weights; what `nll` computes with them is float32, the same in both engines."""
    losses: dict[str, list[Float32]] = {}
    for name, opener in ENGINES.items():
        numerics = Numerics(dtype="bfloat16")
        engine = opener(model_dir=family.directory, adapter=family.spec, numerics=numerics, tick=lambda: None)
        engine.import_state(untrained(family.spec, family.arrays))
        losses[name] = engine.nll(ROWS)
    for mine, other in zip(losses["mlx"], losses["torch-cpu"], strict=True):
        assert np.abs(mine - other).max() < 5e-5
