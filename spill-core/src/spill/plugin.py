"""The built-ins, registered through the same hooks as everybody's plugins."""

from collections.abc import Iterable

from spill.plugins import StageSpec, StoreSpec, hookimpl


@hookimpl
def spill_stores() -> Iterable[StoreSpec]:
    yield StoreSpec(name="file", target="spill.stores.local:LocalStore", contract=1, summary="a folder on this machine")


@hookimpl
def spill_stages() -> Iterable[StageSpec]:
    yield StageSpec(
        name="eval:base", target="spill.stages.evaluate:open_base", contract=1, summary="grade the untrained model"
    )
    yield StageSpec(name="tune", target="spill.stages.tune:open_tune", contract=1, summary="tune a LoRA adapter")
    yield StageSpec(
        name="eval:tuned", target="spill.stages.evaluate:open_tuned", contract=1, summary="grade the tuned model"
    )
