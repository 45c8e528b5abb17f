"""What a build goes through, for a post-mortem and for dashboards: lines of ``events.jsonl``, and Ray's metrics.

A line is a JSON object with ``time`` (UTC) and ``event``: ``build`` (a driver begins), ``receipt``, ``retry`` (a shard or
prompt whose engine died before), ``failed`` (a shard is set aside), ``drop``, ``lost`` (an actor died too often, or with its
node) and ``end``. It is a log of all runs, not a part of the dataset, and may be removed: a build that is resumed takes its
word for what earlier runs published (`receipts`), and looks at each shard that it does not vouch for. A local file has each line
at once; elsewhere, where nothing can be added to an object, the last ones may be lost with a driver.
"""

import json
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from hsray.digest import DIGEST
from hsray.report import ENGINE_PARTS, WRITER_PARTS, Receipt
from hsray.store import Store

NAME = "events.jsonl"

#: How long lines are kept for an object store, which is then given the whole object anew; and for each byte of it, longer.
FLUSH_S, FLUSH_S_PER_BYTE = 30.0, 1e-6

#: What each counter counts.
COUNTERS = {
    "tokens": "Tokens whose states were published",
    "prompts": "Prompts whose states were published",
    "shards": "Shards published",
    "bytes": "Bytes of the shards published",
    "retries": "Shards and prompts tried again, since their engine died",
    "drops": "Prompts left out, since their states cannot be had",
}


class Events(AbstractContextManager):
    """Events of one run, written as they come."""

    def __init__(self, store: Store, *, identity_digest: str, shards_left: int):
        from ray.util.metrics import Counter, Gauge

        self._store = store
        before = store.read_or_empty(NAME)
        self._num_bytes, self._flushed = len(before), time.monotonic()
        self._lines = [] if before.endswith(b"\n") or not before else ["\n"]  # a kill left part of a line
        # Ray's metrics take nothing but ASCII.
        label = {"dataset": store.url.rstrip("/").rsplit("/", 1)[-1].encode("ascii", "backslashreplace").decode()}
        self._counters = {
            name: Counter(f"hsray_{name}", description=what, tag_keys=("dataset",)) for name, what in COUNTERS.items()
        }
        # An engine's capture and its wait for the store of states it may fill; a writer's check, write and publication.
        self._seconds = Counter(
            "hsray_seconds", description="Seconds of engines and writers, by part", tag_keys=("dataset", "part")
        )
        self._left = Gauge("hsray_shards_left", description="Shards still to publish", tag_keys=("dataset",))
        for metric in (*self._counters.values(), self._seconds, self._left):
            metric.set_default_tags(label)
        self._shards_left = shards_left
        self._left.set(shards_left)
        self.note("build", identity=identity_digest, shards_left=shards_left)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.note("end", error=None if error is None else f"{kind.__name__}: {error}".removesuffix(": "))
        self._flush()

    def receipt(self, receipt: Receipt) -> None:
        """A shard was published, or set aside."""
        if receipt.attempt:
            self._count("retries", receipt.attempt)
            self.note("retry", shard=receipt.shard, attempt=receipt.attempt, earlier=receipt.earlier)
        if receipt.failure:
            self.note("failed", shard=receipt.shard, failure=receipt.failure)
            return
        for name, amount in (("tokens", receipt.tokens), ("prompts", receipt.prompts), ("bytes", receipt.nbytes)):
            self._count(name, amount)
        self._count("shards", 1)
        seconds = {f"{part}_s": round(getattr(receipt, f"{part}_s"), 4) for part in (*ENGINE_PARTS, *WRITER_PARTS)}
        for part in (*ENGINE_PARTS, *WRITER_PARTS):
            if (spent_s := getattr(receipt, f"{part}_s")) > 0:
                self._seconds.inc(spent_s, tags={"part": part})
        self._shards_left -= 1
        self._left.set(self._shards_left)
        self.note(
            "receipt",
            shard=receipt.shard,
            captured=receipt.captured,
            prompts=receipt.prompts,
            tokens=receipt.tokens,
            nbytes=receipt.nbytes,
            digest=receipt.digest,
            host=receipt.host,
            pid=receipt.pid,
            **seconds,
        )

    def drop(self, **what: Any) -> None:
        """A prompt was left out."""
        self._count("drops", 1)
        self.note("drop", **what)

    def note(self, event: str, **what: Any) -> None:
        """A line."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **what}
        self._lines.append(json.dumps(line) + "\n")
        kept_s = FLUSH_S + FLUSH_S_PER_BYTE * self._num_bytes
        if self._store.is_local or time.monotonic() - self._flushed > kept_s:
            self._flush()

    def _count(self, name: str, amount: float) -> None:
        if amount > 0:
            self._counters[name].inc(amount)

    def _flush(self) -> None:
        data = "".join(self._lines).encode()
        self._store.append(NAME, data)
        self._lines, self._num_bytes, self._flushed = [], self._num_bytes + len(data), time.monotonic()


def receipts(store: Store, *, identity_digest: str) -> dict[int, tuple[int, str]]:
    """What earlier runs published of the very dataset that is meant: shard -> (bytes of its file, digest of what it holds)."""
    found: dict[int, tuple[int, str]] = {}
    is_meant = False
    for text in store.read_or_empty(NAME).splitlines():
        try:
            line = json.loads(text)
            event = line["event"]
            if event == "build":
                is_meant = line["identity"] == identity_digest
            elif event == "receipt" and is_meant:
                shard, num_bytes, digest = line["shard"], line["nbytes"], line["digest"]
                if type(shard) is int and type(num_bytes) is int and DIGEST.fullmatch(digest):
                    found[shard] = num_bytes, digest
        except (ValueError, KeyError, TypeError, RecursionError):
            is_meant = False  # it was cut off by a kill; whose the next lines are is not known either
    return found
