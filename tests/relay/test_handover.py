"""The handover check on a real model: it finds what makes an engine compute another function, and no honest hop."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import frozen

from spill.testing.plugins import install_plugin

pytestmark = pytest.mark.real_model
STUDENT = "smollm2:135m-q4"
TOP = Path(__file__).parents[2]
NUMBER = r"[-+0-9.e]+"


@frozen(kw_only=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Done]:
    pytest.importorskip("mlx.core")
    top = tmp_path_factory.mktemp("handover")
    install_plugin(top / "site", distribution="wrong-engines", module="tests.relay.wrong_engines")
    environment = {"SPILL_HOME": str(top / "home"), "PYTHONPATH": os.pathsep.join([str(top / "site"), str(TOP)])}

    def call(*arguments: object) -> Done:
        command = [sys.executable, "-m", "spill", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return call


@pytest.fixture(scope="module")
def state(run: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build whose tune stopped at step 3 on torch-cpu, float32."""
    top = tmp_path_factory.mktemp("stopped")
    assert run("example", "relay", top / "folder", "--student", STUDENT).code == 0
    where = ("--state", top / "state", "--stages", "tune", "--stop-after", "tune:3")
    done = run("build", top / "folder", *where, "--engine", "torch-cpu")
    assert done.code == 0, done.err
    return top / "state"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("wrong-rope", r"the base model .* nats"),
        ("wrong-weights", r"the base model .* nats"),
        ("wrong-louder", r"step 3.* nats"),
        ("wrong-transposed", r"step 3.* nats"),
        ("wrong-swapped", r"does not give back the training state of step 3"),
    ],
)
def test_an_engine_that_computes_something_else_is_refused_in_one_line(
    run: Callable[..., Done], state: Path, engine: str, message: str
) -> None:
    done = run("resume", state, "--engine", engine)
    assert done.code == 1
    assert re.search(message, done.err)
    newest = max((state / "log").iterdir(), key=lambda path: int(path.stem))
    assert json.loads(newest.read_text())["stages"]["tune"]["position"] == 3


def test_weights_of_another_model_are_refused_by_their_hash(
    run: Callable[..., Done], state: Path, tmp_path: Path
) -> None:
    from spill.testing.models import tiny_model

    done = run("resume", state, "--engine", "mlx", "--student", tiny_model(tmp_path / "other"))
    assert done.code == 1
    assert "was built from something else" in done.err


def test_honest_hops_there_and_back_are_let_through(run: Callable[..., Done], state: Path) -> None:
    for step, engine in ((4, "mlx"), (5, "torch-cpu")):
        done = run("resume", state, "--engine", engine, "--stop-after", f"tune:{step}")
        assert done.code == 0, done.err
        assert re.search(rf"handover from .*: .*{NUMBER} nats", done.out)
