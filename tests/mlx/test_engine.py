"""The engine mlx against spill's engine suite, and what only it promises: bits, OpenBLAS, refusals, bfloat16."""

import importlib.util

import pytest

from spill.engine import OpenEngine
from spill.testing import EngineContract

if importlib.util.find_spec("spill_engine_mlx") is None:
    pytest.skip("spill-engine-mlx is not installed", allow_module_level=True)


class TestMlx(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        from spill_engine_mlx.opening import open_engine

        return open_engine

    def global_probe(self) -> object:
        import mlx.core as mx

        device = mx.default_device()
        return str(device), str(mx.default_stream(device)), mx.random.state[0].tolist()
