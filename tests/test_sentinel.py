"""A process that stands still is killed by the one beside it; one that is at work is not, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import ctypes, sys, time
from hsray.sentinel import Sentinel

sentinel = Sentinel(3600.0)
sentinel.allow({timeout_s})
print(sentinel._watcher.pid, flush=True)
{work}
"""

FREEZE = "ctypes.PyDLL(None).sleep(20)"  # with Python's lock: no thread runs


def run(work: str, timeout_s: object, stderr: object = subprocess.PIPE) -> subprocess.Popen:
    script = SCRIPT.format(work=work, timeout_s=timeout_s)
    root = Path(__file__).parents[1]
    return subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_process_that_stands_still_is_killed_and_it_is_said():
    process = run(FREEZE, 2.0)
    _, said = process.communicate(timeout=15)
    assert process.returncode == -signal.SIGKILL
    assert said == f"process {process.pid} stood still for 2 s and was killed\n"


def test_so_is_one_whose_words_nobody_can_read():
    with open("/dev/full", "w") as full:
        assert run(FREEZE, 2.0, full).wait(15) == -signal.SIGKILL


def test_so_is_one_that_is_stopped():
    process = run("time.sleep(60)", 2.0)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    assert process.wait(15) == -signal.SIGKILL


def test_one_at_work_is_not():
    work = "end = time.monotonic() + 5\nwhile time.monotonic() < end: pass"
    assert run(work, 3.0).wait(30) == 0


def test_one_that_may_stand_still_for_ever_is_watched_all_the_same():
    process = run("time.sleep(60)", "float('inf')")
    watcher = psutil.Process(int(process.stdout.readline()))
    time.sleep(2)
    assert watcher.status() != psutil.STATUS_ZOMBIE
    process.kill()
    watcher.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it_when_the_process_ends(number):
    process = run("time.sleep(60)", 3600.0)
    watcher = psutil.Process(int(process.stdout.readline()))
    os.kill(process.pid, number)
    process.wait(15)
    ends = time.monotonic() + 15
    while watcher.is_running() and watcher.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends
        time.sleep(0.1)
