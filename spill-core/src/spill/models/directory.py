"""A model directory on this machine: its files, its identity by content, its tensors' names and shapes, its targets."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from attrs import field, frozen

from spill.arrays import TensorInfo, read_header
from spill.engine import Target, Tick
from spill.errors import ModelError
from spill.models.cache import sha256_of
from spill.records import printable

INDEX = "model.safetensors.index.json"
# Every file that is fetched, staged, hashed or read. Weights are safetensors only: a pickle can run code.
FILES = (
    "model*.safetensors",
    INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Written by our GGUF converter beside what it makes: the identity of the source, and of what was written.
SOURCE = "spill-source.json"

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

MAX_JSON = 64 * 2**20
FLOATS = ("F64", "F32", "F16", "BF16")
BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
MIXTURE = re.compile(r"(?:^|\.)(?:experts|shared_experts?|block_sparse_moe|router)(?:\.|$)|\.gate\.weight$")
# These keep a layer's weight as (in, out); every other family keeps (out, in).
TRANSPOSED = ("gpt2", "openai-gpt")


@frozen(kw_only=True)
class Model:
    """A model directory that lies on this machine, ready to load.

    Attributes:
        student: how it was asked for, without local paths: the tag, `hf:org/name@revision`, or `local`.
        directory: where it lies.
        identity: `sha256:<hex>` over the content of its weights, config and tokenizer (`content_identity`), so that
            equal content has equal identity wherever it came from. Of a model that spill converted, `gguf-v<version of
            the converter>:sha256:<hex of the source file>`, also when the converted directory was copied elsewhere.
        parameters: number of weights in the safetensors files; a tied output layer is not counted twice.
        config: config.json, parsed.
        tensors: every tensor of the safetensors files by name, from their headers.
        revision: the hub commit that it was fetched as, 40 hexadecimal digits; empty for anything else.
    """

    student: str
    directory: Path
    identity: str
    parameters: int
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False, factory=dict)
    revision: str = ""

    def files(self) -> list[Path]:
        """The files that are the model, sorted by name: what its identity is made of, and what to copy elsewhere."""
        return model_files(self.directory)


def is_model_file(name: str) -> bool:
    """Whether a file of this name belongs to a model. Names with a folder in them never do."""
    return "/" not in name and "\\" not in name and any(fnmatchcase(name, pattern) for pattern in FILES)


def model_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if is_model_file(p.name) and p.is_file())


def read_directory(directory: Path, *, student: str, tick: Tick, revision: str = "") -> Model:
    """Check a model directory, read its headers and hash its files.

    Raises:
        ModelError: a file is missing, cut short or malformed, the weights are not safetensors, or it is an adapter.
    """
    tensors = _read_tensors(directory)
    config = read_object(directory / "config.json")
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(f"{directory} has no tokenizer.json; convert its tokenizer to that format")
    identity = source_identity(directory, tick) or content_identity(directory, tick)
    return Model(
        student=student,
        directory=directory,
        identity=identity,
        parameters=sum(prod(t.shape) for t in tensors.values()),
        config=config,
        tensors=tensors,
        revision=revision,
    )


def content_identity(directory: Path, tick: Tick) -> str:
    """`sha256:` and the sha256 of one line `<name> <sha256 of the file>` for each of the model's files, by name.

    The files are those of `FILES` that exist. Nothing else in the directory counts, nor does where it lies.
    """
    lines = [f"{path.name} {sha256_of(path, tick)}\n" for path in model_files(directory)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def write_source(directory: Path, identity: str, tick: Tick) -> None:
    """Note what a converted directory was made from, tied to exactly the content that lies there now."""
    source = {"identity": identity, "content": content_identity(directory, tick)}
    (directory / SOURCE).write_text(json.dumps(source, indent=2) + "\n")


def source_identity(directory: Path, tick: Tick) -> str:
    """The identity that `write_source` noted; empty without a note, or where the content is no longer that one."""
    path = directory / SOURCE
    if not path.is_file():
        return ""
    source = read_object(path)
    identity = source.get("identity")
    known = isinstance(identity, str) and source.get("content") == content_identity(directory, tick)
    return str(identity) if known else ""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelError: missing, unreadable, larger than 64 MiB, or not a JSON object.
    """
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError(f"more than {MAX_JSON} bytes")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}: not a model directory, or not a whole one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {printable(str(error))}") from error
    return value


def adapter_targets(model: Model) -> tuple[Target, ...]:
    """The layers that get an adapter: every 2-D `.weight` within a numbered block, by block number, then name.

    Names are those of the safetensors files, so a layer that the files fuse is one target. Embeddings and the output
    layer lie outside the blocks and are never targets, tied or not.

    Raises:
        ModelError: a mixture of experts, quantized weights, weights kept as (in, out), or no target at all.
    """
    if model.config.get("model_type") in TRANSPOSED:
        raise ModelError(
            f"models of type {model.config['model_type']!r} are not supported: their weights are transposed"
        )
    found: list[tuple[int, Target]] = []
    for name, tensor in model.tensors.items():
        block = BLOCK.search(name)
        if block is None:
            continue
        shown = printable(name)
        if MIXTURE.search(name):
            raise ModelError(f"{model.student} is a mixture of experts (it has {shown}); choose a dense model")
        if len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        if tensor.dtype not in FLOATS:
            raise ModelError(
                f"{model.student} is quantized ({shown} is {tensor.dtype}); choose one in float32, float16 or bfloat16"
            )
        rows, columns = tensor.shape
        target = Target(name=name.removesuffix(".weight"), in_features=columns, out_features=rows)
        found.append((int(block[1]), target))
    if not found:
        raise ModelError(
            f"{model.student} has no layer to adapt: no 2-D weight is named …layers.N.….weight or …h.N.….weight"
        )
    found.sort(key=lambda pair: (pair[0], pair[1].name))
    return tuple(target for _, target in found)


def _read_tensors(directory: Path) -> dict[str, TensorInfo]:
    if not directory.is_dir():
        raise ModelError(f"there is no directory {directory}; --student takes a tag, hf:org/name or a model directory")
    if (directory / "adapter_config.json").exists():
        raise ModelError(f"{directory} holds adapter_config.json: an adapter, not a whole model; merge it first")
    shards = [path for path in model_files(directory) if path.suffix == ".safetensors"]
    if not shards:
        raise ModelError(_no_weights(directory))
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, tensor in read_header(shard).items():
            if name in tensors:
                raise ModelError(f"{directory} holds the tensor {printable(name)} twice; keep one set of weights")
            tensors[name] = tensor
    if (directory / INDEX).is_file():
        _check_index(directory, tensors, {path.name for path in shards})
    return tensors


def _no_weights(directory: Path) -> str:
    pickled = [p.name for p in directory.iterdir() if p.suffix in PICKLES]
    if pickled:
        return f"{directory} holds pickled weights ({printable(pickled[0])}) only; convert them to safetensors"
    return f"{directory} has no model*.safetensors: not a model directory, or not a whole one"


def _check_index(directory: Path, tensors: Iterable[str], shards: set[str]) -> None:
    listed = read_object(directory / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise ModelError(f"{directory / INDEX} has no weight_map of tensor names to file names")
    missing = sorted(set(listed.values()) - shards) or sorted(set(listed) - set(tensors))
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelError(f"{directory} is not whole: its index lists {printable(missing[0])}{more}, which is missing")
