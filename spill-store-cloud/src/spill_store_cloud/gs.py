"""`gs://`: requests to Google Cloud Storage through gcsfs, and what their errors mean."""

import asyncio
import base64
import hashlib
import io
import json
import logging
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from spill.errors import StoreError
from spill.stores import Entry
from spill_store_cloud.place import clean, library, parse
from spill_store_cloud.store import CloudStore, Fault, Kind, Piece, Upload, in_time

_RIGHTS = "the role Storage Object User (roles/storage.objectUser)"
_HOW = "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default login"


def open_gs(uri: str) -> CloudStore:
    """Open `gs://BUCKET/FOLDER`; credentials as google-auth finds them, `STORAGE_EMULATOR_HOST` as gcsfs reads it.

    Raises:
        InputError: a malformed URI.
        PluginError: gcsfs is not installed.
        StoreError: the key file that the environment names is not there.
    """
    place = parse(uri, "gs")
    key = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if key and not os.path.exists(key):  # gcsfs would go on without credentials
        raise StoreError(f"cannot open {place.uri}: GOOGLE_APPLICATION_CREDENTIALS names {key}, which is not there")
    # Zonal buckets' own protocol costs an import of gRPC and, before an emulator, a minute's wait; it is not used here.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    for name in ("gcsfs", "google"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    files = _one_try(library("gcsfs", "gs").core)(
        token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else None,
        skip_instance_cache=True,
        use_listings_cache=False,
        requests_timeout=library("aiohttp", "gs").ClientTimeout(total=None, sock_connect=10, sock_read=60),
    )
    return CloudStore(place, GoogleBucket(files, place.bucket))


def _one_try(core: Any) -> Any:
    """gcsfs's file system with one try a request: `CloudStore` repeats them, and has to know which had no answer."""

    class OneTry(core.GCSFileSystem):  # type: ignore[misc]
        _request = core.GCSFileSystem._request.__wrapped__

    return OneTry


class NoBucket(Exception):
    """The bucket is not there."""


class GoogleBucket:
    """One bucket; `files` is a `gcsfs.GCSFileSystem`."""

    lanes = 1  # a resumable upload takes its parts in order
    whole_size = 1024**2  # gcsfs hands a larger body to the event loop as one piece

    def __init__(self, files: Any, bucket: str) -> None:
        self._files = files
        self._bucket = bucket

    def put(self, key: str, data: bytes, exclusive: bool) -> None:
        try:
            in_time(
                self._files,
                self._files._pipe_file,
                f"{self._bucket}/{key}",
                data,
                size=len(data),
                mode="create" if exclusive else "overwrite",
                consistency="md5",
                # Else the store itself keeps copies of what is publicly readable for an hour.
                fixed_key_metadata={"cache_control": "no-store"},
            )
        except FileNotFoundError:
            raise NoBucket from None

    def begin(self, key: str, views: Sequence[memoryview]) -> Upload:
        digest = hashlib.md5(usedforsecurity=False)
        for view in views:
            digest.update(view)
        size = sum(v.nbytes for v in views)
        tag = base64.b64encode(digest.digest()).decode()
        try:
            headers, _ = self._call(
                "POST",
                f"{self._files._location}/upload/storage/v1/b/{quote(self._bucket)}/o",
                uploadType="resumable",
                name=key,
                json={"name": key, "md5Hash": tag, "cacheControl": "no-store"},
                headers={"X-Upload-Content-Type": "application/octet-stream", "X-Upload-Content-Length": str(size)},
            )
        except FileNotFoundError:
            raise NoBucket from None
        return _Resumable(self._files, headers["Location"], size, tag)

    def get(self, key: str, start: int, count: int, version: str) -> Piece:
        # The version is a precondition, so that parts of two objects are never put together.
        further = {"ifGenerationMatch": version} if version else {}
        try:
            headers, data = self._call(
                "GET",
                f"b/{quote(self._bucket)}/o/{quote(key, safe='')}",
                size=count,
                alt="media",
                headers={"Range": f"bytes={start}-{start + count - 1}"},
                **further,
            )
        except FileNotFoundError:
            self.page(key, "")  # a bucket that is not there gives the same answer: this one tells them apart
            raise
        except Exception as error:
            if start == 0 and getattr(error, "code", None) == 416:
                return Piece(data=b"", size=0, version="")  # nothing lies there to take a range of
            raise
        total = headers.get("Content-Range", "").rpartition("/")[2]
        size = int(total) if total.isdigit() else len(data)
        return Piece(data=data, size=size, version=headers.get("X-Goog-Generation", ""))

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str]:
        further = {"pageToken": after} if after else {}
        try:
            _, text = self._call(
                "GET",
                f"b/{quote(self._bucket)}/o",
                prefix=prefix,
                fields="items(name,size,timeCreated),nextPageToken",
                **further,
            )
        except FileNotFoundError:
            raise NoBucket from None
        answer = json.loads(text)
        entries = [
            Entry(
                name=item["name"],
                size=int(item.get("size", 0)),
                modified=datetime.fromisoformat(item["timeCreated"]).timestamp(),
            )
            for item in answer.get("items", ())
        ]
        return entries, answer.get("nextPageToken", "")

    def remove(self, key: str) -> None:
        try:
            self._call("DELETE", f"b/{quote(self._bucket)}/o/{quote(key, safe='')}")
        except FileNotFoundError:
            self.page(key, "")
            raise

    def _call(self, method: str, path: str, size: int = 0, **request: Any) -> Any:
        return in_time(self._files, self._files._call, method, path, size=size, **request)

    def judge(self, error: Exception) -> Fault:
        if isinstance(error, NoBucket):
            return _refused(
                f"there is no bucket {self._bucket!r} at {clean(self._files._location)}: create it, or correct --state"
            )
        if isinstance(error, UploadLost):
            return Fault(kind=Kind.LOST, reason=str(error))
        if isinstance(error, UploadStuck):
            return Fault(kind=Kind.SILENT, reason=str(error))
        if isinstance(error, FileNotFoundError):
            return Fault(kind=Kind.ABSENT, reason="no such object")
        if isinstance(error, FileExistsError):
            return Fault(kind=Kind.TAKEN, reason="the name is taken")
        code = getattr(error, "code", None)
        if str(code).isdigit():
            return self._judge_status(int(str(code)), clean(str(error)), error)
        return self._judge_library(error)

    def _judge_status(self, status: int, says: str, error: Exception) -> Fault:
        if status in (408, 409, 429, 503):
            return Fault(kind=Kind.BUSY, reason=f"the store is busy ({says or status})")
        if status >= 500:
            return Fault(kind=Kind.SILENT, reason=f"the store failed ({says or status})")
        if status == 401:
            cause = _auth_error(error)
            if cause is not None and cause.retryable:
                return Fault(kind=Kind.BUSY, reason=f"no token for now ({clean(str(cause))})")
            if cause is not None:
                says = clean(f"{says}: {cause}")
            if "reasonable timeframe" in str(error.__cause__):
                return _refused("the key was refused for its time: this machine's clock is off, set it")
            return _refused(f"the credentials are wrong or have expired ({says}): {_HOW}")
        return _refused(says or f"status {status}")

    def _judge_library(self, error: Exception) -> Fault:
        """Errors without a status: of gcsfs, of google-auth, of the connection."""
        import aiohttp
        import requests
        from gcsfs.retry import ChecksumError
        from google.auth import exceptions as auth

        says = clean(str(error))
        if isinstance(error, OSError) and str(error).startswith("Forbidden"):
            if "RateLimitExceeded" in str(error) or "rateLimitExceeded" in str(error):
                return Fault(kind=Kind.BUSY, reason=f"the store is busy ({says})")
            return _refused(f"no right to do that ({says}): the account needs {_RIGHTS} on {self._bucket!r}; {_HOW}")
        if isinstance(error, auth.TransportError | ChecksumError):
            return Fault(kind=Kind.SILENT, reason=says)
        if isinstance(error, auth.GoogleAuthError):
            return _refused(f"the credentials cannot be used ({says}): {_HOW}")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return _refused(f"the certificate is not trusted: {says}")
        if isinstance(error, aiohttp.ClientConnectorError):
            return Fault(kind=Kind.BUSY, reason=says)
        broken = aiohttp.ClientError | asyncio.TimeoutError | ConnectionError | requests.exceptions.RequestException
        if isinstance(error, broken):
            return Fault(kind=Kind.SILENT, reason=f"the connection broke off ({says or type(error).__name__})")
        return _refused(f"{type(error).__name__}: {says}")


class UploadLost(Exception):
    """A large upload has to begin again."""


class UploadStuck(Exception):
    """The store has kept nothing of what was sent last."""


class _Resumable:
    """A resumable upload. After a failure the store is asked how much it has before anything is sent again."""

    def __init__(self, files: Any, location: str, size: int, tag: str) -> None:
        self._files = files
        self._location = location
        self._size = size
        self._tag = tag
        self._doubt = False
        self._made: dict[str, Any] | None = None

    def send(self, number: int, start: int, data: bytes) -> None:
        end = start + len(data)
        received = self._put("*", b"") if self._doubt else start
        if received < start:
            raise UploadLost(f"the store has {received} bytes of an upload of which it had {start}")
        self._doubt = True
        while received < end and self._made is None:
            # It may keep less than was sent, and says so.
            before, received = received, self._put(f"{received}-{end - 1}", data[received - start :])
            if received < before:
                raise UploadLost(f"the store has {received} bytes of an upload of which it had {before}")
            if received == before:
                raise UploadStuck(f"the store keeps nothing of what comes after byte {received}")
        self._doubt = False

    def finish(self) -> int:
        if self._made is None:
            raise UploadLost("the store lacks parts that it said it had")
        if self._made.get("md5Hash", self._tag) != self._tag:
            raise UploadLost("the store has other bytes than were sent")
        return int(self._made["size"])

    def abandon(self) -> None:
        if self._made is None:
            in_time(self._files, self._files._call, "DELETE", self._location)

    def _put(self, span: str, data: bytes) -> int:
        """How many bytes the store has now: all of them as soon as it has made the object."""
        try:
            status, headers, _, text = in_time(
                self._files,
                self._files._request,
                "PUT",
                self._location,
                size=len(data),
                headers={"Content-Range": f"bytes {span}/{self._size}"},
                data=io.BytesIO(data),
            )
        except Exception as error:
            if isinstance(error, FileNotFoundError) or str(getattr(error, "code", "")) == "410":
                raise UploadLost("the store has forgotten the unfinished upload") from None
            if isinstance(error, ValueError) and "md5" in str(error).lower():
                raise UploadLost(f"other bytes came than were sent ({clean(str(error))})") from None
            raise
        if status < 300:
            self._made = json.loads(text)
            return self._size
        last = headers.get("Range", "").rpartition("-")[2]
        return int(last) + 1 if last.isdigit() else 0


def _auth_error(error: BaseException | None) -> Any:
    """The error of google-auth that another came from; None where there is none."""
    from google.auth.exceptions import GoogleAuthError

    while error is not None and not isinstance(error, GoogleAuthError):
        error = error.__cause__ or error.__context__
    return error


def _refused(reason: str) -> Fault:
    return Fault(kind=Kind.REFUSED, reason=reason)
