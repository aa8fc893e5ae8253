"""What tests of states share: looking into a state from outside, and copies of a state with something changed."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spill.records import Commit, Plan, Run, StageRecord
from spill.state import newest
from spill.stores.local import LocalStore

STATE_OBJECT = "state.safetensors"


def open_local(state: Path) -> LocalStore:
    return LocalStore(str(state))


def head(state: Path) -> Commit:
    """The state's newest commit whose objects verify."""
    found = newest(open_local(state))
    assert found is not None, f"there is no state in {state}"
    return found.commit


def position(state: Path, stage: str) -> int:
    record = head(state).stages.get(stage)
    return record.position if record else 0


def journal(state: Path, stage: str, commit: Commit | None = None) -> list[dict[str, Any]]:
    """Every record of a stage: of a tune each step's rows, learning rate, loss, tokens and norm."""
    record = (commit or head(state)).stages[stage]
    segments = sorted(role for role in record.objects if role.startswith("journal-"))
    return [item for role in segments for item in json.loads((state / record.objects[role]).read_bytes())]


def training_state(state: Path, commit: Commit | None = None) -> bytes:
    """Adapter and both moments as they are stored."""
    return (state / (commit or head(state)).stages["tune"].objects[STATE_OBJECT]).read_bytes()


def everything(state: Path) -> dict[str, Any]:
    """All that a finished build made, to compare exactly: every journal, and the arrays."""
    commit = head(state)
    made: dict[str, Any] = {stage: journal(state, stage, commit) for stage in commit.plan.stages}
    return {**made, "arrays": training_state(state, commit)}


def log_numbers(state: Path) -> list[int]:
    return sorted(int(path.stem) for path in (state / "log").glob("*.json") if not path.name.startswith("."))


def entry(state: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((state / "log" / f"{number}.json").read_bytes())
    return found


def newest_entry(state: Path) -> dict[str, Any]:
    return entry(state, log_numbers(state)[-1])


def files(top: Path) -> dict[str, bytes]:
    """Every regular file below a folder, by relative name."""
    return {p.relative_to(top).as_posix(): p.read_bytes() for p in sorted(top.rglob("*")) if p.is_file()}


def loadable(state: Path) -> list[frozenset[str]]:
    """The distinct sets of objects (but the empty one, of a new state's claim) that commits name and that are whole on
    disk, the oldest first.

    Looks at the files alone, without spill, so that it holds the state's own code to what it says.
    """
    found: list[frozenset[str]] = []
    for number in log_numbers(state):
        try:
            objects = entry(state, number)["objects"]
        except ValueError:
            continue
        names = frozenset(objects)
        if names and names not in found and all(_is_whole(state / name, record) for name, record in objects.items()):
            found.append(names)
    return found


def _is_whole(path: Path, record: Mapping[str, Any]) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) == record["size"] and hashlib.sha256(data).hexdigest() == record["sha256"]


def rewrite(state: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the newest log entry as somebody would who can write to the state."""
    number = log_numbers(state)[-1]
    plain = entry(state, number)
    change(plain)
    (state / "log" / f"{number}.json").write_bytes(sealed(plain))


def sealed(plain: Mapping[str, Any]) -> bytes:
    """A log entry of these values, as spill would write it, with the seal that they have; also of values that spill
    never writes."""

    def written(values: Mapping[str, Any]) -> bytes:
        text = json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return text.encode("utf-8", "surrogatepass")

    bare = {key: value for key, value in plain.items() if key != "seal"}
    return written({**bare, "seal": hashlib.sha256(written(bare)).hexdigest()})


def replace_object(state: Path, stage: str, role: str, data: bytes) -> None:
    """Put other bytes behind a stage's role, with the size and hash that the newest commit then names."""

    def change(plain: dict[str, Any]) -> None:
        name = plain["stages"][stage]["objects"][role]
        (state / name).write_bytes(data)
        plain["objects"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    rewrite(state, change)


def one_line(error: str) -> bool:
    """Whether this is what a person may see of an error: a line, no traceback, nothing unforeseen, nothing that a
    terminal would obey."""
    unfit = ("Traceback", "unexpected", "\x1b", "\x07", "\x9b")
    return error.startswith("spill: ") and not any(part in error for part in unfit)


def make_plan(**changes: Any) -> Plan:
    """A plan for tests that drive a claim without a build."""
    values: dict[str, Any] = {
        "student": "local", "model": "sha256:" + "0" * 64, "files": {"train.jsonl": "1" * 64}, "dtype": "float32",
        "seed": 0, "epochs": 1, "batch": 4, "learning_rate": 1e-3, "warmup_steps": 1, "beta1": 0.9, "beta2": 0.999,
        "epsilon": 1e-8, "weight_decay": 0.0, "clip_norm": 1.0, "rank": 2, "alpha": 4.0, "max_length": 64,
        "max_new_tokens": 8, "stages": ("tune",), "plugins": {"tune": "spill-core"}, "flags": {},
    }  # fmt: skip
    return Plan(**{**values, **changes})


def make_run(name: str, **changes: Any) -> Run:
    """A run of a machine called `name`, with a nonce of its own."""
    values: dict[str, Any] = {
        "nonce": hashlib.sha256(name.encode()).hexdigest()[:16], "claim": 0, "started": "2026-01-01T00:00:00Z",
        "engine": "numpy", "machine": name, "system": "Linux x86_64",
    }  # fmt: skip
    return Run(**{**values, **changes})


def step_record(position: int, total: int = 1000) -> StageRecord:
    return StageRecord(position=position, total=total, finished=position == total, objects={}, summary={})


SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAXAMPLEXAMPLE0001",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIxK7MDENGbPxRfiCYEXAMPLEKEY1",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountKey=c2VjcmV0LXNlY3JldA==",
    "HF_TOKEN": "hf_exampleexampleexampleexample",
}


def without_nonce(text: str) -> str:
    """Sixteen hexadecimal digits of a run as `N`, to compare texts of two runs."""
    return re.sub(r"[0-9a-f]{16}", "N", text)
