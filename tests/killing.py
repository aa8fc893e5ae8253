"""Real processes that can be killed at any moment, before any chosen system call of the local store, and before or
after any chosen request to a store of any kind.

They are forked from one server that has imported everything already, so that each costs milliseconds.
"""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from attrs import frozen

# What changes something on a disk. `write` counts once per file, and is torn: half of the bytes are written.
CHANGING = ("mkdir", "write", "link", "replace", "unlink", "rmdir")
KILLED = 137


@frozen(kw_only=True)
class Trap:
    """What is done to a child.

    Of the local store: `kill_before` its n-th change (from 1), or wait `slow` seconds in each write; `log` gets a line
    for every change. Of any store, in the main thread alone: SIGKILL before the request number `die_before` or after
    the one `die_after` (from 1), or wait `delay` seconds before each; `requests` gets a line for every one, before it.
    The child begins `lag` seconds after the file `go` is there, and renews its `alive` every `renew` seconds.
    """

    kill_before: int = 0
    slow: float = 0.0
    grace: float = 15.0
    log: Path | None = None
    die_before: int = 0
    die_after: int = 0
    delay: float = 0.0
    requests: Path | None = None
    go: Path | None = None
    lag: float = 0.0
    renew: float = 15.0


class Child:
    """A command line in a process of its own, started in the empty folder `here`. Standard output and error lie in
    `out` and `err` once it has ended."""

    def __init__(self, process: BaseProcess, place: Path) -> None:
        self._process = process
        self._place = place
        assert process.pid is not None
        self.pid = process.pid
        self.here = place / "here"

    def wait_ready(self) -> None:
        """Until the signal handlers stand."""
        self.wait_for(lambda: (self._place / "ready").exists())

    def wait_for(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        """Until something is so; that the child ends before is a fault."""
        assert self.wait_or_end(condition, seconds), f"ended with {self._process.exitcode}: {self.err}"

    def wait_or_end(self, condition: Callable[[], object], seconds: float = 120.0) -> bool:
        """Until something is so, or the child ended: whether it is so."""
        begun = time.monotonic()
        while not condition():
            if not self._process.is_alive():
                return False
            assert time.monotonic() - begun < seconds
            time.sleep(0.002)
        return True

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(self.pid, number)

    def end(self, seconds: float = 120.0) -> int:
        """Wait for it; the exit code, negative where a signal killed it."""
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, "it does not end"
        return code

    @property
    def out(self) -> str:
        return _text(self._place / "out")

    @property
    def err(self) -> str:
        return _text(self._place / "err")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Nursery:
    """Starts children; one at a time is enough."""

    def __init__(
        self, directory: Path, path: Sequence[Path], environment: dict[str, str], preload: Sequence[str] = ()
    ) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.killing", "spill.cli", "spill.upkeep", "spill.report",
                                              "spill.stages.tune", "spill.stages.evaluate", "spill.stores.local",
                                              "spill.testing.numpy_engine", "pytest", *preload])  # fmt: skip
        self._directory = directory
        self._path = [str(p) for p in path]
        self._environment = environment
        self._count = 0
        self._started: list[BaseProcess] = []

    def start(self, *arguments: object, trap: Trap | None = None, **environment: str) -> Child:
        """Start `spill` with these arguments."""
        self._count += 1
        place = self._directory / f"child-{self._count}"
        (place / "here").mkdir(parents=True)
        environment = {**self._environment, **environment}
        given = (place, self._path, environment, [str(a) for a in arguments], trap or Trap())
        process = self._context.Process(target=_run, args=given)
        process.start()
        self._started.append(process)
        return Child(process, place)

    def close(self) -> None:
        for process in self._started:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()


@contextlib.contextmanager
def nursery(
    directory: Path, path: Sequence[Path], preload: Sequence[str] = (), **environment: str
) -> Iterator[Nursery]:
    """`preload` are modules that the server of children imports beside spill's own; the first nursery decides."""
    made = Nursery(directory, path, environment, preload)
    try:
        yield made
    finally:
        made.close()


def _run(place: Path, path: list[str], environment: dict[str, str], arguments: list[str], trap: Trap) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT, 0o666), number)
    os.chdir(place / "here")
    sys.path[:0] = path
    os.environ.update(environment)

    from spill import alive, signals
    from spill.cli import run
    from spill.stores import local

    signals.GRACE_SECONDS = trap.grace
    alive.RENEW_SECONDS = trap.renew
    alive.WATCH_SECONDS = min(alive.WATCH_SECONDS, trap.renew)
    local._sync = lambda handle: None  # type: ignore[assignment]  # a kill loses nothing that the kernel has
    local.os = _Trapped(trap)  # type: ignore[assignment]
    stop = signals.StopRequest()
    stop.install()
    _trap_requests(trap)
    (place / "ready").touch()
    while trap.go and not trap.go.exists():
        time.sleep(0.001)
    time.sleep(trap.lag)
    code = run(stop, arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _trap_requests(trap: Trap) -> None:
    if not (trap.die_before or trap.die_after or trap.delay or trap.requests):
        return
    from spill import stores
    from spill.testing.faulty_store import DIE_AFTER, DIE_BEFORE, Call, Fault, FaultyStore, delay, kill

    count = 0

    def plan(call: Call) -> Fault | None:
        nonlocal count
        if threading.current_thread() is not threading.main_thread():
            return None
        count += 1
        if trap.requests:
            with trap.requests.open("a") as file:
                file.write(f"{call.verb} {call.name}\n")
        if count == trap.die_before:
            return DIE_BEFORE
        if count == trap.die_after:
            return DIE_AFTER
        return delay(trap.delay) if trap.delay else None

    real = stores.load_target
    stores.load_target = lambda spec: lambda uri: FaultyStore(real(spec)(uri), plan, die=kill)  # type: ignore[attr-defined]


class _Trapped:
    """The module `os` as the local store sees it: counts what changes the disk, in the main thread."""

    def __init__(self, trap: Trap) -> None:
        self._trap = trap
        self._count = 0
        self._written = -1

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGING:
            return real

        def call(*arguments: Any, **named: Any) -> Any:
            if name == "write":
                if arguments[0] == self._written:
                    return real(*arguments)
                self._written = arguments[0]
                if self._trap.slow:
                    time.sleep(self._trap.slow)
            else:
                self._written = -1
            self._count += 1
            if self._trap.log:
                with self._trap.log.open("a") as log:
                    log.write(f"{name} {arguments[0]}\n")
            if self._count == self._trap.kill_before:
                if name == "write":
                    real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                os._exit(KILLED)
            return real(*arguments, **named)

        return call
