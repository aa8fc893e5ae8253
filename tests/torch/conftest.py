"""One thread: the models are tiny, and threads that wait for one another cost more than they compute."""

import pytest

torch = pytest.importorskip("torch", reason="the torch engine is not installed")
pytest.importorskip("spill_engine_torch", reason="the torch engine is not installed")
torch.set_num_threads(1)
