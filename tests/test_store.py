"""An object is there whole or not at all, whoever writes, reads or dies."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hsray.store import TEMPORARY_PREFIX, Store


@pytest.fixture(params=["local", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that does not exist yet."""
    folder = f"{tmp_path}/a folder/ünïcode 你好 #1 %20"
    return folder if request.param == "local" else f"{request.param}{folder}"


@pytest.fixture
def store(url: str) -> Store:
    return Store(url)


def leftovers(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(f"{TEMPORARY_PREFIX}*")]


def test_what_is_published_is_read_back_by_anyone(store, url, tmp_path):
    store.publish("shards/000001.parquet", b"one")
    other = Store(url)
    assert other.read("shards/000001.parquet") == b"one"
    assert other.exists("shards/000001.parquet")
    assert not other.exists("shards/000002.parquet")
    assert leftovers(tmp_path) == []


def test_the_target_is_where_the_url_says(tmp_path):
    Store(tmp_path / "a b" / "#ü %20").publish("x/y", b"1")
    assert (tmp_path / "a b" / "#ü %20" / "x" / "y").read_bytes() == b"1"


@pytest.mark.parametrize("data", [b"", b"\0" * 3_000_000])
def test_bytes_of_any_number_are_published(store, data):
    store.publish("x", data)
    assert store.read("x") == data
    assert store.list() == {"x": len(data)}


def test_pieces_written_one_after_the_other_are_one_object(store):
    with store.staged("x") as sink:
        for piece in (b"ab", b"", b"cd"):
            sink.write(piece)
        assert sink.tell() == 4
    assert store.read("x") == b"abcd"


def test_an_object_is_read_at_random(store):
    store.publish("x", bytes(range(200)))
    with store.open("x") as file:
        file.seek(100)
        assert file.read(3) == bytes([100, 101, 102])


def test_nothing_is_seen_before_the_end(store):
    with store.staged("x") as sink:
        sink.write(b"half")
        assert not store.exists("x")
        assert store.list() == {}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_writer_that_raises_publishes_nothing_and_leaves_nothing(store, tmp_path, error):
    with pytest.raises(error), store.staged("x") as sink:
        sink.write(b"half")
        raise error
    assert not store.exists("x")
    assert leftovers(tmp_path) == []


def test_a_writer_that_raises_leaves_the_version_before(store):
    store.publish("x", b"before")
    with pytest.raises(RuntimeError), store.staged("x") as sink:
        sink.write(b"aft")
        raise RuntimeError
    assert store.read("x") == b"before"


def test_a_reader_sees_only_whole_versions(store):
    versions = {bytes([number]) * (1 << 20) for number in range(2)}
    store.publish("x", min(versions))
    done = threading.Event()

    def read_until_done() -> tuple[int, set[bytes]]:
        count, torn = 0, set()
        while not done.is_set():
            data = store.read("x")
            count += 1
            if data not in versions:
                torn.add(data)
        return count, torn

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_until_done)
        for _ in range(15):
            for data in versions:
                store.publish("x", data)
        done.set()
        count, torn = reading.result()
    assert count > 0
    assert not torn


def test_of_many_publishers_of_one_name_one_wins_whole(store, tmp_path):
    contents = [bytes([number]) * 100_000 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: store.publish("shards/x", data), contents))
    assert store.read("shards/x") in contents
    assert store.list("shards") == {"x": 100_000}
    assert leftovers(tmp_path) == []


def test_a_listing_has_objects_and_folders_with_their_bytes(store):
    assert store.list() == {}
    assert store.list("nowhere") == {}
    store.publish("manifest.json", b"12345")
    store.publish("shards/000000.parquet", b"123")
    store.publish("shards/000001.parquet", b"1234")
    assert set(store.list()) == {"manifest.json", "shards"}
    assert store.list()["manifest.json"] == 5
    assert store.list("shards") == {"000000.parquet": 3, "000001.parquet": 4}


def test_a_listing_is_never_stale(store, url):
    other = Store(url)
    for number in range(3):
        assert len(other.list("shards")) == number
        store.publish(f"shards/{number}", b"x")


def test_a_missing_object_is_a_file_not_found(store):
    for act in (store.read, store.open, store.remove):
        with pytest.raises(FileNotFoundError):
            act("missing")


def test_what_is_removed_is_gone(store):
    store.publish("plan/0", b"x")
    store.publish("plan/1", b"x")
    store.publish("other", b"x")
    store.remove("plan/0")
    assert store.list("plan") == {"1": 1}
    store.remove_folder("plan")
    store.remove_folder("never there")
    assert set(store.list()) == {"other"}


def test_what_is_added_to_an_object_comes_after_what_it_holds(store):
    for data in (b"one\n", b"two\n"):
        store.append("log", data)
    assert store.read("log") == b"one\ntwo\n"


def test_an_object_is_created_once_and_says_by_whom(store):
    assert store.create("a", b"first")
    assert not store.create("a", b"second")
    assert store.read("a") == b"first"


def test_a_sweep_removes_what_killed_writers_left_and_nothing_else(tmp_path):
    store = Store(tmp_path)
    store.publish("shards/000000.parquet", b"x")
    for name in (f"{TEMPORARY_PREFIX}0123", f"{TEMPORARY_PREFIX}4567", ".hidden", "hsray-tmp-1", "x.tmp"):
        (tmp_path / "shards" / name).write_bytes(b"half")
    (tmp_path / f"{TEMPORARY_PREFIX}elsewhere").write_bytes(b"half")
    store.sweep("shards")
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {
        "000000.parquet",
        ".hidden",
        "hsray-tmp-1",
        "x.tmp",
    }
    assert leftovers(tmp_path) == [str(tmp_path / f"{TEMPORARY_PREFIX}elsewhere")]


def test_a_folder_that_is_absent_is_swept_without_a_word(store):
    store.sweep("shards")


def test_what_killed_writers_left_is_not_listed(tmp_path):
    (tmp_path / f"{TEMPORARY_PREFIX}0123").write_bytes(b"half")
    assert Store(tmp_path).list() == {}


def test_a_target_that_can_be_written_is_left_as_it_was(store, url):
    store.check_writable()
    assert Store(url).list() == {}


def test_a_target_that_cannot_be_written_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("I am a file")
    for url in (f"{tmp_path}/file/below", f"{tmp_path}/file", "/proc/hsray"):
        with pytest.raises(OSError, match=f"^'{re.escape(url)}' cannot be written: .*; give an out= that can$"):
            Store(url).check_writable()
    assert (tmp_path / "file").read_text() == "I am a file"


def test_a_relative_target_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("out")
    os.chdir("/")
    store.publish("x", b"1")
    assert (tmp_path / "out" / "x").read_bytes() == b"1"


def test_a_path_with_a_slash_at_its_end_is_the_same_target(url):
    Store(url + "/").publish("shards/x", b"1")
    assert Store(url).list("shards") == {"x": 1}


def test_a_full_disk_is_an_error_that_names_the_object_and_the_bytes(tmp_path):
    """A limit on the file's size stands for the disk's end: both fail a write part of the way."""
    script = (
        "import errno, resource, signal, sys\n"
        "import pyarrow as pa, hsray.store\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "errno.ENOSPC = errno.EFBIG\n"
        f"hsray.store.Store({str(tmp_path)!r}).publish('x', bytes(3 << 20))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.search(
        rf"no space for {re.escape(str(tmp_path))}/x: about 3,145,728 bytes are needed, 1,048,576 of them were written, "
        r"[\d,]+ are free now; make room, and build again to go on",
        ended.stderr,
    ), ended.stderr
    assert list(tmp_path.iterdir()) == []
