"""The suite that holds a plugin to `spill.plugins`: inherit `PluginContract` and give it one fixture.

    class TestMine(PluginContract):
        @pytest.fixture
        def plugin(self):
            return "my_engine.plugin"

It looks at the light module alone: what it registers, and that importing and asking it costs nothing.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest

from spill.plugins import GROUP, KINDS, EngineSpec, Plugin, Registry, detect, load_plugin, load_target

HEAVY = (
    *("torch", "mlx", "mlx_lm", "jax", "tensorflow", "transformers", "peft", "datasets", "tokenizers", "safetensors"),
    *("numpy", "scipy", "pandas", "fsspec", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "aiohttp", "requests"),
)
SUMMARY_LENGTH = 100

# Imports the plugin, asks every engine's `detect`, and says what that loaded and how long each answer took.
LOOK = """
import contextlib, io, json, sys, time
before = set(sys.modules)
printed = io.StringIO()
answers = {}
with contextlib.redirect_stdout(printed):
    from importlib import metadata
    from spill.plugins import GROUP, EngineSpec, load_plugin
    plugin = load_plugin(metadata.EntryPoint(name="suite", value=sys.argv[1], group=GROUP), "suite", "0")
    for kind, spec in plugin.specs:
        if isinstance(spec, EngineSpec):
            begun = time.monotonic()
            try:
                spec.detect()
                fault = ""
            except BaseException as error:
                fault = f"{type(error).__name__}: {error}"
            answers[spec.name] = [time.monotonic() - begun, fault]
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"loaded": loaded, "printed": printed.getvalue(), "answers": answers, "cause": plugin.cause}))
"""


class PluginContract:
    """Attributes:
    detect_seconds: how long an engine's `detect` may take, in a fresh process.
    """

    detect_seconds: float = 1.0

    @pytest.fixture
    def plugin(self) -> str:
        """The name of the module that the entry point names."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `plugin` that returns the module's name")

    @pytest.fixture
    def loaded(self, plugin: str) -> Plugin:
        return load_plugin(metadata.EntryPoint(name="suite", value=plugin, group=GROUP), "suite", "0")

    def test_it_loads_and_its_records_are_well_formed(self, loaded: Plugin) -> None:
        assert not loaded.cause, loaded.trace
        assert loaded.specs, (
            f"nothing is registered: implement one of {', '.join(hook for hook, _, _ in KINDS.values())}"
        )

    def test_it_claims_no_name_twice(self, loaded: Plugin) -> None:
        registry = Registry([loaded])
        twice = [f"{kind} {name}" for kind in KINDS for name, found in registry.named(kind).items() if len(found) > 1]
        assert not twice, f"claimed twice: {', '.join(twice)}"

    def test_it_speaks_the_contracts_of_this_core(self, loaded: Plugin) -> None:
        strange = [found.mismatch() for found in Registry([loaded]).found if not found.usable]
        assert not strange, "; ".join(strange)

    def test_its_contract_numbers_are_literals(self, plugin: str) -> None:
        found = importlib.util.find_spec(plugin)
        assert found is not None, f"there is no module {plugin}"
        assert found.origin, f"{plugin} has no source file"
        for node in ast.walk(ast.parse(Path(found.origin).read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "contract":
                # A number imported from the core would say that whatever core is installed is understood.
                literal = isinstance(node.value, ast.Constant) and type(node.value.value) is int
                assert literal, f"{found.origin}:{node.value.lineno}: write the contract as a number"

    def test_its_summaries_are_short(self, loaded: Plugin) -> None:
        for _, spec in loaded.specs:
            assert 0 < len(spec.summary) <= SUMMARY_LENGTH, f"the summary of {spec.name} has {len(spec.summary)} signs"

    def test_looking_at_it_loads_nothing_heavy(self, plugin: str) -> None:
        seen = _look(plugin)
        assert not seen["cause"], seen["cause"]
        heavy = sorted(set(seen["loaded"]) & set(HEAVY))
        assert not heavy, f"importing {plugin} and asking detect loads {', '.join(heavy)}"
        assert seen["printed"] == "", f"it prints {seen['printed']!r} when looked at"

    def test_detect_answers_quickly_and_anywhere(self, plugin: str, tmp_path: Path) -> None:
        bare = {"PATH": "", "HOME": str(tmp_path / "nowhere")}
        for environment in (dict(os.environ), bare):
            for name, (seconds, fault) in _look(plugin, environment)["answers"].items():
                assert not fault, f"detect of {name} raised {fault}"
                assert seconds <= self.detect_seconds, f"detect of {name} took {seconds:.1f} s"

    def test_detect_answers_a_detection(self, loaded: Plugin) -> None:
        for _, spec in loaded.specs:
            if isinstance(spec, EngineSpec):
                seen = detect(spec)
                assert not seen.reason.startswith("detect failed"), f"{spec.name}: {seen.reason}"
                assert seen.reason.strip(), f"detect of {spec.name} gives no reason"
                assert seen.reason.isprintable(), f"the reason of {spec.name} is not one line: {seen.reason!r}"

    def test_its_targets_are_there(self, loaded: Plugin) -> None:
        for _, spec in loaded.specs:
            if isinstance(spec, EngineSpec) and not detect(spec).available:
                # Its library may not even be installed here; that the module exists can be seen all the same.
                module = spec.target.partition(":")[0]
                assert importlib.util.find_spec(module), f"{spec.name}: there is no module {module}"
            else:
                load_target(spec)


def _look(plugin: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, plugin],
        env={**(os.environ if environment is None else environment), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"a process that looks at {plugin} failed: {done.stderr[-2000:]}"
    return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))
