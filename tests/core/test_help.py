"""Help and version: quick, since they import nothing heavy and no plugin, and there for every command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest

from spill.cli import main
from spill.testing.plugins import install_plugin
from tests.conftest import Spill

# What a look at the help may load besides the standard library.
LIGHT = {"spill", "click"}
HEAVY = {"numpy", "attr", "attrs", "cattrs", "pluggy", "rich", "jinja2", "tokenizers", "huggingface_hub"}
STANDARD_BUT_SLOW = {"asyncio", "http", "ssl", "email", "multiprocessing", "tomllib", "importlib.metadata"}

LOOK = """
import json, sys
before = set(sys.modules)
sys.argv = ["spill", *sys.argv[1:]]
from spill.__main__ import main
try:
    main()
except SystemExit as leave:
    code = leave.code
print(json.dumps([code, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name)


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command


def look(*arguments: str, path: Path) -> tuple[str, int, set[str]]:
    """What a fresh process prints, its exit code, and the modules it loaded."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return done.stdout, code, set(modules)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"], ["state", "gc", "-h"]])
def test_help_loads_nothing_heavy_and_no_plugin(arguments: list[str], tmp_path: Path) -> None:
    install_plugin(tmp_path, distribution="spill-loud", module="plugin_that_must_not_be_imported")
    (tmp_path / "plugin_that_must_not_be_imported.py").write_text("raise SystemExit('imported')")
    out, code, modules = look(*arguments, path=tmp_path)
    assert code == 0
    assert out
    tops = {name.partition(".")[0] for name in modules}
    third_party = {t for t in tops if t not in sys.stdlib_module_names and not t.startswith(("_", "plugin_that"))}
    assert third_party - LIGHT == set()
    assert not tops & HEAVY
    assert not modules & STANDARD_BUT_SLOW
    assert "spill.plugins" not in modules
    assert "plugin_that_must_not_be_imported" not in modules


def test_heavy_names_are_seen_where_they_are_loaded(tmp_path: Path) -> None:
    """The look above can fail: a command that works loads what help must not."""
    (tmp_path / "empty").mkdir()
    _, code, modules = look("table", str(tmp_path / "empty"), path=tmp_path)
    assert code == 1
    assert {"numpy", "attr", "cattrs", "pluggy", "spill.plugins"} <= modules


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_command_has_help(spill: Spill, path: tuple[str, ...], option: str) -> None:
    done = spill(*path, option)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: ")
    assert len(done.out.split("\n\n")[1].strip()) > 10, "what the command does"
    assert "\x1b" not in done.out


def test_every_option_says_what_it_is() -> None:
    silent = [
        f"{' '.join(path)} {option.opts[0]}"
        for path in commands(main)
        for option in command_at(path).params
        if isinstance(option, click.Option) and not option.help
    ]
    assert silent == []


def test_the_commands_of_the_design_are_there() -> None:
    names = {" ".join(path) for path in commands(main)}
    assert names >= {"build", "resume", "example", "check", "table", "ask", "export", "doctor", "plugins"}


def test_version_is_that_of_the_distribution(spill: Spill) -> None:
    done = spill("--version")
    assert (done.code, done.out) == (0, f"spill, version {metadata.version('spill-core')}\n")


def test_no_command_at_all_shows_the_help(spill: Spill) -> None:
    done = spill()
    assert done.code == 2
    assert "spill: Usage" not in done.err
    assert (done.out + done.err).startswith("Usage: ")
