"""Fixtures for tests of states: quicker builds, engines for handovers, a folder that every user may enter."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spill import plugins
from spill.cli import run
from spill.signals import StopRequest
from spill.testing.models import tiny_model
from spill.testing.plugins import install_plugin


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what costs most of a tiny build's time: fsync, which guards against a power cut that no test makes, and
    looking for plugins again in every command."""
    monkeypatch.setattr("spill.stores.local._sync", lambda handle: None)
    monkeypatch.setattr("spill.plugins.discover", functools.cache(plugins.discover))


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory, site: Path) -> Callable[..., None]:
    """Run the command line outside of a test, for what several tests copy."""

    def build(*arguments: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(site))
            patch.setenv("SPILL_HOME", str(tmp_path_factory.mktemp("home")))
            patch.setenv("SPILL_MACHINE", "alpha")
            assert run(StopRequest(), [str(a) for a in arguments]) == 0

    return build


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest student, so that a build takes a tenth of a second."""
    directory = tmp_path_factory.mktemp("small") / "student"
    return tiny_model(directory, hidden=8, layers=1, heads=2, kv_heads=1, intermediate=8, max_positions=128)


@pytest.fixture(scope="session")
def engines_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the engines of `tests.core.engines` an installed plugin."""
    directory = tmp_path_factory.mktemp("engines")
    install_plugin(directory, distribution="spill-engines-for-tests", module="tests.core.engines")
    return directory


@pytest.fixture
def other_engines(engines_site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds them to this process."""
    monkeypatch.syspath_prepend(str(engines_site))


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user of the machine may enter, unlike pytest's own."""
    directory = Path(tempfile.mkdtemp(prefix="spill-public-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the machine has one: a disk takes milliseconds for every file that is removed."""
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="spill-", dir=shared if shared.is_dir() else tmp_path))
    yield directory
    shutil.rmtree(directory)
