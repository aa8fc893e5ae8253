"""`az://`: requests to Azure Blob Storage through adlfs, and what their errors mean."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from spill.environment import nonce
from spill.errors import InputError, StoreError
from spill.stores import Entry
from spill_store_cloud.place import clean, library, parse
from spill_store_cloud.store import PART_SIZE, CloudStore, Fault, Kind, Piece, Upload, in_time

_HOW = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or a login"
# One try each: `CloudStore` repeats them, and has to know which of them went without an answer.
_ONCE = {"retry_total": 0, "connection_timeout": 10, "read_timeout": 60}
# Answers of 409 and 403 that neither asking again nor other credentials change.
_NEVER = {
    "PublicAccessNotPermitted", "BlobImmutableDueToPolicy", "SnapshotsPresent", "BlobArchived", "AccountIsDisabled",
    "AuthorizationSourceIPMismatch",
}  # fmt: skip
_EXPIRED = ("expired", "not in valid time", "Signature not valid in the specified time frame")


def open_az(uri: str) -> CloudStore:
    """Open `az://CONTAINER/FOLDER`; account and credentials as adlfs and azure-identity find them.

    Raises:
        InputError: a malformed URI.
        PluginError: adlfs is not installed.
        StoreError: no account is configured.
    """
    place = parse(uri, "az")
    if not set(place.bucket) <= set("abcdefghijklmnopqrstuvwxyz0123456789-"):
        raise InputError(
            f"{uri!r} has no usable container name ({place.bucket!r}: lower-case letters, digits and dashes); "
            "write az://CONTAINER/FOLDER, the account comes from the environment"
        )
    adlfs = library("adlfs", "az")
    for name in ("adlfs", "azure"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    try:
        files = adlfs.AzureBlobFileSystem(skip_instance_cache=True, use_listings_cache=False)
    except ValueError as error:
        raise StoreError(f"cannot open {place.uri}: {clean(str(error))}; set {_HOW}") from error
    return CloudStore(place, AzureContainer(files, place.bucket))


class AzureContainer:
    """One container; `files` is an `adlfs.AzureBlobFileSystem`."""

    lanes = 4
    whole_size = PART_SIZE

    def __init__(self, files: Any, container: str) -> None:
        self._files = files
        self._container = container

    def put(self, key: str, data: bytes, exclusive: bool) -> None:
        self.run(self.blob(key).upload_blob, data, size=len(data), overwrite=not exclusive, validate_content=True)

    def begin(self, key: str, views: Sequence[memoryview]) -> Upload:
        return _Blocks(self, key)

    def get(self, key: str, start: int, count: int, version: str) -> Piece:
        try:
            return self.run(self._get, key, start, count, version, size=count)
        except Exception as error:
            if start == 0 and _code(error) == "InvalidRange":
                return Piece(data=b"", size=0, version="")  # nothing lies there to take a range of
            raise

    async def _get(self, key: str, start: int, count: int, version: str, **once: Any) -> Piece:
        from azure.core import MatchConditions

        condition = {"etag": version, "match_condition": MatchConditions.IfNotModified} if version else {}
        stream = await self.blob(key).download_blob(offset=start, length=count, **condition, **once)
        data = await stream.readall()
        found = stream.properties
        size = int(str(found.content_range).rpartition("/")[2]) if found.content_range else len(data)
        return Piece(data=data, size=size, version=found.etag)

    def page(self, prefix: str, after: str) -> tuple[list[Entry], str]:
        return self.run(self._page, prefix, after)

    async def _page(self, prefix: str, after: str, **once: Any) -> tuple[list[Entry], str]:
        container = self._files.service_client.get_container_client(self._container)
        pages = container.list_blobs(name_starts_with=prefix, include=["metadata"], **once).by_page(after or None)
        entries = [
            Entry(name=blob.name, size=blob.size, modified=blob.last_modified.timestamp())
            async for blob in await anext(pages)
            if (blob.metadata or {}).get("hdi_isfolder") != "true"  # accounts with folders of their own list them too
        ]
        return entries, pages.continuation_token or ""

    def remove(self, key: str) -> None:
        self.run(self.blob(key).delete_blob)

    def judge(self, error: Exception) -> Fault:
        from azure.core import exceptions as azure

        says = clean(str(error).partition("\n")[0])
        code = _code(error)
        status = int(getattr(error, "status_code", None) or 0)
        if isinstance(error, azure.ClientAuthenticationError) and not status:
            return _refused(f"no usable credentials ({says}): set {_HOW}")
        if isinstance(error, azure.HttpResponseError) and status:
            return self._judge_answer(status, code, says, error)
        if isinstance(error, azure.ServiceRequestTimeoutError) or type(error.__cause__).__name__ in (
            "ClientConnectorError",
            "ClientConnectorDNSError",
        ):
            return Fault(kind=Kind.BUSY, reason=says)
        if type(error.__cause__).__name__ == "ClientConnectorCertificateError":
            return _refused(f"the certificate is not trusted: {says}")
        broken = (azure.ServiceRequestError, azure.ServiceResponseError, azure.HttpResponseError, azure.DecodeError)
        if isinstance(error, (*broken, asyncio.TimeoutError, ConnectionError)) or (
            type(error).__module__.startswith("aiohttp")
        ):
            return Fault(kind=Kind.SILENT, reason=f"the connection broke off ({says or type(error).__name__})")
        return _refused(f"{type(error).__name__}: {says}")

    def _judge_answer(self, status: int, code: str, says: str, error: Any) -> Fault:
        named = f"{code}: {says}" if code else says
        if code == "BlobNotFound" or (status == 404 and not code):
            return Fault(kind=Kind.ABSENT, reason=named)
        if code in ("ContainerNotFound", "ContainerBeingDeleted"):
            return _refused(
                f"there is no container {self._container!r} at {self._where()}: create it, or correct --state"
            )
        if code == "BlobAlreadyExists":
            return Fault(kind=Kind.TAKEN, reason=named)
        if status in (412, 304):
            reading = getattr(error.response.request, "method", "GET") == "GET"
            return Fault(kind=Kind.MOVED if reading else Kind.TAKEN, reason=named)
        # What came was not what was sent; the second is how Azurite words it.
        damaged = code == "Md5Mismatch" or "contentMD5" in says
        if code in _NEVER:
            return _refused(f"the store refuses it ({named}): change the account's settings, or give another --state")
        if status in (408, 409, 429, 503) or damaged:
            return Fault(kind=Kind.BUSY, reason=f"the store is busy ({named})")
        if status >= 500:
            return Fault(kind=Kind.SILENT, reason=f"the store failed ({named})")
        if status in (401, 403):
            return self._judge_rights(code, named, str(error))
        return _refused(named)

    def _judge_rights(self, code: str, named: str, text: str) -> Fault:
        if "date header" in text.lower() or "RequestTimeTooSkewed" in text:
            return _refused(f"this machine's clock is off the store's ({named}): set the clock")
        if any(sign in text for sign in _EXPIRED):
            return _refused(f"the credentials have expired ({named}): get new ones")
        known = "failed to authenticate" not in text
        if known and code in (
            "AuthorizationFailure",
            "AuthorizationPermissionMismatch",
            "InsufficientAccountPermissions",
        ):
            return _refused(
                f"no right to do that ({named}): the account needs Storage Blob Data Contributor on {self._container!r}"
            )
        return _refused(f"the credentials are wrong ({named}): check {_HOW}")

    def _where(self) -> str:
        return clean(str(self._files.service_client.url))

    def blob(self, key: str) -> Any:
        return self._files.service_client.get_blob_client(self._container, key)

    def run(self, request: Any, *arguments: Any, size: int = 0, **keywords: Any) -> Any:
        """Make a request once; `size` is how many bytes it moves."""
        return in_time(self._files, request, *arguments, size=self.lanes * size, **keywords, **_ONCE)


class _Blocks:
    """Blocks that become a blob when their list is committed. Their names are drawn, so that two writers never mix."""

    def __init__(self, container: AzureContainer, key: str) -> None:
        self._container = container
        self._blob = container.blob(key)
        self._mark = nonce()
        self._sent: set[str] = set()

    def send(self, number: int, start: int, data: bytes) -> None:
        block = f"{self._mark}-{number:06d}"
        self._container.run(
            self._blob.stage_block, block, data, size=len(data), length=len(data), validate_content=True
        )
        self._sent.add(block)

    def finish(self) -> int:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(block_id=block) for block in sorted(self._sent)]
        self._container.run(self._blob.commit_block_list, blocks)
        return int(self._container.run(self._blob.get_blob_properties).size)

    def abandon(self) -> None:
        """Nothing to do: the store drops blocks that no list names."""


def _code(error: Exception) -> str:
    """The store's name for a fault, such as `BlobNotFound`; empty where it gave none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _refused(reason: str) -> Fault:
    return Fault(kind=Kind.REFUSED, reason=reason)
