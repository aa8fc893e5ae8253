"""Time, randomness, host and environment variables: the one place where each enters."""

import os
import platform
import secrets
import time
from pathlib import Path

import platformdirs


def utc_now() -> str:
    """The machine's clock, for people to read; nothing is ever decided by it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def seconds() -> float:
    """Monotonic seconds, to measure durations within one process."""
    return time.monotonic()


def sleep(duration: float) -> None:
    """Wait `duration` seconds."""
    time.sleep(duration)


def nonce() -> str:
    """Sixteen random hexadecimal digits that name one run."""
    return secrets.token_hex(8)


def machine_name() -> str:
    """`SPILL_MACHINE`, else the host's name. For people to read; never decides anything."""
    return os.environ.get("SPILL_MACHINE") or platform.node() or "unknown"


def operating_system() -> str:
    """For example `Linux x86_64` or `macOS arm64`."""
    system = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    return f"{system} {platform.machine()}"


def home() -> Path:
    """Where models and file hashes are cached: `SPILL_HOME`, else the platform's cache folder."""
    moved = os.environ.get("SPILL_HOME")
    return Path(moved).expanduser() if moved else Path(platformdirs.user_cache_dir("spill", appauthor=False))
