"""These tests need the core and the mlx engine, nothing else."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("spill_engine_mlx") else ["test_*.py"]
