"""Fixtures for tests of states: builds without fsync, engines for handovers, a folder that every user may enter."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spill.testing.plugins import install_plugin


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave fsync out: it guards against a power cut, which no test makes, and costs most of a tiny build's time."""
    monkeypatch.setattr("spill.stores.local._sync", lambda handle: None)


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
