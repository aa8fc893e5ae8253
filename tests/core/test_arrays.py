"""spill.arrays: round trips, hostile headers, and tensors of model files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spill.arrays import METADATA, STATE_HEADER_LIMIT, TensorInfo, load_float32, read, read_header, write_parts
from spill.errors import ModelError, StateError

EXPECT: dict[str, tuple[Any, tuple[int, ...]]] = {"a": (np.float32, (2, 3)), "b": (np.int32, (4,))}


def sample() -> dict[str, Any]:
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "b": np.array([1, -2, 2**31 - 1, 0], np.int32)}


def joined(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    return b"".join(write_parts(arrays, metadata))


def file_bytes(header: Any, payload: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header: bytes as they are, text, or an object to be written as JSON."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def good_header() -> dict[str, Any]:
    return {"a": entry("F32", [2, 3], 0, 24), "b": entry("I32", [4], 24, 40)}


def test_round_trip_in_any_order_of_expectation_gives_writable_copies() -> None:
    arrays = sample()
    data = joined(arrays, {"format": "pt"})
    back = read(data, expect=dict(reversed(EXPECT.items())))
    assert list(back) == ["b", "a"]
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array.tobytes()
        assert back[name].flags.c_contiguous
        back[name][...] = 0
    assert joined(arrays, {"format": "pt"}) == data


def test_empty_arrays_scalars_and_int64_survive() -> None:
    arrays = {"none": np.zeros((0, 3), np.float32), "one": np.float32(2.5).reshape(()), "big": np.array([2**40])}
    expect = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    back = read(memoryview(joined(arrays)), expect=expect)
    assert {name: array.tolist() for name, array in back.items()} == {"none": [], "one": 2.5, "big": [2**40]}
    assert joined({}) == file_bytes("{}      ")
    assert read(joined({}), expect={}) == {}


def test_the_header_is_deterministic_ordered_and_aligned() -> None:
    parts = write_parts(sample())
    length = int.from_bytes(bytes(parts[0][:8]), "little")
    assert length == len(parts[0]) - 8
    assert length % 8 == 0
    assert list(json.loads(bytes(parts[0][8:]))) == ["a", "b"]
    assert list(json.loads(bytes(write_parts(dict(reversed(sample().items())))[0][8:]))) == ["b", "a"]


def test_parts_are_views_not_copies() -> None:
    arrays = sample()
    parts = write_parts(arrays)
    arrays["a"][0, 0] = 99
    assert b"".join(parts) == joined(arrays)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("a", np.zeros(3)),
        ("a", np.zeros(3, ">f4")),
        ("a", np.zeros((3, 4), np.float32).T),
        (METADATA, np.zeros(3, np.float32)),
    ],
)
def test_what_cannot_be_written_is_refused(name: str, array: Any) -> None:
    with pytest.raises(ValueError, match="cannot write"):
        write_parts({name: array})


PAYLOAD = joined(sample())[-40:]

HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "too short"),
    "seven bytes": (b"\0" * 7, "too short"),
    "a length beyond the file": (file_bytes(good_header(), PAYLOAD, length=2**63), "claims"),
    "a length beyond the cap": (file_bytes(b" " * (STATE_HEADER_LIMIT + 8)), "allowed"),
    "not JSON": (file_bytes("{"), "not JSON"),
    "UTF-16": (file_bytes(json.dumps(good_header()).encode("utf-16"), PAYLOAD), "not JSON"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "not JSON"),
    "nested without end": (file_bytes(b"[" * 200_000), "not JSON"),
    "a number of many digits": (file_bytes(b"1" * 5000), "not JSON"),
    "a list": (file_bytes([]), "not a JSON object"),
    "metadata that is no text": (file_bytes(good_header() | {METADATA: {"x": 1}}, PAYLOAD), "metadata"),
    "metadata that is a list": (file_bytes(good_header() | {METADATA: []}, PAYLOAD), "metadata"),
    "a key twice": (file_bytes('{"a": 1, "a": 2}'), "twice"),
    "a field twice": (file_bytes('{"a": {"dtype": "F32", "dtype": "F32"}}'), "twice"),
    "an entry that is a number": (file_bytes({"a": 1}), "'a'"),
    "a field too many": (file_bytes({"a": entry("F32", [2], 0, 8) | {"x": 1}}), "'a'"),
    "a dtype that is a number": (file_bytes({"a": entry(1, [2], 0, 8)}), "malformed"),
    "a negative size": (file_bytes({"a": entry("F32", [-2, -1], 0, 8)}), "malformed"),
    "true as a size": (file_bytes({"a": entry("F32", [True], 0, 4)}), "malformed"),
    "a size of 1e3": (file_bytes(json.dumps({"a": entry("F32", [2], 0, 8)}).replace("[2]", "[2e0]")), "malformed"),
    "NaN as an offset": (file_bytes({"a": entry("F32", [2], float("nan"), 8)}), "malformed"),
    "an offset beyond 63 bits": (file_bytes({"a": entry("F32", [2], 0, 2**63)}), "malformed"),
    "many dimensions": (file_bytes({"a": entry("F32", [1] * 1000, 0, 4)}), "malformed"),
    "three offsets": (file_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}), "malformed"),
    "an end before its start": (file_bytes({"a": entry("F32", [0], 8, 0)}), "does not take"),
    "a size that overflows": (file_bytes({"a": entry("F32", [2**62, 2**62], 0, 0)}), "does not take"),
    "another number of bytes": (file_bytes({"a": entry("F32", [2], 0, 12)}, b"\0" * 12), "does not take"),
    "a gap": (file_bytes({"a": entry("F32", [2], 4, 12)}, b"\0" * 12), "gap or overlap"),
    "an overlap": (
        file_bytes({"a": entry("F32", [2, 3], 0, 24), "b": entry("I32", [4], 20, 36)}, PAYLOAD[4:]),
        "gap or overlap",
    ),
    "bytes too few": (file_bytes(good_header(), PAYLOAD[:-1]), "bytes"),
    "bytes too many": (file_bytes(good_header(), PAYLOAD + b"\0"), "bytes"),
    "an array missing": (file_bytes({"a": entry("F32", [2, 3], 0, 24)}, PAYLOAD[:24]), "missing, the first is 'b'"),
    "an array too many": (
        file_bytes(good_header() | {"\x1b[31m" + "c" * 999: entry("F32", [0], 40, 40)}, PAYLOAD),
        r"unknown, the first is '\x1b[31m",
    ),
    "a lone surrogate as a name": (file_bytes(good_header() | {"\ud800": entry("F32", [0], 40, 40)}, PAYLOAD), "ud800"),
    "another shape": (file_bytes(good_header() | {"a": entry("F32", [3, 2], 0, 24)}, PAYLOAD), "expected F32 (2, 3)"),
    "another dtype": (file_bytes(good_header() | {"b": entry("F32", [4], 24, 40)}, PAYLOAD), "expected I32 (4,)"),
    "a dtype nobody knows": (file_bytes(good_header() | {"b": entry("X\n", [4], 24, 40)}, PAYLOAD), "expected I32"),
    "not a number": (joined(sample() | {"a": np.full((2, 3), np.nan, np.float32)}), "not finite"),
    "infinity": (joined(sample() | {"a": np.full((2, 3), np.inf, np.float32)}), "not finite"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bytes_are_refused_in_one_printable_line(case: str) -> None:
    data, fault = HOSTILE[case]
    with pytest.raises(StateError) as caught:
        read(data, expect=EXPECT)
    message = str(caught.value)
    assert fault in message
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 300


def test_every_cut_of_a_good_file_is_refused() -> None:
    data = joined(sample())
    for length in range(len(data)):
        with pytest.raises(StateError):
            read(data[:length], expect=EXPECT)


def test_model_tensors_of_three_dtypes_are_read_as_float32(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25], [1e-8, 65504.0, -0.0]], np.float32)
    bfloat = (values.view(np.uint32) >> 16).astype("<u2")
    header = {
        METADATA: {"format": "pt"},
        "half": entry("F16", [2, 3], 36, 48),
        "brain": entry("BF16", [2, 3], 0, 12),
        "full": entry("F32", [2, 3], 12, 36),
        "odd": entry("F8_E8M9", [5], 48, 49),
    }
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(header, bfloat.tobytes() + values.tobytes() + values.astype("<f2").tobytes() + b"\0"))
    infos = read_header(path)
    assert list(infos) == ["half", "brain", "full", "odd"]
    assert infos["brain"] == TensorInfo(
        dtype="BF16", shape=(2, 3), start=os.path.getsize(path) - 49, end=os.path.getsize(path) - 37
    )
    loaded = {name: load_float32(path, infos[name]) for name in ("half", "brain", "full")}
    assert all(array.dtype == np.float32 and array.flags.c_contiguous for array in loaded.values())
    assert loaded["full"].tobytes() == values.tobytes()
    assert loaded["half"].tobytes() == values.astype(np.float16).astype(np.float32).tobytes()
    assert loaded["brain"].tobytes() == (bfloat.astype(np.uint32) << 16).tobytes()
    with pytest.raises(ModelError, match="F8_E8M9"):
        load_float32(path, infos["odd"])


def test_a_model_file_that_is_no_safetensors_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        read_header(path)
    unlimited = {"a length beyond the cap", "an array missing", "an array too many", "a lone surrogate as a name"}
    values_unread = {"another shape", "another dtype", "a dtype nobody knows", "not a number", "infinity"}
    for case, (data, _) in HOSTILE.items():
        if case in unlimited | values_unread:
            continue
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"model\.safetensors is not a usable"):
            read_header(path)


def test_a_model_file_cut_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(joined({"a": np.ones(8, np.float32)}))
    info = read_header(path)["a"]
    os.truncate(path, info.end - 4)
    with pytest.raises(ModelError, match="7 of 8"):
        load_float32(path, info)
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        load_float32(path, info)
