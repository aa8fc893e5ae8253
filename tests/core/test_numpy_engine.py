"""The numpy engine keeps the engine contract, in both kinds of head; and what it promises beyond it."""

import pytest

from spill.engine import OpenEngine
from spill.testing import EngineContract
from spill.testing.numpy_engine import open_engine as open_numpy


class TestNumpyEngine(EngineContract):
    @pytest.fixture
    def open_engine(self) -> OpenEngine:
        return open_numpy
