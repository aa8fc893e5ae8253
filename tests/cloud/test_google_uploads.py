"""Large objects on Google's store, whose upload goes on after a break: against the protocol as Google documents it.
The emulator keeps only the part of it that needs no break.

https://cloud.google.com/storage/docs/performing-resumable-uploads: a part is answered with 308 and the range that the
store has (none where it has nothing), which may be less than was sent; an empty part with `bytes */SIZE` asks for it;
the last part is answered with the object.
"""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from fsspec.asyn import get_loop

from spill.errors import StoreError
from spill.stores import Unanswered
from spill_store_cloud import store as store_module
from spill_store_cloud.gs import GoogleBucket
from spill_store_cloud.place import parse
from spill_store_cloud.store import CloudStore

MIB = 1024**2
Fault = str | None


class Google:
    """The upload side of the store, as gcsfs's file system reaches it; `faults` says what goes wrong with each request.

    `before`: no answer, nothing kept. `after`: no answer, all kept. `half`: half is kept, and said. `half-lost`: half
    is kept, and not said. `none`: nothing is kept, and that is said. `damage`: a bit is turned. `gone`: the upload is
    forgotten. `less`: what was kept before is gone, and that is said.
    """

    _location = "http://google"

    def __init__(self, faults: Iterator[Fault]) -> None:
        self.loop = get_loop()
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self._faults = faults
        self._open: dict[str, tuple[str, str, bytearray]] = {}

    async def _call(self, method: str, path: str, **request: Any) -> tuple[dict[str, str], bytes]:
        if method == "DELETE":
            self._open.pop(path, None)
            return {}, b""
        assert request["uploadType"] == "resumable"
        location = f"{path}?upload_id={len(self._open)}"
        self._open[location] = (request["name"], request["json"]["md5Hash"], bytearray())
        return {"Location": location}, b""

    async def _request(self, method: str, location: str, *, headers: dict[str, str], data: Any) -> tuple[Any, ...]:
        await asyncio.sleep(0)
        span, body = headers["Content-Range"], data.read()
        self.requests.append(span)
        fault = next(self._faults, None)
        if fault == "before":
            raise aiohttp.ServerDisconnectedError()
        if fault == "gone":
            self._open.clear()
        if location not in self._open:
            raise FileNotFoundError(location)
        name, tag, kept = self._open[location]
        found = re.fullmatch(r"bytes (\*|(\d+)-(\d+))/(\d+)", span)
        assert found, span
        size = int(found[4])
        if found[1] != "*":
            start = int(found[2])
            assert start == len(kept), "a part that does not begin where the last one ended"
            assert int(found[3]) - start + 1 == len(body)
            if fault == "damage":
                body = bytes([body[0] ^ 1]) + body[1:]
            half = len(body) // 2 // 262144 * 262144
            kept += body[: {"half": half, "half-lost": half, "none": 0}.get(str(fault), len(body))]
            if fault == "less":
                del kept[262144:]
        if fault in ("after", "half-lost"):
            raise aiohttp.ServerDisconnectedError()
        if len(kept) < size:
            return 308, ({"Range": f"bytes=0-{len(kept) - 1}"} if kept else {}), None, b""
        if base64.b64encode(hashlib.md5(kept).digest()).decode() != tag:
            raise ValueError("Bad Request: the MD5 you specified is invalid for the data that came")
        self.objects[name] = bytes(kept)
        return 200, {}, None, json.dumps({"size": str(size), "md5Hash": tag}).encode()


@pytest.fixture
def upload(no_sleep: list[float], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Google]:
    monkeypatch.setattr(store_module, "PART_SIZE", MIB)

    def write(*faults: Fault, size: int = 5 * MIB // 2) -> Google:
        google = Google(iter(faults))
        client = CloudStore(parse("gs://bucket/relay", "gs"), GoogleBucket(google, "bucket"))
        client.patience_seconds = 2.0
        data = bytes(range(256)) * (size // 256)
        try:
            client.write("data/x", [data[:1000], data[1000:]])
        except StoreError:
            assert google.objects == {}
            raise
        assert google.objects == {"relay/data/x": data}
        return google

    return write


def test_three_parts(upload: Callable[..., Google]) -> None:
    assert upload().requests == [
        "bytes 0-1048575/2621440",
        "bytes 1048576-2097151/2621440",
        "bytes 2097152-2621439/2621440",
    ]


@pytest.mark.parametrize("fault", ["before", "after", "half", "half-lost", "none", "gone", "damage", "less"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_break_at_any_part(upload: Callable[..., Google], fault: str, at: int, times: int) -> None:
    upload(*[None] * at, *[fault] * times)


def test_what_is_there_is_not_sent_again(upload: Callable[..., Google]) -> None:
    google = upload(None, "half-lost")
    assert google.requests[1:4] == [
        "bytes 1048576-2097151/2621440",
        "bytes */2621440",
        "bytes 1572864-2097151/2621440",
    ]


def test_the_object_was_made_and_the_answer_lost(upload: Callable[..., Google]) -> None:
    assert upload(None, None, "after").requests[-1] == "bytes */2621440"


@pytest.mark.parametrize(("fault", "says"), [("damage", "MD5"), ("gone", "forgotten the unfinished upload")])
def test_an_upload_that_is_lost_whenever_it_begins_is_an_error(
    upload: Callable[..., Google], fault: str, says: str
) -> None:
    with pytest.raises(StoreError, match=f"{says}.*, 3 times; run again"):
        upload(*[fault] * 100)


def test_a_store_that_keeps_nothing_is_asked_with_pauses_and_not_for_ever(
    upload: Callable[..., Google], no_sleep: list[float]
) -> None:
    with pytest.raises(Unanswered, match="keeps nothing of what comes after byte 1048576"):
        upload(None, *["none"] * 10**6)
    assert max(no_sleep) > 1


def test_silence_is_unanswered(no_sleep: list[float]) -> None:
    def forever() -> Iterator[Fault]:
        while True:
            yield "after"

    google = Google(forever())
    client = CloudStore(parse("gs://bucket/relay", "gs"), GoogleBucket(google, "bucket"))
    client.patience_seconds = 0.2
    with pytest.raises(Unanswered):
        client.write("data/x", [b"x" * 2 * MIB])
