"""Models: the table, directories and their identity, remembered hashes, targets, staging from a store."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill import models
from spill.arrays import write_parts
from spill.errors import ModelError
from spill.models import cache, staging
from spill.models.directory import is_model_file
from spill.stores import Entry
from spill.testing.models import VOCABULARY, tiny_model

NEWLINE = "\n"


class Stop(Exception):
    """What a tick raises in these tests."""


class Ticks:
    """A tick that counts, and raises once it was called so often."""

    def __init__(self, stop_at: int = 10**9) -> None:
        self.count = 0
        self.stop_at = stop_at

    def __call__(self) -> None:
        self.count += 1
        if self.count >= self.stop_at:
            raise Stop


def never(line: str) -> None:
    raise AssertionError(f"said without need: {line}")


def tick() -> None:
    pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def local(directory: Path, say: Callable[[str], None] = never) -> models.Model:
    model = models.resolve(str(directory), tick=tick, say=say)
    assert model is not None
    return model


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None takes a key out."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in value.items() if v is not None}))


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    path.write_bytes(b"".join(bytes(part) for part in write_parts(arrays)))


def with_weights(directory: Path, *names: str, shape: tuple[int, ...] = (4, 3)) -> models.Model:
    write_weights(directory / "model.safetensors", dict.fromkeys(names, shape))
    return local(directory)


# The table


def test_the_table_names_instruction_tuned_repositories() -> None:
    assert sorted(models.TAGS) == sorted(
        f"{family}:{size}"
        for family, sizes in {
            "qwen2.5": ("0.5b", "1.5b", "7b"),
            "smollm2": ("135m", "360m", "1.7b"),
            "llama3.2": ("1b", "3b"),
        }.items()
        for size in sizes
    )
    for name, tag in models.TAGS.items():
        family, size = name.split(":")
        assert tag.repository.lower().replace("-", "").endswith(f"{family}{size}instruct".replace("-", ""))
        assert tag.revision


def test_learning_rates_fall_with_size_and_agree_with_the_table() -> None:
    sizes = {"0.5b": 494e6, "1.5b": 1.54e9, "7b": 7.6e9, "135m": 134.5e6, "360m": 362e6, "1.7b": 1.71e9, "1b": 1.24e9}
    sizes["3b"] = 3.2e9
    for name, tag in models.TAGS.items():
        parameters = int(sizes[name.split(":")[1]])
        assert models.default_learning_rate("local", parameters) == tag.learning_rate
        assert models.default_learning_rate(name, 1) == tag.learning_rate
    rates = [models.default_learning_rate("local", n * 10**7) for n in range(1, 2000)]
    assert rates == sorted(rates, reverse=True)
    assert models.default_learning_rate("smollm2:135m-q4", 134_515_008) == 2e-3


@pytest.mark.parametrize("student", ["llama4:1b", "", "smollm2", "nothing-here"])
def test_an_unknown_student_is_answered_with_every_form(student: str) -> None:
    with pytest.raises(ModelError) as caught:
        models.resolve(student, tick=tick, say=never)
    message = str(caught.value)
    assert all(form in message for form in [*models.TAGS, "smollm2:135m-q4", "hf:org/name@revision", "directory"])
    assert NEWLINE not in message


@pytest.mark.parametrize(
    "student",
    [
        "hf:name",
        "hf:a/b/c",
        "hf:../x",
        "hf:a/..",
        "hf:a/b@",
        "hf:a/b@../c",
        "hf:/b",
        "hf:a/b c",
        "hf:a--b/c",
        "hf:a/b@x y",
    ],
)
def test_a_malformed_hub_name_is_refused_before_the_network(student: str) -> None:
    with pytest.raises(ModelError, match="hf:org/name@revision"):
        models.resolve(student, tick=tick, say=never)
    assert not models.names_directory(student)


def test_a_local_student_of_another_machine_is_asked_for() -> None:
    with pytest.raises(ModelError, match="--student PATH"):
        models.resolve("local", tick=tick, say=never)


# Directories


def test_a_directory_becomes_a_model(tiny: Path) -> None:
    model = local(tiny)
    assert (model.student, model.directory, model.revision) == ("local", tiny, "")
    assert model.config["model_type"] == "llama"
    block = 32 * 32 * 2 + 16 * 32 * 2 + 48 * 32 * 3 + 2 * 32
    assert model.parameters == VOCABULARY * 32 + 2 * block + 32
    assert [path.name for path in model.files()] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert models.names_directory(str(tiny))


def test_identity_is_the_hash_of_names_and_contents(tiny: Path) -> None:
    model = local(tiny)
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in model.files()]
    assert model.identity == "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def test_equal_content_has_equal_identity_wherever_it_lies(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "copy"
    shutil.copytree(tiny, other)
    (other / "README.md").write_text("not part of the model")
    (other / "consolidated.safetensors").write_bytes(b"nor is this")
    linked = tmp_path / "linked"  # as the hub's cache has it
    linked.mkdir()
    for path in tiny.iterdir():
        (linked / path.name).symlink_to(path)
    assert local(tiny).identity == local(other).identity == local(linked).identity


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_changed_file_is_another_model(tiny: Path, name: str) -> None:
    before = local(tiny).identity
    path = tiny / name
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert local(tiny).identity != before


def test_one_changed_weight_is_another_model(tiny: Path) -> None:
    before = local(tiny).identity
    path = tiny / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert local(tiny).identity != before


def test_shards_with_an_index_count_like_one_file(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    write_weights(tiny / "model-00001-of-00002.safetensors", {"model.layers.0.a.weight": (4, 3)})
    write_weights(tiny / "model-00002-of-00002.safetensors", {"model.layers.1.a.weight": (5, 3), "norm.weight": (7,)})
    weight_map = {
        "model.layers.0.a.weight": "model-00001-of-00002.safetensors",
        "model.layers.1.a.weight": "model-00002-of-00002.safetensors",
        "norm.weight": "model-00002-of-00002.safetensors",
    }
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = local(tiny)
    assert model.parameters == 12 + 15 + 7
    assert [t.name for t in models.adapter_targets(model)] == ["model.layers.0.a", "model.layers.1.a"]
    assert "model.safetensors.index.json" in [path.name for path in model.files()]
    (tiny / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not whole.*model-00002-of-00002\.safetensors"):
        local(tiny)


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def pickle(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def twice(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "model-00001-of-00001.safetensors")


def put(name: str, content: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        (directory / name).write_text(content)

    return write


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "there is no directory"),
        (remove("model.safetensors"), r"no model\*\.safetensors"),
        (pickle, r"pickled weights \(pytorch_model\.bin\) only"),
        (truncate, "not a usable safetensors file"),
        (twice, "twice"),
        (remove("config.json"), r"has no config\.json"),
        (put("config.json", "[1]"), "not an object"),
        (put("config.json", "{"), r"config\.json cannot be read as JSON"),
        (put("config.json", "[" * 100_000), r"config\.json cannot be read as JSON"),
        (remove("tokenizer.json"), r"no tokenizer\.json"),
        (put("adapter_config.json", "{}"), "an adapter"),
        (put("model.safetensors.index.json", '{"weight_map": {"x": "model-7.safetensors"}}'), r"model-7\.safetensors"),
        (put("model.safetensors.index.json", '{"weight_map": {"x": "model.safetensors"}}'), "lists x"),
        (put("model.safetensors.index.json", '{"weight_map": 3}'), "no weight_map"),
    ],
)
def test_what_is_not_a_whole_model_is_refused(tiny: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(tiny)
    with pytest.raises(ModelError, match=message) as caught:
        local(tiny)
    assert NEWLINE not in str(caught.value)
    assert str(tiny) in str(caught.value)


def test_a_directory_and_weights_contradict_each_other(tiny: Path) -> None:
    with pytest.raises(ModelError, match="leave out --weights"):
        models.resolve(str(tiny), weights=str(tiny), tick=tick, say=never)


@pytest.mark.parametrize("student", ["smollm2:135m", "hf:org/name@main", "/no/such/directory", "./nor/this"])
def test_offline_and_not_here_is_none(student: str) -> None:
    assert models.resolve(student, tick=tick, say=never, offline=True) is None
    if not student.startswith(("/", ".")):
        assert models.resolve(student, weights="s3://bucket/model", tick=tick, say=never, offline=True) is None


# Hashes are remembered


def test_a_file_is_hashed_once(tiny: Path, home: Path) -> None:
    first = Ticks()
    model = models.resolve(str(tiny), tick=first, say=never)
    again = Ticks()
    assert models.resolve(str(tiny), tick=again, say=never) == model
    assert first.count >= 5
    assert again.count == 0
    assert len(json.loads((home / "hashes.json").read_text())) == 5


def test_a_swap_with_the_same_size_and_time_is_seen(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    before, found = local(tiny).identity, path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert local(tiny).identity != before


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"/x": 3}', b"[" * 100_000])
def test_a_damaged_hash_cache_is_ignored_and_written_anew(tiny: Path, home: Path, content: bytes) -> None:
    identity = local(tiny).identity
    (home / "hashes.json").write_bytes(content)
    assert local(tiny).identity == identity
    assert len(json.loads((home / "hashes.json").read_text())) == 5


@pytest.mark.parametrize("entry", [3, [], [0, 0, 0, 0, 5], ["a", 0, 0, 0, "0" * 64], [0, 0, 0, 0, "short"]])
def test_a_damaged_entry_is_not_believed(tiny: Path, home: Path, entry: Any) -> None:
    identity = local(tiny).identity
    edit(home / "hashes.json", **{str(tiny / "config.json"): entry})
    assert local(tiny).identity == identity


def test_without_a_place_for_the_cache_a_directory_still_works(tiny: Path, home: Path) -> None:
    home.write_text("a file where the cache folder should be")
    assert local(tiny).identity == local(tiny).identity


def test_a_tick_that_raises_stops_the_hashing(tiny: Path) -> None:
    with pytest.raises(Stop):
        models.resolve(str(tiny), tick=Ticks(stop_at=2), say=never)


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    final = tmp_path / "kept" / "final"

    def break_off() -> None:
        with cache.appearing(final) as fresh:
            (fresh / "half").write_text("x")
            raise Stop

    with pytest.raises(Stop):
        break_off()
    assert list(final.parent.iterdir()) == []
    with cache.appearing(final) as slow:
        (slow / "who").write_text("slow")
        with cache.appearing(final) as fast:
            (fast / "who").write_text("fast")
        assert (final / "who").read_text() == "fast"
    assert (final / "who").read_text() == "fast"
    assert [path.name for path in final.parent.iterdir()] == ["final"]


def test_what_a_killed_run_left_is_removed_a_day_later(tmp_path: Path) -> None:
    final = tmp_path / "final"
    old, recent = tmp_path / ".final.0.tmp", tmp_path / ".final.1.tmp"
    for path in (old, recent):
        path.mkdir()
        (path / "model.safetensors").write_text("half")
    day_ago = time.time() - cache.ABANDONED_SECONDS - 60
    os.utime(old, (day_ago, day_ago))
    with cache.appearing(final):
        pass
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".final.1.tmp"]


# Targets


def test_targets_are_the_blocks_matrices_in_order(tiny: Path) -> None:
    model = local(tiny_model(tiny.parent / "deep", layers=11, tied=False))
    targets = models.adapter_targets(model)
    assert len(targets) == 77
    numbers = [int(t.name.split(".")[2]) for t in targets]
    assert numbers == sorted(numbers)  # 2 before 10
    first = [(t.name, t.in_features, t.out_features) for t in targets[:7]]
    assert first == [
        ("model.layers.0.mlp.down_proj", 48, 32),
        ("model.layers.0.mlp.gate_proj", 32, 48),
        ("model.layers.0.mlp.up_proj", 32, 48),
        ("model.layers.0.self_attn.k_proj", 32, 16),
        ("model.layers.0.self_attn.o_proj", 32, 32),
        ("model.layers.0.self_attn.q_proj", 32, 32),
        ("model.layers.0.self_attn.v_proj", 32, 16),
    ]
    assert not any("embed" in t.name or "lm_head" in t.name for t in targets)


def test_fused_layers_stay_fused_and_h_blocks_count(tiny: Path) -> None:
    names = ["transformer.h.0.attn.query_key_value.weight", "model.layers.3.self_attn.qkv_proj.weight"]
    model = with_weights(tiny, *names, "transformer.wte.weight", "lm_head.weight", "model.layers.3.self_attn.scale")
    assert [t.name for t in models.adapter_targets(model)] == [name.removesuffix(".weight") for name in names]
    assert models.adapter_targets(model)[0].in_features == 3


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.7.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.feed_forward.router.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
    ],
)
def test_a_mixture_of_experts_is_refused_by_its_tensor(tiny: Path, name: str) -> None:
    model = with_weights(tiny, "model.layers.0.self_attn.q_proj.weight", name)
    with pytest.raises(ModelError, match=f"mixture of experts.*{name}"):
        models.adapter_targets(model)


def test_quantized_weights_are_refused(tiny: Path) -> None:
    header = {"model.layers.0.mlp.up_proj.weight": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}}
    text = json.dumps(header).encode()
    (tiny / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(6))
    with pytest.raises(ModelError, match=r"quantized.*U8"):
        models.adapter_targets(local(tiny))


def test_transposed_weights_are_refused(tiny: Path) -> None:
    edit(tiny / "config.json", model_type="gpt2")
    with pytest.raises(ModelError, match=r"gpt2.*transposed"):
        models.adapter_targets(with_weights(tiny, "h.0.attn.c_attn.weight"))


def test_a_model_without_blocks_is_refused(tiny: Path) -> None:
    with pytest.raises(ModelError, match="no layer to adapt"):
        models.adapter_targets(with_weights(tiny, "encoder.weight", "mylayers.0.weight"))


def test_names_from_a_model_are_printed_safely(tiny: Path) -> None:
    model = with_weights(tiny, "model.layers.0.experts.\x1b[31m.weight")
    with pytest.raises(ModelError) as caught:
        models.adapter_targets(model)
    assert "\x1b" not in str(caught.value)


# Staging from a store


def test_weights_are_staged_from_a_store_with_size_and_hash(tiny: Path, home: Path) -> None:
    (tiny / "README.md").write_text("not staged")
    (tiny / "original").mkdir()
    (tiny / "original" / "model.safetensors").write_text("not staged either")
    said: list[str] = []
    model = models.resolve("qwen2.5:0.5b", weights=str(tiny), tick=tick, say=said.append)
    assert model is not None
    assert (model.student, model.identity) == ("qwen2.5:0.5b", local(tiny).identity)
    assert home in model.directory.parents
    staged = {path.name for path in model.directory.iterdir() if is_model_file(path.name)}
    assert staged == {path.name for path in tiny.iterdir() if is_model_file(path.name)}
    assert "5 files" in said[0]
    assert any(line.strip().startswith("model.safetensors: ") and "MB" in line for line in said)
    assert "100 %" in said[-2]
    assert model.identity in said[-1]
    again = models.resolve("qwen2.5:0.5b", weights=f"{tiny}/", tick=tick, say=never)
    assert again == model
    assert models.resolve("qwen2.5:0.5b", weights=str(tiny), tick=tick, say=never, offline=True) == model
    hub_name = models.resolve("hf:org/name", weights=f"file://{tiny}", tick=tick, say=never)
    assert hub_name is not None
    assert hub_name.student == "hf:org/name@main"


def test_weights_that_changed_in_the_store_are_staged_again(tiny: Path) -> None:
    first = models.resolve("hf:a/b", weights=str(tiny), tick=tick, say=lambda line: None)
    edit(tiny / "config.json", note="changed")
    second = models.resolve("hf:a/b", weights=str(tiny), tick=tick, say=lambda line: None)
    assert first is not None
    assert second is not None
    assert second.identity == local(tiny).identity != first.identity


def test_a_store_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pytorch_model.bin").write_text("x")
    with pytest.raises(ModelError, match=r"--weights .*empty holds no model\*\.safetensors"):
        models.resolve("hf:a/b", weights=str(tmp_path / "empty"), tick=tick, say=never)


def test_a_stop_while_staging_leaves_nothing(tiny: Path, home: Path) -> None:
    said: list[str] = []

    def stop_after_two() -> None:
        if len(said) > 2:
            raise Stop

    with pytest.raises(Stop):
        models.resolve("hf:a/b", weights=str(tiny), tick=stop_after_two, say=said.append)
    assert list((home / "staged").iterdir()) == []


class OddStore:
    """A store that lists what it likes, and whose reads may be short or slow."""

    uri = "odd://store"

    def __init__(self, names: dict[str, bytes], cut: int = 0) -> None:
        self.names = names
        self.cut = cut
        self.reads: list[str] = []

    def list(self, prefix: str) -> list[Entry]:
        return [Entry(name=name, size=len(data), modified=0.0) for name, data in self.names.items()]

    def read(self, name: str, limit: int) -> bytes:
        self.reads.append(name)
        return self.names[name][: len(self.names[name]) - self.cut]


def test_only_plain_names_of_model_files_are_staged(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    hostile = [
        "model/../../x.safetensors",
        "model\\..\\x.safetensors",
        "../model.safetensors",
        "/model.safetensors",
        "a/config.json",
        "..\\config.json",
        "spill-staged.json",
    ]
    store = OddStore({**files, **dict.fromkeys(hostile, b"x")})
    monkeypatch.setattr(staging, "open_store", lambda uri: store)
    model = models.resolve("hf:a/b", weights="odd://store", tick=tick, say=lambda line: None)
    assert model is not None
    assert sorted(store.reads) == sorted(files)
    assert len(list((home / "staged").iterdir())) == 1


def test_a_short_read_is_an_error_and_leaves_nothing(tiny: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = OddStore({path.name: path.read_bytes() for path in tiny.iterdir()}, cut=1)
    monkeypatch.setattr(staging, "open_store", lambda uri: store)
    with pytest.raises(OSError, match="were listed"):
        models.resolve("hf:a/b", weights="odd://store", tick=tick, say=lambda line: None)
    assert list((home / "staged").iterdir()) == []


def test_a_slow_read_does_not_hold_a_stop_up(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Slow(OddStore):
        def read(self, name: str, limit: int) -> bytes:
            released.wait(30)
            return super().read(name, limit)

    store = Slow({path.name: path.read_bytes() for path in tiny.iterdir()})
    monkeypatch.setattr(staging, "open_store", lambda uri: store)
    started = time.monotonic()
    with pytest.raises(Stop):
        models.resolve("hf:a/b", weights="odd://store", tick=Ticks(stop_at=4), say=lambda line: None)
    assert time.monotonic() - started < 10
    released.set()


def test_the_core_reads_models_without_torch_or_transformers(tiny: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from spill import models; from spill.models.text import Text\n"
        "m = models.resolve(sys.argv[1], tick=lambda: None, say=print)\n"
        "models.adapter_targets(m); Text.load(m.directory, models.stop_ids(m)).prompt('x')\n"
        "assert not {'torch', 'transformers', 'gguf', 'huggingface_hub', 'safetensors'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
