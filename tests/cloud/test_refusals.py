"""Wrong keys, expired ones, a clock that is off, missing rights, missing buckets: one line each, at once, with what to
do, never taken for absence, and without a secret in it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib import import_module
from typing import Any

import pytest

from spill.errors import StoreError
from spill.stores import Store, Unanswered
from tests.cloud.buckets import bucket_of
from tests.cloud.relay import Answer, Relay
from tests.cloud.servers import AZURE_KEY, READER, READER_SECRET, SECRET, Server

Reach = Callable[..., Callable[..., Any]]

REQUESTS: dict[str, Callable[[Store], object]] = {
    "create": lambda s: s.create("log/2.json", b"two"),
    "write": lambda s: s.write("log/1.json", [b"one"]),
    "read": lambda s: s.read("log/1.json", 99),
    "list": lambda s: s.list("log/"),
    "delete": lambda s: s.delete("log/1.json"),
}


def refusals(store: Any, verbs: tuple[str, ...] = tuple(REQUESTS)) -> list[str]:
    """What each request is refused with: at once, one line, no doubt, no secret."""
    store.patience_seconds = 0.0
    lines = []
    for verb in verbs:
        with pytest.raises(StoreError) as found:
            pytest.fail(f"{verb} answered {REQUESTS[verb](store)!r}")
        text = str(found.value)
        assert not isinstance(found.value, Unanswered)
        assert "\n" not in text
        assert len(text) < 600
        assert not any(secret in text for secret in (SECRET, READER_SECRET, AZURE_KEY, "hunter2"))
        assert "nothing succeeded in" not in text, "asking again does not help here"
        lines.append(text)
    return lines


def s3_error(status: int, code: str, message: str = "", **headers: str) -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", **{k.title(): v for k, v in headers.items()}})


def expect(store: Any, *words: str, verbs: tuple[str, ...] = tuple(REQUESTS)) -> None:
    for line in refusals(store, verbs):
        for word in words:
            assert word in line


# every provider


def test_a_bucket_is_deleted_mid_way(server: Server, reach: Reach) -> None:
    opener = reach(server)
    with bucket_of(server, "soon-gone") as bucket:
        store = opener(bucket="soon-gone")
        store.create("log/1.json", b"one")
        store.delete("log/1.json")
        bucket.delete()
        expect(store, "there is no ", " 'soon-gone' at ", "create it, or correct --state")


# S3


def test_s3_wrong_keys(seaweed: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    place = reach(seaweed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    expect(place(), "the credentials are wrong (SignatureDoesNotMatch", "AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    expect(place(), "the credentials are wrong (InvalidAccessKeyId", "AWS_PROFILE")


def test_s3_no_credentials(moto: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    place = reach(moto)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    expect(place(), "no credentials", "AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    expect(place(), "no credentials", "nowhere")


def test_s3_a_right_is_missing(seaweed: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    place = reach(seaweed)
    place().create("log/1.json", b"one")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    reader = place()
    assert reader.read("log/1.json", 9) == b"one"
    assert [e.name for e in reader.list("")] == ["log/1.json"]
    expect(reader, "no right to do that", "s3:PutObject", verbs=("create", "write", "delete"))


def test_s3_a_right_is_lost_mid_way(moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    store.create("log/1.json", b"one")
    relay.order(lambda request: s3_error(403, "AccessDenied", "Access Denied"))
    expect(store, "no right to do that (AccessDenied", "s3:ListBucket")
    relay.order(lambda request: None)
    assert store.read("log/1.json", 9) == b"one"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (s3_error(400, "ExpiredToken", "The provided token has expired."), ("have expired", "get new ones")),
        (s3_error(400, "InvalidToken", "The provided token is malformed."), ("no longer valid", "get new ones")),
        (s3_error(400, "IllegalLocationConstraintException", "Not here."), ("lies elsewhere", "AWS_DEFAULT_REGION")),
        (s3_error(507, "InsufficientStorage", "Full."), ("the store is full", "make room")),
        (s3_error(501, "NotImplemented", "A header you provided implies functionality"), ("NotImplemented",)),
        (s3_error(400, "InvalidRequest", "see http://h/p?X-Amz-Signature=hunter2&amp;b=1"), ("InvalidRequest",)),
    ],
)
def test_s3_answers_that_asking_again_does_not_change(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], answer: Answer, words: tuple[str, ...]
) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    relay.order(lambda request: answer)
    expect(store, *words)


@pytest.mark.parametrize("minutes", [-20, 45])
def test_s3_a_clock_that_is_off(moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], minutes: int) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    theirs = format_datetime(datetime.now(UTC) + timedelta(minutes=minutes), usegmt=True)
    text = "The difference between the request time and the current time is too large."
    relay.order(lambda request: s3_error(403, "RequestTimeTooSkewed", text, date=theirs))
    expect(store, f"this machine's clock is {abs(minutes)} minutes off the store's", "set the clock")


def test_s3_a_clock_that_is_off_by_nobody_knows_how_much(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]
) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    relay.order(lambda request: s3_error(403, "RequestTimeTooSkewed", "Too large."))
    expect(store, "this machine's clock is off the store's", "set the clock")


@pytest.mark.parametrize("code", ["ConcurrentModification", "Conflict"])
def test_s3_conflicts_of_any_name_are_asked_again(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay], code: str
) -> None:
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    relay.order(lambda request: s3_error(409, code, "Try again.") if request.index < 3 else None)
    store.create("log/1.json", b"one")
    assert store.read("log/1.json", 9) == b"one"


def test_s3_a_condition_that_vanished_is_no_absence(
    moto: Server, reach: Reach, relay_of: Callable[[Server], Relay]
) -> None:
    """A store may answer 404 where a condition failed because all is gone."""
    relay = relay_of(moto)
    store = reach(moto, relay.url)()
    relay.order(lambda request: s3_error(404, "NoSuchKey", "The specified key does not exist."))
    expect(store, "is the bucket still there?", verbs=("create", "write", "list"))


# Google


def google_error(status: int, message: str) -> Answer:
    body = f'{{"error": {{"code": {status}, "message": "{message}"}}}}'.encode()
    return Answer(status, body, {"Content-Type": "application/json"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (google_error(401, "Invalid Credentials"), ("wrong or have expired", "GOOGLE_APPLICATION_CREDENTIALS")),
        (google_error(403, "x@y does not have storage.objects.get access"), ("no right", "roles/storage.objectUser")),
        (google_error(400, "invalid argument: X"), ("invalid argument",)),
        (google_error(412, "conditionNotMet"), ()),
    ],
)
def test_google_answers_that_asking_again_does_not_change(
    fake_gcs: Server, reach: Reach, relay_of: Callable[[Server], Relay], answer: Answer, words: tuple[str, ...]
) -> None:
    relay = relay_of(fake_gcs)
    store = reach(fake_gcs, relay.url)()
    relay.order(lambda request: answer)
    expect(store, *words, verbs=("write", "list", "delete") if answer.status == 412 else tuple(REQUESTS))


def test_google_too_many_requests_by_one_user_are_asked_again(
    fake_gcs: Server, reach: Reach, relay_of: Callable[[Server], Relay]
) -> None:
    relay = relay_of(fake_gcs)
    store = reach(fake_gcs, relay.url)()
    slow = google_error(403, "rateLimitExceeded: The rate of requests is too high")
    relay.order(lambda request: slow if request.index < 3 else None)
    store.create("log/1.json", b"one")
    assert store.read("log/1.json", 9) == b"one"


@pytest.mark.parametrize(("retryable", "kind"), [(True, "BUSY"), (False, "REFUSED")])
def test_google_a_token_that_cannot_be_had_for_now_is_asked_for_again(retryable: bool, kind: str) -> None:
    """As gcsfs wraps what the token's server answers."""
    pytest.importorskip("gcsfs")
    from gcsfs.retry import HttpError
    from google.auth.exceptions import RefreshError

    gs = import_module("spill_store_cloud.gs")
    wrapped = HttpError({"code": 401, "message": "Invalid Credentials"})
    wrapped.__cause__ = RefreshError("Invalid JWT Signature.", retryable=retryable)
    fault = gs.GoogleBucket(None, "bucket").judge(wrapped)
    assert fault.kind.name == kind
    assert "Invalid JWT Signature" in fault.reason


def test_google_a_clock_that_is_off() -> None:
    pytest.importorskip("gcsfs")
    from gcsfs.retry import HttpError
    from google.auth.exceptions import RefreshError

    gs = import_module("spill_store_cloud.gs")
    wrapped = HttpError({"code": 401, "message": "Invalid Credentials"})
    wrapped.__cause__ = RefreshError("Invalid JWT: Token must be a short-lived token and in a reasonable timeframe.")
    fault = gs.GoogleBucket(None, "bucket").judge(wrapped)
    assert fault.kind.name == "REFUSED"
    assert "this machine's clock is off, set it" in fault.reason


def test_google_a_user_in_the_endpoint_is_not_shown(
    fake_gcs: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(fake_gcs, fake_gcs.url.replace("//", "//ada:hunter2@"))
    store = import_module("spill_store_cloud.gs").open_gs("gs://nowhere/relay")
    expect(store, "there is no bucket 'nowhere' at http://127.0.0.1", verbs=("read", "list", "delete"))


def test_google_an_object_replaced_while_it_is_read_is_read_again(
    fake_gcs: Server, reach: Reach, relay_of: Callable[[Server], Relay]
) -> None:
    """The store answers 412 to a part of a version that is gone; the emulator does not."""
    relay = relay_of(fake_gcs)
    store, data = reach(fake_gcs, relay.url)(), b"x" * 17 * 1024**2
    store.write("data/x", [data])
    moved = google_error(412, "conditionNotMet")
    ranged = iter([moved])
    relay.order(lambda request: next(ranged, None) if "ifGenerationMatch" in request.path else None)
    whole = store.read("data/x", len(data)) == data
    assert whole
    assert next(ranged, None) is None


def test_google_a_key_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gcsfs")
    gs = import_module("spill_store_cloud.gs")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with pytest.raises(StoreError, match=r"GOOGLE_APPLICATION_CREDENTIALS names .*, which is not there"):
        gs.open_gs("gs://bucket/folder")


# Azure


def azure_error(status: int, code: str, message: str = "") -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return Answer(status, body, {"Content-Type": "application/xml", "x-ms-error-code": code})


def test_azure_wrong_key(azurite: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    place = reach(azurite)
    text = azurite.environment(azurite.url)["AZURE_STORAGE_CONNECTION_STRING"]
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text.replace(AZURE_KEY, "aHVudGVyMg=="))
    expect(place(), "the credentials are wrong", "AZURE_STORAGE_CONNECTION_STRING")


def test_azure_without_an_account() -> None:
    pytest.importorskip("adlfs")
    az = import_module("spill_store_cloud.az")
    with pytest.raises(StoreError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        az.open_az("az://container/folder")


def test_azure_a_connection_string_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("adlfs")
    az = import_module("spill_store_cloud.az")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountKey=hunter2;nothing")
    with pytest.raises(StoreError, match="cannot open az://container/folder") as found:
        az.open_az("az://container/folder")
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (azure_error(403, "AuthorizationPermissionMismatch", "Not authorized."), ("no right", "Blob Data Contributor")),
        (azure_error(403, "AuthenticationFailed", "Signature not valid in the specified time frame"), ("expired",)),
        (azure_error(403, "AuthenticationFailed", "The Date header in the request is incorrect."), ("set the clock",)),
        (azure_error(403, "AuthenticationFailed", "Request date header too old: 'Tue, 3 Jan'"), ("set the clock",)),
        (azure_error(409, "BlobImmutableDueToPolicy", "No."), ("the store refuses it", "another --state")),
        (azure_error(409, "PublicAccessNotPermitted", "No."), ("the store refuses it", "account's settings")),
        (azure_error(403, "AuthorizationSourceIPMismatch", "No."), ("the store refuses it", "account's settings")),
        (azure_error(400, "InvalidHeaderValue", "see http://h/p?sig=hunter2"), ("InvalidHeaderValue",)),
        (azure_error(404, "ContainerNotFound", "Gone."), ("there is no container", "create it")),
        (azure_error(409, "ContainerBeingDeleted", "Going."), ("there is no container", "create it")),
        (azure_error(404, "ResourceNotFound", "Gone."), ("ResourceNotFound",)),
    ],
)
def test_azure_answers_that_asking_again_does_not_change(
    azurite: Server, reach: Reach, relay_of: Callable[[Server], Relay], answer: Answer, words: tuple[str, ...]
) -> None:
    relay = relay_of(azurite)
    store = reach(azurite, relay.url)()
    relay.order(lambda request: answer)
    expect(store, *words)
