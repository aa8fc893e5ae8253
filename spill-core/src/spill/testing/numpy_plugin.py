"""The numpy engine's plugin. Not registered by spill-core: tests register it with `spill.testing.plugins`."""

from collections.abc import Iterable

from spill.plugins import Detection, EngineSpec, hookimpl


def detect() -> Detection:
    """Always there, and ranked below every engine that is meant for work."""
    return Detection(available=True, rank=-10, reason="numpy, for tests")


@hookimpl
def spill_engines() -> Iterable[EngineSpec]:
    yield EngineSpec(
        name="numpy",
        target="spill.testing.numpy_engine:open_engine",
        contract=1,
        summary="llama in float32 on numpy, for tests",
        detect=detect,
    )
