"""What all tests share: the numpy engine as a plugin, a tiny model and folder, and `spill` in this process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attrs import frozen

from spill.testing.models import tiny_model
from spill.testing.plugins import install_plugin


@frozen(kw_only=True)
class Outcome:
    """What a command gave back."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error that is the error."""
        return next((line for line in self.err.splitlines() if line.startswith("spill: ")), "")


Spill = Callable[..., Outcome]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the numpy engine an installed plugin of every process that has it on its path."""
    directory = tmp_path_factory.mktemp("site")
    install_plugin(directory, distribution="spill-engine-numpy", module="spill.testing.numpy_plugin")
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a cache of its own."""
    directory = tmp_path / "home"
    monkeypatch.setenv("SPILL_HOME", str(directory))
    monkeypatch.setenv("SPILL_MACHINE", "alpha")
    return directory


def write_folder(directory: Path, student: Path | str, *, rows: int = 10, exam: int = 5, **settings: object) -> Path:
    """A folder of short rows; 10 training rows, batch 4 and 2 epochs make 6 steps with a tail of 2 rows an epoch."""
    directory.mkdir(parents=True, exist_ok=True)
    answers = ("yes", "no")
    training = [{"prompt": f"say {i}", "answer": answers[i % 2]} for i in range(rows)]
    evals = [{"prompt": f"tell {i}", "expected": answers[i % 2]} for i in range(exam)]
    for name, items in (("train.jsonl", training), ("evals.jsonl", evals)):
        (directory / name).write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    (directory / "instructions.txt").write_text("Say yes or no.\n", encoding="utf-8")
    values = {"student": str(student), "engine": "numpy", **settings}
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (directory / "spill.toml").write_text("".join(lines), encoding="utf-8")
    return directory


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    return write_folder(tmp_path / "folder", model)


@pytest.fixture
def spill(site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Spill:
    """Run the command line in this process: `spill("build", folder)`; no signal handlers."""
    from spill.cli import run
    from spill.signals import StopRequest

    monkeypatch.syspath_prepend(str(site))

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run(StopRequest(), [str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def spill_process(site: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start the command line as a real process."""

    def start(
        *arguments: object, path: Sequence[Path] = (), stdin: int | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "spill", *map(str, arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, site))), **environment},
        )

    return start
