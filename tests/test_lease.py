"""One driver builds in a folder at a time; a dead one's lease is taken over, a living one's never."""

import re
import subprocess
import sys
import threading
import time

import pytest

import hsray
from hsray.lease import BEAT_S, Holder, LeaseError, held
from hsray.manifest import LEASE_NAME
from hsray.pipeline import make_plan
from hsray.store import Store
from tests.builds import files_of
from tests.s3 import options_for, s3_server

FAST = {"beat_s": 0.1, "stale_s": 1.0}


@pytest.fixture(scope="module")
def s3_options():
    with s3_server() as endpoint:
        yield options_for(endpoint)


@pytest.fixture(params=["local", "s3", "memory"])
def store(request, tmp_path):
    """A folder where creating is atomic, one on S3, and one where it is not."""
    if request.param == "s3":
        return Store("s3://bucket/lease", request.getfixturevalue("s3_options"))
    return Store(tmp_path / "out" if request.param == "local" else f"memory://{tmp_path}")


def test_a_second_driver_is_refused_with_the_firsts_host_time_and_job(store):
    with held(store, job="job-1", **FAST) as lease:
        holder = Holder.parse(store.read(LEASE_NAME))
        refused = pytest.raises(LeaseError, match=re.escape(f"is being built by {holder}; wait for it or stop it"))
        with refused, held(store, job="job-2", **FAST):
            pass
        assert (holder.job, holder.since[:2]) == ("job-1", "20") and holder.host in str(holder)
        lease.check()
    assert store.list() == {}
    with held(store, job="job-2", **FAST):  # it was given back
        pass


def test_a_lease_that_is_not_renewed_is_taken_over_and_its_old_holder_ends(store):
    elsewhere = Holder(owner="x", host="other", pid=1, machine="another", job="job-1", since="2026-01-01")
    store.publish(LEASE_NAME, elsewhere.encoded(7))
    started = time.monotonic()
    with held(store, job="job-2", **FAST) as lease:
        assert FAST["stale_s"] <= time.monotonic() - started
        store.publish(LEASE_NAME, elsewhere.encoded(8))  # it wakes up
        wait_until_lost(lease, r"its lease was taken over by process 1 of host 'other'")
    assert Holder.parse(store.read(LEASE_NAME)).owner == "x"  # another's is left alone
    store.remove(LEASE_NAME)


def wait_until_lost(lease, match: str) -> None:
    ends = time.monotonic() + 30
    with pytest.raises(LeaseError, match=match):
        while time.monotonic() < ends:
            lease.check()
            time.sleep(0.02)


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path):
    script = f"import os, signal\nfrom hsray.lease import held\nfrom hsray.store import Store\nstore = Store({str(tmp_path)!r})\n"
    script += "with held(store, job='a'):\n    os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == -9
    assert (tmp_path / LEASE_NAME).exists()
    started = time.monotonic()
    with held(Store(tmp_path), job="b"):
        assert time.monotonic() - started < 5


def test_an_interrupt_just_after_the_lease_was_created_leaves_none(store):
    create = store.create

    def create_and_be_interrupted(*args: object) -> bool:
        assert create(*args)
        raise KeyboardInterrupt

    store.create = create_and_be_interrupted
    with pytest.raises(KeyboardInterrupt), held(store, job="a", **FAST):
        pass
    assert store.list() == {}


def test_a_folder_in_the_leases_place_is_said_with_the_way_out(tmp_path):
    (tmp_path / LEASE_NAME).mkdir()
    words = rf"a folder is where a file of hsray's belongs: move it away, .*{LEASE_NAME}"
    with pytest.raises(IsADirectoryError, match=words), held(Store(tmp_path), job="a", **FAST):
        pass


def test_a_lease_that_cannot_be_given_back_hides_neither_an_error_nor_a_success(tmp_path, caplog):
    with held(Store(tmp_path), job="a"):
        (tmp_path / LEASE_NAME).unlink()
        (tmp_path / LEASE_NAME).mkdir()
    assert "its lease could not be given back" in caplog.text


@pytest.mark.parametrize("content", [b"", b"half a", b"[1]", b'{"owner": 3}'])
def test_a_damaged_lease_is_anybodys_and_goes_stale(tmp_path, content):
    (tmp_path / LEASE_NAME).write_bytes(content)
    with held(Store(tmp_path), job="b", **FAST):
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_many_drivers_at_one_moment_one_holds_the_folder(store):
    got, refused, together = [], [], threading.Barrier(6)
    ended = threading.Event()

    def drive(number: int) -> None:
        together.wait()
        try:
            with held(store, job=str(number), **FAST) as lease:
                time.sleep(0.5)  # some beats, in which one too many would be found out
                lease.check()
                got.append(number)
                ended.wait(30)
        except LeaseError:
            refused.append(number)

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + 30
    while len(got) + len(refused) < 6 and time.monotonic() < ends:
        time.sleep(0.05)
    ended.set()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert len(got) == 1


def test_a_lease_that_was_removed_or_cannot_be_renewed_ends_its_driver(tmp_path):
    with held(Store(tmp_path), job="a", **FAST) as lease:
        (tmp_path / LEASE_NAME).unlink()
        wait_until_lost(lease, "its lease was removed")
    with held(Store(tmp_path), job="a", **FAST) as lease:
        lease._store.publish = None
        wait_until_lost(lease, r"could not be renewed for \d+ s \(TypeError")


def test_a_driver_that_has_lost_its_lease_publishes_and_removes_nothing(store):
    elsewhere = Holder(owner="x", host="other", pid=1, machine="another", job="job-1", since="2026-01-01")
    with held(store, job="job-2", **FAST) as lease:
        guarded = store.guarded(lease.check)
        guarded.publish("plan/a", b"mine")
        store.publish(LEASE_NAME, elsewhere.encoded(0))
        wait_until_lost(lease, "its lease was taken over")
        for change in (
            lambda: guarded.publish("plan/a", b"late"),
            lambda: guarded.publish("plan/b", b"late"),
            lambda: guarded.remove("plan/a"),
            lambda: guarded.remove_folder("plan"),
            lambda: guarded.sweep("plan"),
        ):
            with pytest.raises(LeaseError, match="its lease was taken over"):
                change()
    assert set(store.list("plan")) == {"a"} and store.read("plan/a") == b"mine"
    store.remove_folder("plan")
    store.remove(LEASE_NAME)


def test_a_driver_that_wakes_up_before_its_plan_leaves_anothers_dataset_as_it_is(
    ray_session, tiny_llama, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    asked = {"model": str(tiny_llama), "layers": ["final"], "out": out, "engine": "transformers", "progress": False}
    builds: list[dict[str, bytes]] = []

    def sleeping(*args, **options):
        """Sleeps, as a stopped process does, while another driver takes the lease and builds."""
        builds.append(files_of(out))
        if len(builds) == 1:
            (out / LEASE_NAME).unlink()
            hsray.build([{"id": "b", "input_ids": [4, 5, 6]}], **asked)
            builds.append(files_of(out))
            time.sleep(2 * BEAT_S)
        return make_plan(*args, **options)

    monkeypatch.setattr("hsray.pipeline.make_plan", sleeping)
    with pytest.raises(LeaseError, match="its lease was (removed|taken over)"):
        hsray.build([{"id": "a", "input_ids": [1, 2, 3]}], **asked)
    assert files_of(out) == builds[-1] and hsray.check(out, deep=True, progress=False).ok


def test_a_second_build_is_refused_and_leaves_the_firsts_plan_alone(ray_session, tiny_llama, tmp_path):
    """The second asks for the same while the first is planning, which is when it would remove a half-written plan."""
    build = {"model": str(tiny_llama), "layers": [0], "out": tmp_path, "engine": "transformers", "progress": False}
    rows = [{"input_ids": [1, 2, 3]}]
    with held(Store(tmp_path), job="the first", beat_s=0.5):
        (tmp_path / "plan").mkdir()
        (tmp_path / "plan" / "000000.parquet").write_bytes(b"being written")
        with pytest.raises(LeaseError, match="job 'the first', since 20"):
            hsray.build(rows, **build)
        assert (tmp_path / "plan" / "000000.parquet").read_bytes() == b"being written"
