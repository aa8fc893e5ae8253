"""Whole buckets of the servers, made and deleted by each provider's own means."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tests.cloud.servers import Server, s3_client


class Bucket(Protocol):
    """A bucket of the test's own."""

    def make(self) -> None: ...

    def delete(self) -> None:
        """It must be empty."""
        ...

    def close(self) -> None:
        """Let go of the client."""
        ...


class _S3:
    def __init__(self, server: Server, name: str) -> None:
        self._client = s3_client(server)
        self._name = name

    def make(self) -> None:
        self._client.create_bucket(Bucket=self._name)

    def delete(self) -> None:
        self._client.delete_bucket(Bucket=self._name)

    def close(self) -> None:
        self._client.close()


class _Google:
    def __init__(self, server: Server, name: str) -> None:
        self._url = f"{server.url}/storage/v1/b"
        self._name = name

    def make(self) -> None:
        self._ask("POST", f"{self._url}?project=test", json.dumps({"name": self._name}).encode())

    def delete(self) -> None:
        self._ask("DELETE", f"{self._url}/{self._name}")

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, method: str, url: str, body: bytes | None = None) -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
        urllib.request.urlopen(request, timeout=10).close()


class _Azure:
    def __init__(self, server: Server, name: str) -> None:
        from azure.storage.blob import ContainerClient

        text = server.environment(server.url)["AZURE_STORAGE_CONNECTION_STRING"]
        self._client = ContainerClient.from_connection_string(text, name)

    def make(self) -> None:
        self._client.create_container()

    def delete(self) -> None:
        self._client.delete_container()

    def close(self) -> None:
        self._client.close()


@contextmanager
def bucket_of(server: Server, name: str) -> Iterator[Bucket]:
    """A bucket of this name, made."""
    bucket: Bucket = {"s3": _S3, "gs": _Google, "az": _Azure}[server.scheme](server, name)
    bucket.make()
    try:
        yield bucket
    finally:
        bucket.close()
