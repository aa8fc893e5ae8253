"""`s3://`: requests to Amazon S3 and stores that speak its protocol, through s3fs, and what their errors mean."""

import asyncio
import base64
import hashlib
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from spill.environment import nonce, utc_now
from spill.stores import Entry
from spill_store_cloud.place import clean, library, parse
from spill_store_cloud.store import PART_SIZE, CloudStore, Fault, Kind, Piece, Upload, in_time

# The store says that it did nothing, or that what came was not what was sent.
_BUSY = {
    "SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded",
    "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "BadDigest", "IncompleteBody",
    "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "429", "503", "409",
}  # fmt: skip
_KEYS = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "MissingSecurityHeader",
    "CredentialsNotSupported", "401", "AuthorizationHeaderMalformed",
}  # fmt: skip
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired"}
_ELSEWHERE = {"PermanentRedirect", "TemporaryRedirect", "Redirect", "IllegalLocationConstraintException", "301", "307"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "507"}
_SKEW_SECONDS = 300


def open_s3(uri: str) -> CloudStore:
    """Open `s3://BUCKET/FOLDER`; settings and credentials as botocore finds them (environment, profiles, instance).

    Raises:
        InputError: a malformed URI.
        PluginError: s3fs is not installed.
    """
    place = parse(uri, "s3")
    s3fs = library("s3fs", "s3")
    logging.getLogger("s3fs").addHandler(logging.NullHandler())
    files = s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        # One try each: `CloudStore` repeats them, and has to know which of them went without an answer.
        config_kwargs={
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": 16,
        },
    )
    files.retries = 1
    return CloudStore(place, S3Bucket(files, place.bucket))


class S3Bucket:
    """One bucket; `files` is an `s3fs.S3FileSystem`."""

    lanes = 4
    whole_size = PART_SIZE

    def __init__(self, files: Any, bucket: str) -> None:
        self._files = files
        self._bucket = bucket

    def put(self, key: str, data: bytes, exclusive: bool) -> None:
        # What s3fs sends for pipe_file(mode="create"), with a checksum that every store of this protocol checks.
        condition = {"IfNoneMatch": "*"} if exclusive else {}
        self._call("put_object", Key=key, Body=data, ContentMD5=checksum(data), **condition)

    def begin(self, key: str, views: Sequence[memoryview]) -> Upload:
        mark = nonce()
        begun = self._call("create_multipart_upload", Key=key, Metadata={"spill-upload": mark})
        return _S3Upload(self, key, begun["UploadId"], mark)

    def get(self, key: str, start: int, count: int, version: str) -> Piece:
        condition = {"IfMatch": version} if version else {}
        span = f"bytes={start}-{start + count - 1}"
        try:
            answer, data = in_time(self._files, self._fetch, size=count, Key=key, Range=span, **condition)
        except Exception as error:
            if start == 0 and _code(error) in ("InvalidRange", "416"):
                return Piece(data=b"", size=0, version="")  # nothing lies there to take a range of
            raise
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        size = int(total) if total.isdigit() else int(answer["ContentLength"])
        return Piece(data=data, size=size, version=answer.get("ETag", ""))

    async def _fetch(self, **request: Any) -> tuple[Mapping[str, Any], bytes]:
        answer = await self._files._call_s3("get_object", Bucket=self._bucket, **request)
        async with answer["Body"] as body:
            return answer, await body.read()

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str]:
        further = {"ContinuationToken": after} if after else {}
        answer = self._call("list_objects_v2", Prefix=prefix, **further)
        entries = [
            Entry(name=o["Key"], size=o["Size"], modified=o["LastModified"].timestamp())
            for o in answer.get("Contents", ())
        ]
        return entries, answer["NextContinuationToken"] if answer.get("IsTruncated") else ""

    def remove(self, key: str) -> None:
        self._call("delete_object", Key=key)

    def judge(self, error: Exception) -> Fault:
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError

        code = _code(error)
        if code:
            return self._judge_answer(code, error)
        cause = error.__cause__ if isinstance(error.__cause__, boto.BotoCoreError) else error
        if isinstance(cause, boto.NoCredentialsError | boto.PartialCredentialsError | boto.ProfileNotFound):
            return _refused(
                f"no credentials: {clean(str(cause))}; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if isinstance(cause, boto.SSLError) and "CERTIFICATE_VERIFY" in str(cause):
            return _refused(f"the certificate is not trusted: {clean(str(cause))}; set AWS_CA_BUNDLE")
        if isinstance(cause, boto.EndpointConnectionError | boto.ConnectTimeoutError):
            return Fault(kind=Kind.BUSY, reason=clean(str(cause)))
        if isinstance(cause, boto.HTTPClientError | ResponseParserError | asyncio.TimeoutError | ConnectionError):
            return Fault(
                kind=Kind.SILENT, reason=f"the connection broke off ({clean(str(cause)) or type(cause).__name__})"
            )
        if type(cause).__module__.startswith("aiohttp"):
            return Fault(
                kind=Kind.SILENT, reason=f"the connection broke off ({clean(str(cause)) or type(cause).__name__})"
            )
        if isinstance(cause, boto.BotoCoreError):
            return _refused(f"{clean(str(cause))}; check the AWS settings of this machine")
        return _refused(f"{type(cause).__name__}: {clean(str(cause))}")

    def _judge_answer(self, code: str, error: Exception) -> Fault:
        """An answer of the store, by its code (or status, where it has no body)."""
        says = clean(str(_response(error).get("Error", {}).get("Message", "")))
        status = int(_response(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        named = f"{code}: {says}" if says else code
        if code in ("NoSuchKey", "404"):
            return Fault(kind=Kind.ABSENT, reason=named)
        if code in ("PreconditionFailed", "412"):
            reading = getattr(_cause(error), "operation_name", "") == "GetObject"
            return Fault(kind=Kind.MOVED if reading else Kind.TAKEN, reason=named)
        if code in _BUSY or status in (408, 409, 429, 503):
            return Fault(kind=Kind.BUSY, reason=f"the store is busy ({named})")
        if code == "NoSuchBucket":
            return _refused(f"there is no bucket {self._bucket!r} at {self._where()}: create it, or correct --state")
        if code == "NoSuchUpload":
            return Fault(kind=Kind.LOST, reason=f"the store has forgotten the unfinished upload ({named})")
        if code == "RequestTimeTooSkewed" or (code in ("403", "AccessDenied") and _skew(error) > _SKEW_SECONDS):
            off = f"{_skew(error) / 60:.0f} minutes " if _skew(error) > _SKEW_SECONDS else ""
            return _refused(f"this machine's clock is {off}off the store's ({code}): set the clock")
        if code in _EXPIRED:
            return _refused(f"the credentials have expired or are no longer valid ({named}): get new ones")
        if code in _KEYS:
            return _refused(
                f"the credentials are wrong ({named}): check AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, and the region"
            )
        if code in _ELSEWHERE:
            headers = _response(error).get("ResponseMetadata", {}).get("HTTPHeaders", {})
            region = headers.get("x-amz-bucket-region", "its region")
            return _refused(f"the bucket lies elsewhere ({named}): set AWS_DEFAULT_REGION to {region}")
        if code in _FULL:
            return _refused(f"the store is full ({named}): make room there")
        if status == 403 or code in ("AccessDenied", "403", "AllAccessDisabled", "AccountProblem"):
            return _refused(
                f"no right to do that ({named}): the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject, "
                f"s3:AbortMultipartUpload and s3:ListBucket on {self._bucket!r}"
            )
        if status >= 500 and code not in ("NotImplemented", "501"):
            return Fault(kind=Kind.SILENT, reason=f"the store failed ({named})")
        return _refused(named)

    def _where(self) -> str:
        return clean(str(self._files.s3.meta.endpoint_url))

    def _call(self, method: str, **request: Any) -> Any:
        return in_time(
            self._files,
            self._files._call_s3,
            method,
            size=self.lanes * len(request.get("Body", b"")),
            Bucket=self._bucket,
            **request,
        )


class _S3Upload:
    def __init__(self, bucket: S3Bucket, key: str, upload_id: str, mark: str) -> None:
        self._bucket = bucket
        self._key = key
        self._id = upload_id
        self._mark = mark
        self._tags: dict[int, str] = {}

    def send(self, number: int, start: int, data: bytes) -> None:
        answer = self._bucket._call(
            "upload_part",
            Key=self._key,
            UploadId=self._id,
            PartNumber=number + 1,
            Body=data,
            ContentMD5=checksum(data),
        )
        self._tags[number] = answer["ETag"]

    def finish(self) -> int:
        parts = [{"PartNumber": n + 1, "ETag": tag} for n, tag in sorted(self._tags.items())]
        lost: Exception | None = None
        try:
            self._bucket._call(
                "complete_multipart_upload", Key=self._key, UploadId=self._id, MultipartUpload={"Parts": parts}
            )
        except Exception as error:
            if _code(error) != "NoSuchUpload":
                raise
            lost = error
        try:
            found = self._bucket._call("head_object", Key=self._key)
        except Exception as error:
            if lost is not None and _code(error) in ("404", "NoSuchKey"):
                raise lost from None
            raise
        # An upload that is gone was finished by an earlier try whose answer was lost, if the object carries its mark.
        if lost is not None and found.get("Metadata", {}).get("spill-upload") != self._mark:
            raise lost
        return int(found["ContentLength"])

    def abandon(self) -> None:
        self._bucket._call("abort_multipart_upload", Key=self._key, UploadId=self._id)


def checksum(data: bytes) -> str:
    """The MD5 of the bytes in base64, as `Content-MD5` carries it: against errors on the way, not against malice."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _cause(error: BaseException) -> BaseException:
    """The library's own error: s3fs raises a built-in one from it."""
    return error if hasattr(error, "response") or error.__cause__ is None else error.__cause__


def _response(error: BaseException) -> Mapping[str, Any]:
    found = getattr(_cause(error), "response", None)
    return found if isinstance(found, Mapping) else {}


def _code(error: BaseException) -> str:
    return str(_response(error).get("Error", {}).get("Code", ""))


def _skew(error: BaseException) -> float:
    """Seconds between this machine's clock and the answer's date; 0 where it has none. Decides a text, nothing else."""
    stamp = _response(error).get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        theirs = parsedate_to_datetime(stamp)
    except ValueError:
        return 0.0
    ours = datetime.strptime(utc_now(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return abs((ours - theirs).total_seconds()) if theirs.tzinfo else 0.0


def _refused(reason: str) -> Fault:
    return Fault(kind=Kind.REFUSED, reason=reason)
