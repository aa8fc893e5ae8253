"""What can run here: every engine with its reason, and its rate measured in a process of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spill.environment import machine_name, operating_system, seconds
from spill.plugins import EngineSpec, Registry, detect, discover

MEASURE_SECONDS = 180
STEPS = 3
ROWS, LENGTH, ANSWER = 4, 64, 8


def available(registry: Registry) -> list[str]:
    """Names of the engines that can run here, the one that would be chosen first."""
    found = []
    for name, claimants in registry.named("engine").items():
        spec = claimants[0].spec
        assert isinstance(spec, EngineSpec)
        if len(claimants) == 1 and claimants[0].usable and (seen := detect(spec)).available:
            found.append((-seen.rank, name))
    return [name for _, name in sorted(found)]


def report(registry: Registry) -> Iterator[str]:
    """Lines for the user, each engine's as soon as it was measured."""
    yield f"{machine_name()}, {operating_system()}, Python {sys.version.split()[0]}"
    names = available(registry)
    for name, claimants in registry.named("engine").items():
        for found in claimants:
            spec = found.spec
            assert isinstance(spec, EngineSpec)
            if len(claimants) > 1 or not found.usable:
                clash = f"claimed by {len(claimants)} plugins, {found.plugin.label} among them"
                yield f"  {name:12} not usable: {clash if found.usable else found.mismatch()}"
                continue
            seen = detect(spec)
            chosen = " (chosen here)" if names[:1] == [name] else ""
            yield f"  {name:12} {'available' if seen.available else 'not available'}{chosen}: {seen.reason}"
            if seen.available:
                yield f"  {'':12} {_measured(name)}"
    if not names:
        yield "no engine can run here: pip install spill-engine-torch, or spill-engine-mlx on Apple silicon"
    else:
        yield "next: spill example relay"


def _measured(name: str) -> str:
    command = [sys.executable, "-m", "spill.doctor", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MEASURE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not measured: took over {MEASURE_SECONDS} s"
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"FAILED to run: {last}"
    found = json.loads(done.stdout.splitlines()[-1])
    lines = [f"{found['gflops']:.1f} GFLOP/s, {found['rate']:.2f} steps/s on a {found['millions']:.0f}M test model"]
    lines += [f"{found['device']}, {found['hardware']}, {found['threads']} threads, {found['numerics']}"]
    return f"\n  {'':12} ".join(lines + found["notes"])


def _measure(name: str) -> dict[str, object]:
    """Steps of one engine on a random model in this process. 4 floating-point operations a weight and token: forward,
    and the backward pass through frozen weights."""
    import numpy as np

    from spill.engine import AdapterSpec, Numerics, Row, Update
    from spill.plugins import load_target
    from spill.recipe import initial_state
    from spill.testing.models import block_targets, tiny_model

    spec = discover().engine(name)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(
            Path(folder) / "model", hidden=512, layers=6, heads=8, kv_heads=4, intermediate=1536, vocabulary=4096
        )
        adapter = AdapterSpec(rank=16, alpha=32.0, targets=block_targets(model))
        engine = load_target(spec)(
            model_dir=model, adapter=adapter, numerics=Numerics(dtype=detect(spec).dtype), tick=lambda: None
        )
        engine.import_state(initial_state(adapter, 0))
        tokens = np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH) % 4096
        mask = (np.arange(LENGTH) >= LENGTH - ANSWER).astype(np.int32)
        batch = [Row(tokens=row.copy(), mask=mask) for row in tokens]
        engine.step(batch, Update(step=1, learning_rate=0.0))
        begun = seconds()
        for step in range(STEPS):
            engine.step(batch, Update(step=step + 2, learning_rate=0.0))
        each = (seconds() - begun) / STEPS
        facts = engine.facts()
        weights = sum(t.in_features * t.out_features for t in adapter.targets)
        engine.close()
    numerics = facts.numerics
    return {
        "gflops": 4 * weights * ROWS * LENGTH / each / 1e9,
        "rate": 1 / each,
        "millions": weights / 1e6,
        "device": facts.device,
        "hardware": facts.hardware,
        "threads": facts.threads,
        "numerics": f"{numerics.dtype} {numerics.layout}, up to {numerics.micro_batch_tokens} tokens a micro-batch",
        "notes": list(facts.notes),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
