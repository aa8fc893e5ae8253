"""Safetensors in numpy: written without copies, read from untrusted bytes, and tensors out of model files.

The layout is that of the safetensors library: 8 bytes little-endian header length, a JSON header padded with
spaces, then the arrays without gaps. The same arrays, in the same order, always give the same bytes.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import DTypeLike, NDArray

from spill.errors import ModelError, StateError

STATE_HEADER_LIMIT = 8 * 1024 * 1024
MODEL_HEADER_LIMIT = 100 * 1024 * 1024
METADATA = "__metadata__"

_NUMPY: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}
# Bits of an element, where we know it. Other dtypes may stand in a model file; only their place is checked.
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F16": 16, "BF16": 16, "U16": 16, "I16": 16,
    "F32": 32, "U32": 32, "I32": 32, "F64": 64, "U64": 64, "I64": 64,
}  # fmt: skip


@frozen(kw_only=True)
class TensorInfo:
    """A tensor in a file: its dtype as safetensors names it (`BF16`), its shape, and its bytes in the file,
    from `start` up to but without `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Fault(Exception):
    """What is wrong with a header, in words that fit after a colon."""


def write_parts(
    arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """A safetensors file as parts to write one after another: the header, then the arrays in the order given.

    Nothing is copied: the parts are views of the arrays, so write or hash them before the arrays change.

    Args:
        arrays: C-contiguous float32, int32 or int64, any shape.
        metadata: the file's `__metadata__`, for example `{"format": "pt"}`.

    Raises:
        ValueError: an array has another dtype or is not C-contiguous, or is named `__metadata__`.
    """
    header: dict[str, Any] = {}
    if metadata is not None:
        header[METADATA] = dict(metadata)
    parts: list[bytes | memoryview] = []
    place = 0
    for name, array in arrays.items():
        kind = _NAMES.get(array.dtype)
        if name == METADATA or kind is None:
            raise ValueError(f"cannot write {name!r} of dtype {array.dtype}: float32, int32 or int64 is needed")
        if not array.flags.c_contiguous:
            raise ValueError(f"cannot write {name!r}: it is not C-contiguous (numpy.ascontiguousarray makes it so)")
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        parts.append(array.reshape(-1).view(np.uint8).data)
        place += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def read(
    data: bytes | memoryview, *, expect: Mapping[str, tuple[DTypeLike, tuple[int, ...]]]
) -> dict[str, NDArray[Any]]:
    """Arrays out of untrusted bytes: exactly the expected ones, in the order of `expect`, as writable copies.

    Args:
        data: a whole safetensors file.
        expect: every array's dtype (float32, int32 or int64) and shape. Metadata is checked and dropped.

    Raises:
        StateError: header, keys, dtypes, shapes, places or length are not those, or a number is not finite.
    """
    view = memoryview(data).cast("B")
    try:
        return _read(view, {name: (_NAMES[np.dtype(dtype)], shape) for name, (dtype, shape) in expect.items()})
    except _Fault as fault:
        raise StateError(f"the state's arrays cannot be used: {fault}") from None


def _read(view: memoryview, expect: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, NDArray[Any]]:
    if len(view) < 8:
        raise _Fault(f"{len(view)} bytes are too short for a safetensors file")
    length = _header_length(bytes(view[:8]), len(view), STATE_HEADER_LIMIT)
    infos = _parse(bytes(view[8 : 8 + length]), len(view) - 8 - length, base=8 + length)
    missing, extra = expect.keys() - infos.keys(), infos.keys() - expect.keys()
    if missing or extra:
        word, names = ("missing", missing) if missing else ("unknown", extra)
        raise _Fault(f"{len(names)} arrays are {word}, the first is {_shown(min(names))}")
    arrays: dict[str, NDArray[Any]] = {}
    for name, (kind, shape) in expect.items():
        info = infos[name]
        if (info.dtype, info.shape) != (kind, tuple(shape)):
            is_now = f"{_shown(info.dtype)} {_shown(info.shape)}"
            raise _Fault(f"{_shown(name)} is {is_now}, expected {kind} {_shown(tuple(shape))}")
        array = np.frombuffer(view[info.start : info.end], dtype=_NUMPY[kind]).reshape(info.shape).copy()
        if kind == "F32" and not np.isfinite(array).all():
            raise _Fault(f"{_shown(name)} holds numbers that are not finite")
        arrays[name] = array
    return arrays


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model's safetensors file, of any dtype, in the header's order; reads no tensor.

    Raises:
        ModelError: the file cannot be read, or is not a whole safetensors file.
    """
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise _Fault(f"{len(start)} bytes are too short for a safetensors file")
            length = _header_length(start, size, MODEL_HEADER_LIMIT)
            return _parse(file.read(length), size - 8 - length, base=8 + length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; is the model whole?") from error
    except _Fault as fault:
        raise ModelError(f"{path} is not a usable safetensors file: {fault}; fetch the model again") from None


def load_float32(path: Path, info: TensorInfo) -> NDArray[np.float32]:
    """One tensor of a file, F32, F16 or BF16, as a C-contiguous float32 array; all three convert exactly.

    Args:
        path: the file whose `read_header` gave `info`.

    Raises:
        ModelError: the tensor has another dtype, or the file cannot be read or ends before the tensor does.
    """
    stored = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(info.dtype)
    if stored is None:
        raise ModelError(f"{path} holds a tensor of dtype {_shown(info.dtype)}; only F32, F16 and BF16 can be read")
    count = math.prod(info.shape)
    try:
        raw: NDArray[Any] = np.fromfile(path, dtype=stored, count=count, offset=info.start)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; is the model whole?") from error
    if raw.size != count:
        raise ModelError(f"{path} ends inside a tensor: {raw.size} of {count} numbers; fetch the model again")
    if info.dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
    return raw.astype(np.float32, copy=False).reshape(info.shape)


def _header_length(start: bytes, size: int, limit: int) -> int:
    length = int.from_bytes(start, "little")
    if length > limit or length > size - 8:
        raise _Fault(f"its header claims {length} bytes, of {size} in all and {limit} allowed")
    return length


def _parse(header: bytes, payload: int, base: int) -> dict[str, TensorInfo]:
    """A header's entries, checked against each other and against `payload` bytes that start at byte `base`."""
    try:
        table = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError too
        raise _Fault(f"its header is not JSON ({type(error).__name__})") from None
    if not isinstance(table, dict):
        raise _Fault("its header is not a JSON object")
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _Fault("its metadata does not map texts to texts")
    infos = {name: _info(name, entry, base) for name, entry in table.items()}
    place = base
    for info in sorted(infos.values(), key=lambda info: (info.start, info.end)):
        if info.start != place:
            raise _Fault(f"its arrays leave a gap or overlap at byte {place}")
        place = info.end
    if place != base + payload:
        raise _Fault(f"its arrays take {place - base} bytes, but {payload} are there")
    return infos


def _info(name: str, entry: Any, base: int) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Fault(f"the entry of {_shown(name)} is not dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _Fault(f"the entry of {_shown(name)} has a malformed dtype, shape or data_offsets")
    start, end = offsets
    bits = _BITS.get(dtype)
    if end < start or (bits is not None and (end - start) * 8 != math.prod(shape) * bits):
        size = f"{_shown(dtype)} {_shown(tuple(shape))}"
        raise _Fault(f"{_shown(name)} is {size}, which does not take {end - start} bytes")
    return TensorInfo(dtype=dtype, shape=tuple(shape), start=base + start, end=base + end)


def _counts(value: Any) -> bool:
    """Whole numbers from 0 below 2**63, at most eight; `True` is none."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(count) is int and 0 <= count < 2**63 for count in value)
    )


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise _Fault("its header names a key twice")
    return table


def _shown(value: object) -> str:
    """A value from a file, made fit to print: ASCII without control characters, and short."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
