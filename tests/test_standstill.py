"""A start that computes nothing for too long is found out, whichever of its processes stands still; one at work is not."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, subprocess, sys, threading, time
from hsray.standstill import StandstillWatch, kill_descendants

def end():
    kill_descendants()
    os._exit(7)

def compute(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends: pass

def child(code):
    return subprocess.Popen([sys.executable, "-c", code])

{before}
with StandstillWatch(2.0, end):
    {work}
"""

BUSY = "while True: pass"


IN_A_THREAD = "threading.Thread(target=compute, args=({seconds},), daemon=True).start()"


@pytest.mark.parametrize(
    ("before", "work", "status"),
    [
        ("", "time.sleep(30)", 7),
        ("", "child('import time; time.sleep(30)').wait()", 7),
        (IN_A_THREAD.format(seconds=30), "time.sleep(30)", 7),  # as Ray's do
        ("", "compute(5)", 0),
        ("", IN_A_THREAD.format(seconds=5) + "; time.sleep(5)", 0),  # as a download's do
        ("", f"busy = child({BUSY!r}); time.sleep(5); busy.kill()", 0),
        ("", "time.sleep(1)", 0),
    ],
)
def test_what_stands_still_is_ended_and_what_computes_is_not(before, work, status):
    root = Path(__file__).parents[1]
    script = SCRIPT.format(before=before, work=work)
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60)
    assert done.returncode == status
