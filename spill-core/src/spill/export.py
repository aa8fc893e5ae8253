"""Handing the tuned model to other tools: the adapter as PEFT or mlx-lm reads it, or a whole merged model directory."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from spill import arrays
from spill.arrays import TensorInfo
from spill.engine import AdapterSpec, Float32, TrainingState
from spill.environment import nonce
from spill.errors import InputError, StoreError
from spill.models import TAGS, Model
from spill.records import Plan, to_json
from spill.stores import Buffer

PEFT_PREFIX = "base_model.model."
CHUNK = 8 * 2**20
_LAYER = re.compile(r"(.*\.(?:layers|h)\.(\d+)\.)(.+)")


def peft_files(state: TrainingState, spec: AdapterSpec, plan: Plan) -> dict[str, Sequence[Buffer]]:
    """`adapter_model.safetensors` and `adapter_config.json` as peft reads them."""
    weights = {f"{PEFT_PREFIX}{name}.weight": array for name, array in state.adapter.items()}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": repository(plan.student),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [target.name for target in spec.targets],
        "use_dora": False,
        "use_rslora": False,
    }
    return {
        "adapter_model.safetensors": arrays.write_parts(weights, {"format": "pt"}),
        "adapter_config.json": [to_json(config)],
    }


def mlx_files(state: TrainingState, spec: AdapterSpec, plan: Plan) -> dict[str, Sequence[Buffer]]:
    """`adapters.safetensors` and `adapter_config.json` as mlx-lm reads them: transposed, (in, rank) and (rank, out)."""
    weights: dict[str, Float32] = {}
    keys: set[str] = set()
    layers = 0
    for target in spec.targets:
        place = _LAYER.fullmatch(target.name)
        if place is None:
            raise InputError(f"mlx-lm adapts layers of blocks only, {target.name} is none; use --layout peft")
        keys.add(place[3])
        layers = max(layers, int(place[2]) + 1)
        for side in ("a", "b"):
            array = state.adapter[f"{target.name}.lora_{side.upper()}"]
            weights[f"{target.name}.lora_{side}"] = np.ascontiguousarray(array.T)
    config: dict[str, Any] = {
        "fine_tune_type": "lora",
        "model": repository(plan.student),
        "num_layers": layers,
        "lora_parameters": {"rank": spec.rank, "scale": spec.scale, "dropout": 0.0, "keys": sorted(keys)},
    }
    return {
        "adapters.safetensors": arrays.write_parts(weights, {"format": "mlx"}),
        "adapter_config.json": [to_json(config)],
    }


LAYOUTS: Mapping[str, Callable[[TrainingState, AdapterSpec, Plan], dict[str, Sequence[Buffer]]]] = {
    "peft": peft_files,
    "mlx": mlx_files,
}


def write_adapter(directory: Path, layout: str, state: TrainingState, spec: AdapterSpec, plan: Plan) -> list[Path]:
    """Write the adapter's files. The same state gives the same bytes.

    Raises:
        InputError: the directory exists and is not empty.
        StoreError: it cannot be written.
    """
    files = LAYOUTS[layout](state, spec, plan)
    with _appearing(directory) as made:
        for name, parts in files.items():
            with open(made / name, "wb") as file:
                for part in parts:
                    file.write(part)
    return [directory / name for name in files]


@frozen(kw_only=True)
class Merged:
    """What merging wrote, and the largest change that rounding to the base's dtype made to a weight."""

    files: tuple[Path, ...]
    dtype: str
    rounding: float


def write_merged(
    directory: Path, model: Model, state: TrainingState, spec: AdapterSpec, tick: Callable[[], None]
) -> Merged:
    """A whole model directory in the base's dtype: `W + (alpha / rank) * B A`, computed in float32.

    Raises:
        InputError: the directory exists and is not empty.
        StoreError: it cannot be written.
    """
    targets = {f"{target.name}.weight": target.name for target in spec.targets}
    worst, dtypes = 0.0, set()
    with _appearing(directory) as made:
        for source in model.files():
            if source.suffix != ".safetensors":
                shutil.copyfile(source, made / source.name)
                continue
            infos = arrays.read_header(source)
            with open(source, "rb") as old, open(made / source.name, "wb") as new:
                _copy(old, new, min(info.start for info in infos.values()), tick)
                for name, info in sorted(infos.items(), key=lambda item: item[1].start):
                    tick()
                    if name not in targets:
                        old.seek(info.start)
                        _copy(old, new, info.end - info.start, tick)
                        continue
                    merged = arrays.load_float32(source, info) + _delta(state, targets[name], spec.scale)
                    stored, error = _rounded(merged, info)
                    worst = max(worst, error)
                    dtypes.add(info.dtype)
                    new.write(stored)
    files = tuple(sorted(directory.iterdir()))
    return Merged(files=files, dtype=", ".join(sorted(dtypes)), rounding=worst)


def repository(student: str) -> str:
    """The hub's name of a student, where it has one: `hf:org/name@revision` is `org/name`."""
    if student.startswith("hf:"):
        return student[3:].split("@")[0]
    return TAGS[student].repository if student in TAGS else student


def _delta(state: TrainingState, name: str, scale: float) -> Float32:
    product = state.adapter[f"{name}.lora_B"] @ state.adapter[f"{name}.lora_A"]
    return (product * np.float32(scale)).astype(np.float32)


def _rounded(merged: Float32, info: TensorInfo) -> tuple[bytes, float]:
    """The bytes of the tensor in its file's dtype, to the nearest and ties to even, and the largest change."""
    if info.dtype == "BF16":
        bits = np.ascontiguousarray(merged).view(np.uint32)
        high = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        back = (high.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return high.tobytes(), float(np.abs(back - merged).max())
    narrow = merged.astype({"F32": "<f4", "F16": "<f2"}[info.dtype])
    return narrow.tobytes(), float(np.abs(narrow.astype(np.float32) - merged).max())


def _copy(old: Any, new: Any, size: int, tick: Callable[[], None]) -> None:
    while size:
        tick()
        block = old.read(min(size, CHUNK))
        if not block:
            raise OSError("the model's weights end early")
        new.write(block)
        size -= len(block)


@contextmanager
def _appearing(directory: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `directory` once it is whole, and vanishes where that fails.

    Raises:
        InputError: `directory` exists and is not empty.
        StoreError: the file system fails.
    """
    temporary = directory.with_name(f".{directory.name}.{nonce()}")
    try:
        taken = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
        if taken:
            raise InputError(f"{directory} is there already; give --out a folder that is new or empty")
        temporary.mkdir(parents=True)
        try:
            yield temporary
            os.replace(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}; give another --out") from error
