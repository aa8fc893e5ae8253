"""These tests need the core and both engines. One thread: the models are tiny, and threads only wait for each other."""

import pytest

torch = pytest.importorskip("torch", reason="the torch engine is not installed")
for engine in ("spill_engine_torch", "spill_engine_mlx"):
    pytest.importorskip(engine, reason=f"{engine} is not installed")
torch.set_num_threads(1)
