"""Who is building in a folder: one driver at a time, which says so in ``lease.json`` and renews it.

A driver that finds another's lease watches it. If it is renewed meanwhile, or the process that holds it runs on this very
machine and has not, the driver is refused; if it stays as it is for `STALE_S`, its holder is dead and the lease is taken
over (at once, where the holder's process was of this machine and is gone). No clock is compared with another's.

What is guaranteed: where the filesystem creates an object only if there is none (local folders, S3, GCS), two drivers
never hold a free folder at one time. Elsewhere, and in the moment in which two take over one dead driver's lease, both
may go on until the next beat, which ends all but one; a shard that both made in that time is the same shard.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from hsray.manifest import LEASE_NAME
from hsray.store import Store

logger = logging.getLogger(__name__)

#: How often a lease is renewed.
BEAT_S = 5.0

#: A lease that was not renewed for so long is nobody's: twelve beats, so that a slow store costs no build.
STALE_S = 60.0


class LeaseError(RuntimeError):
    """Another driver is building in the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    owner: str
    """Random: no other driver's."""
    host: str
    pid: int
    machine: str
    """Where `pid` means something: a boot of a kernel, and a namespace of process ids in it."""
    job: str
    since: str
    """UTC, for people."""
    beat: int = 0
    """How often it was renewed."""

    @classmethod
    def here(cls, job: str) -> "Holder":
        """This process."""
        return cls(
            owner=uuid.uuid4().hex,
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            job=job,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @classmethod
    def parse(cls, data: bytes) -> "Holder":
        """What a lease says; of one that says nothing that can be read, a holder without a name."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return cls(owner="", host="unknown", pid=0, machine="", job="unknown", since="an unknown time")

    def encoded(self, beat: int) -> bytes:
        """The lease's content after so many renewals."""
        return (json.dumps({**asdict(self), "beat": beat}, indent=1) + "\n").encode()

    @property
    def has_ended(self) -> bool:
        """Whether it is sure that the process is gone: it was of this machine."""
        if self.machine != _machine():
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} of host {self.host!r}, job {self.job!r}, since {self.since}"


class Lease:
    """A lease: taken, then renewed by a thread of its own until it is released."""

    def __init__(self, store: Store, holder: Holder, *, beat_s: float, stale_s: float):
        self._store, self._holder, self._beat_s, self._stale_s = store, holder, beat_s, stale_s
        self._lost, self._trouble = "", ""
        self._may_be_mine = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hsray-lease", daemon=True)

    def take(self) -> None:
        """Creates it, once there is none or it is a dead driver's. Raises LeaseError or OSError where it is not to be had."""
        self._store.check_writable()
        first: bytes | None = None
        while not self._create():
            try:
                found = self._store.read(LEASE_NAME)
            except FileNotFoundError:
                continue  # just released
            other = Holder.parse(found)
            if first is None:
                first, seen_at = found, time.monotonic()
                words = "%r has a lease of %s: up to %.0f s to see whether that lives"
                logger.warning(words, self._store.url, other, self._stale_s)
            if found != first:
                raise LeaseError(
                    f"{self._store.url!r} is being built by {other}; wait for it or stop it, or give another out"
                )
            if other.has_ended or time.monotonic() - seen_at > self._stale_s:
                logger.warning("%r: the lease of %s, which is dead, is taken over", self._store.url, other)
                with suppress(FileNotFoundError):
                    self._store.remove(LEASE_NAME)
                first = None
                continue
            time.sleep(self._beat_s / 5)
        self._renewed = time.monotonic()
        self._thread.start()

    def _create(self) -> bool:
        self._may_be_mine = True  # before it is, so that an interrupt in between leaves nothing
        self._may_be_mine = self._store.create(LEASE_NAME, self._holder.encoded(0))
        return self._may_be_mine

    @property
    def is_lost(self) -> bool:
        """Whether the folder is, or may be, another's."""
        silent_s = time.monotonic() - self._renewed
        if not self._lost and silent_s > self._stale_s:
            self._lost = f"its lease could not be renewed for {silent_s:.0f} s ({self._trouble or 'no answer'})"
        return bool(self._lost)

    def check(self) -> None:
        """Raises LeaseError once the folder is not this driver's any more."""
        if self.is_lost:
            raise LeaseError(
                f"{self._store.url!r}: {self._lost}, so another driver may build there; this one ends. Saying the same again "
                "resumes the build"
            )

    def release(self) -> None:
        """Gives the folder back, if it was taken."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            if self._may_be_mine and self._is_mine():
                self._store.remove(LEASE_NAME)
        except FileNotFoundError:
            pass
        except OSError as error:  # it must not take the place of what ended the build, nor of its success
            logger.warning("%r: its lease could not be given back: %s", self._store.url, error)

    def _is_mine(self) -> bool:
        holder = Holder.parse(self._store.read(LEASE_NAME))
        if holder.owner == self._holder.owner:
            return True
        self._lost = f"its lease was taken over by {holder}"
        return False

    def _renew(self) -> None:
        beat = 0
        while not self._ended.wait(self._beat_s):
            beat += 1
            try:
                if not self._is_mine():
                    return
                self._store.publish(LEASE_NAME, self._holder.encoded(beat))
            except FileNotFoundError:
                self._lost = "its lease was removed"
                return
            except Exception as error:  # whatever a filesystem raises; it counts once it has lasted
                self._trouble = f"{type(error).__name__}: {error}"
            else:
                self._renewed = time.monotonic()


@contextmanager
def held(store: Store, *, job: str, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> Iterator[Lease]:
    """The folder, for this driver alone.

    Args:
        store: The folder.
        job: What the driver is called in its cluster.
        beat_s: How often the lease is renewed.
        stale_s: How long another's lease must stay as it is to be taken over.

    Raises:
        LeaseError: another driver is building there; it is named.
        OSError: the folder cannot be written.
    """
    lease = Lease(store, Holder.here(job), beat_s=beat_s, stale_s=stale_s)
    try:
        lease.take()
        yield lease
    finally:
        lease.release()


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
