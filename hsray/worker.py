"""The actor: it owns one engine and one writer, captures shards, publishes them, and says so.

The states never leave it. While a shard is written on the writer's thread, the next one is captured; the engine's
memory bounds how many are under way. A shard that is there already is not made again.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from hsray.engine import CaptureError, EngineDied, EngineName, EngineOptions, ShardBuffer, open_engine
from hsray.plan import shard_name
from hsray.report import Receipt
from hsray.shard import ShardPrompts, check_shard, shard_table, stamped, write_table
from hsray.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureJob:
    """What an engine actor needs to know."""

    engine: EngineName
    options: EngineOptions
    out: str
    storage_options: Mapping[str, Any] | None
    schema: pa.Schema
    identity_digest: str


class CaptureWorker:
    """An actor that owns one engine and one writer thread."""

    def __init__(self, job: CaptureJob):
        started = time.monotonic()
        _use_all_cores()
        self._store, self._identity_digest = Store(job.out, job.storage_options), job.identity_digest
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hsray-writer")
        self._not_started: Exception | None = None
        try:
            self._engine = open_engine(job.engine, job.options)
        except Exception as error:
            # Raised by the first call: of a constructor that fails, Ray reports a dead actor and a page of its own.
            self._not_started = error
            return
        versions = {b"hsray.engine_version": self._engine.version.encode()}
        self._schema = job.schema.with_metadata({**job.schema.metadata, **versions})
        self._engine_start_s = time.monotonic() - started

    def __call__(self, shards: pa.Table) -> Iterator[pa.Table]:
        """Captures and publishes a task's shards; yields a receipt for each, in order, once it is published."""
        if self._not_started is not None:
            words = f"the engine did not start: {type(self._not_started).__name__}: {self._not_started}"
            raise EngineDied(words) from self._not_started
        writing: deque[Future[Receipt]] = deque()
        for row in range(len(shards)):
            if len(writing) == self._engine.options.num_buffers:
                yield _receipt_table(self._take(writing))
            writing.append(self._start_shard(_shard_prompts(shards.slice(row, 1))))
        while writing:
            yield _receipt_table(self._take(writing))

    def _take(self, writing: "deque[Future[Receipt]]") -> Receipt:
        """The oldest shard's receipt, once it is published; the engine idles meanwhile."""
        asked = time.monotonic()
        receipt = writing.popleft().result()
        return replace(receipt, wait_s=receipt.wait_s + time.monotonic() - asked)

    def _start_shard(self, prompts: ShardPrompts) -> "Future[Receipt]":
        """Captures a shard and hands it to the writer."""
        receipt = Receipt(
            shard=prompts.shard,
            prompts=len(prompts.prompt_ids),
            tokens=sum(prompts.lengths),
            nbytes=0,
            captured=False,
            engine_start_s=self._engine_start_s,
            started_at=time.time(),
            published_at=time.time(),
            wait_s=0.0,
            capture_s=0.0,
            write_s=0.0,
        )
        if self._store.exists(shard_name(prompts.shard)):
            check_shard(
                self._store, prompts.shard, identity_digest=self._identity_digest, num_prompts=len(prompts.prompt_ids)
            )
            present: Future[Receipt] = Future()
            present.set_result(receipt)
            return present
        asked = time.monotonic()
        buffer = self._engine.buffer(receipt.tokens)
        lent = time.monotonic()
        try:
            self._capture_prompts(prompts, buffer)
        except BaseException:
            buffer.release()
            raise
        receipt = replace(receipt, captured=True, wait_s=lent - asked, capture_s=time.monotonic() - lent)
        return self._writer.submit(self._publish, prompts, buffer, receipt)

    def _capture_prompts(self, prompts: ShardPrompts, buffer: ShardBuffer) -> None:
        row = 0
        for prompt_id, input_ids in zip(prompts.prompt_ids, prompts.input_ids, strict=True):
            try:
                self._engine.capture(input_ids, into=buffer, at=row)
            except Exception as error:
                kind = type(error) if isinstance(error, CaptureError) else CaptureError
                words = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error}"
                raise kind(f"prompt {prompt_id!r} of shard {prompts.shard}: {words}") from error
            row += len(input_ids)

    def _publish(self, prompts: ShardPrompts, buffer: ShardBuffer, receipt: Receipt) -> Receipt:
        started = time.monotonic()
        name = shard_name(prompts.shard)
        try:
            schema = stamped(self._schema, shard=prompts.shard, identity_digest=self._identity_digest)
            table = shard_table(prompts, buffer.states, schema)
            with self._store.staged(name) as sink:
                write_table(table, sink)
                nbytes = sink.tell()
        finally:
            table = None
            buffer.release()
        return replace(receipt, nbytes=nbytes, published_at=time.time(), write_s=time.monotonic() - started)


def _use_all_cores() -> None:
    """Ray sets one thread for each CPU an actor reserves; an engine without a GPU needs the machine's cores."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))


def _shard_prompts(row: pa.Table) -> ShardPrompts:
    values = row.to_pylist()[0]
    return ShardPrompts(
        shard=values["shard"],
        prompt_ids=values["prompt_id"],
        input_ids=values["input_ids"],
        loss_masks=values["loss_mask"],
    )


def _receipt_table(receipt: Receipt) -> pa.Table:
    return pa.Table.from_pylist([asdict(receipt)])
