"""The store in a folder keeps the contract, with hard links and without, and says what the file system refuses."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from spill.errors import StoreError
from spill.stores import Absent, Exists, Store, Unreadable, open_store
from spill.stores.local import LocalStore
from spill.testing.store_contract import StoreContract

NOBODY = 65534


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


class TestLocalStore(StoreContract):
    settle_seconds = 0.0

    @pytest.fixture
    def make_store(self, root: Path) -> Iterator[Callable[[], Store]]:
        yield lambda: LocalStore(str(root))
        assert not [p for p in root.rglob(".*")], "temporary files are left"

    @pytest.fixture
    def refusing_stores(self, root: Path) -> Iterator[Mapping[str, Store]]:
        root.mkdir()
        LocalStore(str(root)).create("log/1.json", b"x")
        with without_rights(root, root / "log"):
            yield {"no right": LocalStore(str(root))}


class TestLocalStoreWithoutHardLinks(TestLocalStore):
    """As on exFAT, some network mounts and some containers."""

    @pytest.fixture(autouse=True)
    def _no_links(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: object, **keywords: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)


@contextlib.contextmanager
def without_rights(*folders: Path) -> Iterator[None]:
    """Take all rights on the folders; for root, to whom all is allowed, become another user meanwhile."""
    for folder in reversed(folders):
        folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        for folder in folders:
            folder.chmod(0o700)


def store_with(root: Path, name: str = "log/1.json", data: bytes = b"before") -> LocalStore:
    store = LocalStore(str(root))
    store.write(name, [data])
    return store


# What the file system refuses


@pytest.mark.parametrize("verb", ["create", "write"])
def test_a_full_disk_says_what_is_needed_and_leaves_what_was(
    root: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store = store_with(root)
    real, written = os.write, []

    def full(handle: int, data: object) -> int:
        if sum(written) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real(handle, bytes(data)[:3]))  # type: ignore[call-overload]
        return written[-1]

    monkeypatch.setattr(os, "write", full)
    requests: dict[str, Callable[[], None]] = {
        "write": lambda: store.write("log/1.json", [b"x" * 1000, b"y" * 234]),
        "create": lambda: store.create("log/2.json", b"x" * 1234),
    }
    with pytest.raises(StoreError, match=r"no room to write .*log/[12]\.json: 1,234 bytes are needed"):
        requests[verb]()
    monkeypatch.undo()
    assert sorted(p.name for p in root.rglob("*")) == ["1.json", "log"]
    assert store.read("log/1.json", 99) == b"before"
    store.create("log/2.json", b"x" * 1234)


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MB, mounted in a name space of its own."""
    program = (
        "import sys; from spill.stores.local import LocalStore; from spill.errors import StoreError\n"
        "store = LocalStore(sys.argv[1]); store.create('log/1.json', b'before')\n"
        "try: store.write('data/1-0123456789abcdef/x', [b'x' * 400_000] * 4)\n"
        "except StoreError as error: print(error)\n"
        "assert [e.name for e in store.list('')] == ['log/1.json'] and store.read('log/1.json', 9) == b'before'\n"
        "store.write('data/1-0123456789abcdef/x', [b'x' * 400_000] * 2)\n"
        "assert len(store.read('data/1-0123456789abcdef/x', 10**7)) == 800_000\n"
    )
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no right to mount a file system in a name space of its own")
    done = subprocess.run(
        [*command, sys.executable, "-c", program, str(tmp_path / "state")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "no room to write" in done.stdout
    assert "1,600,000 bytes are needed" in done.stdout


def test_a_folder_of_somebody_else_names_path_and_owner(root: Path) -> None:
    store = store_with(root)
    owner = root.stat().st_uid
    root.chmod(0o755)
    for folder in [*root.parents][:3]:  # so that the path itself can be walked
        folder.chmod(folder.stat().st_mode | 0o055)
    (root / "log").chmod(0o555)
    with without_rights():
        me = os.geteuid()
        with pytest.raises(StoreError, match=rf"no right to write .*belongs to user {owner}, you are {me}.*--state"):
            store.create("log/2.json", b"x")
        assert store.read("log/1.json", 99) == b"before"
    (root / "log").chmod(0o755)


def test_a_sync_that_fails_once_is_done_anew_on_new_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(root)
    real, synced = os.fsync, []

    def failing(handle: int) -> None:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            synced.append(os.fstat(handle).st_ino)
            if len(synced) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr(os, "fsync", failing)
    store.write("log/1.json", [b"after"])
    assert store.read("log/1.json", 99) == b"after"
    assert len(synced) == 2
    assert sorted(p.name for p in root.rglob("*")) == ["1.json", "log"]


def test_a_sync_that_always_fails_is_an_error_and_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(root)

    def failing(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    for request in (lambda: store.write("log/1.json", [b"after"]), lambda: store.create("log/2.json", b"x")):
        with pytest.raises(StoreError, match="cannot write"):
            request()
    assert store.read("log/1.json", 99) == b"before"
    with pytest.raises(Absent):
        store.read("log/2.json", 99)


# What lies in an object's place


def test_a_link_a_pipe_and_a_folder_are_no_objects(root: Path, tmp_path: Path) -> None:
    store = store_with(root)
    secret = tmp_path / "secret"
    secret.write_bytes(b"outside")
    (root / "log" / "2.json").symlink_to(secret)
    os.mkfifo(root / "log" / "3.json")
    (root / "log" / "4.json").mkdir()
    (root / "log" / "5.json").symlink_to(tmp_path / "nowhere")
    for number in (2, 3, 4, 5):
        with pytest.raises(Unreadable):
            store.read(f"log/{number}.json", 99)
        with pytest.raises(Exists):
            store.create(f"log/{number}.json", b"x")
    assert [e.name for e in store.list("")] == ["log/1.json"]
    store.write("log/2.json", [b"inside"])
    assert (secret.read_bytes(), store.read("log/2.json", 99)) == (b"outside", b"inside")


def test_folders_that_are_links_are_not_followed(root: Path, tmp_path: Path) -> None:
    store = store_with(root)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"outside")
    (root / "data").symlink_to(outside)
    with pytest.raises(Unreadable):
        store.read("data/x", 99)
    assert [e.name for e in store.list("")] == ["log/1.json"]
    for request in (
        lambda: store.delete("data/x"),
        lambda: store.write("data/x", [b"y"]),
        lambda: store.create("data/y", b"y"),
    ):
        with pytest.raises(StoreError):
            request()
    assert [(p.name, p.read_bytes()) for p in outside.iterdir()] == [("x", b"outside")]


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    store_with(root)
    link = tmp_path / "link"
    link.symlink_to(root)
    assert LocalStore(str(link)).read("log/1.json", 99) == b"before"
    assert [e.name for e in LocalStore(str(link)).list("log/")] == ["log/1.json"]


# One state under every way to write its path


@pytest.mark.parametrize("odd", ["plain", "with space", "é", "a#b", "%40", "[x]", "a?b", "tab\tname", "x:y"])
def test_paths_with_odd_characters(tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_store(odd).create("log/1.json", b"x")
    for uri in (f"{odd}/", f"./{odd}", f"{tmp_path}/{odd}", f"{tmp_path}//{odd}//", f"file://{tmp_path}/{odd}/"):
        assert open_store(uri).read("log/1.json", 9) == b"x"
    assert [p.name for p in tmp_path.iterdir() if p.name != "home"] == [odd]


# Processes


CREATOR = (
    "import sys; from spill.stores.local import LocalStore; from spill.stores import Exists\n"
    "store, me = LocalStore(sys.argv[1]), sys.argv[2]; sys.stdin.read(1)\n"
    "for number in range(60):\n"
    "    try: store.create(f'log/{number}.json', me.encode() * 2000); print(number)\n"
    "    except Exists: pass\n"
)


def test_races_of_processes(root: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(root), str(me)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("g")
        racer.stdin.close()
    won = []
    for racer in racers:
        assert racer.stdout is not None
        won.append({int(line) for line in racer.stdout})
        racer.stdout.close()
        assert racer.wait(60) == 0
    assert sorted(n for numbers in won for n in numbers) == list(range(60)), "each name was won once"
    store = LocalStore(str(root))
    for me, numbers in enumerate(won):
        for number in numbers:
            assert store.read(f"log/{number}.json", 10**6) == str(me).encode() * 2000


WRITER = (
    "import sys; from spill.stores.local import LocalStore\n"
    "store, turn = LocalStore(sys.argv[1]), 0\n"
    "while True:\n"
    "    store.write('alive/x', [bytes([65 + turn % 26]) * 300_000]); print(turn, flush=True); turn += 1\n"
)


def test_a_kill_leaves_a_whole_object(root: Path) -> None:
    for turn in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.01 * turn)
        writer.send_signal(signal.SIGKILL)
        writer.stdout.close()
        writer.wait(30)
        data = LocalStore(str(root)).read("alive/x", 10**6)
        assert data == data[:1] * 300_000
