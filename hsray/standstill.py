"""Whether a start that takes long is still at work: what computes nothing, and waits for nothing but itself, stands still.

How long an engine may take to load a model nobody can say: 600 GB may come from the next room, or from another continent.
But whoever loads uses a core now and then, and one that waits for a lock, or for a disk that has gone, does not.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import psutil

#: Seconds of a core, for each second, below which nothing is done but waking up to look: loading over a network of
#: 100 Mbit/s takes ten times as much.
STILL = 0.001

LOOK_S = 5.0


class StandstillWatch(AbstractContextManager):
    """While it is open, calls `end` once this process, and all those that it started, have stood still for `timeout_s`.

    Of the threads that were there before, the main one alone counts: Ray's wake up all the time. Later ones may load for it.
    """

    def __init__(self, timeout_s: float, end: Callable[[], object]):
        self._timeout_s, self._end = timeout_s, end
        self._is_over = threading.Event()
        self._not_counted = {thread.id for thread in psutil.Process().threads()} - {threading.main_thread().native_id}
        self._thread = threading.Thread(target=self._watch, name="hsray-standstill", daemon=True)

    def __enter__(self) -> "StandstillWatch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        self._not_counted.add(threading.get_native_id())  # looking costs more than is looked for
        since, before_s = time.monotonic(), self._computed_s()
        while not self._is_over.wait(min(LOOK_S, self._timeout_s / 4)):
            now, now_s = time.monotonic(), self._computed_s()
            if abs(now_s - before_s) > STILL * self._timeout_s:  # less, where a process or a thread has ended
                since, before_s = now, now_s
            elif now - since > self._timeout_s:
                self._end()
                return

    def _computed_s(self) -> float:
        """Seconds of a core that have been used."""
        process = psutil.Process()
        used_s = sum(t.user_time + t.system_time for t in process.threads() if t.id not in self._not_counted)
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                used_s += times.user + times.system
        return used_s


def kill_descendants() -> None:
    """Ends (SIGKILL) all processes that this one started, and those that they did."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
