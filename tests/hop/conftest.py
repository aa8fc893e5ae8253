"""These tests need both engines, each where it says so."""

from importlib.util import find_spec

collect_ignore = []
if not all(find_spec(engine) for engine in ("spill_engine_torch", "spill_engine_mlx")):
    collect_ignore.append("test_families.py")
