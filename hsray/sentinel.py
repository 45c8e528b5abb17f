"""A process beside another that kills it once it stands still.

A thread can tell that the engine is silent, but not that a library keeps Python's lock, or that the whole process was stopped:
then it stands still itself. This file is run, as it is, in a small process of its own, which hears from a thread of the other
every second and kills it when it has heard nothing for too long.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

BEAT_S = 1.0

#: A month, which is as good as for ever; `select` knows no number above 9e9.
MOST_S = 30 * 24 * 3600.0


class Sentinel:
    """Has this process killed (SIGKILL) once no thread of it has run for so many seconds."""

    def __init__(self, timeout_s: float):
        # Isolated, and without site packages: it needs nothing, and starts in 20 ms.
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
        self._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self.allow(timeout_s)
        threading.Thread(target=self._beat, name="hsray-beat", daemon=True).start()

    def allow(self, timeout_s: float) -> None:
        """Lets it stand still for so many seconds from now on."""
        self._timeout_s = timeout_s
        with suppress(BrokenPipeError):  # the watcher was ended, by hand
            self._watcher.stdin.write(f"{timeout_s}\n".encode())

    def _beat(self) -> None:
        while self._watcher.poll() is None:
            time.sleep(BEAT_S)
            self.allow(self._timeout_s)


def _watch(pid: int) -> None:
    """Kills a process unless each line from it, how long it may be silent, is followed by another within that time."""
    timeout_s = None
    while select.select([0], [], [], timeout_s)[0]:
        said = os.read(0, 1 << 12)
        if not said:  # it has ended
            return
        timeout_s = min(float(said.split()[-1]), MOST_S)
    if os.getppid() == pid:  # it lives; the number may be another's else
        os.kill(pid, signal.SIGKILL)
        with suppress(OSError):  # nobody may be left to read it
            os.write(2, f"process {pid} stood still for {timeout_s:g} s and was killed\n".encode())


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
