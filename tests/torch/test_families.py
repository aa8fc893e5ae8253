"""Families and layouts against transformers itself: losses, gradients and greedy tokens of rows alone, in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import frozen
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from spill.engine import AdapterSpec, Arrays, Float32, Int32, Numerics, Row, Target
from spill.testing.engine_cases import PROBE, adapter, generator, relative_difference, untrained
from spill_engine_torch.engine import TorchEngine, open_cpu

VOCABULARY = 101
WINDOW = 6
NEW_TOKENS = 9
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
PACKED: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**WITHOUT_HEAD_DIM),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "phi3": Phi3Config(**WITHOUT_HEAD_DIM),
}
PADDED: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**SIZES, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "phi3 with windows": Phi3Config(**WITHOUT_HEAD_DIM, sliding_window=WINDOW),
    "qwen2 with windows": Qwen2Config(
        **WITHOUT_HEAD_DIM, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
}


@frozen(kw_only=True)
class Family:
    """A random tiny model on disk, its adapter, and the layouts that it can take."""

    path: Path
    spec: AdapterSpec
    layouts: tuple[str, ...]

    def open(self, **numerics: Any) -> TorchEngine:
        asked = Numerics(**{"dtype": "float32"} | numerics)
        return open_cpu(model_dir=self.path, adapter=self.spec, numerics=asked, tick=lambda: None)


@pytest.fixture(scope="module", params=[*PACKED, *PADDED])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    name = request.param
    path = write_model((PACKED | PADDED)[name], tmp_path_factory.mktemp("family"))
    model = AutoModelForCausalLM.from_pretrained(path)
    targets = tuple(
        Target(name=name, in_features=layer.in_features, out_features=layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and (name != "lm_head" or not model.config.tie_word_embeddings)
    )
    layouts = ("packed", "padded") if name in PACKED else ("padded",)
    return Family(path=path, spec=AdapterSpec(rank=4, alpha=8.0, targets=targets), layouts=layouts)


def write_model(config: PreTrainedConfig, path: Path) -> Path:
    """Random weights that bfloat16 holds exactly, norms and biases included."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.0)
            parameter.data = (parameter.data + noise).bfloat16().float()
    model.save_pretrained(path)
    return path


class Truth:
    """transformers on rows alone, without cache or padding, in float64, the adapter merged into the weights."""

    def __init__(self, family: Family, arrays: Arrays) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            family.path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._model.requires_grad_(False)
        self._spec = family.spec
        self.arrays = {n: torch.from_numpy(a.copy()).double().requires_grad_(True) for n, a in arrays.items()}

    def logits(self, tokens: Int32) -> torch.Tensor:
        weights = dict(self._model.named_parameters())
        for target in self._spec.targets:
            a, b = (self.arrays[f"{target.name}.lora_{side}"] for side in "AB")
            key = f"{target.name}.weight"
            weights[key] = weights[key] + self._spec.scale * b @ a
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        kwargs = {"input_ids": ids, "use_cache": False}
        return torch.func.functional_call(self._model, weights, kwargs=kwargs, tie_weights=True).logits[0]

    def losses(self, row: Row) -> torch.Tensor:
        answers = torch.from_numpy(np.flatnonzero(row.mask))
        chosen = torch.log_softmax(self.logits(row.tokens)[answers - 1], dim=-1)
        return -chosen[torch.arange(len(answers)), torch.from_numpy(row.tokens.astype(np.int64))[answers]]

    def gradient(self, rows: Sequence[Row]) -> dict[str, Float32]:
        losses = torch.cat([self.losses(row) for row in rows])
        found = torch.autograd.grad(losses.sum() / len(losses), list(self.arrays.values()))
        return {name: gradient.numpy() for name, gradient in zip(self.arrays, found, strict=True)}

    @torch.no_grad()
    def greedy(self, prompt: Int32) -> list[int]:
        tokens = prompt.tolist()
        for _ in range(NEW_TOKENS):
            tokens.append(int(self.logits(np.array(tokens, dtype=np.int32))[-1].argmax()))
        return tokens[len(prompt) :]


def training_rows() -> list[Row]:
    """Rows longer than the window behind a common prefix longer than it, of different lengths and answers."""
    draw = generator(21)
    prefix = draw.integers(0, VOCABULARY, 9)
    rows = []
    for length, answers, tail in [(20, 4, 0), (13, 2, 1), (27, 9, 0), (11, 1, 0)]:
        tokens = np.concatenate([prefix, draw.integers(0, VOCABULARY, length - 9)]).astype(np.int32)
        mask = np.zeros(length, dtype=np.int32)
        mask[length - answers - tail : length - tail] = 1
        rows.append(Row(tokens=tokens, mask=mask))
    return rows


def prompts() -> list[Int32]:
    return [row.tokens for row in training_rows()] + [training_rows()[0].tokens[:9]]


def test_the_layout_follows_from_the_config(family: Family) -> None:
    facts = family.open().facts()
    assert facts.numerics.layout == family.layouts[0]
    assert facts.notes == ()
    if family.layouts == ("padded",):
        asked = family.open(layout="packed").facts()
        assert asked.numerics.layout == "padded"
        assert "'packed' cannot be used" in asked.notes[0]


def test_losses_are_those_of_rows_alone(family: Family) -> None:
    arrays = adapter(family.spec, 1)
    truth, engine = Truth(family, arrays), family.open()
    engine.import_state(untrained(family.spec, arrays))
    for row, found in zip(training_rows(), engine.nll(training_rows()), strict=True):
        assert np.abs(found - truth.losses(row).detach().numpy()).max() < 5e-5


@pytest.mark.parametrize("bound", [0, 1, 45])
def test_every_layout_has_the_gradient_of_rows_alone(family: Family, bound: int) -> None:
    rows, arrays = training_rows(), adapter(family.spec, 2)
    truth = Truth(family, arrays)
    expected = truth.gradient(rows)
    loss_sum = sum(truth.losses(row).sum().item() for row in rows)
    for layout in family.layouts:
        engine = family.open(layout=layout, micro_batch_tokens=bound)
        engine.import_state(untrained(family.spec, arrays))
        result = engine.step(rows, PROBE)
        assert abs(result.loss_sum / loss_sum - 1) < 1e-5, layout
        found = {name: 2 * moment for name, moment in engine.export_state().first_moment.items()}
        difference, name = relative_difference(found, expected)
        assert difference < 1e-4, (layout, name)


def test_greedy_tokens_are_those_of_rows_alone(family: Family) -> None:
    arrays = adapter(family.spec, 3)
    truth, engine = Truth(family, arrays), family.open()
    engine.import_state(untrained(family.spec, arrays))
    expected = [truth.greedy(prompt) for prompt in prompts()]
    together = {c.index: c.tokens.tolist() for c in engine.generate(prompts(), NEW_TOKENS, [])}
    assert [together[index] for index in range(len(expected))] == expected
    for prompt, tokens in zip(prompts(), expected, strict=True):
        (alone,) = engine.generate([prompt], NEW_TOKENS, [])
        assert alone.tokens.tolist() == tokens


def test_rows_that_end_early_leave_the_others_as_they_are(family: Family) -> None:
    arrays = adapter(family.spec, 3)
    engine = family.open()
    engine.import_state(untrained(family.spec, arrays))
    whole = {c.index: c.tokens.tolist() for c in engine.generate(prompts(), NEW_TOKENS, [])}
    stop = whole[0][2]
    for completion in engine.generate(prompts(), NEW_TOKENS, [stop]):
        tokens = whole[completion.index]
        cut = tokens.index(stop) if stop in tokens else len(tokens)
        assert completion.tokens.tolist() == tokens[:cut]
        assert completion.reason == ("stop" if stop in tokens else "length")


def test_nll_is_float32_also_from_a_bfloat16_base(family: Family) -> None:
    arrays = adapter(family.spec, 4)
    losses = []
    for dtype in ("float32", "bfloat16"):
        engine = family.open(dtype=dtype)
        engine.import_state(untrained(family.spec, arrays))
        losses.append(np.concatenate(engine.nll(training_rows())))
    assert np.abs(losses[0] - losses[1]).max() < 2e-6


def test_a_bfloat16_base_learns(family: Family) -> None:
    rows, arrays = training_rows(), adapter(family.spec, 5)
    expected = Truth(family, arrays).gradient(rows)
    engine = family.open(dtype="bfloat16")
    engine.import_state(untrained(family.spec, arrays))
    engine.step(rows, PROBE)
    found = {name: 2 * moment for name, moment in engine.export_state().first_moment.items()}
    assert relative_difference(found, expected)[0] < 0.15


def test_layers_that_are_not_linear_are_refused_by_name(tmp_path: Path) -> None:
    path = write_model(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=64), tmp_path)
    target = Target(name="transformer.h.0.attn.c_attn", in_features=32, out_features=96)
    with pytest.raises(ValueError, match="c_attn"):
        Family(path=path, spec=AdapterSpec(rank=2, alpha=2.0, targets=(target,)), layouts=()).open()
