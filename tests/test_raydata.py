"""Ray Data as hsray uses it: a signal ends a driver, wherever in it the signal falls."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import ray.data
from ray.exceptions import OutOfMemoryError

from hsray.raydata import ProcessDied, _is_refused, blocks_of, ray_data
from hsray.tasks import map_batches


@pytest.fixture(autouse=True)
def heeded_interrupts() -> Iterator[None]:
    """What a shell starts in the background is told to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send_lost(number: int) -> None:
    """Sends this process a signal within a weak reference's callback, which may not raise."""
    dying = set()
    end = weakref.ref(dying, lambda _: os.kill(os.getpid(), number))
    del dying
    assert end() is None


def test_the_callers_thread_does_not_preempt_others_meanwhile_and_has_its_policy_back(ray_session):
    with pytest.raises(ZeroDivisionError), ray_data():
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        _ = 1 / 0
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_sandbox_that_forbids_the_policy_is_no_error(ray_session, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with ray_data():
        assert len(list(blocks_of(ray.data.range(1)))) == 1


def test_threads_that_build_at_one_time_leave_ray_datas_settings_as_they_were(ray_session):
    settings = ray.data.DataContext.get_current()
    first_is_in, first_may_end, second_is_in = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with ray_data():
            first_is_in.set()
            assert second_is_in.wait(60)
        first_may_end.set()

    thread = threading.Thread(target=first)
    before = settings.copy()
    thread.start()
    assert first_is_in.wait(60)
    with ray_data():
        second_is_in.set()
        assert first_may_end.wait(60)
        assert settings.execution_options.preserve_order and settings.raise_original_map_exception  # the second's still
    thread.join()
    assert (settings.execution_options.preserve_order, settings.raise_original_map_exception) == (
        before.execution_options.preserve_order,
        before.raise_original_map_exception,
    )
    assert (settings.enable_progress_bars, settings.execution_no_progress_timeout_s) == (
        before.enable_progress_bars,
        before.execution_no_progress_timeout_s,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_lost_in_a_callback_still_interrupts(ray_session, number):
    before = signal.getsignal(number)
    blocks = []
    with pytest.raises(KeyboardInterrupt), ray_data():
        for block in blocks_of(ray.data.range(20, override_num_blocks=20)):
            blocks.append(block)
            send_lost(number)
    assert len(blocks) == 1
    assert signal.getsignal(number) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_after_the_last_block_is_raised_at_the_end(ray_session):
    with pytest.raises(KeyboardInterrupt), ray_data():
        assert len(list(blocks_of(ray.data.range(1)))) == 1
        send_lost(signal.SIGINT)
    with ray_data():  # the next is not interrupted
        assert len(list(blocks_of(ray.data.range(1)))) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_follows_from_an_interrupt_that_was_lost_is_raised_as_an_interrupt(ray_session):
    has_gone = ConnectionError("Ray has gone")
    with pytest.raises(KeyboardInterrupt) as raised, ray_data():
        send_lost(signal.SIGINT)
        raise has_gone
    assert raised.value.__cause__ is has_gone
    with pytest.raises(ConnectionError), ray_data():  # without one it stays what it is
        raise has_gone


@pytest.mark.parametrize(
    "named",
    ["localhost", ":6379", "10.0.0.1:", "ray://10.0.0.1:10001", "http://10.0.0.1:8265", "[::1]", "10.0.0.1:99999"],
)
def test_what_is_no_address_of_a_cluster_is_said_by_its_name(named):
    environment = {**os.environ, "RAY_ADDRESS": named}
    command = [sys.executable, "-c", "from hsray.raydata import ray_data\nwith ray_data(): pass"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith(
        f"ValueError: RAY_ADDRESS={named!r} is no address of a Ray cluster: wanted host:port (6379 by default), 'auto', or"
    )


DRIVER = """
import sys
import ray.data
from hsray.raydata import blocks_of, ray_data

def slow(batch):
    import time
    time.sleep(0.5)
    return batch

with ray_data():
    for block in blocks_of(ray.data.range(200, override_num_blocks=200).map_batches(slow)):
        print("block", flush=True)
"""


#: Its main thread hears of no signal for five seconds, as one does that is in Ray's core, or that waits for a busy machine's turn.
DEAF_DRIVER = """
import signal, time
from hsray.raydata import ray_data

with ray_data():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print("block", flush=True)
    time.sleep(5)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    time.sleep(60)
"""


@contextmanager
def running(script: str, address: str, **more: object) -> Iterator[subprocess.Popen]:
    """A script that has said its first line; those that are to join one another's Ray share a token."""
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes, **more) as process:
        process.first_line = process.stdout.readline().strip()
        try:
            yield process
        finally:
            process.kill()


def end_with_its_group(script: str) -> tuple[int, str]:
    """Of a driver that a signal to its group ends, with the Ray that it started: its status, and what it said."""
    with running(script, "local", start_new_session=True) as driver:
        assert driver.first_line == "block"
        os.killpg(driver.pid, signal.SIGTERM)
        began = time.monotonic()
        _, said = driver.communicate(timeout=50)  # Ray's own patience is 60 s
    assert time.monotonic() - began < 30
    return driver.returncode, said


@pytest.mark.parametrize("script", [DRIVER, DEAF_DRIVER], ids=["at work", "deaf"])
def test_a_driver_whose_ray_a_signal_to_its_group_ended_ends_at_once_and_says_so(script):
    for _ in range(3):
        status, said = end_with_its_group(script)
        if (status, "Ray has ended" in said) != (1, False):  # Ray's core, which found no object store, was faster
            break
    assert (status, said.splitlines()[-1]) == (
        130,
        "interrupted, and Ray has ended; say the same again: a build goes on where it was",
    ), said


def kill_ray_of(driver: subprocess.Popen) -> None:
    [head] = [child for child in psutil.Process(driver.pid).children() if "gcs_server" in child.name()]
    head.kill()


def test_a_driver_whose_own_ray_ends_by_itself_ends_at_once_and_says_so():
    with running(DRIVER, "local") as driver:
        assert driver.first_line == "block"
        kill_ray_of(driver)
        _, said = driver.communicate(timeout=50)
    assert driver.returncode == 1
    assert said.splitlines()[-1] == "error: Ray has ended; say the same again: a build goes on where it was"


CLUSTER = """
import time
import ray

ray.init(include_dashboard=False, logging_level="ERROR")
print(ray.get_runtime_context().gcs_address, flush=True)
time.sleep(600)
"""


def test_a_cluster_that_asks_for_a_token_is_said_to():
    script = "from hsray.raydata import ray_data\nwith ray_data(): pass"
    with running(CLUSTER, "local") as cluster:
        environment = {
            **os.environ,
            "RAY_ADDRESS": cluster.first_line,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "6" * 64,
        }
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100
        )
    assert done.stderr.splitlines()[-1].startswith(
        f"ConnectionError: Failed to connect to Ray cluster at {cluster.first_line}: it asks for a token; give this process the same"
    )


def test_a_driver_whose_cluster_ends_says_so_before_ray_ends_it():
    with running(CLUSTER, "local") as cluster, running(DRIVER, cluster.first_line) as driver:
        assert driver.first_line == "block"
        kill_ray_of(cluster)
        lines = [line for line in driver.stderr if not line.startswith("[")]
    assert lines[0].startswith(f"Ray at {cluster.first_line} does not answer; if it stays away, Ray ends this process")
    assert len(lines) == 1


@pytest.mark.parametrize("named_by", ["RAY_ADDRESS names it", "the last `ray start` here left this address"])
def test_a_cluster_that_is_not_there_is_said_at_once(tmp_path, named_by):
    with socket.socket() as unheard:  # bound, so that nobody else has its port, and not listening
        unheard.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unheard.getsockname()[1]}"
        environment = {**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": address}
        if "ray start" in named_by:
            del environment["RAY_ADDRESS"]
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray/ray_current_cluster").write_text(address)
        command = [sys.executable, "-c", "from hsray.raydata import ray_data\nwith ray_data(): pass"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ConnectionError: no Ray cluster answers at {address} (Connection refused); {named_by}.")


def test_what_is_wrong_on_this_side_is_no_sign_that_ray_has_ended():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert _is_refused("127.0.0.1:1")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert not _is_refused("127.0.0.1:1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_handler_of_the_applications_own_is_there_again_after_the_build_that_starts_ray():
    script = (
        "import signal\nfrom hsray.raydata import ray_data\ndef own(*_): pass\nsignal.signal(signal.SIGTERM, own)\n"
        "with ray_data(): assert signal.getsignal(signal.SIGTERM) is not own\n"
        "assert signal.getsignal(signal.SIGTERM) is own"
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


def test_a_task_that_ends_its_process_each_time_is_tried_so_often_and_no_more(ray_session, tmp_path):
    def die(batch: object) -> object:
        with open(tmp_path / "deaths", "a") as deaths:
            deaths.write("x")
        os._exit(1)

    with ray_data(), pytest.raises(ProcessDied, match="died 11 times over one task; out of memory is the usual cause"):
        list(blocks_of(map_batches(ray.data.range(1), die)))
    assert (tmp_path / "deaths").read_text() == "x" * 11


def test_a_node_short_of_memory_is_said_in_a_line_and_counts_as_a_death():
    class Dataset:
        def iter_internal_ref_bundles(self) -> Iterator[object]:
            raise OutOfMemoryError(
                "4 worker(s) were killed due to the node running low on memory.\nObject store memory usage: [-"
            )

    with pytest.raises(
        ProcessDied, match=r"ran low on memory, .*resumes the build. Ray says: 4 worker\(s\) were killed.*memory\.$"
    ):
        list(blocks_of(Dataset()))


def test_a_workers_error_is_its_own_words_without_rays_advice(ray_session):
    def fail(batch: object) -> object:
        raise OSError(errno.ENOSPC, "no space for it; make room")

    with ray_data(), pytest.raises(OSError) as raised:
        list(blocks_of(map_batches(ray.data.range(1), fail)))
    assert str(raised.value) == f"[Errno {errno.ENOSPC}] no space for it; make room"


def test_threads_that_need_ray_at_one_time_start_one():
    started = (
        "import threading\nfrom hsray.raydata import ray_data\n"
        "def start():\n    with ray_data(): print('started')\n"
        "threads = [threading.Thread(target=start) for _ in range(2)]\n"
        "for step in (threading.Thread.start, threading.Thread.join):\n    for thread in threads: step(thread)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, "-c", started], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.count("started") == 2, done.stderr


def test_a_ray_that_a_thread_started_outlives_it():
    script = (
        "import threading, time\nimport ray.data\nfrom hsray.raydata import blocks_of, ray_data\n"
        "def count():\n    with ray_data(): print(len(list(blocks_of(ray.data.range(1)))))\n"
        "thread = threading.Thread(target=count)\nthread.start()\nthread.join()\n"
        "time.sleep(5)\ncount()"  # long enough for the watcher to see a Ray that has ended
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n1\n"), done.stderr


def test_what_is_wrong_with_a_start_in_a_thread_is_raised_there():
    script = (
        "from concurrent.futures import ThreadPoolExecutor\nimport ray\nfrom hsray.raydata import ray_data\n"
        "def refuse(**_): raise ConnectionError('no such Ray')\nray.init = refuse\n"
        "def start():\n    with ray_data(): pass\n"
        "print(repr(ThreadPoolExecutor(1).submit(start).exception()))"
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ConnectionError('no such Ray')\n", done.stderr
