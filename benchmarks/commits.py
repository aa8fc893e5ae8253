"""What commits cost, measured: `python benchmarks/commits.py [--seconds 150]`.

Prints the bytes of each commit of a tune against adapter and moments, the share of a tune's time that its commits take
on a store with 100 ms added to every request, and how long the newest commit is looked for, and the history told, among
many. Needs spill-core alone; its numpy engine trains a tiny model. Nothing is judged: the figures are for people.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from spill import holding, runner, stores
from spill.cli import run
from spill.records import Parent
from spill.signals import StopRequest
from spill.state import entry_bytes, log_name, newest
from spill.stores import Buffer, Store
from spill.stores.local import LocalStore
from spill.testing.faulty_store import FaultyStore, delay, never
from spill.testing.memory_store import MemoryStore
from spill.testing.models import tiny_model
from spill.testing.plugins import install_plugin

LATENCY = 0.1
FEW, MANY = 5, 5000


class Meter(MemoryStore):
    """`spent` holds, for every commit, the bytes written since the one before, its own entry included."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[str, int] = {}
        self._bytes = 0

    def create(self, name: str, data: bytes) -> None:
        super().create(name, data)
        self.spent[name] = self._bytes + len(data)
        self._bytes = 0

    def write(self, name: str, parts: Sequence[Buffer]) -> None:
        super().write(name, parts)
        self._bytes += sum(memoryview(part).nbytes for part in parts)


@contextlib.contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def spill(*arguments: object) -> str:
    """Run the command line; what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run(StopRequest(), [str(a) for a in arguments])
    assert code == 0, f"spill {arguments} exits {code}"
    return said.getvalue()


def write_folder(directory: Path, student: Path, rows: int, epochs: int, rank: int = 32) -> Path:
    directory.mkdir()
    (directory / "instructions.txt").write_text("Say yes or no.\n")
    (directory / "evals.jsonl").write_text('{"prompt": "tell", "expected": "yes"}\n')
    training = [{"prompt": f"say {i}", "answer": ("yes", "no")[i % 2]} for i in range(rows)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in training))
    settings = {"student": str(student), "engine": "numpy", "rank": rank, "batch": 1, "epochs": epochs}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
    (directory / "spill.toml").write_text("".join(lines) + 'stages = ["tune"]\n')
    return directory


def measure_bytes(top: Path, student: Path) -> None:
    folder = write_folder(top / "bytes", student, rows=60, epochs=1)
    meter = Meter()
    with replaced(stores, "load_target", lambda spec: lambda uri: meter):
        spill("build", folder, "--state", top / "anywhere", "--commit-every", 0)
    head = newest(meter)
    assert head
    arrays = head.commit.objects[head.commit.stages["tune"].objects["state.safetensors"]].size
    tuned = [size for name, size in meter.spent.items() if name not in ("log/1.json", "log/2.json")]
    print(
        f"bytes per commit: {len(tuned)} commits of a tune with {arrays:,} bytes of adapter and moments: "
        f"{statistics.mean(tuned) / arrays:.4f} times that on average, at most {max(tuned) / arrays:.4f} "
        f"(the limit, 1.02 times and 64 KiB, is {1.02 + 65536 / arrays:.4f})"
    )


def measure_share(top: Path, student: Path, seconds: float) -> None:
    """A tune of about so many seconds on a store that takes 100 ms longer for everything, at the default spacing."""
    probe = write_folder(top / "probe", student, rows=100, epochs=1)
    begun = time.monotonic()
    spill("build", probe, "--state", top / "probed")
    steps = max(100, int(seconds / (time.monotonic() - begun) * 100))
    folder = write_folder(top / "share", student, rows=100, epochs=-(-steps // 100))
    spent: list[float] = []
    tuned: list[float] = []
    commit, stage = holding.Hold.commit, runner.Build._run_stage
    store = FaultyStore(MemoryStore(), lambda call: delay(LATENCY))

    def timed(work: Callable[..., None], into: list[float]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.monotonic()
            work(*arguments)
            into.append(time.monotonic() - start)

        return call

    with (
        replaced(stores, "load_target", lambda spec: lambda uri: store),
        replaced(holding.Hold, "commit", timed(commit, spent)),
        replaced(runner.Build, "_run_stage", timed(stage, tuned)),
    ):
        spill("build", folder, "--state", top / "anywhere")
    print(
        f"commits at {LATENCY * 1000:.0f} ms a request: {len(spent)} in a tune of {sum(tuned):.0f} s "
        f"({-(-steps // 100) * 100} steps), {statistics.mean(spent):.2f} s each: {sum(spent) / sum(tuned):.2%} of it"
    )


def with_commits(state: Store, count: int) -> None:
    """Lengthen a state's log to `count` entries, each of which continues the one before."""
    head = newest(state)
    assert head
    commit, parent = head.commit, head.entry.parent
    while commit.number < count:
        commit = evolve(commit, number=commit.number + 1, parent=parent)
        data = entry_bytes(commit)
        state.create(log_name(commit.number), data)
        parent = Parent(number=commit.number, sha256=hashlib.sha256(data).hexdigest())


def best(work: Callable[[], object], times: int) -> float:
    """The shortest of so many tries, in seconds."""
    tries = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        tries.append(time.perf_counter() - begun)
    return min(tries)


def measure_many(top: Path, student: Path, label: str, rank: int) -> None:
    folder = write_folder(top / f"many-{label}", student, rows=4, epochs=1, rank=rank)
    times, size = {}, 0
    for count in (FEW, MANY):
        place = top / f"{count}-{label}"
        spill("build", folder, "--state", place, "--stop-after", "tune:1")
        store = LocalStore(str(place))
        with replaced(sys.modules["spill.stores.local"], "_sync", lambda handle: None):
            with_commits(store, count)
        times[count] = best(lambda found=store: newest(found), 20)
        head = newest(store)
        assert head
        assert head.commit.number == count
        size = sum(record.size for record in head.commit.objects.values())
    history = best(lambda: spill("state", "history", top / f"{MANY}-{label}"), 3)
    print(
        f"newest commit of a local state of {size:,} bytes: among {FEW} {times[FEW] * 1000:.1f} ms, among {MANY:,} "
        f"{times[MANY] * 1000:.1f} ms, {times[MANY] / times[FEW]:.2f} times; history of {MANY:,}: {history:.2f} s"
    )


def count_requests(top: Path, student: Path) -> None:
    folder = write_folder(top / "requests", student, rows=4, epochs=1, rank=2)
    for count in (FEW, MANY):
        inner = MemoryStore()
        with replaced(stores, "load_target", lambda spec, inner=inner: lambda uri: inner):
            spill("build", folder, "--state", top / "anywhere", "--stop-after", "tune:1")
        with_commits(inner, count)
        counted = FaultyStore(inner, never)
        newest(counted)
        listings = sum(call.verb == "list" for call in counted.calls)
        print(f"requests to find the newest of {count:,}: {listings} listing, {len(counted.calls) - listings} reads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="length of the tune on the slow store")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory(prefix="spill-commits-") as directory:
        top = Path(directory)
        install_plugin(top / "site", distribution="spill-engine-numpy", module="spill.testing.numpy_plugin")
        sys.path.insert(0, str(top / "site"))
        os.environ["SPILL_HOME"] = str(top / "home")
        small = tiny_model(top / "small", hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, max_positions=128)
        large = tiny_model(top / "large", hidden=64, layers=4, heads=4, kv_heads=2, intermediate=128)
        huge = tiny_model(top / "huge", hidden=512, layers=8, heads=4, kv_heads=4, intermediate=1024)
        measure_bytes(top, large)
        measure_many(top, small, "small", rank=2)
        measure_many(top, huge, "large", rank=32)
        count_requests(top, small)
        measure_share(top, large, seconds)


if __name__ == "__main__":
    main()
