"""URIs, the plugin, missing libraries, and what a process says when it ends. No server but for the last."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spill.errors import InputError, PluginError
from spill.plugins import discover
from spill.stores import open_store
from spill_store_cloud.place import clean, library, parse
from tests.cloud.servers import BUCKET, Server

SCHEMES = ("s3", "gs", "az")
LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rest", "bucket", "folder"),
    [
        ("bucket/relay", "bucket", "relay"),
        ("bucket/relay/", "bucket", "relay"),
        ("my-bucket.x_1/a/b-c/d.e/user=me", "my-bucket.x_1", "a/b-c/d.e/user=me"),
        ("bucket/UPPER/.hidden/..x/x..", "bucket", "UPPER/.hidden/..x/x.."),
    ],
)
def test_uris_that_name_a_place(scheme: str, rest: str, bucket: str, folder: str) -> None:
    for spelled in (scheme, scheme.upper()):
        place = parse(f"{spelled}://{rest}", scheme)
        assert (place.bucket, place.folder, place.uri) == (bucket, folder, f"{scheme}://{bucket}/{folder}")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("bucket", "root of a bucket: give a folder in the bucket"),
        ("bucket/", "root of a bucket"),
        ("", "no usable bucket name"),
        ("/", "no usable bucket name"),
        ("/relay", "no usable bucket name"),
        ("-x/relay", "no usable bucket name"),
        ("bu cket/relay", "no usable bucket name"),
        ("[x]/relay", "no usable bucket name"),
        ("arn:aws:s3:eu-west-1:123456789012:accesspoint/relay", "no usable bucket name"),
        ("bucket//", "root of a bucket"),
        ("bucket//relay", "double slash"),
        ("bucket/a//b", "double slash"),
        ("bucket/relay//", "double slash"),
        ("bucket/../relay", "dots only"),
        ("bucket/relay/..", "dots only"),
        ("bucket/./relay", "dots only"),
        ("bucket/my relay", "' '"),
        ("bucket/relay ", "' '"),
        ("bucket/é", "without accents"),
        ("bucket/e\u0301", "without accents"),
        ("bucket/a#b", "'#'"),
        ("bucket/a?b=c", "'?'"),
        ("bucket/a%40b", "'%'"),
        ("bucket/[x]", "'['"),
        ("bucket/a\\b", "'\\\\'"),
        ("bucket/a\nb", "without accents"),
        ("bucket/a*b", "'*'"),
        ("bucket/" + "x" * 600, "at most 512"),
    ],
)
def test_uris_that_are_refused_when_parsed(scheme: str, rest: str, says: str) -> None:
    with pytest.raises(InputError) as found:
        parse(f"{scheme}://{rest}", scheme)
    assert says in str(found.value)
    assert "\n" not in str(found.value)
    with pytest.raises(InputError):
        open_store(f"{scheme}://{rest}")


def test_keys_in_a_uri_are_refused_and_not_repeated() -> None:
    for uri in ("s3://AKIA:hunter2@bucket/relay", "az://container@account/relay?sig=hunter2"):
        with pytest.raises(InputError, match="set them in the environment") as found:
            parse(uri, uri[:2])
        assert "hunter2" not in str(found.value)
        assert "AKIA" not in str(found.value)


def test_a_container_has_no_dots_and_no_capitals() -> None:
    """`az://account.blob.core.windows.net/container/...` is how others write it."""
    for uri in ("az://account.blob.core.windows.net/c/relay", "az://Container/relay"):
        with pytest.raises(InputError, match="the account comes from the environment"):
            open_store(uri)


def test_foreign_texts_become_one_clean_line() -> None:
    text = "a\n\x1b[31mb https://h/p?X-Amz-Signature=hunter2 AccountKey=hunter2;x sig=hunter2&y Token=hunter2"
    line = clean(text)
    assert "hunter2" not in line
    assert "\x1b" not in line
    assert line.startswith("a [31mb https://h/p?... AccountKey=...")
    assert len(clean("x" * 5000)) == 300


def test_the_plugin_brings_three_schemes_without_their_libraries() -> None:
    program = (
        "import sys\nfrom spill.plugins import discover\n"
        "found = discover().named('store')\n"
        "print([n for n in found if [f.plugin.distribution for f in found[n]] == ['spill-store-cloud']])\n"
        "print([m for m in ('fsspec', 's3fs', 'gcsfs', 'adlfs', 'numpy', 'azure', 'botocore') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['az', 'gs', 's3']", "[]"], done.stderr
    assert discover().get("store", "s3").usable


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_missing_library_names_what_to_install(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == LIBRARIES[scheme]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, LIBRARIES[scheme], None)
    with pytest.raises(PluginError) as found:
        open_store(f"{scheme}://bucket/relay")
    assert f'pip install "spill-store-cloud[{scheme}]"' in str(found.value)
    assert LIBRARIES[scheme] in str(found.value)


def test_a_broken_library_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "halfthere.py").write_text("import nosuchthing\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no\\nlibrary')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="which lacks nosuchthing: pip install nosuchthing"):
        library("halfthere", "s3")
    with pytest.raises(PluginError, match="cannot be imported: no library"):
        library("broken", "s3")


PROGRAM = """
import sys, threading
from spill.stores import open_store
store = open_store(sys.argv[1])
store.create('log/1.json', b'x')
store.write('data/x', [b'y' * 100])
threading.Thread(target=lambda: store.list(''), daemon=True).start()
assert store.read('log/1.json', 9) == b'x' and len(store.list('')) == 2
store.delete('data/x'); store.delete('log/1.json')
"""


def test_a_process_ends_in_silence(server: Server, reach: Callable[..., Any]) -> None:
    """No complaint of a library about a connection that is still open, and no wait."""
    uri = reach(server)().uri
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", PROGRAM, uri], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert BUCKET in uri
