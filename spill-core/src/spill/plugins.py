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
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any, Literal, TypeVar, get_args

import pluggy
from attrs import field, frozen

from spill.errors import PluginError

GROUP = "spill"
ENGINE_CONTRACT = 1
STORE_CONTRACT = 1
STAGE_CONTRACT = 1

Dtype = Literal["float32", "bfloat16"]

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

# Where a name that somebody may ask for can be had. Only used to say what to install.
KNOWN_DISTRIBUTIONS = {
    ("engine", "torch-cpu"): "spill-engine-torch",
    ("engine", "torch-cuda"): "spill-engine-torch",
    ("engine", "torch-mps"): "spill-engine-torch",
    ("engine", "mlx"): "spill-engine-mlx",
    ("store", "s3"): '"spill-store-cloud[s3]"',
    ("store", "gs"): '"spill-store-cloud[gs]"',
    ("store", "az"): '"spill-store-cloud[az]"',
}

# A name is typed, listed with commas, and printed.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@frozen(kw_only=True)
class Detection:
    """What an engine's `detect` saw, without importing the engine.

    `rank`: among available engines the highest is chosen. `dtype`: the compute dtype of a new build here,
    `float32` on a CPU, `bfloat16` on a GPU.
    """

    available: bool
    rank: int
    reason: str
    dtype: Dtype = "float32"


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
        claimants = self.named(kind).get(name, [])
        if not claimants:
            raise PluginError(self._unknown(kind, name))
        if len(claimants) > 1:
            raise PluginError(self._clash(kind, name, claimants))
        if not claimants[0].usable:
            raise PluginError(claimants[0].mismatch())
        return claimants[0]

    def fault(self, kind: str, name: str) -> str:
        """Why `get` would refuse, in its words; empty where it would not."""
        try:
            self.get(kind, name)
        except PluginError as error:
            return error.message
        return ""

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

    def _unknown(self, kind: str, name: str) -> str:
        known = KNOWN_DISTRIBUTIONS.get((kind, name), "")
        bringer = known.strip('"').partition("[")[0]
        broken = [p.label for p in self.plugins if p.cause and (not known or p.distribution == bringer)]
        if broken:
            hint = f"{', '.join(broken)} may bring it, but is broken (`spill plugins` shows why)"
        elif known:
            return f"{kind} {name!r} is not installed: pip install {known}"
        else:
            hint = "`spill plugins` lists every plugin"
        have = ", ".join(self.named(kind)) or "none"
        return f"unknown {kind} {name!r}; installed: {have}; {hint}"


def detect(spec: EngineSpec) -> Detection:
    """An engine's own answer, guarded: a `detect` that fails counts as not available, with the reason."""
    try:
        seen = spec.detect()
        well_formed = (
            isinstance(seen, Detection)
            and (type(seen.available), type(seen.rank), type(seen.reason)) == (bool, int, str)
            and seen.dtype in get_args(Dtype)
        )
        if not well_formed:
            raise TypeError(f"it answered {seen!r:.80}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is, it is no reason for the command line to end
        return Detection(available=False, rank=0, reason=f"detect failed: {_cause(error)}")
    return seen


def load_target(spec: Spec) -> Any:
    """Import `package.module:callable`.

    Raises:
        PluginError: the module or the attribute is not there, or importing it fails.
    """
    module_name, _, attribute = spec.target.partition(":")
    try:
        target = getattr(importlib.import_module(module_name), attribute)
        if not callable(target):
            raise TypeError(f"it is of type {type(target).__name__} and cannot be called")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{spec.name!r} was chosen but {spec.target} cannot be loaded: {_cause(error)}") from error
    return target


def record_fault(kind: str, spec: object) -> str:
    """What is wrong with a yielded record; empty where it is well-formed."""
    record = KINDS[kind][1]
    if not isinstance(spec, record):
        return f"a {type(spec).__name__} was yielded, not a record {record.__name__}"
    if not isinstance(spec.name, str) or not _NAME.fullmatch(spec.name):
        return f"{spec.name!r:.40} is not a name of letters, digits and . _ : + -"
    if not isinstance(spec.target, str) or not _TARGET.fullmatch(spec.target):
        return f"{spec.name!r} has target {spec.target!r:.60}, not package.module:callable"
    if type(spec.contract) is not int:
        return f"{spec.name!r} has contract {spec.contract!r:.40}, not a whole number"
    if not isinstance(spec.summary, str) or not spec.summary.isprintable():
        return f"{spec.name!r} has a summary that is not one line of text"
    if isinstance(spec, EngineSpec) and not callable(spec.detect):
        return f"{spec.name!r} has a detect that cannot be called"
    return ""


def discover() -> Registry:
    """Load every entry point of the group, each in a guard of its own."""
    plugins = [load_plugin(entry, name, version) for entry, name, version in _entry_points()]
    return Registry(sorted(plugins, key=lambda p: (p.name, p.distribution)))


def _entry_points() -> Iterator[tuple[metadata.EntryPoint | Exception, str, str]]:
    """Every entry point of the group, with its distribution's name and version; an Exception where a distribution's
    entry points cannot be read."""
    seen: set[str] = set()
    for distribution in metadata.distributions():
        entries: list[metadata.EntryPoint | Exception]
        # The entry points first: reading every installed package's name costs tenths of a second.
        try:
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:  # any package of this machine, most likely none of ours
            if f"[{GROUP}]" not in _raw_entry_points(distribution):
                continue
            entries = [error]
        if not entries:
            continue
        name, version = _identity(distribution)
        if name in seen:  # a later copy on the path is shadowed by the first
            continue
        seen.add(name)
        for entry in entries:
            yield entry, name, version


def _identity(distribution: metadata.Distribution) -> tuple[str, str]:
    """Name and version, also where a half-removed package has lost its metadata."""
    try:
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:
        name, version = "", ""
    return str(name or getattr(distribution, "_path", "a package without metadata")), str(version or "?")


def _raw_entry_points(distribution: metadata.Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except Exception:
        return ""


def load_plugin(entry: metadata.EntryPoint | Exception, distribution: str, version: str) -> Plugin:
    """One plugin, in a manager of its own, so that nothing it registers reaches another's hooks."""
    name = entry.name if isinstance(entry, metadata.EntryPoint) else "entry_points.txt"
    specs: list[tuple[str, Spec]] = []
    try:
        if isinstance(entry, Exception):
            raise entry
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(Hooks)
        manager.register(entry.load())
        manager.check_pending()  # a misspelt hook would otherwise bring nothing, silently
        for kind, (hook, _, _) in KINDS.items():
            for yielded in getattr(manager.hook, hook)():
                for spec in yielded:
                    if fault := record_fault(kind, spec):
                        raise TypeError(f"{hook}: {fault}")
                    specs.append((kind, spec))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too, and what extensions raise beside Exception
        cause, trace = _cause(error), "".join(traceback.format_exception(error))
        return Plugin(name=name, distribution=distribution, version=version, cause=cause, trace=trace)
    return Plugin(name=name, distribution=distribution, version=version, specs=tuple(specs))


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
