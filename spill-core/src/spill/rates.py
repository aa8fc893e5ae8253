"""How long a unit of a stage took here last time, remembered in the cache folder to estimate the next build."""

import contextlib
import json
import os
from collections.abc import Mapping

from spill.environment import home, nonce

SECONDS_LIMIT = 10**6


def key(engine: str, dtype: str, model: str, stage: str) -> str:
    """What a rate depends on, as one text. `model` is its identity."""
    return f"{engine} {dtype} {model} {stage}"


def remember(name: str, unit_seconds: float) -> None:
    """Keep a rate. A cache that cannot be written costs only the estimate."""
    target = home() / "rates.json"
    temporary = target.with_name(f"rates.{nonce()}.tmp")
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps({**known(), name: round(unit_seconds, 6)}, indent=0, sort_keys=True))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def known() -> dict[str, float]:
    """Every remembered rate, in seconds a unit."""
    try:
        read = json.loads((home() / "rates.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(read, dict):
        return {}
    return {k: float(v) for k, v in read.items() if type(v) in (int, float) and 0 < v < SECONDS_LIMIT}


def estimate(units: Mapping[str, int]) -> float | None:
    """Seconds for so many units by rate key; None where a rate is not known."""
    rates = known()
    if any(name not in rates for name in units):
        return None
    return sum(rates[name] * count for name, count in units.items())


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3 h`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
