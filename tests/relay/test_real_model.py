"""The promise on a real model: the packaged student, moved in the middle of its tune, ends bit for bit the same."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attrs import frozen

pytestmark = pytest.mark.real_model
STUDENT = "smollm2:135m-q4"
# Between engines: two of the 20 exam rows, which is twice the spread over seeds in docs/continuity.md.
SCORE_TOLERANCE = 0.1


@frozen(kw_only=True)
class Relay:
    """An example folder, its uninterrupted state, and two that moved to another machine at step 20: to the same engine,
    and (`hopped`) to another one, not finished yet."""

    folder: Path
    whole: Path
    moved: Path
    hopped: Path
    run: Callable[..., str]


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Relay:
    top = tmp_path_factory.mktemp("relay")
    home = top / "home"

    def run(*arguments: object, machine: str = "alpha") -> str:
        done = subprocess.run(
            [sys.executable, "-m", "spill", *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, "SPILL_HOME": str(home), "SPILL_MACHINE": machine},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    folder, whole, moved, hopped = (top / name for name in ("folder", "whole", "moved", "hopped"))
    run("example", "relay", folder, "--student", STUDENT)
    run("build", folder, "--state", whole, "--engine", "torch-cpu")
    run("build", folder, "--state", top / "here", "--engine", "torch-cpu", "--stop-after", "tune:20")
    shutil.copytree(top / "here", hopped)
    (top / "here").rename(moved)  # all that the second machine gets
    run("resume", moved, "--engine", "torch-cpu", machine="beta")
    return Relay(folder=folder, whole=whole, moved=moved, hopped=hopped, run=run)


@pytest.fixture(scope="module")
def adapter(relay: Relay, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "adapter"
    relay.run("export", relay.moved, "--out", directory)
    return directory


def test_the_moved_build_has_the_adapter_of_the_uninterrupted_one(relay: Relay, adapter: Path, tmp_path: Path) -> None:
    relay.run("export", relay.whole, "--out", tmp_path / "adapter")
    hashes = {
        hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()
        for directory in (adapter, tmp_path / "adapter")
    }
    assert len(hashes) == 1


def test_the_table_names_both_machines_and_the_scores_agree(relay: Relay) -> None:
    table = relay.run("table", relay.moved, "--reference", relay.whole).splitlines()
    assert "alpha -> beta" in table[2]
    score, reference = table[3].split()[-2:]
    assert float(score) >= 0.8
    assert score == reference
    assert float(table[1].split()[-1]) < 0.5


def test_a_build_that_hopped_to_another_engine_has_the_reference_s_score_within_the_tolerance(relay: Relay) -> None:
    pytest.importorskip("mlx.core")
    relay.run("resume", relay.hopped, "--engine", "mlx", machine="beta")
    table = relay.run("table", relay.hopped, "--reference", relay.whole).splitlines()
    assert "torch-cpu -> mlx" in table[2]
    score, reference = map(float, table[3].split()[-2:])
    assert abs(score - reference) <= SCORE_TOLERANCE


def test_the_tuned_model_answers_with_a_label(relay: Relay) -> None:
    answer = relay.run("ask", relay.moved, "Somebody took my card out of my bag, what do I do?").strip()
    labels = {json.loads(line)["expected"] for line in (relay.folder / "evals.jsonl").read_text().splitlines()}
    assert answer in labels


def test_peft_computes_the_same_logits_from_the_exported_adapter(relay: Relay, adapter: Path) -> None:
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from spill import models
    from spill.engine import AdapterSpec, Numerics
    from spill.models.text import Text
    from spill.opening import find, saved_stage
    from spill.plugins import discover
    from spill.stages.tune import STATE_ROLE, parse_state
    from spill_engine_torch.engine import open_cpu

    os.environ["SPILL_HOME"] = str(relay.folder.parent / "home")
    model = models.resolve(STUDENT, tick=lambda: None, say=print)
    assert model is not None
    _, store, head = find(str(relay.moved), None, discover())
    plan = head.commit.plan
    spec = AdapterSpec(rank=plan.rank, alpha=plan.alpha, targets=models.adapter_targets(model))
    engine = open_cpu(model_dir=model.directory, adapter=spec, numerics=Numerics(dtype="float32"), tick=lambda: None)
    saved = saved_stage(store, head.commit, head.commit.stages["tune"])
    engine.import_state(parse_state(saved.read(STATE_ROLE), spec))
    base = transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, adapter)
    text = Text.load(model.directory, models.stop_ids(model))
    prompts = [json.loads(line)["prompt"] for line in (relay.folder / "evals.jsonl").read_text().splitlines()[:10]]
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.from_numpy(text.prompt(prompt).astype(np.int64))[None]
            ours = engine._model.logits(ids, torch.arange(ids.shape[1]))
            assert (ours - theirs(input_ids=ids).logits[0]).abs().max().item() < 1e-4
