"""What is written down: plan, runs, stages, commit; and the one converter between records and JSON.

Reading is strict, since a state is untrusted: unknown and doubled keys, NaN, infinities and wrong types are refused.
docs/state-format.md describes every field.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import cattrs
from attrs import field, frozen, validators
from cattrs.gen import make_dict_structure_fn

from spill.engine import Numerics

FORMAT = 1
DEPTH_LIMIT = 32
CLAIM_LIMIT = 10**12

Scalar = str | int | float | bool
T = TypeVar("T")


_BETA = [validators.ge(0.0), validators.lt(1.0)]


@frozen(kw_only=True)
class Plan:
    """What a build computes. Every field is compared on resume, except those named in `NOT_COMPARED`.

    `files` maps each data file of the folder to its sha256; `model` is the content identity of weights, config and
    tokenizer; `plugins` maps each stage to the distribution that brings it; `flags` are the settings that were given
    on the command line when the build began.
    """

    student: str
    model: str
    files: Mapping[str, str]
    dtype: Literal["float32", "bfloat16"]
    seed: int
    epochs: int
    batch: int
    learning_rate: float
    warmup_steps: int = field(validator=validators.ge(0))
    beta1: float = field(validator=_BETA)
    beta2: float = field(validator=_BETA)
    epsilon: float = field(validator=[validators.gt(0.0), validators.le(1.0)])
    weight_decay: float = field(validator=[validators.ge(0.0), validators.le(1.0)])
    clip_norm: float = field(validator=[validators.gt(0.0), validators.lt(math.inf)])
    rank: int
    alpha: float
    max_length: int
    max_new_tokens: int
    stages: tuple[str, ...]
    plugins: Mapping[str, str]
    flags: Mapping[str, Scalar | list[str]]

    NOT_COMPARED = ("student", "flags")


@frozen(kw_only=True)
class Run:
    """One start of spill. `work` maps a stage to the positions it took it from and to; `starts` is above 1 where the
    rows of several runs were folded into one to keep a commit small."""

    # Both stand in names of objects, so a state may not put anything else there.
    nonce: str = field(validator=validators.matches_re(r"[0-9a-f]{16}"))
    claim: int = field(validator=[validators.ge(0), validators.lt(CLAIM_LIMIT)])
    started: str
    engine: str
    machine: str
    system: str
    hardware: str = ""
    numerics: Numerics | None = None
    versions: Mapping[str, str] = field(factory=dict)
    work: Mapping[str, tuple[int, int]] = field(factory=dict)
    notes: tuple[str, ...] = ()
    starts: int = 1


@frozen(kw_only=True)
class StageRecord:
    """How far a stage is: `position` of `total` steps or rows; `objects` maps its roles to names of data objects;
    `summary` is the stage's own, at most a few KiB of JSON."""

    position: int
    total: int
    finished: bool
    objects: Mapping[str, str]
    summary: Mapping[str, Any]


@frozen(kw_only=True)
class ObjectRecord:
    """A data object's size in bytes and sha256 in hexadecimal."""

    size: int
    sha256: str


@frozen(kw_only=True)
class Parent:
    """The commit that this one continues: its number, and the sha256 of its bytes."""

    number: int
    sha256: str


@frozen(kw_only=True)
class Probe:
    """The base model's loss of every answer token of two fixed training rows, to check another engine by."""

    rows: tuple[int, ...]
    losses: tuple[tuple[float, ...], ...]


@frozen(kw_only=True)
class Commit:
    """One log entry. `objects` names every object of the state; `folder` is the one that holds the folder's files."""

    format: int
    state: str
    number: int
    run: str
    parent: Parent | None
    plan: Plan
    runs: tuple[Run, ...]
    stages: Mapping[str, StageRecord]
    objects: Mapping[str, ObjectRecord]
    folder: str
    probe: Probe | None = None


class Malformed(ValueError):
    """JSON that is not what was expected; the text says where and why."""


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)

    def exact(value: Any, kind: type) -> Any:
        # cattrs would turn "3" into 3 and true into 1; a state must say what it means.
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise Malformed(f"{value!r:.40} is not of type {kind.__name__}")
        return value

    for primitive in (str, int, float, bool):
        converter.register_structure_hook(primitive, exact)
    converter.register_structure_hook(Scalar | list[str], lambda value, _: value if _is_flag(value) else _refuse(value))
    converter.register_structure_hook_factory(
        lambda kind: get_origin(kind) is not None and kind == Mapping[str, Any],
        lambda kind: lambda value, _: value if isinstance(value, dict) else _refuse(value),
    )

    def exact_tuple(value: Any, kind: Any) -> Any:
        # cattrs would make a tuple of letters from a string.
        if not isinstance(value, list):
            return _refuse(value)
        inner = get_args(kind)
        kinds = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
        if len(kinds) != len(value):
            return _refuse(value)
        return tuple(converter.structure(v, k) for v, k in zip(value, kinds, strict=True))

    converter.register_structure_hook_func(_is_tuple, exact_tuple)
    return converter


def _is_tuple(kind: Any) -> bool:
    origin: Any = get_origin(kind)
    return origin is tuple


def _is_flag(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(v, str) for v in value)
    return isinstance(value, str | int | float | bool)


def _refuse(value: object) -> Any:
    raise Malformed(f"{value!r:.40} has the wrong type")


_converter = _make_converter()
_converter.register_structure_hook(Plan, make_dict_structure_fn(Plan, _converter))


def structure(value: object, kind: type[T]) -> T:
    """A record from plain JSON values.

    Raises:
        Malformed: a key is missing or unknown, or a value has the wrong type.
    """
    try:
        return _converter.structure(value, kind)
    except Malformed:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise Malformed(f"not a {kind.__name__}: {text:.200}") from error


def unstructure(record: object) -> Any:
    """Plain JSON values from a record."""
    return _converter.unstructure(record)


def to_json(value: object) -> bytes:
    """Compact UTF-8 JSON with sorted keys; refuses NaN and infinities with ValueError."""
    plain = value if isinstance(value, dict | list) else unstructure(value)
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def from_json(data: bytes) -> Any:
    """Plain values from untrusted UTF-8 JSON.

    Raises:
        Malformed: not UTF-8, not JSON, nested too deeply to be written again, a doubled key, a number that is not
            finite, or half of a surrogate pair, which no encoding has.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=_refuse, parse_float=_finite
        )
        _refuse_depth(value)
        if re.search(rb"\\u[dD][89a-fA-F]", data):
            json.dumps(value, ensure_ascii=False).encode()
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from None
    return value


def _refuse_depth(value: Any) -> None:
    layer = [value]
    for _ in range(DEPTH_LIMIT):
        layer = [inner for item in layer for inner in _inner(item)]
        if not layer:
            return
    raise Malformed(f"nested deeper than {DEPTH_LIMIT} levels")


def _inner(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: a dict, or `Malformed` where a key is given twice."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise Malformed(f"the key {key!r:.60} is given twice")
        made[key] = value
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed(f"the number {text:.40} is not finite")
    return value


# Control characters, those that turn or break lines, and halves of surrogate pairs.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, limit: int = 200, keep_lines: bool = False) -> str:
    """Text from a state or a model, made safe for a terminal: control and direction characters become `?`."""
    lines = text.split("\n") if keep_lines else [text]
    cleaned = "\n".join(_UNPRINTABLE.sub("?", line) for line in lines)
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"
