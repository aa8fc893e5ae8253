"""These tests need the core and the mlx engine, nothing else."""

import pytest

pytest.importorskip("spill_engine_mlx", reason="the mlx engine is not installed")
