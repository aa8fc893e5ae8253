"""Real object stores for the tests of spill-store-cloud. What they need beside it:

    pip install -e "./spill-store-cloud[all]" -r tests/cloud/requirements.txt
    npm install --no-save --prefix .cache/azurite azurite@3.35.0      # Node 20; or `azurite-blob` on PATH

Each server starts once, when the first test asks for it, and is stopped at the end. A machine without one skips its
tests with the reason; where the environment variable CI is set, a skip is a failure.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spill.environment import nonce
from spill.stores import Store
from tests.cloud import servers
from tests.cloud.relay import Relay, relayed
from tests.cloud.servers import BUCKET, NotInstalled, Server

INSTALLED = find_spec("spill_store_cloud") is not None
# They import it; the others say why they are skipped.
collect_ignore = [] if INSTALLED else ["test_places.py"]
collect_ignore += [] if INSTALLED and find_spec("gcsfs") else ["test_google_uploads.py"]
LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
CI = bool(os.environ.get("CI"))
PREFIXES = ("AWS_", "AZURE_", "GOOGLE_", "GCSFS_", "GCLOUD_", "CLOUDSDK_", "STORAGE_EMULATOR", "FSSPEC_", "BOTO")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report


def started(start: Callable[[], AbstractContextManager[Server]]) -> Iterator[Server]:
    if not INSTALLED:
        pytest.skip('spill-store-cloud is not installed: pip install -e "./spill-store-cloud[all]"')
    running = start()
    try:
        server = running.__enter__()
    except NotInstalled as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    yield from started(servers.moto)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Server]:
    yield from started(servers.seaweed)


@pytest.fixture(scope="session")
def fake_gcs() -> Iterator[Server]:
    yield from started(servers.fake_gcs)


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    yield from started(servers.azurite)


@pytest.fixture(autouse=True)
def less_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has died fails a test soon."""
    if INSTALLED:
        monkeypatch.setattr("spill_store_cloud.store.PATIENCE_SECONDS", 20.0)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings or credentials of the machine's own, in the environment or in files."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="session", autouse=True)
def one_botocore_loader() -> Iterator[None]:
    """Each client reads the description of S3 anew, a fifth of a second each; here they share it."""
    if find_spec("botocore") is None:
        yield
        return
    from botocore import loaders

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "create_loader", functools.cache(loaders.create_loader))
        yield


Opener = Callable[..., Any]


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Opener]:
    """`reach(server, url)` sets what a user sets to reach that server, and answers `open(bucket, folder)`."""

    def prepare(server: Server, url: str | None = None) -> Opener:
        if find_spec(LIBRARIES[server.scheme]) is None:
            pytest.skip(f'{server.scheme} is not installed: pip install "spill-store-cloud[{server.scheme}]"')
        for name, value in server.environment(url or server.url).items():
            monkeypatch.setenv(name, value)
        here = f"tests/{nonce()}"

        def open_store(bucket: str = BUCKET, folder: str = here) -> Store:
            module = import_module(f"spill_store_cloud.{server.scheme}")
            store: Store = getattr(module, f"open_{server.scheme}")(f"{server.scheme}://{bucket}/{folder}")
            return store

        return open_store

    return prepare


@pytest.fixture(params=["moto", "fake_gcs", "azurite"])
def server(request: pytest.FixtureRequest) -> Server:
    """One server of each provider."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def relay(server: Server) -> Iterator[Relay]:
    with relayed(server.url) as relay:
        yield relay


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries take no time; answers the list of them."""
    pauses: list[float] = []
    monkeypatch.setattr("spill_store_cloud.store.sleep", pauses.append)
    return pauses


@pytest.fixture
def relay_of() -> Iterator[Callable[[Server], Relay]]:
    """Relays before given servers."""
    with contextlib.ExitStack() as stack:
        yield lambda server: stack.enter_context(relayed(server.url))
