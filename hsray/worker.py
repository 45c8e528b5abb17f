"""The actor: it owns one engine, captures shards, publishes them, and says so.

The states never leave it. Ray runs several tasks of an actor at one time, each one shard's: one has the engine, the
others write what they captured, and the engine's memory bounds how many there are. A shard that is there already is
not made again.

An engine that is gone takes its process with it, once what was captured is published and its last words are left. Ray
starts the actor anew, perhaps on another node, and its tasks again; how often each was begun is counted, and a task gives up
in time.
"""

import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from queue import Empty
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pyarrow as pa

from hsray.attempts import actor_id, attempt_key, begin_attempt, died, forget_attempts, leave_words, past_attempts
from hsray.cpu import use_all_cores
from hsray.engine import (
    CaptureError,
    EngineDied,
    EngineKilled,
    EngineName,
    EngineOptions,
    PromptFailed,
    ShardBuffer,
    open_engine,
)
from hsray.layers import Layer
from hsray.plan import shard_name
from hsray.report import Receipt, Verdict
from hsray.sentinel import Sentinel
from hsray.shard import FileFormat, ShardError, ShardPrompts, shard_table, stamped, write_table
from hsray.shard_file import ExpectedShard, check_shard
from hsray.standstill import StandstillWatch, kill_descendants
from hsray.store import Store

if TYPE_CHECKING:
    import torch


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
    skipped: Mapping[int, tuple[int, ...]]
    """Of some shards, the places of the prompts that are left out."""
    max_attempts: int
    """How often a shard, or a prompt alone, is tried before its process's deaths are put down to it."""
    on_failure: Literal["stop", "skip"]
    turn: str = ""
    """What keeps its attempts apart from another job's."""


#: How long a process whose engine is gone waits for its writers.
DRAIN_S = 60.0

#: How often it is looked whether the engine answers; one that can tell by itself has so long to say it first.
WATCH_S = 1.0


class CaptureWorker:
    """An actor that owns one engine; its calls may run in several threads at one time."""

    def __init__(self, job: CaptureJob):
        started = time.monotonic()
        sentinel = Sentinel(job.options.start_timeout_s)
        self._job, self._store = job, Store(job.out, job.storage_options)
        self._capturing = threading.Semaphore(job.options.shards_in_capture)
        self._leaving = threading.Lock()
        self._asked: dict[str, float] = {}  # what the engine is at work on, and since when
        self._not_started: Exception | None = None
        # Raised by the first call: of a constructor that fails, Ray reports a dead actor and a page of its own; and one that
        # dies, or whose engine was killed, it would start for ever.
        starts = self._key("start", actor_id())
        before = past_attempts(starts)
        if before.begun >= job.max_attempts:
            self._not_started = EngineDied(before.words or died(before.begun, "it started"))
            return
        begin_attempt(starts)
        use_all_cores()
        try:
            with StandstillWatch(
                job.options.start_timeout_s, lambda: self._leave_start(starts, _stood_still(job.options))
            ):
                self._engine = open_engine(job.engine, job.options)
        except EngineKilled as error:
            self._leave_start(starts, error)
        except Exception as error:
            self._not_started = error
            return
        forget_attempts(starts)
        versions = {b"hsray.engine_version": self._engine.version.encode()}
        self._schema = job.schema.with_metadata({**job.schema.metadata, **versions})
        self._engine_start_s = time.monotonic() - started
        threading.Thread(target=self._watch, name="hsray-watch", daemon=True).start()
        sentinel.allow(job.options.request_timeout_s + 2 * WATCH_S)  # `_watch` too may stand still

    def __call__(self, plan: pa.Table) -> Iterator[pa.Table]:
        """Captures and publishes the shards of some rows of the plan; yields each one's receipt once it is published."""
        self._check_started()
        for row in range(len(plan)):
            prompts = ShardPrompts.from_plan(plan, row)
            receipt = self._make(prompts.without(self._job.skipped.get(prompts.shard, ())))
            yield pa.Table.from_pylist([asdict(receipt)])

    def _leave_start(self, key: str, error: EngineKilled) -> NoReturn:
        """Ends this process, whose engine did not start for no fault of its own, so that Ray starts another."""
        _give_words(key, error)
        kill_descendants()
        os._exit(1)

    def _check_started(self) -> None:
        if self._not_started is not None:
            words = f"the engine did not start: {type(self._not_started).__name__}: {self._not_started}"
            raise EngineDied(words) from self._not_started

    def _make(self, prompts: ShardPrompts) -> Receipt:
        key = self._key(prompts.shard)
        before = past_attempts(key)
        receipt = Receipt(
            shard=prompts.shard,
            prompts=len(prompts.prompt_ids),
            tokens=int(prompts.ends[-1]),
            host=platform.node(),
            pid=os.getpid(),
            engine_start_s=self._engine_start_s,
            load_s=self._engine.load_s,
            first_request_s=self._engine.first_request_s,
            started_at=time.time(),
            published_at=time.time(),
            attempt=before.begun,
            earlier=before.words,
        )
        if self._store.exists(shard_name(prompts.shard, self._job.file_format)):
            return replace(receipt, digest=check_shard(self._store, self._expected(receipt)))
        if before.begun >= self._job.max_attempts:
            # Not forgotten: Ray may send the task again, when its answer is lost with a node.
            return replace(receipt, failure=before.failure)
        try:
            receipt = self._capture_and_publish(prompts, receipt)
        except EngineDied as error:
            self._leave(key, error)
        except (CaptureError, ShardError) as error:
            if self._job.on_failure == "stop":
                raise PromptFailed.of_stopped(str(error)) from error
            receipt = replace(receipt, failure=str(error))
        forget_attempts(key)
        return receipt

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Counted, and watched while it lasts: the engine must answer."""
        begin_attempt(key)
        self._asked[key] = time.monotonic()
        try:
            yield
        finally:
            del self._asked[key]

    def _watch(self) -> None:
        """Ends this process once the engine is silent for too long."""
        timeout_s = self._job.options.request_timeout_s
        while True:
            time.sleep(WATCH_S)
            for key, asked in list(self._asked.items()):
                silent_s = time.monotonic() - max(asked, self._engine.answered)
                if silent_s > timeout_s + WATCH_S:
                    words = f"the engine gave no answer within request_timeout_s={timeout_s:g} and was killed"
                    self._leave(key, EngineDied(words))

    def _key(self, *what: object) -> str:
        return attempt_key(self._job.turn, *what)

    def _leave(self, key: str, error: EngineDied) -> NoReturn:
        """Ends this process, whose engine is gone, so that Ray starts another."""
        _give_words(key, error)
        with self._leaving:  # for good
            with suppress(Empty):  # a writer that hangs is given up; its shard is made again
                self._engine.drain(timeout_s=DRAIN_S, still_lent=len(self._asked))
            self._engine.close()
            os._exit(1)

    def _capture_and_publish(self, prompts: ShardPrompts, receipt: Receipt) -> Receipt:
        if not len(prompts.prompt_ids):
            return self._publish(prompts, self._no_states(), replace(receipt, captured=True))
        buffer, receipt = self._capture(prompts, receipt)
        try:
            return self._publish(prompts, buffer.states, receipt)
        finally:
            buffer.release()

    def _no_states(self) -> "dict[Layer, torch.Tensor]":
        """Of a shard all of whose prompts are left out."""
        import torch

        options = self._job.options
        none_0D = torch.empty(0, options.model.hidden_size, dtype=getattr(torch, options.model.dtype))
        return dict.fromkeys(options.layers, none_0D)

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
                with self._asking(self._key(prompts.shard)):
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

    def _publish(self, prompts: ShardPrompts, states: "Mapping[Layer, torch.Tensor]", receipt: Receipt) -> Receipt:
        begun = time.monotonic()
        schema = stamped(self._schema, shard=prompts.shard, identity_digest=self._job.identity_digest)
        table = shard_table(prompts, states, schema)
        checked = time.monotonic()
        with self._store.staged(shard_name(prompts.shard, self._job.file_format), num_bytes=table.nbytes) as sink:
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


def _give_words(key: str, error: EngineDied) -> None:
    """Says what this process will now end of, to the next attempt and to the log."""
    leave_words(key, str(error))
    print(error, file=sys.stderr, flush=True)


def _stood_still(options: EngineOptions) -> EngineKilled:
    return EngineKilled(
        f"the engine stood still for {options.start_timeout_s:g} s while it started (it used no core, as while it waits for a disk, or "
        "a lock) and was killed; where that is no time for this machine, give a longer request_timeout_s"
    )


class ProbeWorker(CaptureWorker):
    """Tries the prompts of shards that could not be made, one at a time, and says which it is; keeps no states."""

    def __call__(self, plan: pa.Table) -> Iterator[pa.Table]:
        """A verdict on each row: a shard of the plan, and in ``place`` the prompt to try."""
        self._check_started()
        for row in range(len(plan)):
            place = plan["place"][row].as_py()
            yield pa.Table.from_pylist([asdict(self._try(ShardPrompts.from_plan(plan, row).alone(place), place))])

    def _try(self, prompts: ShardPrompts, place: int) -> Verdict:
        key = self._key(prompts.shard, place)
        before = past_attempts(key)
        failure = before.failure if before.begun >= self._job.max_attempts else self._failure(prompts, key)
        forget_attempts(key)
        return Verdict(
            shard=prompts.shard,
            place=place,
            prompt_id=prompts.prompt_ids[0].as_py(),
            num_tokens=int(prompts.ends[-1]),
            failure=failure,
        )

    def _failure(self, prompts: ShardPrompts, key: str) -> str:
        """Why a prompt's states cannot be had; empty if they can. An engine that dies of it takes the process along."""
        try:
            with self._capturing:
                buffer = self._engine.buffer(int(prompts.ends[-1]))
                try:
                    with self._asking(key):
                        self._engine.capture_all(prompts.tokens, into=buffer)
                    shard_table(prompts, buffer.states, self._schema)
                finally:
                    buffer.release()
        except EngineDied as error:
            self._leave(key, error)
        except (CaptureError, ShardError) as error:
            return str(error)
        return ""
