"""The store contract, on a real server of each provider, and of S3 on two."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from spill.stores import Store
from spill.testing.store_contract import StoreContract
from tests.cloud.servers import READER, READER_SECRET, Server

Reach = Callable[..., Callable[..., Store]]


class CloudContract(StoreContract):
    races = 12
    settle_seconds = 1.0
    large = 36 * 1024**2

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


class TestS3OnMoto(CloudContract):
    @pytest.fixture
    def place(self, moto: Server, reach: Reach) -> Callable[..., Store]:
        return reach(moto)


class TestS3OnSeaweed(CloudContract):
    races = 25

    @pytest.fixture
    def place(self, seaweed: Server, reach: Reach) -> Callable[..., Store]:
        return reach(seaweed)

    @pytest.fixture
    def refusing_stores(
        self, place: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, seaweed: Server
    ) -> Mapping[str, Store]:
        """Credentials are read when a client first asks, so each of these has asked once when it is handed over."""
        stores = {"no bucket": place(bucket="no-such-bucket")}
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        stores["wrong secret"] = place()
        return stores


class TestGoogle(CloudContract):
    @pytest.fixture
    def place(self, fake_gcs: Server, reach: Reach) -> Callable[..., Store]:
        return reach(fake_gcs)


# The SDK itself hands a part to its HTTP library as plain bytes.
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
class TestAzure(CloudContract):
    many = 300

    @pytest.fixture
    def place(self, azurite: Server, reach: Reach) -> Callable[..., Store]:
        return reach(azurite)

    def test_pages_are_put_together(self, place: Callable[..., Store], monkeypatch: pytest.MonkeyPatch) -> None:
        """The server's own pages are of 5,000."""
        from azure.storage.blob.aio import ContainerClient

        listed = ContainerClient.list_blobs

        def small_pages(self: Any, *arguments: Any, **keywords: Any) -> Any:
            return listed(self, *arguments, results_per_page=7, **keywords)

        monkeypatch.setattr(ContainerClient, "list_blobs", small_pages)
        store = place()
        expected = [f"log/{n}.json" for n in range(10, 40)]
        for name in expected:
            store.write(name, [b"x"])
        assert [e.name for e in store.list("log/")] == expected


assert READER
assert READER_SECRET
