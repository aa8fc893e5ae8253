"""Models from the hub: fetched whole and once, refused in one line, stopped at once; an HTTP server plays the hub."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from spill import models
from spill.errors import ModelError
from spill.testing.models import tiny_model

SHA = "0123456789abcdef0123456789abcdef01234567"
NEWLINE = "\n"
FAILURES = {
    "gated": (401, "GatedRepo"),
    "forbidden": (403, "GatedRepo"),
    "hidden": (401, "RepoNotFound"),
    "unknown": (404, "RevisionNotFound"),
    "busy": (503, ""),
}


class Stop(Exception):
    """What a tick raises in these tests."""


def never(line: str) -> None:
    raise AssertionError(f"said without need: {line}")


def tick() -> None:
    pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPILL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def identity_of(directory: Path) -> str:
    model = models.resolve(str(directory), tick=tick, say=never)
    assert model is not None
    return model.identity


class Hub:
    """The few endpoints of the hub that a download asks, for one repository."""

    def __init__(self, files: dict[str, bytes], answer: str = "") -> None:
        self.files = files
        self.answer = answer  # "gated", "forbidden", "hidden", "unknown", "busy" or nothing
        self.absent: set[str] = set()
        self.requests: list[str] = []
        self.release = threading.Event()
        self.release.set()

    def listing(self) -> list[dict[str, str]]:
        return [{"rfilename": name} for name in self.files]

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = hub


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        if hub.answer in FAILURES:
            status, code = FAILURES[hub.answer]
            self.send(status, b"{}", **{"X-Error-Code": code})
        elif path in ("/api/models/org/name/revision/main", f"/api/models/org/name/revision/{SHA}"):
            info = {"id": "org/name", "sha": SHA, "siblings": hub.listing(), "private": False, "tags": []}
            self.send(200, json.dumps(info).encode())
        elif path == f"/api/models/org/name/tree/{SHA}":
            self.send(200, json.dumps(hub.tree()).encode())
        elif path.startswith(f"/org/name/resolve/{SHA}/"):
            self.send_file(path.rpartition("/")[2])
        else:
            self.send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

    def send_file(self, name: str) -> None:
        hub = self.server.hub
        if name in hub.absent:
            self.send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET" and name.endswith(".safetensors"):
            hub.release.wait(30)
        data = hub.files[name]
        self.send(200, data, **{"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": SHA})

    def send(self, status: int, data: bytes, **headers: str) -> None:
        everything = {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}
        try:
            self.send_response(status)
            for key, value in everything.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the client was ended


@contextmanager
def serving(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = HubServer(hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub_files(tiny: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    return {**files, "README.md": b"# hello", "pytorch_model.bin": b"pickle", "modeling.py": b"raise SystemExit"}


def test_a_model_is_fetched_once_whole_and_without_code(
    tiny: Path, hub_files: dict[str, bytes], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with serving(Hub(hub_files), monkeypatch) as hub:
        model = models.resolve("hf:org/name", tick=tick, say=said.append)
        asked = list(hub.requests)
    assert model is not None
    assert model.student == "hf:org/name@main"
    assert model.revision == SHA
    assert model.identity == identity_of(tiny)
    assert home in model.directory.parents
    assert sorted(path.name for path in model.directory.iterdir()) == sorted(path.name for path in tiny.iterdir())
    assert not any("pytorch_model" in line or "modeling" in line for line in asked)
    assert [line.split()[0] for line in said] == ["fetching", "fetched"]
    assert "org/name" in said[0]
    # From here on the network is not needed, and not asked.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert models.resolve("hf:org/name@main", tick=tick, say=never) == model
    assert models.resolve("hf:org/name@main", tick=tick, say=never, offline=True) == model


def test_a_tag_is_fetched_from_its_repository(hub_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    tag = models.resolving.Tag(repository="org/name", revision="main", learning_rate=1e-3)
    monkeypatch.setitem(models.TAGS, "smollm2:135m", tag)
    with serving(Hub(hub_files), monkeypatch):
        model = models.resolve("smollm2:135m", tick=tick, say=lambda line: None)
    assert model is not None
    assert (model.student, model.revision) == ("smollm2:135m", SHA)


def test_a_fetch_that_broke_off_is_not_a_model_and_is_continued(
    tiny: Path, hub_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Hub(hub_files), monkeypatch) as hub:
        hub.absent = {"tokenizer_config.json"}
        with pytest.raises(ModelError, match="cannot be fetched"):
            models.resolve("hf:org/name", tick=tick, say=lambda line: None)
        assert models.resolve("hf:org/name", tick=tick, say=never, offline=True) is None
        hub.absent = set()
        model = models.resolve("hf:org/name", tick=tick, say=lambda line: None)
        assert model is not None
        assert model.identity == identity_of(tiny)


def test_a_fetched_model_that_lost_a_file_or_a_part_of_one_is_fetched_again(
    tiny: Path, hub_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Hub(hub_files), monkeypatch):
        for spoil in (Path.unlink, lambda path: path.resolve().write_bytes(b"{")):
            model = models.resolve("hf:org/name", tick=tick, say=lambda line: None)
            assert model is not None
            assert model.identity == identity_of(tiny)
            spoil(model.directory / "generation_config.json")
            assert models.resolve("hf:org/name", tick=tick, say=never, offline=True) is None
        again = models.resolve("hf:org/name", tick=tick, say=lambda line: None)
        assert again is not None
        assert again.identity == identity_of(tiny)


@pytest.mark.parametrize(
    ("answer", "student", "words"),
    [
        ("gated", "llama3.2:1b", ["is gated", "meta-llama/Llama-3.2-1B-Instruct", "licence", "HF_TOKEN"]),
        ("forbidden", "hf:org/name", ["is gated", "HF_TOKEN"]),
        ("hidden", "hf:org/name", ["no such repository", "HF_TOKEN"]),
        ("unknown", "hf:org/name@v9", ["no revision v9", "commits", "--student hf:org/name,"]),
        ("busy", "hf:org/name", ["cannot be fetched", "503", "try again"]),
        ("", "hf:other/name", ["no such repository"]),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_ways_out(
    answer: str, student: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(Hub({}, answer), monkeypatch),
        pytest.raises(ModelError) as caught,
    ):
        models.resolve(student, tick=tick, say=lambda line: None)
    message = str(caught.value)
    assert message.startswith(student)
    for word in [*words, "--student PATH", "--weights URI"]:
        assert word in message
    assert NEWLINE not in message


def test_without_a_network_the_packaged_model_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        models.resolve("qwen2.5:0.5b", tick=tick, say=lambda line: None)
    assert time.monotonic() - started < 20
    message = str(caught.value)
    for word in ("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "--student PATH", "--weights URI", "smollm2:135m-q4"):
        assert word in message
    assert "refused" in message
    assert NEWLINE not in message


def test_a_repository_of_pickles_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with serving(Hub(files), monkeypatch) as hub:
        with pytest.raises(ModelError, match=r"no model\*\.safetensors \(only pytorch_model\.bin\)"):
            models.resolve("hf:org/name", tick=tick, say=lambda line: None)
        assert not any("resolve" in line for line in hub.requests)


def test_a_stop_ends_a_download_at_once(hub_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Hub(hub_files), monkeypatch) as hub:
        hub.release.clear()

        def stop_when_downloading() -> None:
            if any(line.startswith("GET") and "safetensors" in line for line in hub.requests):
                raise Stop

        started = time.monotonic()
        with pytest.raises(Stop):
            models.resolve("hf:org/name", tick=stop_when_downloading, say=lambda line: None)
        assert time.monotonic() - started < 15
        assert models.resolve("hf:org/name", tick=tick, say=never, offline=True) is None


def test_the_download_ends_when_its_parent_does(
    hub_files: dict[str, bytes], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Hub(hub_files), monkeypatch) as hub:
        hub.release.clear()
        command = [
            sys.executable,
            "-P",
            "-c",
            "from spill.models.hub import child; child()",
            "org/name",
            "main",
            str(home),
            "",
        ]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            try:
                while not any("GET" in line and "safetensors" in line for line in hub.requests):
                    assert child.poll() is None
                    time.sleep(0.02)
                assert child.stdin is not None
                child.stdin.close()  # what the kernel does when the parent is killed
                assert child.wait(10) == 1
            finally:
                child.kill()
