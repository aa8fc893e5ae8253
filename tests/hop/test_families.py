"""Every family that the engine mlx computes, against transformers itself: losses, gradients, windows, padding, greedy
tokens. The models are tiny and random; transformers computes each row alone, without cache or padding, in float64."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

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

from spill.engine import AdapterSpec, Arrays, Engine, Int32, Numerics, OpenEngine, Row, Target
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
    """A random model on disk and in transformers, without and with an adapter on all linear layers of its blocks."""

    directory: Path
    base: PreTrainedModel
    merged: PreTrainedModel
    spec: AdapterSpec
    arrays: Arrays

    def open(self, opener: OpenEngine, dtype: Literal["float32", "bfloat16"] = "float32") -> Engine:
        numerics = Numerics(dtype=dtype)
        engine = opener(model_dir=self.directory, adapter=self.spec, numerics=numerics, tick=lambda: None)
        engine.import_state(untrained(self.spec, self.arrays))
        return engine

    @torch.no_grad()
    def losses(self, row: Row, adapter: bool) -> NDArray[np.float64]:
        return _losses(self.merged if adapter else self.base, row, {}).numpy()

    def gradient(self, rows: list[Row]) -> dict[str, NDArray[np.float64]]:
        """Of the summed loss divided by the number of answer tokens."""
        tensors = {name: torch.from_numpy(array).double().requires_grad_(True) for name, array in self.arrays.items()}
        changed = {}
        for target in self.spec.targets:
            product = tensors[f"{target.name}.lora_B"] @ tensors[f"{target.name}.lora_A"]
            name = f"{target.name}.weight"
            changed[name] = self.base.get_parameter(name) + self.spec.scale * product
        count = sum(int(row.mask.sum()) for row in rows)
        (sum(_losses(self.base, row, changed).sum() for row in rows) / count).backward()
        return {name: tensor.grad.numpy() for name, tensor in tensors.items()}

    @torch.no_grad()
    def greedy(self, prompt: Int32, count: int) -> tuple[list[int], float]:
        """The tokens that follow, and by how many logits the least certain of them won."""
        tokens: list[int] = []
        margin = float("inf")
        for _ in range(count):
            ids = torch.tensor([[*prompt.tolist(), *tokens]])
            logits = self.merged(input_ids=ids, use_cache=False).logits[0, -1]
            first, second = torch.topk(logits, 2).values.tolist()
            margin = min(margin, first - second)
            tokens.append(int(logits.argmax()))
        return tokens, margin


def _losses(model: PreTrainedModel, row: Row, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    answers = np.flatnonzero(row.mask)
    ids = torch.from_numpy(row.tokens.astype(np.int64))
    given = {"input_ids": ids[None], "use_cache": False}
    logits = torch.func.functional_call(model, changed, kwargs=given).logits[0, answers - 1]
    return torch.nn.functional.cross_entropy(logits, ids[answers], reduction="none")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp("model")
    random_model(CONFIGS[request.param]()).save_pretrained(directory)
    # Read back, so that transformers' own reading of the files is what counts.
    base, merged = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
        for _ in range(2)
    )
    spec = AdapterSpec(rank=3, alpha=7.5, targets=targets(base.requires_grad_(False)))
    arrays = adapter(spec, 1, deviation=0.08)
    for target in spec.targets:
        a, b = (torch.from_numpy(arrays[f"{target.name}.lora_{side}"]).double() for side in "AB")
        merged.requires_grad_(False).get_parameter(f"{target.name}.weight").add_(spec.scale * (b @ a))
    return Family(directory=directory, base=base, merged=merged, spec=spec, arrays=arrays)


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
    start = np.random.default_rng(0).integers(0, VOCABULARY, min(prefix, length))
    tokens[: len(start)] = start
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
            worst = float(np.abs(found - family.losses(one, with_adapter)).max())
            assert worst < 1e-4, f"{name}: a token of a row of {len(one.tokens)} is off by {worst:g} nats"


def test_gradients_are_those_of_transformers(family: Family) -> None:
    engine = family.open(open_mlx)
    for size, rows in BATCHES.items():
        engine.import_state(untrained(family.spec, family.arrays))
        result = engine.step(rows, PROBE)
        expected = sum(float(family.losses(one, True).sum()) for one in rows)
        assert abs(result.loss_sum / expected - 1) < 1e-5, f"{size} rows: summed {result.loss_sum}, not {expected}"
        found = {name: 2 * moment for name, moment in engine.export_state().first_moment.items()}
        difference, where = relative_difference(found, family.gradient(rows))
        assert difference < 2e-4, f"{size} rows: the gradient of {where!r} is off by {difference:g} of its norm"


def test_greedy_tokens_are_those_of_transformers(family: Family) -> None:
    count, prompts, expected = 10, [], []
    for seed in range(100, 130):  # of very different lengths, some with a shared start, most longer than the window
        prompt = row(seed, 2 + 9 * (len(prompts) % 5), 0, prefix=(seed % 2) * 10).tokens
        tokens, margin = family.greedy(prompt, count)
        if margin > 1e-3:
            prompts.append(prompt)
            expected.append(tokens)
        if len(prompts) == 6:
            break
    assert len(prompts) == 6, "too few prompts whose greedy tokens are certain"
    engine = family.open(open_mlx)
    for size in (1, 2, KEY_HEADS, 6):
        found = {c.index: c.tokens.tolist() for c in engine.generate(prompts[:size], count, [])}
        assert [found[i] for i in range(size)] == expected[:size], f"{size} prompts together"
    stop = expected[0][5]
    cut = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
    found = {c.index: c.tokens.tolist() for c in engine.generate(prompts, count, [stop])}
    assert [found[i] for i in range(6)] == cut, "rows that end early disturb those that go on"


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


def test_nll_of_a_bfloat16_base_is_float32_in_both_engines(family: Family) -> None:
    """Weights are rounded to bfloat16 when they are loaded, and nothing else is; so a handover stays exact."""
    mine, other = (family.open(opener, "bfloat16").nll(ROWS) for opener in ENGINES.values())
    for found, expected in zip(mine, other, strict=True):
        assert np.abs(found - expected).max() < 5e-5
