"""Plugins: the hooks, the light records they yield, discovery in isolation, and choice. Imports no numpy.

A plugin is an entry point of group `spill` that names a light module with implementations of the hooks below:

    from spill.plugins import EngineSpec, Detection, hookimpl

    @hookimpl
    def spill_engines():
        yield EngineSpec(name="mine", target="my_engine.engine:open_engine", contract=1,
                         summary="my accelerator", detect=detect)

`target` is imported only when the name is chosen. `detect` must be cheap: it looks at the platform, the driver and
installed wheels, and never imports an engine's library.
"""

import importlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any, Literal, TypeVar

import pluggy
from attrs import field, frozen

from spill.errors import PluginError

GROUP = "spill"
ENGINE_CONTRACT = 1
STORE_CONTRACT = 1
STAGE_CONTRACT = 1

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

# Where a name that somebody may ask for can be had. Only used to say what to install.
KNOWN_DISTRIBUTIONS = {
    "torch-cpu": "spill-engine-torch",
    "torch-cuda": "spill-engine-torch",
    "torch-mps": "spill-engine-torch",
    "mlx": "spill-engine-mlx",
    "s3": "spill-store-cloud[s3]",
    "gs": "spill-store-cloud[gs]",
    "az": "spill-store-cloud[az]",
}


@frozen(kw_only=True)
class Detection:
    """What an engine's `detect` saw, without importing the engine.

    `rank`: among available engines the highest is chosen. `dtype`: the compute dtype of a new build here,
    `float32` on a CPU, `bfloat16` on a GPU.
    """

    available: bool
    rank: int
    reason: str
    dtype: Literal["float32", "bfloat16"] = "float32"


@frozen(kw_only=True)
class EngineSpec:
    """An engine by name. `target`, called with keywords, opens it: see `spill.engine.OpenEngine`."""

    name: str
    target: str
    contract: int
    summary: str
    detect: Callable[[], Detection]


@frozen(kw_only=True)
class StoreSpec:
    """A store by URI scheme; `name` is the scheme. `target(uri)` opens it: see `spill.stores.Store`."""

    name: str
    target: str
    contract: int
    summary: str


@frozen(kw_only=True)
class StageSpec:
    """A stage by name, as spill.toml lists it. `target(work)` opens it: see `spill.stages.Stage`."""

    name: str
    target: str
    contract: int
    summary: str


Spec = EngineSpec | StoreSpec | StageSpec
AnySpec = TypeVar("AnySpec", EngineSpec, StoreSpec, StageSpec)


class Hooks:
    """The hook specifications. Each takes no arguments and yields records of its kind."""

    @hookspec
    def spill_engines(self) -> Iterable[EngineSpec]:
        """Engines this plugin brings."""
        raise AssertionError("a specification, never called")

    @hookspec
    def spill_stores(self) -> Iterable[StoreSpec]:
        """Stores this plugin brings, one per URI scheme."""
        raise AssertionError("a specification, never called")

    @hookspec
    def spill_stages(self) -> Iterable[StageSpec]:
        """Stages this plugin brings."""
        raise AssertionError("a specification, never called")


KINDS: dict[str, tuple[str, type[Any], int]] = {
    "engine": ("spill_engines", EngineSpec, ENGINE_CONTRACT),
    "store": ("spill_stores", StoreSpec, STORE_CONTRACT),
    "stage": ("spill_stages", StageSpec, STAGE_CONTRACT),
}


@frozen(kw_only=True)
class Plugin:
    """One entry point: whose it is, what it registered, and, when it is broken, why."""

    name: str
    distribution: str
    version: str
    specs: tuple[tuple[str, Spec], ...] = ()
    cause: str = ""
    trace: str = field(default="", repr=False)

    @property
    def label(self) -> str:
        return f"{self.distribution} {self.version}"


@frozen(kw_only=True)
class Found:
    """A record and the plugin that registered it."""

    kind: str
    spec: Spec
    plugin: Plugin

    @property
    def usable(self) -> bool:
        return self.spec.contract == KINDS[self.kind][2]

    def mismatch(self) -> str:
        """Which side to upgrade when the contract numbers differ."""
        spoken = KINDS[self.kind][2]
        newer = self.spec.contract > spoken
        upgrade = "spill-core" if newer else self.plugin.distribution
        return (
            f"{self.kind} {self.spec.name!r} of {self.plugin.label} speaks contract {self.spec.contract}, "
            f"this spill-core speaks {spoken}: upgrade {upgrade}"
        )


class Registry:
    """All plugins found, and lookups that raise `PluginError` with what to do."""

    def __init__(self, plugins: Sequence[Plugin]) -> None:
        self.plugins = tuple(plugins)
        self.found = tuple(Found(kind=kind, spec=spec, plugin=p) for p in self.plugins for kind, spec in p.specs)

    def warnings(self) -> list[str]:
        """One line for every plugin that is broken or speaks another contract."""
        lines = [
            f"plugin {p.name!r} of {p.label} is broken and was left out: {p.cause} (`spill plugins` shows all of it)"
            for p in self.plugins
            if p.cause
        ]
        return lines + [f.mismatch() for f in self.found if not f.usable]

    def named(self, kind: str) -> dict[str, list[Found]]:
        """Everything of a kind by name, in name order; more than one under a name is a clash."""
        names: dict[str, list[Found]] = {}
        for found in sorted((f for f in self.found if f.kind == kind), key=lambda f: f.spec.name):
            names.setdefault(found.spec.name, []).append(found)
        return names

    def get(self, kind: str, name: str) -> Found:
        """The one record of this name.

        Raises:
            PluginError: unknown, claimed twice, or of a contract that this core does not speak.
        """
        names = self.named(kind)
        claimants = names.get(name, [])
        if not claimants:
            raise PluginError(self._unknown(kind, name, sorted(names)))
        if len(claimants) > 1:
            raise PluginError(self._clash(kind, name, claimants))
        if not claimants[0].usable:
            raise PluginError(claimants[0].mismatch())
        return claimants[0]

    def engine(self, name: str) -> EngineSpec:
        spec = self.get("engine", name).spec
        assert isinstance(spec, EngineSpec)
        return spec

    def choose_engine(self) -> tuple[EngineSpec, Detection]:
        """The available engine of highest rank; on equal ranks the first by name.

        Raises:
            PluginError: none is installed, none is available, or two plugins claim one name.
        """
        candidates: list[tuple[EngineSpec, Detection]] = []
        reasons: list[str] = []
        for name, claimants in self.named("engine").items():
            if len(claimants) > 1:
                raise PluginError(self._clash("engine", name, claimants))
            spec = claimants[0].spec
            assert isinstance(spec, EngineSpec)
            if not claimants[0].usable:
                reasons.append(claimants[0].mismatch())
                continue
            seen = detect(spec)
            if seen.available:
                candidates.append((spec, seen))
            else:
                reasons.append(f"{name}: {seen.reason}")
        if not candidates:
            if not reasons:
                raise PluginError(
                    "no engine is installed: pip install spill-engine-torch, or spill-engine-mlx on Apple silicon"
                )
            raise PluginError("no installed engine can run here; `spill doctor` says more", reasons)
        return max(candidates, key=lambda c: c[1].rank)

    @staticmethod
    def _clash(kind: str, name: str, claimants: Sequence[Found]) -> str:
        who = ", ".join(f"{f.plugin.label} ({f.spec.target})" for f in claimants)
        return f"{kind} {name!r} is claimed by {len(claimants)} plugins: {who}; uninstall all but one of them"

    @staticmethod
    def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
        if name in KNOWN_DISTRIBUTIONS:
            return f"{kind} {name!r} is not installed: pip install {KNOWN_DISTRIBUTIONS[name]!r}".replace("'", '"')
        have = ", ".join(known) or "none"
        return f"unknown {kind} {name!r}; installed: {have} (`spill plugins` lists every plugin)"


def detect(spec: EngineSpec) -> Detection:
    """An engine's own answer, guarded: a `detect` that raises counts as not available, with the reason."""
    try:
        return spec.detect()
    except Exception as error:
        return Detection(available=False, rank=0, reason=f"detect failed: {_cause(error)}")


def load_target(spec: Spec) -> Any:
    """Import `package.module:callable`.

    Raises:
        PluginError: the module or the attribute is not there, or importing it fails.
    """
    module_name, _, attribute = spec.target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{spec.name!r} was chosen but {spec.target} cannot be loaded: {_cause(error)}") from error


def discover() -> Registry:
    """Load every entry point of the group, each in a guard of its own."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    entries = sorted(_entry_points(), key=lambda pair: (pair[0].name, pair[1].name))
    return Registry([_load(manager, entry, distribution) for entry, distribution in entries])


def _entry_points() -> Iterator[tuple[metadata.EntryPoint, metadata.Distribution]]:
    seen: set[str] = set()
    for distribution in metadata.distributions():
        # The entry points first: reading every installed package's name costs tenths of a second.
        entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        if not entries or distribution.name in seen:  # a later copy on the path is shadowed by the first
            continue
        seen.add(distribution.name)
        for entry in entries:
            yield entry, distribution


def _load(manager: pluggy.PluginManager, entry: metadata.EntryPoint, distribution: metadata.Distribution) -> Plugin:
    name, version = distribution.name, distribution.version
    unique = f"{name}:{entry.name}"
    try:
        manager.register(entry.load(), name=unique)
        others = [p for p in manager.get_plugins() if manager.get_name(p) != unique]
        specs: list[tuple[str, Spec]] = []
        for kind, (hook, record, _) in KINDS.items():
            for yielded in manager.subset_hook_caller(hook, remove_plugins=others)():
                for spec in yielded:
                    if not isinstance(spec, record):
                        raise TypeError(f"{hook} yielded {type(spec).__name__}, not {record.__name__}")
                    specs.append((kind, spec))
    except (Exception, SystemExit) as error:
        if manager.has_plugin(unique):
            manager.unregister(name=unique)
        return Plugin(
            name=entry.name,
            distribution=name,
            version=version,
            cause=_cause(error),
            trace="".join(traceback.format_exception(error)),
        )
    return Plugin(name=entry.name, distribution=name, version=version, specs=tuple(specs))


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
