"""The engines this distribution registers. Light: `engine` and with it torch are imported when one is chosen."""

from collections.abc import Iterable

from spill.plugins import EngineSpec, hookimpl
from spill_engine_torch import detect

_ENGINE = "spill_engine_torch.engine"


@hookimpl
def spill_engines() -> Iterable[EngineSpec]:
    """`torch-cpu`, `torch-cuda` and `torch-mps`."""
    cuda, mps = "PyTorch on an NVIDIA GPU (never run by its authors)", "PyTorch on Metal (never run by its authors)"
    yield EngineSpec(
        name="torch-cpu", target=f"{_ENGINE}:open_cpu", contract=1, summary="PyTorch on the CPU", detect=detect.cpu
    )
    yield EngineSpec(name="torch-cuda", target=f"{_ENGINE}:open_cuda", contract=1, summary=cuda, detect=detect.cuda)
    yield EngineSpec(name="torch-mps", target=f"{_ENGINE}:open_mps", contract=1, summary=mps, detect=detect.mps)
