"""What every part of the engine suite shares: the knobs that a subclass may turn, and the fixtures."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from spill.engine import OpenEngine
from spill.testing.engine_cases import Bench
from spill.testing.models import tiny_model

MODEL = pytest.StashKey[Path]()


class EngineBase:
    """Defaults fit an engine that computes in float32; the tolerances are upper bounds. In bfloat16, 2e-2 for
    `step_tolerance`, 0.1 for `gradient_tolerance` and 0.4 for `generation_margin` still catch what is wrong.

    Attributes:
        dtype: the compute dtype that engines are opened with.
        nll_tolerance: nats on a token's loss as `nll` answers it, against float64. It is float32 whatever `dtype` is.
        step_tolerance: relative, on the `loss_sum` of a step.
        gradient_tolerance: relative L2 distance of any adapter array's gradient.
        generation_margin: prompts are chosen such that every greedy token wins by this many logits.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    nll_tolerance: float = 1e-4
    step_tolerance: float = 2e-5
    gradient_tolerance: float = 2e-4
    generation_margin: float = 0.02

    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        """The callable that the plugin's `EngineSpec.target` names."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture `open_engine` that returns the engine's callable"
        )

    def global_probe(self) -> object:
        """Settings of the engine's library that belong to the process, as something comparable: default dtype, gradient
        mode, determinism flags, state of random generators. The suite compares it around an engine's whole life."""
        return None

    def stir_generators(self) -> None:
        """Draw once from every random generator of the process, so that one which an engine seeds stands elsewhere
        afterwards. A subclass adds those of its engine's library, and calls this."""
        random.random()
        np.random.random()

    @pytest.fixture
    def bench(
        self, open_engine: OpenEngine, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Bench]:
        stash = (
            request.session.stash
        )  # one model for all tests: writing and removing one for each takes longer than they
        if MODEL not in stash:
            stash[MODEL] = tiny_model(tmp_path_factory.mktemp("model"))
        bench = Bench.at(open_engine, stash[MODEL], self.dtype)
        yield bench
        bench.close()
