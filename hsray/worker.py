"""The actor: it owns one engine, captures shards, publishes them, and says so.

The states never leave it. Ray runs several tasks of an actor at one time, each one shard's: one has the engine, the
others write what they captured, and the engine's memory bounds how many there are. A shard that is there already is
not made again.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa

from hsray.engine import CaptureError, EngineDied, EngineName, EngineOptions, ShardBuffer, open_engine
from hsray.plan import shard_name
from hsray.report import Receipt
from hsray.shard import FileFormat, ShardPrompts, shard_table, stamped, write_table
from hsray.shard_file import ExpectedShard, check_shard
from hsray.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureJob:
    """What an engine actor needs to know."""

    engine: EngineName
    options: EngineOptions
    out: str
    storage_options: Mapping[str, Any] | None = field(repr=False)
    schema: pa.Schema
    stored_dtype: str
    file_format: FileFormat
    compression: str
    identity_digest: str


class CaptureWorker:
    """An actor that owns one engine; its calls may run in several threads at one time."""

    def __init__(self, job: CaptureJob):
        started = time.monotonic()
        _use_all_cores()
        self._job, self._store = job, Store(job.out, job.storage_options)
        self._capturing = threading.Semaphore(job.options.shards_in_capture)
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

    def __call__(self, plan: pa.Table) -> Iterator[pa.Table]:
        """Captures and publishes the shards of some rows of the plan; yields each one's receipt once it is published."""
        if self._not_started is not None:
            words = f"the engine did not start: {type(self._not_started).__name__}: {self._not_started}"
            raise EngineDied(words) from self._not_started
        for row in range(len(plan)):
            receipt = self._make(ShardPrompts.from_plan(plan, row))
            yield pa.Table.from_pylist([asdict(receipt)])

    def _make(self, prompts: ShardPrompts) -> Receipt:
        receipt = Receipt(
            shard=prompts.shard,
            prompts=len(prompts.prompt_ids),
            tokens=int(prompts.ends[-1]),
            engine_start_s=self._engine_start_s,
            load_s=self._engine.load_s,
            first_request_s=self._engine.first_request_s,
            started_at=time.time(),
            published_at=time.time(),
        )
        if self._store.exists(shard_name(prompts.shard, self._job.file_format)):
            return replace(receipt, digest=check_shard(self._store, self._expected(receipt)))
        buffer, receipt = self._capture(prompts, receipt)
        try:
            return self._publish(prompts, buffer, receipt)
        finally:
            buffer.release()

    def _expected(self, receipt: Receipt) -> ExpectedShard:
        model = self._job.options.model
        return ExpectedShard(
            shard=receipt.shard,
            identity_digest=self._job.identity_digest,
            layers=self._job.options.layers,
            hidden_size=model.hidden_size,
            dtype=self._job.stored_dtype,
            file_format=self._job.file_format,
            num_prompts=receipt.prompts,
            num_tokens=receipt.tokens,
        )

    def _capture(self, prompts: ShardPrompts, receipt: Receipt) -> tuple[ShardBuffer, Receipt]:
        """A shard's states, once the engine is free for it."""
        with self._capturing:
            asked, started_at = time.monotonic(), time.time()
            buffer = self._engine.buffer(receipt.tokens)
            lent = time.monotonic()
            try:
                self._engine.capture_all(prompts.tokens, into=buffer)
            except BaseException as error:
                buffer.release()
                if not isinstance(error, CaptureError):
                    raise
                struck = slice(None) if error.prompt is None else slice(error.prompt, error.prompt + 1)
                ids = prompts.prompt_ids[struck].to_pylist()
                which = f"prompt {ids[0]!r}" if len(ids) == 1 else f"prompts {ids[0]!r} to {ids[-1]!r}"
                raise type(error)(f"{which} of shard {prompts.shard}: {error}") from error
            captured = time.monotonic()
        return buffer, replace(
            receipt, captured=True, started_at=started_at, wait_s=lent - asked, capture_s=captured - lent
        )

    def _publish(self, prompts: ShardPrompts, buffer: ShardBuffer, receipt: Receipt) -> Receipt:
        begun = time.monotonic()
        schema = stamped(self._schema, shard=prompts.shard, identity_digest=self._job.identity_digest)
        table = shard_table(prompts, buffer.states, schema)
        checked = time.monotonic()
        with self._store.staged(shard_name(prompts.shard, self._job.file_format)) as sink:
            write_table(table, sink, compression=self._job.compression, file_format=self._job.file_format)
            nbytes, written = sink.tell(), time.monotonic()
        published = time.monotonic()
        return replace(
            receipt,
            nbytes=nbytes,
            digest=table.schema.metadata[b"hsray.digest"].decode(),
            rounding=table.schema.metadata.get(b"hsray.rounding", b"{}").decode(),
            published_at=time.time(),
            check_s=checked - begun,
            write_s=written - checked,
            publish_s=published - written,
        )


def _use_all_cores() -> None:
    """Ray sets one thread for each CPU an actor reserves; an engine without a GPU needs the machine's cores."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(len(os.sched_getaffinity(0)))
