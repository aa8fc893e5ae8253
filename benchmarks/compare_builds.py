"""How far finished builds of one folder lie from each other: python benchmarks/compare_builds.py STATE STATE...

Rows, steps and learning rates must be equal exactly. Printed for every pair: the largest difference of a step's mean
loss in nats, the smallest cosine of a tensor of the finished adapters, and that of the adapters as a whole.
"""

import itertools
import sys
from typing import Any

import numpy as np
from attrs import frozen

from spill import models
from spill.engine import AdapterSpec, Arrays
from spill.models.directory import Model
from spill.opening import find, saved_stage
from spill.plugins import discover
from spill.records import Commit
from spill.stages import Journal
from spill.stages.tune import STATE_ROLE, parse_state
from spill.table import who


@frozen(kw_only=True)
class Finished:
    """A build whose tune is done."""

    uri: str
    commit: Commit
    steps: list[dict[str, Any]]
    adapter: Arrays

    @property
    def scores(self) -> str:
        graded = {name: record.summary.get("score") for name, record in self.commit.stages.items() if name != "tune"}
        return ", ".join(f"{name} {score:.3f}" for name, score in graded.items() if isinstance(score, float))

    @property
    def producers(self) -> str:
        return ", ".join(f"{who(run)} {run.work['tune']}" for run in self.commit.runs if "tune" in run.work)


def load(uri: str) -> Finished:
    _, store, head = find(uri, None, discover())
    commit = head.commit
    saved = saved_stage(store, commit, commit.stages["tune"])
    model = models.resolve(commit.plan.student, tick=lambda: None, say=print)
    assert isinstance(model, Model)
    targets = models.adapter_targets(model)
    spec = AdapterSpec(rank=commit.plan.rank, alpha=commit.plan.alpha, targets=targets)
    adapter = parse_state(saved.read(STATE_ROLE), spec).adapter
    return Finished(uri=uri, commit=commit, steps=Journal(saved).records, adapter=adapter)


def cosine(a: Arrays, b: Arrays, names: list[str]) -> float:
    one, other = (np.concatenate([arrays[name].ravel() for name in names]).astype(np.float64) for arrays in (a, b))
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def compare(a: Finished, b: Finished) -> str:
    for key in ("step", "rows", "learning_rate"):
        if [step[key] for step in a.steps] != [step[key] for step in b.steps]:
            return f"{a.uri} and {b.uri} are not builds of one plan: another {key}"
    loss = max(abs(x["loss"] - y["loss"]) for x, y in zip(a.steps, b.steps, strict=True))
    worst = min(cosine(a.adapter, b.adapter, [name]) for name in a.adapter)
    whole = cosine(a.adapter, b.adapter, list(a.adapter))
    return f"{a.uri} | {b.uri}: step loss {loss:.1e}; cosine: worst tensor 1 - {1 - worst:.1e}, all 1 - {1 - whole:.1e}"


def main(uris: list[str]) -> None:
    builds = [load(uri) for uri in uris]
    for build in builds:
        print(f"{build.uri}: {build.producers}; {build.scores}")
    for a, b in itertools.combinations(builds, 2):
        print(compare(a, b))


if __name__ == "__main__":
    main(sys.argv[1:])
