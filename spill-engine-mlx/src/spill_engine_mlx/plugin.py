"""The engine this distribution registers. Light: `opening` and with it mlx are imported when it is chosen."""

from collections.abc import Iterable

from spill.plugins import EngineSpec, hookimpl
from spill_engine_mlx.detect import detect


@hookimpl
def spill_engines() -> Iterable[EngineSpec]:
    """`mlx`, on whatever device the installed MLX computes."""
    target, summary = "spill_engine_mlx.opening:open_engine", "MLX: Metal on Apple silicon, CPU or CUDA on Linux"
    yield EngineSpec(name="mlx", target=target, contract=1, summary=summary, detect=detect)
