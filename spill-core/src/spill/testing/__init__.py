"""What plugins are tested with: contract suites to inherit, tiny models, and an engine in numpy.

The suites need pytest (`pip install spill-core[testing]`) and are imported only when they are asked for, so that the
light plugin modules in this package stay light.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spill.testing.engine_contract import EngineContract
    from spill.testing.plugin_contract import PluginContract
    from spill.testing.stage_contract import StageContract
    from spill.testing.store_contract import StoreContract

__all__ = ["EngineContract", "PluginContract", "StageContract", "StoreContract"]

_SUITES = {
    "EngineContract": "spill.testing.engine_contract",
    "PluginContract": "spill.testing.plugin_contract",
    "StageContract": "spill.testing.stage_contract",
    "StoreContract": "spill.testing.store_contract",
}


def __getattr__(name: str) -> Any:
    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_SUITES[name]), name)
