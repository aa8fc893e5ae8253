"""What stores do wrong on a bad day, on a real server of each provider behind a relay: busy answers, lost requests and
replies, broken and damaged transfers, silence. Nothing here may change what is stored, or be taken for absence."""

import socket
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from spill.errors import StoreError
from spill.stores import Absent, Exists, Store, Unanswered, Unreadable
from tests.cloud.relay import CUT, DAMAGE, DEAF, DROP, LOSE, MUTE, Answer, Relay, Request, Rule
from tests.cloud.servers import BUCKET, Server

Reach = Callable[..., Callable[..., Any]]
MIB = 1024**2

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture
def place(server: Server, relay: Relay, reach: Reach) -> Callable[..., Any]:
    """Clients behind the relay."""
    return reach(server, relay.url)


def first(count: int, order: Answer | str, only: Callable[[Request], bool] = lambda request: True) -> Rule:
    """The order for the first `count` requests that `only` picks."""
    orders = iter([order] * count)  # whose `next` is one step for threads

    def rule(request: Request) -> Answer | str | None:
        return next(orders, None) if only(request) else None

    return rule


def creates(request: Request) -> bool:
    return request.creates


REQUESTS: dict[str, tuple[Callable[[Store], object], object]] = {
    "create": (lambda s: s.create("log/2.json", b"two"), None),
    "write": (lambda s: s.write("log/1.json", [b"one"]), None),
    "read": (lambda s: s.read("log/1.json", 99), b"one"),
    "list": (lambda s: [e.name for e in s.list("log/")], ["log/1.json"]),
    "delete": (lambda s: s.delete("log/1.json"), None),
}
AFTER = {"create": {"log/1.json", "log/2.json"}, "delete": set()}


# Busy, and broken before the request arrived


@pytest.mark.parametrize("verb", REQUESTS)
@pytest.mark.parametrize(("order", "times"), [(Answer(503), 5), (Answer(429), 2), (Answer(409), 2), (DROP, 2)])
def test_it_asks_again(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float], verb: str, order: Answer | str, times: int
) -> None:
    store = place()
    store.create("log/1.json", b"one")
    request, expected = REQUESTS[verb]
    relay.order(first(times, order))
    assert request(store) == expected
    # aiohttp itself sends a request once more when a connection that stood is gone.
    assert len(no_sleep) == times or (order == DROP and len(no_sleep) == times - 1)
    assert {e.name for e in store.list("")} == AFTER.get(verb, {"log/1.json"})


def test_pauses_grow_and_are_spread(place: Callable[..., Any], relay: Relay, no_sleep: list[float]) -> None:
    store = place()
    relay.order(first(12, Answer(503)))
    store.create("log/1.json", b"one")
    for turn, pause in enumerate(no_sleep):
        longest = min(0.1 * 2**turn, 10.0)
        assert longest / 2 <= pause <= longest


def test_slow_down_five_times_in_real_time(moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]) -> None:
    """As S3 words it, and with the real pauses: 0.1 + 0.2 + 0.4 + 0.8 + 1.6 s at most."""
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    store.list("")
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    relay.order(first(5, Answer(503, body, {"Content-Type": "application/xml"})))
    begun = time.monotonic()
    store.create("log/1.json", b"one")
    assert 1.5 < time.monotonic() - begun < 10
    assert store.read("log/1.json", 9) == b"one"


def test_a_conditional_conflict_twice_then_done(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float]
) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    body = b"<Error><Code>ConditionalRequestConflict</Code><Message>A conflicting operation occurred.</Message></Error>"
    relay.order(first(2, Answer(409, body, {"Content-Type": "application/xml"}), creates))
    store.create("log/1.json", b"one")
    assert len([r for r in relay.seen if r.creates]) == 3
    with pytest.raises(Exists):
        store.create("log/1.json", b"two")


# Lost replies


def test_a_lost_reply_to_a_create_is_found_by_reading_back(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float]
) -> None:
    store = place()
    relay.order(first(1, LOSE, creates))
    with pytest.raises(Exists):
        store.create("log/1.json", b"mine, with a nonce")
    assert store.read("log/1.json", 99) == b"mine, with a nonce"


def test_a_create_that_was_lost_on_the_way_is_made(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float]
) -> None:
    store = place()
    relay.order(first(1, DROP, creates))
    store.create("log/1.json", b"mine")
    assert store.read("log/1.json", 99) == b"mine"


def test_an_answer_of_500_after_it_was_done(place: Callable[..., Any], relay: Relay, no_sleep: list[float]) -> None:
    """A failure of the store says nothing about what it did."""
    store = place()
    relay.order(first(1, Answer(500), creates))
    store.create("log/1.json", b"mine")
    assert store.read("log/1.json", 99) == b"mine"


@pytest.mark.parametrize(("order", "stored"), [(DROP, False), (LOSE, True)])
def test_silence_for_too_long_is_unanswered(place: Callable[..., Any], relay: Relay, order: str, stored: bool) -> None:
    store = place()
    store.patience_seconds = 0.5
    store.list("")
    relay.order(lambda request: order if request.creates or request.method == "PUT" else None)
    # Applied once with its reply lost, then refused for being there: that is Exists, an answer. So lose that too.
    with pytest.raises((Unanswered, Exists)) as found:
        store.create("log/1.json", b"mine")
    relay.order(lambda request: None)
    assert [e.name for e in store.list("log/")] == (["log/1.json"] if stored else [])
    if isinstance(found.value, Unanswered):
        assert "nothing succeeded in 0 s of trying" in str(found.value) or "in 1 s" in str(found.value)


def test_a_store_that_stays_busy_is_an_error_and_no_doubt(place: Callable[..., Any], relay: Relay) -> None:
    store = place()
    store.patience_seconds = 0.3
    relay.order(lambda request: Answer(503))
    for request, _ in REQUESTS.values():
        with pytest.raises(StoreError, match="the last commit stands") as found:
            request(store)
        assert not isinstance(found.value, Unanswered)


def test_nobody_listens(server: Server, reach: Reach) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = reach(server, f"http://127.0.0.1:{unused.getsockname()[1]}")()
        store.patience_seconds = 0.3
        for request, _ in REQUESTS.values():
            with pytest.raises(StoreError) as found:
                request(store)
            assert not isinstance(found.value, Unanswered), "what never left was not done"


def test_it_says_that_it_waits_and_that_it_goes_on(
    place: Callable[..., Any],
    relay: Relay,
    no_sleep: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = place()
    store.patience_seconds = 300.0
    store.list("")
    now = [1000.0]
    monkeypatch.setattr("spill_store_cloud.store.seconds", lambda: now[0])

    def rule(request: Request) -> Answer | None:
        now[0] += 2.0
        return Answer(503) if request.index <= 30 else None

    monkeypatch.setattr("spill_store_cloud.store._last_said", 0.0)
    relay.order(rule)
    store.create("log/1.json", b"one")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3, lines
    assert all(line.startswith(store.uri) for line in lines)
    assert "trying again for up to 296 s" in lines[0]
    assert "trying again for up to 266 s" in lines[1]
    assert "answers again after 62 s" in lines[2]


def test_five_minutes_without_a_success(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place()
    store.patience_seconds = 300.0
    store.list("")
    now = [1000.0]
    monkeypatch.setattr("spill_store_cloud.store.seconds", lambda: now[0])

    def rule(request: Request) -> Answer:
        now[0] += 7.0
        return Answer(503)

    relay.order(rule)
    with pytest.raises(StoreError, match="nothing succeeded in 300 s"):
        store.read("log/1.json", 9)
    assert len(relay.seen) == 43


def test_after_five_minutes_of_silence_reading_back_and_clearing_up_get_one_try_each(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place()
    store.patience_seconds = 300.0
    store.list("")
    now = [1000.0]
    monkeypatch.setattr("spill_store_cloud.store.seconds", lambda: now[0])

    def rule(request: Request) -> str:
        now[0] += 60.0
        return DROP

    relay.order(rule)
    with pytest.raises(Unanswered, match="nothing succeeded in 300 s"):
        store.create("log/1.json", b"mine")
    assert len(no_sleep) >= 2
    no_sleep.clear()
    for request, _ in (REQUESTS["read"], REQUESTS["delete"]):
        with pytest.raises(StoreError, match="nothing succeeded in 300 s"):
            request(store)
    assert no_sleep == []
    relay.order(lambda request: None)
    store.list("")  # a success: patience begins anew
    relay.order(rule)
    with pytest.raises(Unanswered):
        store.create("log/1.json", b"mine")
    assert len(no_sleep) >= 2


def test_what_was_answered_or_given_up_long_ago_shortens_no_later_patience(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place()
    store.patience_seconds = 300.0
    store.list("")
    now = [1000.0]
    monkeypatch.setattr("spill_store_cloud.store.seconds", lambda: now[0])
    relay.order(first(1, Answer(503)))
    with pytest.raises(Absent):
        store.read("alive/1-x", 9)  # busy once, then an answer, if not a happy one
    now[0] += 400.0
    relay.order(first(1, Answer(503)))
    store.create("log/1.json", b"one")

    def busy(request: Request) -> Answer:
        now[0] += 60.0
        return Answer(503)

    relay.order(busy)
    with pytest.raises(StoreError, match="nothing succeeded in 300 s"):
        store.delete("data/old")
    now[0] += 60.0
    relay.order(first(1, Answer(503)))
    store.create("log/2.json", b"two")


@pytest.mark.parametrize("order", [MUTE, DEAF])
def test_a_store_that_takes_a_connection_and_falls_silent_is_not_waited_for_without_end(
    place: Callable[..., Any], relay: Relay, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries' own limits do not see all of it: a reply that is never begun, a body that nobody takes."""
    monkeypatch.setattr("spill_store_cloud.store.LAST_TRY_SECONDS", 1.0)
    monkeypatch.setattr("spill_store_cloud.store.SLOWEST_BYTES_PER_SECOND", 100 * MIB)
    store, data = place(), large(17)
    store.create("log/1.json", b"one")
    store.patience_seconds = 0.0
    relay.order(lambda request: order)
    for verb, (request, _) in {**REQUESTS, "large": (lambda s: s.write("data/x", [data]), None)}.items():
        begun = time.monotonic()
        with pytest.raises(StoreError, match="nothing succeeded in") as found:
            request(store)
        assert isinstance(found.value, Unanswered) == (verb not in ("read", "list"))
        assert time.monotonic() - begun < 10
    relay.order(lambda request: None)
    store.patience_seconds = 20.0
    assert store.read("log/1.json", 9) == b"one"


@pytest.mark.parametrize("order", [MUTE, DEAF])
def test_a_part_that_nobody_takes_is_sent_again(
    place: Callable[..., Any], relay: Relay, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spill_store_cloud.store.REQUEST_SECONDS", 1.0)
    monkeypatch.setattr("spill_store_cloud.store.SLOWEST_BYTES_PER_SECOND", 10 * MIB)
    store, data = place(), large(20)
    relay.order(first(1, order, lambda request: int(request.headers.get("content-length", 0)) > MIB))
    store.write("data/x", [data])
    whole = store.read("data/x", len(data)) == data
    assert whole


# Large objects


def large(megabytes: float) -> bytes:
    block = bytes(range(251)) * 4177
    return (block * (int(megabytes) + 1))[: int(megabytes * MIB)]


@pytest.mark.parametrize("order", [Answer(503), DROP, LOSE])
def test_parts_are_sent_again(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float], order: Answer | str
) -> None:
    relay = relay_of(moto)
    store, data = reach(moto, relay.url)(), large(36)
    relay.order(first(2, order, lambda request: "partNumber=" in request.path))
    store.write("data/x", [data])
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert len([r for r in relay.seen if "partNumber=" in r.path]) == 7
    assert unfinished(moto) == 0


def test_damage_on_the_way_is_noticed_and_sent_again(
    seaweed: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float]
) -> None:
    """By SeaweedFS: moto looks at no checksum."""
    relay = relay_of(seaweed)
    store, data = reach(seaweed, relay.url)(), large(18)
    relay.order(first(2, DAMAGE, lambda request: request.method == "PUT"))
    store.write("data/x", [data])
    assert len(no_sleep) == 2
    relay.order(first(2, DAMAGE, lambda request: request.method == "PUT"))
    store.create("log/1.json", b"small")
    assert len(no_sleep) == 4
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert store.read("log/1.json", 9) == b"small"


@pytest.mark.parametrize("order", [Answer(503), DROP, LOSE])
def test_the_last_request_of_a_large_object_is_lost(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float], order: Answer | str
) -> None:
    relay = relay_of(moto)
    store, data = reach(moto, relay.url)(), large(18)
    store.write("data/x", [b"what was there before"])
    relay.order(first(1, order, lambda request: request.method == "POST" and "uploadId=" in request.path))
    store.write("data/x", [data])
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert unfinished(moto) == 0


def test_an_upload_that_vanished_is_an_error_and_changes_nothing(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]
) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    store.write("data/x", [b"what was there before"])
    gone = Answer(404, b"<Error><Code>NoSuchUpload</Code><Message>The upload does not exist.</Message></Error>")
    relay.order(lambda request: gone if request.method == "POST" and "uploadId=" in request.path else None)
    with pytest.raises(StoreError, match=r"NoSuchUpload.*, 3 times; run again"):
        store.write("data/x", [large(18)])
    assert store.read("data/x", 99) == b"what was there before"
    data = large(18)
    for where in ("partNumber=", "?uploadId="):
        name = f"data/{len(where)}"
        relay.order(first(1, gone, lambda request, part=where: part in request.path))
        store.write(name, [data])  # it begins again
        whole = store.read(name, len(data)) == data
        assert whole
    assert unfinished(moto) == 0


def test_a_refused_part_leaves_nothing_behind(moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    no = Answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
    relay.order(lambda request: no if "partNumber=2" in request.path else None)
    with pytest.raises(StoreError, match="no right to do that"):
        store.write("data/x", [large(36)])
    with pytest.raises(Absent):
        store.read("data/x", 9)
    assert store.list("") == []
    assert unfinished(moto) == 0


def unfinished(moto: Server) -> int:
    """Multipart uploads that are neither finished nor given up."""
    from botocore.session import Session

    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
    client = Session().create_client("s3", endpoint_url=moto.url, region_name="us-east-1", **keys)
    found = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    client.close()
    return len(found)


def block(request: Request) -> bool:
    return "comp=block&" in request.path + "&"


@pytest.mark.parametrize("order", [Answer(503), DROP, LOSE, DAMAGE])
def test_blocks_are_sent_again(
    azurite: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float], order: Answer | str
) -> None:
    relay = relay_of(azurite)
    store, data = reach(azurite, relay.url)(), large(20)
    relay.order(first(1, order, block))
    store.write("data/x", [data])
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert len([r for r in relay.seen if block(r)]) == 4


@pytest.mark.parametrize("order", [Answer(503), DROP, LOSE])
def test_the_list_of_blocks_is_lost(
    azurite: Server, reach: Reach, relay_of: Callable[[Server], Relay], no_sleep: list[float], order: Answer | str
) -> None:
    relay = relay_of(azurite)
    store, data = reach(azurite, relay.url)(), large(18)
    relay.order(first(1, order, lambda request: "comp=blocklist" in request.path))
    store.write("data/x", [data])
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert len([r for r in relay.seen if "comp=blocklist" in r.path]) == 2


@pytest.mark.parametrize("megabytes", [0.5, 20])
def test_a_reply_that_breaks_off_is_read_again(
    place: Callable[..., Any], relay: Relay, no_sleep: list[float], megabytes: float
) -> None:
    store, data = place(), large(megabytes)
    store.write("data/x", [data])
    relay.order(first(2, CUT, lambda request: request.method == "GET"))
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert len(relay.seen) == 3 + (2 if megabytes > 16 else 0)


def test_an_object_replaced_while_it_is_read_is_read_whole(server: Server, relay: Relay, reach: Reach) -> None:
    other = reach(server)(folder="tests/replaced")
    old, new = large(17), large(18)[::-1]
    other.write("data/x", [old])
    store = reach(server, relay.url)(folder="tests/replaced")
    replaced = []

    def rule(request: Request) -> None:
        # Between the first part of a read and its second, the range of which does not begin at 0.
        span = request.headers.get("range") or request.headers.get("x-ms-range") or "bytes=0-"
        if request.method == "GET" and not span.startswith("bytes=0-") and not replaced:
            replaced.append(span)
            other.write("data/x", [new])

    relay.order(rule)
    whole = store.read("data/x", len(new)) == new
    assert whole
    assert replaced
    with pytest.raises(Unreadable):
        store.read("data/x", len(new) - 1)


def test_a_large_write_takes_a_bounded_amount_of_memory(
    server: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine times 5 MiB at most for an object of 96: parts under way, one being made, and what the library holds of
    them."""
    monkeypatch.setattr("spill_store_cloud.store.PART_SIZE", 5 * MIB)
    bucket = {"s3": "s3.S3Bucket", "gs": "gs.GoogleBucket", "az": "az.AzureContainer"}[server.scheme]
    monkeypatch.setattr(f"spill_store_cloud.{bucket}.whole_size", 5 * MIB)
    store, data = reach(server)(), memoryview(large(96))
    store.write("data/small", [b"x"])
    tracemalloc.start()
    try:
        store.write("data/x", [data[: 7 * MIB + 3], data[7 * MIB + 3 :]])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * MIB, f"{peak / MIB:.0f} MiB"
    store.delete("data/x")
