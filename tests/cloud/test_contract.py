"""The store contract, on a real server of each provider, and of S3 on two."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from spill.errors import StoreError
from spill.stores import Store
from spill.testing.store_contract import StoreContract
from tests.cloud.servers import Server

Reach = Callable[..., Callable[..., Store]]


class CloudContract(StoreContract):
    races = 8
    many = 30
    large = 36 * 1024**2
    settle_seconds = 1.0

    @pytest.fixture
    def place(self, reach: Reach) -> Callable[..., Store]:
        raise NotImplementedError

    @pytest.fixture
    def make_store(self, place: Callable[..., Store]) -> Callable[[], Store]:
        return place

    @pytest.fixture
    def refusing_stores(self, place: Callable[..., Store]) -> Mapping[str, Store]:
        return {"no bucket": place(bucket="no-such-bucket")}

    def test_a_slash_at_the_end_names_the_same_state(self, place: Callable[..., Store]) -> None:
        place(folder="tests/slash").write("log/1.json", [b"x"])
        other = place(folder="tests/slash/")
        assert (other.read("log/1.json", 9), other.uri) == (b"x", place(folder="tests/slash").uri)
        other.delete("log/1.json")

    def test_a_neighbour_whose_name_begins_alike_is_not_listed(self, place: Callable[..., Store]) -> None:
        here, there = place(folder="tests/next"), place(folder="tests/next-door")
        there.write("log/1.json", [b"x"])
        assert here.list("") == []
        there.delete("log/1.json")

    def test_a_folder_marker_is_no_object(self, place: Callable[..., Store]) -> None:
        """Consoles make them: empty objects whose names end in a slash."""
        store: Any = place()
        store._bucket.put(f"{store._folder}/data/", b"", False)
        store.write("data/1-0123456789abcdef/x", [b"x"])
        assert [e.name for e in store.list("")] == ["data/1-0123456789abcdef/x"]


class TestS3OnMoto(CloudContract):
    @pytest.fixture
    def place(self, moto: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Store]:
        """With pages of 7."""
        from spill_store_cloud.s3 import S3Bucket

        call = S3Bucket._call

        def small_pages(self: S3Bucket, method: str, **request: Any) -> Any:
            return call(self, method, **request, **({"MaxKeys": 7} if method == "list_objects_v2" else {}))

        monkeypatch.setattr(S3Bucket, "_call", small_pages)
        return reach(moto)


class TestS3OnSeaweed(CloudContract):
    races, racers = 4, 8  # its lock on a name lets a queue wait for a second each
    many = 1100  # a page is 1,000

    @pytest.fixture
    def place(self, seaweed: Server, reach: Reach) -> Callable[..., Store]:
        return reach(seaweed)

    @pytest.fixture
    def refusing_stores(self, place: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Store]:
        stores = {"no bucket": place(bucket="no-such-bucket")}
        with contextlib.suppress(StoreError):
            stores["no bucket"].list("")  # credentials are read at the first request
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        stores["wrong secret"] = place()
        return stores


class TestGoogle(CloudContract):
    @pytest.fixture
    def place(self, fake_gcs: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Store]:
        """With pages of 7."""
        files: Any = pytest.importorskip("gcsfs.core").GCSFileSystem
        call = files.call

        def small_pages(self: Any, method: str, path: str, *arguments: Any, **request: Any) -> Any:
            listing = method == "GET" and path.endswith("/o")
            return call(self, method, path, *arguments, **request, **({"maxResults": 7} if listing else {}))

        monkeypatch.setattr(files, "call", small_pages)
        return reach(fake_gcs)


# The SDK hands a part to its HTTP library as plain bytes.
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
class TestAzure(CloudContract):
    @pytest.fixture
    def place(self, azurite: Server, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Store]:
        """With pages of 7."""
        from azure.storage.blob.aio import ContainerClient

        listed = ContainerClient.list_blobs

        def small_pages(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return listed(self, *arguments, results_per_page=7, **keywords)

        monkeypatch.setattr(ContainerClient, "list_blobs", small_pages)
        return reach(azurite)
