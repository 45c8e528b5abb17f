"""The contract of a capture engine, and opening one by name.

An engine is ready when constructed. `CaptureEngine.buffer` lends memory for one shard's states, `capture` runs one
prompt and leaves its states in that memory, each at its final place: layer ``l`` of a shard of S tokens is one
row-major ``[S, D]`` block, and a prompt's rows stand at its offset in it, so a Parquet column is a view of the block.

Shapes: T tokens of a prompt, S tokens of a shard, D hidden size.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil

from hsray.layers import Layer
from hsray.model import DTYPE_BYTES, ModelDescription

if TYPE_CHECKING:
    import torch

EngineName = Literal["sglang", "transformers"]

#: Of `EngineOptions.requests_in_flight`.
MAX_REQUESTS_IN_FLIGHT = 1024


class CaptureError(RuntimeError):
    """A prompt's states could not be captured, or are not what they must be."""

    prompt: int | None = None
    """Which of the prompts given to `CaptureEngine.capture_all`, from 0; None where it is no one's."""

    @classmethod
    def of(cls, error: Exception, *, prompt: int) -> "CaptureError":
        """Another error as one of ours, of its own kind if it is one, that says which prompt it struck."""
        if not isinstance(error, CaptureError):
            error = cls(f"{type(error).__name__}: {error}")
        error.prompt = prompt
        return error


class EngineDied(CaptureError):
    """The engine is gone; a new one must be opened."""


class EngineKilled(EngineDied):
    """A signal ended a process of the engine's own: that need not be the model's fault, even at its start."""


class PromptFailed(CaptureError):
    """A prompt's states cannot be had; where its engine died of it, though it was tried again, and alone."""

    @classmethod
    def of_stopped(cls, failure: str) -> "PromptFailed":
        """What ends a build that was told to stop at such a one."""
        return cls(
            f"{failure}; pass on_failure='skip', or take it out of the dataset, which is then another and needs another out"
        )


#: Imports, and libraries that load a model, keep Python's lock for long; and the first prompt waits for a GPU's kernels to be
#: compiled, from the beginning where a process that did so was killed.
START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine needs to know before it opens."""

    model: ModelDescription
    layers: tuple[Layer, ...]
    """In depth order, resolved."""
    max_tokens: int
    """The longest prompt that will be asked for."""
    buffer_tokens: int
    """The most tokens of one shard."""
    num_buffers: int = 2
    """Shards whose memory may be lent at one time: one being captured, the others being written."""
    tensor_parallel: int = 1
    """GPUs of one host that share the model."""
    requests_in_flight: int = 1
    """Prompts that an engine may be given at one time, which it then computes in one pass."""
    prefill_tokens: int = 16_384
    """Tokens at which such a pass takes no more prompts."""
    request_timeout_s: float = 1800.0
    """An engine that answers nothing for so long is given up, once it has started."""
    trust_remote_code: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for the engine itself, handed on as they are."""

    @property
    def start_timeout_s(self) -> float:
        """One that starts, and its first prompt, may take as long as this without a sign."""
        return max(START_S, self.request_timeout_s)

    @property
    def shards_in_capture(self) -> int:
        """Shards captured at one time: with several requests in flight the next one's follow without a gap."""
        return 1 if self.requests_in_flight == 1 else 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's states, all layers."""
        return len(self.layers) * self.model.hidden_size * DTYPE_BYTES[self.model.dtype]


class ShardBuffer:
    """Memory for the states of one shard, lent by an engine until `release`."""

    def __init__(self, *, index: int, memory: "torch.Tensor", num_tokens: int, options: EngineOptions, home: Queue):
        import torch

        self.index = index
        self.num_tokens = num_tokens
        self._home = home
        num_bytes = num_tokens * options.bytes_per_token
        states = memory[:num_bytes].view(getattr(torch, options.model.dtype))
        by_layer = states.view(len(options.layers), num_tokens, options.model.hidden_size)
        self.states: dict[Layer, torch.Tensor] = dict(zip(options.layers, by_layer, strict=True))
        """layer -> [S, D]; views of the lent memory, valid until `release`."""

    def release(self) -> None:
        """Gives the memory back to the engine; every view of it is then stale."""
        self.states = {}
        self._home.put(self.index)


class CaptureEngine(AbstractContextManager, ABC):
    """One model, open and checked, that turns token ids into hidden states."""

    name: str
    version: str
    load_s: float = 0.0
    """Of the start, loading the model."""
    first_request_s: float = 0.0
    """Of the start, the first request."""
    answered: float = 0.0
    """When it last was done with a prompt, in seconds of `time.monotonic`."""

    def __init__(self, options: EngineOptions, memories: "Sequence[torch.Tensor]"):
        """Args: options: what it was opened with; memories: one flat uint8 tensor for each buffer it can lend."""
        self.options = options
        self._memories = memories
        self._free: Queue[int] = Queue()
        for index in range(len(memories)):
            self._free.put(index)

    def buffer(self, num_tokens: int, *, timeout_s: float | None = None) -> ShardBuffer:
        """Lends memory for a shard of `num_tokens`, waiting while all of it is lent.

        Raises:
            ValueError: the shard is larger than the `buffer_tokens` the engine was opened with.
            queue.Empty: nothing was given back within `timeout_s`.
        """
        if not 0 < num_tokens <= self.options.buffer_tokens:
            raise ValueError(
                f"a shard of {num_tokens} tokens; the engine was opened for 1..{self.options.buffer_tokens}"
            )
        index = self._free.get(timeout=timeout_s)
        return ShardBuffer(
            index=index, memory=self._memories[index], num_tokens=num_tokens, options=self.options, home=self._free
        )

    def drain(self, *, timeout_s: float, still_lent: int = 0) -> None:
        """Takes back all the memory it has lent, but that of `still_lent` shards, for good; what was captured is written then.

        Raises:
            queue.Empty: some was not given back within `timeout_s`.
        """
        ends = time.monotonic() + timeout_s
        for _ in self._memories[still_lent:]:
            self._free.get(timeout=max(0.0, ends - time.monotonic()))

    def capture(self, input_ids: Sequence[int], *, into: ShardBuffer, at: int) -> None:
        """Runs one prompt and leaves its T rows of every layer at row `at` of `into`; complete on return.

        Raises as `capture_all` does.
        """
        self.capture_all([input_ids], into=into, at=at)

    def capture_all(self, prompts: "Sequence[Sequence[int] | np.ndarray]", *, into: ShardBuffer, at: int = 0) -> None:
        """Runs prompts and leaves their rows one after another from row `at` of `into`; complete on return.

        `EngineOptions.requests_in_flight` of them may run at one time, and if that is more than one, several threads may
        call this at one time.

        Raises:
            ValueError: a prompt is empty, too long, has an id outside the vocabulary, or does not fit; nothing ran.
            CaptureError: the engine failed, or gave other rows than were asked for; `CaptureError.prompt` says for which.
        """
        arrays = [np.asarray(input_ids) for input_ids in prompts]
        longest, vocab_size = self.options.max_tokens, self.options.model.vocab_size
        for ids_T in arrays:
            if not 0 < len(ids_T) <= longest:
                raise ValueError(f"a prompt of {len(ids_T)} tokens; the engine was opened for 1..{longest}")
            if ids_T.min() < 0 or ids_T.max() >= vocab_size:
                raise ValueError(f"token ids {ids_T.min()}..{ids_T.max()}; the vocabulary is 0..{vocab_size - 1}")
        rows = np.cumsum([at, *map(len, arrays)]).tolist()
        if not 0 <= at <= rows[-1] <= into.num_tokens:
            raise ValueError(f"{rows[-1] - at} tokens do not fit at row {at} of a shard of {into.num_tokens}")
        self._run(arrays, rows[:-1], into)

    def capture_alone(self, input_ids: Sequence[int]) -> "dict[Layer, torch.Tensor]":
        """Runs one prompt and returns its states, layer -> [T, D], in memory of their own."""
        buffer = self.buffer(len(input_ids))
        try:
            self.capture(input_ids, into=buffer, at=0)
            return {layer: hidden_TD.clone() for layer, hidden_TD in buffer.states.items()}
        finally:
            buffer.release()

    @abstractmethod
    def _run(self, prompts: Sequence[np.ndarray], rows: Sequence[int], into: ShardBuffer) -> None:
        """What `capture_all` promises, for arguments already checked: int arrays [T], and each one's first row."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and frees what it holds; safe to call twice."""

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_engine_args(name: EngineName, engine_args: Mapping[str, Any]) -> None:
    """Raises ValueError for an engine that is not known, or arguments of it that would make states wrong."""
    if name == "sglang":
        from hsray import engine_sglang

        engine_sglang.check_engine_args(engine_args)
    elif name != "transformers":
        raise ValueError(f"engine={name!r} is not known; wanted 'sglang' or 'transformers'")


def open_engine(name: EngineName, options: EngineOptions) -> CaptureEngine:
    """Opens an engine by name.

    Raises:
        ValueError: there is no engine of that name.
        CaptureError: the machine has not the memory; the message says how much is there and how much is needed.
        ImportError: its extra is not installed; the message names it.
    """
    check_engine_args(name, options.engine_args)
    check_memory(options)
    if name == "transformers":
        from hsray.engine_transformers import TransformersEngine

        return TransformersEngine(options)
    from hsray.engine_sglang import SGLangEngine

    return SGLangEngine(options)


def check_memory(options: EngineOptions) -> None:
    """Raises CaptureError where the machine, or the container, has less memory than the shards in flight take."""
    shard_bytes = options.buffer_tokens * options.bytes_per_token
    needed, available = options.num_buffers * shard_bytes, available_memory()
    if needed > available:
        raise CaptureError(
            f"{options.num_buffers} shards in flight of {shard_bytes / 1e6:,.0f} MB take {needed / 1e6:,.0f} MB of memory; "
            f"{available / 1e6:,.0f} MB are available: give smaller shard_bytes"
        )


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or the container's (cgroup v2) if those are fewer."""
    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
    except OSError:  # no such controller here
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))
