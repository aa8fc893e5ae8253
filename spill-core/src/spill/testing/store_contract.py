"""The suite that holds a store to `spill.stores.Store`, from outside: inherit `StoreContract` and give it one fixture.

    class TestMine(StoreContract):
        @pytest.fixture
        def make_store(self):
            place = fresh_place()
            return lambda: my_store.open(place)

`make_store` answers a new client at each call, all of them on one place that is empty when a test begins. A second
fixture, `refusing_stores`, answers clients of places that cannot be used (no bucket, no right), by what is wrong.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spill.errors import StoreError
from spill.stores import Absent, Buffer, Entry, Exists, Store, Unanswered, Unreadable

MakeStore = Callable[[], Store]
NONCE = "0123456789abcdef"
LIMIT = 64 * 1024


def names(store: Store, prefix: str) -> list[str]:
    return [entry.name for entry in store.list(prefix)]


def joined(parts: Sequence[Buffer]) -> bytes:
    return b"".join(memoryview(part).tobytes() for part in parts)


def create_and_settle(store: Store, name: str, data: bytes) -> bool:
    """Whether this create won, as a run finds out: what is refused or unanswered is read back."""
    try:
        store.create(name, data)
    except (Exists, Unanswered):
        return store.read(name, LIMIT) == data
    return True


class StoreContract:
    """Obligations of a store.

    Attributes:
        races: how many names are raced for.
        racers: clients in each race.
        many: how many objects a folder gets that is listed; more than a page where the store lists in pages.
        large: bytes of the object that is written in many parts; above 16 MiB, so that it goes up in several.
        writers: threads that make those objects.
        settle_seconds: by how much two timestamps of the store may lie apart without their order counting, for one
            that keeps whole seconds.
    """

    races: int = 40
    racers: int = 16
    many: int = 1100
    large: int = 40 * 1024**2
    writers: int = 8
    settle_seconds: float = 1.0

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Answers a new client of the one place of this test at each call."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `make_store` that returns a callable")

    @pytest.fixture
    def refusing_stores(self) -> Mapping[str, Store]:
        """Clients of places that cannot be used, by what is wrong with them; a subclass gives what it can make."""
        pytest.skip(f"{type(self).__name__} has no fixture `refusing_stores`")

    # Exclusive creation

    def test_a_created_object_reads_back(self, make_store: MakeStore) -> None:
        make_store().create("log/1.json", b"{}\n")
        assert make_store().read("log/1.json", LIMIT) == b"{}\n"

    @pytest.mark.parametrize("again", [b"second", b"first", b"longer than the first"])
    def test_a_second_create_is_refused_and_changes_nothing(self, make_store: MakeStore, again: bytes) -> None:
        make_store().create("log/1.json", b"first")
        with pytest.raises(Exists):
            make_store().create("log/1.json", again)
        assert make_store().read("log/1.json", LIMIT) == b"first"

    def test_a_create_is_refused_where_a_write_was(self, make_store: MakeStore) -> None:
        store = make_store()
        store.write("log/1.json", [])
        with pytest.raises(Exists):
            store.create("log/1.json", b"late")
        assert store.read("log/1.json", LIMIT) == b"", "an empty object takes its name as any other does"

    def test_an_empty_create_is_refused(self, make_store: MakeStore) -> None:
        store = make_store()
        with pytest.raises(ValueError, match="empty"):
            store.create("log/1.json", b"")
        with pytest.raises(Absent):
            store.read("log/1.json", LIMIT)

    def test_a_name_is_free_again_after_a_delete(self, make_store: MakeStore) -> None:
        store = make_store()
        store.create("log/1.json", b"first")
        store.delete("log/1.json")
        store.create("log/1.json", b"second")
        assert store.read("log/1.json", LIMIT) == b"second"

    def test_of_racing_creates_exactly_one_wins_and_stays(self, make_store: MakeStore) -> None:
        clients = [make_store() for _ in range(self.racers)]
        for client in clients:
            client.list("log/")  # connections stand before the races begin
        barrier = threading.Barrier(self.racers)

        def race(me: int) -> list[bool]:
            won = []
            for number in range(self.races):
                barrier.wait(60)
                # Of different sizes, so that a mixture would show.
                data = f"{me:02d} {NONCE}".encode() * (1 + me * 37 + number)
                won.append(create_and_settle(clients[me], f"log/{number}.json", data))
            return won

        with ThreadPoolExecutor(self.racers) as pool:
            results = list(pool.map(race, range(self.racers)))
        for number in range(self.races):
            winners = [me for me in range(self.racers) if results[me][number]]
            found = make_store().read(f"log/{number}.json", LIMIT * 16)
            assert len(winners) == 1, f"race {number} was won by {winners}"
            assert found == f"{winners[0]:02d} {NONCE}".encode() * (1 + winners[0] * 37 + number)
        assert len(names(make_store(), "log/")) == self.races

    # Writing

    def test_a_write_replaces_what_was_there(self, make_store: MakeStore) -> None:
        store = make_store()
        for data in (b"first and longer", b"second", b"", b"third"):
            store.write("alive/1-" + NONCE, [data])
            assert make_store().read("alive/1-" + NONCE, LIMIT) == data

    def test_buffers_of_all_kinds_become_one_object(self, make_store: MakeStore) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        nothing = np.zeros((0, 4), np.float32)
        parts: list[Buffer] = [b"head", bytearray(b""), array.data, nothing.data, bytearray(b"tail"), b""]
        store = make_store()
        store.write("data/1-" + NONCE + "/parts", parts)
        assert make_store().read("data/1-" + NONCE + "/parts", LIMIT) == b"head" + array.tobytes() + b"tail"

    def test_a_large_object_of_many_parts(self, make_store: MakeStore) -> None:
        count = self.large // 3 // 4
        array = np.random.Generator(np.random.Philox(7)).random(count, dtype=np.float32)
        # Lengths that fit no block: one byte, a little more than a third, many small ones.
        parts: list[Buffer] = [b"x", array.data, *[bytes([i % 251]) * 1021 for i in range(500)]]
        parts += [array[::-1].copy().data, array.reshape(1, -1).data, b"end"]
        name = f"data/1-{NONCE}/000001-tune-state"
        store = make_store()
        store.write(name, parts)
        whole = joined(parts)
        assert make_store().read(name, len(whole)) == whole
        assert [(e.name, e.size) for e in make_store().list("data/")] == [(name, len(whole))]
        store.write(name, [b"small now"])
        assert make_store().read(name, LIMIT) == b"small now"

    def test_a_reader_sees_an_old_object_or_a_new_one_whole(self, make_store: MakeStore) -> None:
        name = "alive/1-" + NONCE
        versions = [bytes([65 + i]) * (20_000 * (1 + i % 3)) for i in range(12)]
        writer, reader = make_store(), make_store()
        writer.write(name, [versions[0]])
        done = threading.Event()

        def write() -> None:
            try:
                for data in versions[1:]:
                    writer.write(name, [data[:7], data[7:]])
            finally:
                done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            seen = 0
            while not done.is_set() or seen == 0:
                assert reader.read(name, LIMIT) in versions, "a mixture, or a part, was read"
                seen += 1
            writing.result()

    def test_one_client_serves_several_threads(self, make_store: MakeStore) -> None:
        store = make_store()

        def work(me: int) -> None:
            for turn in range(5):
                name, data = f"data/{me + 1}-{NONCE}/{turn:06d}", f"{me} {turn}".encode() * 500
                store.write(name, [data])
                assert store.read(name, LIMIT) == data
                assert name in names(store, f"data/{me + 1}-{NONCE}/")
                store.delete(name)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert names(store, "") == []

    # Reading

    def test_absence_is_told(self, make_store: MakeStore) -> None:
        store = make_store()
        for name in ("log/1.json", f"data/1-{NONCE}/x", "plain"):
            with pytest.raises(Absent):
                store.read(name, LIMIT)
        store.create("log/1.json", b"x")
        for name in ("log/1.jso", "log/1.json.bak", "log/1.json/below", "log", "LOG/1.json"):
            with pytest.raises((Absent, Unreadable)):
                store.read(name, LIMIT)

    @pytest.mark.parametrize("size", [0, 1, 1000])
    def test_no_more_than_the_limit_is_read(self, make_store: MakeStore, size: int) -> None:
        store = make_store()
        store.write("log/1.json", [b"x" * size])
        assert store.read("log/1.json", size) == b"x" * size
        assert store.read("log/1.json", 10**12) == b"x" * size
        if size:
            for limit in {0, size - 1}:
                with pytest.raises(Unreadable):
                    store.read("log/1.json", limit)

    def test_what_another_client_did_is_seen_at_once(self, make_store: MakeStore) -> None:
        here, there = make_store(), make_store()
        assert names(here, "") == []
        with pytest.raises(Absent):
            here.read("log/1.json", LIMIT)
        there.create("log/1.json", b"one")
        assert here.read("log/1.json", LIMIT) == b"one"
        assert names(here, "log/") == ["log/1.json"]
        there.write("log/1.json", [b"another"])
        there.create("log/2.json", b"two")
        assert here.read("log/1.json", LIMIT) == b"another"
        assert [(e.name, e.size) for e in here.list("log/")] == [("log/1.json", 7), ("log/2.json", 3)]
        there.delete("log/1.json")
        assert names(here, "log/") == ["log/2.json"]
        with pytest.raises(Absent):
            here.read("log/1.json", LIMIT)

    # Listing

    def test_a_listing_is_complete_with_sizes(self, make_store: MakeStore) -> None:
        store = make_store()
        expected = {
            "log/1.json": 3,
            "log/10.json": 4,
            "log/2.json": 5,
            f"alive/2-{NONCE}": 6,
            f"data/1-{NONCE}/000001-tune-state": 7,
            f"data/1-{NONCE}/deep/er": 8,
            f"data/12-{NONCE}/000001-folder.json": 0,
        }
        for name, size in expected.items():
            store.write(name, [b"x" * size])
        reader = make_store()
        for prefix in ("", "log/", "alive/", "data/", f"data/1-{NONCE}/", f"data/1-{NONCE}/deep/"):
            found = reader.list(prefix)
            assert sorted(reader.names(prefix)) == sorted(entry.name for entry in found)
            assert {e.name: e.size for e in found} == {n: s for n, s in expected.items() if n.startswith(prefix)}
            assert len(found) == len({e.name for e in found}), f"names come once under {prefix!r}"
            assert all(isinstance(e, Entry) for e in found)
        for prefix in ("none/", f"data/2-{NONCE}/", "log/1.json/", "lo/", f"data/1-{NONCE[:-1]}/"):
            assert reader.list(prefix) == [], f"{prefix!r} is nobody's folder"

    def test_a_listing_of_many_objects_is_complete(self, make_store: MakeStore) -> None:
        store = make_store()
        expected = [f"log/{number}.json" for number in range(1, self.many + 1)]
        with ThreadPoolExecutor(self.writers) as pool:
            list(pool.map(lambda name: store.create(name, b"x"), expected))
        counted = Counter(names(make_store(), "log/"))
        assert counted == Counter(expected)

    def test_modified_is_the_stores_clock_and_goes_on(self, make_store: MakeStore) -> None:
        store, name = make_store(), "alive/1-" + NONCE
        store.write(name, [b"1"])
        (first,) = make_store().list("alive/")
        time.sleep(self.settle_seconds + 0.2)
        store.write("alive/2-" + NONCE, [b"later"])
        entries = {e.name: e.modified for e in make_store().list("alive/")}
        assert entries[name] == first.modified, "it stays while nobody writes"
        assert entries["alive/2-" + NONCE] > first.modified
        time.sleep(self.settle_seconds + 0.2)
        store.write(name, [b"2"])
        (again,) = (e for e in make_store().list("alive/") if e.name == name)
        gone = again.modified - first.modified
        assert entries["alive/2-" + NONCE] < again.modified, "a rewritten object is younger than one from before"
        assert 2 * self.settle_seconds - 1 <= gone < 2 * self.settle_seconds + 30, f"{gone} s"

    # Deleting

    def test_a_delete_removes_one_object_and_may_be_repeated(self, make_store: MakeStore) -> None:
        store = make_store()
        for name in ("log/1.json", "log/10.json", f"data/1-{NONCE}/a", f"data/1-{NONCE}/b"):
            store.create(name, b"x")
        for _ in range(2):
            store.delete("log/1.json")
            store.delete(f"data/1-{NONCE}/a")
            store.delete(f"data/7-{NONCE}/never/was")
        assert names(make_store(), "") == [f"data/1-{NONCE}/b", "log/10.json"]
        store.delete(f"data/1-{NONCE}/b")
        assert names(make_store(), "data/") == []
        store.create(f"data/1-{NONCE}/c", b"the folder is still usable")
        assert names(make_store(), "data/") == [f"data/1-{NONCE}/c"]

    # Names

    @pytest.mark.parametrize(
        "name", ["", "/log/1.json", "../log/1.json", "data/../log/1.json", "..", "a\\b", "a\0b", "a//b", "./a"]
    )
    def test_a_name_that_leads_elsewhere_is_refused(self, make_store: MakeStore, name: str) -> None:
        store = make_store()
        requests: list[Callable[[], object]] = [
            lambda: store.create(name, b"x"),
            lambda: store.write(name, [b"x"]),
            lambda: store.read(name, LIMIT),
            lambda: store.delete(name),
        ]
        for request in requests:
            with pytest.raises(ValueError):
                request()
        assert names(store, "") == []

    def test_long_names_of_the_layout(self, make_store: MakeStore) -> None:
        name = f"data/999999999999-{NONCE}/000001-" + "a.b_c-d" * 16
        store = make_store()
        store.create(name, b"x")
        assert make_store().read(name, LIMIT) == b"x"
        assert names(make_store(), "data/") == [name]

    def test_the_uri_names_the_store(self, make_store: MakeStore) -> None:
        assert make_store().uri == make_store().uri
        assert make_store().uri

    # Places that cannot be used

    def test_a_place_that_cannot_be_used_is_a_store_error(self, refusing_stores: Mapping[str, Store]) -> None:
        for wrong, store in refusing_stores.items():
            requests: dict[str, Callable[[], object]] = {
                "create": lambda s=store: s.create("log/1.json", b"x"),  # type: ignore[misc]
                "write": lambda s=store: s.write("log/1.json", [b"x"]),  # type: ignore[misc]
                "read": lambda s=store: s.read("log/1.json", LIMIT),  # type: ignore[misc]
                "list": lambda s=store: s.list("log/"),  # type: ignore[misc]
                "names": lambda s=store: s.names("log/"),  # type: ignore[misc]
                "delete": lambda s=store: s.delete("log/1.json"),  # type: ignore[misc]
            }
            for verb, request in requests.items():
                with pytest.raises(StoreError) as found:
                    pytest.fail(f"{wrong}: {verb} answered {request()!r}")
                assert not isinstance(found.value, Unanswered), f"{wrong}: {verb} was refused, which is an answer"
                assert "\n" not in str(found.value), f"{wrong}: {verb} says more than one line"
