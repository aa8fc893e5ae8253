"""Handing the tuned adapter to other tools: PEFT's layout."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spill import arrays
from spill.engine import AdapterSpec, TrainingState
from spill.environment import nonce
from spill.errors import InputError, StoreError
from spill.models import TAGS
from spill.records import Plan, to_json
from spill.stores import Buffer

PEFT_PREFIX = "base_model.model."


def write_peft(directory: Path, state: TrainingState, spec: AdapterSpec, plan: Plan) -> list[Path]:
    """`adapter_model.safetensors` and `adapter_config.json` as peft reads them. The same state gives the same bytes.

    Raises:
        InputError: the directory exists and is not empty.
        StoreError: it cannot be written.
    """
    try:
        taken = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    except OSError as error:
        raise StoreError(f"cannot look into {directory}: {error.strerror or error}; give another --out") from error
    if taken:
        raise InputError(f"{directory} is there already; give --out a folder that is new or empty")
    names = {name: f"{PEFT_PREFIX}{name}.weight" for name in state.adapter}
    weights = arrays.write_parts({names[name]: array for name, array in state.adapter.items()}, {"format": "pt"})
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
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files: dict[str, Sequence[Buffer]] = {
            "adapter_model.safetensors": weights,
            "adapter_config.json": [to_json(config)],
        }
        for name, parts in files.items():
            temporary = directory / f".{name}.{nonce()}"
            try:
                with open(temporary, "xb") as file:
                    for part in parts:
                        file.write(part)
                os.replace(temporary, directory / name)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {directory}: {error.strerror or error}; give another --out") from error
    return [directory / name for name in files]


def repository(student: str) -> str:
    """The hub's name of a student, where it has one: `hf:org/name@revision` is `org/name`."""
    if student.startswith("hf:"):
        return student[3:].split("@")[0]
    return TAGS[student].repository if student in TAGS else student
