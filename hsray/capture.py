"""What runs inside SGLang's scheduler process: each captured layer's rows, copied to their place in shared memory.

The state that enters block ``b`` is read by a pre-hook on that block (``b = N``: on the final norm), whatever the
model's class: SGLang's own auxiliary capture numbers layers differently from model to model, drops the last block's
output, and for some models forgets the residual. ``"final"`` is what the logits processor is given. A request says
in its id where its rows go (`Ticket`), so a row can only ever land in its own prompt's place.

Invariants: a hook never raises, since SGLang answers that by killing the actor with no word: it writes the error on
the `ControlPage`, which the engine raises. A prompt's row count appears in the ledger only after all of its layers
have been copied.

Shapes: B tokens of a batch, S tokens of a shard, D hidden size.
"""

import functools
import json
import math
import mmap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.canary import Canary, block_input, norm_input
from hsray.cpu import settle_vector_math
from hsray.layers import Layer, boundary
from hsray.staging import DeviceStaging, HostStaging, LayerMemory, Place, map_memory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What the scheduler process is told at its start."""

    layers: tuple[Layer, ...]
    """In depth order: the order of the blocks in a shard's memory."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    buffer_paths: tuple[str, ...]
    """Shared-memory files, one for each shard in flight."""
    control_path: str
    cpu_threads: int | None
    """PyTorch threads of a rank where there is no GPU; None leaves them."""


#: The sequence number of an engine's first request, which `hsray.canary` judges.
CANARY_SEQUENCE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Where one request's rows go. It travels as the request's id."""

    sequence: int
    """Counts an engine's requests from 1."""
    buffer: int
    shard_tokens: int
    row: int
    num_tokens: int

    def rid(self) -> str:
        """The request id: ``hsray:SEQUENCE:BUFFER:SHARD_TOKENS:ROW:NUM_TOKENS``."""
        return f"hsray:{self.sequence}:{self.buffer}:{self.shard_tokens}:{self.row}:{self.num_tokens}"

    @classmethod
    def parse(cls, rid: str) -> "Ticket | None":
        """The ticket in a request id; None for a request that is not ours, such as a health check."""
        if not rid.startswith("hsray:"):
            return None
        sequence, buffer, shard_tokens, row, num_tokens = map(int, rid.split(":")[1:])
        return cls(sequence=sequence, buffer=buffer, shard_tokens=shard_tokens, row=row, num_tokens=num_tokens)


class ControlPage:
    """A page of shared memory by which the scheduler process tells the engine what it did.

    Layout, little-endian: two texts (a description, an error), each an int64 byte count and then UTF-8, at 0 and at
    ``TEXT_BYTES``; then the ledger, ``LEDGER_SLOTS`` pairs of int64 (sequence, rows); then the passes, an int64.
    """

    TEXT_BYTES = 1 << 16
    LEDGER_SLOTS = 4096
    NUM_BYTES = 2 * TEXT_BYTES + LEDGER_SLOTS * 16 + 8

    def __init__(self, path: str):
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), self.NUM_BYTES)
        self._bytes = np.frombuffer(memory, np.uint8)
        numbers = self._bytes[2 * self.TEXT_BYTES :].view(np.int64)
        self._ledger, self._passes = numbers[:-1].reshape(self.LEDGER_SLOTS, 2), numbers[-1:]

    def describe(self, description: dict[str, Any]) -> None:
        """Says what was found in the model; called once, after it has loaded."""
        self._write_text(0, json.dumps(description))

    @property
    def description(self) -> dict[str, Any] | None:
        """What `describe` was told, or None before."""
        text = self._read_text(0)
        return json.loads(text) if text else None

    def report(self, error: str) -> None:
        """Records an error; the first one stays, since what follows is mostly its consequence."""
        if not self.error:
            self._write_text(self.TEXT_BYTES, error)

    @property
    def error(self) -> str:
        """The recorded error, or an empty text."""
        return self._read_text(self.TEXT_BYTES)

    def forget_error(self) -> None:
        """Makes room for another."""
        if self.error:
            self._write_text(self.TEXT_BYTES, "")

    def count_pass(self) -> None:
        """Records that a forward pass with prompts of ours has ended."""
        self._passes += 1

    @property
    def passes(self) -> int:
        """Forward passes so far; each took one prompt or more."""
        return int(self._passes[0])

    def enter(self, sequence: int, num_rows: int) -> None:
        """Records that `num_rows` rows of request `sequence` are complete in memory, in every layer."""
        slot = self._ledger[sequence % self.LEDGER_SLOTS]
        slot[1] = num_rows
        slot[0] = sequence

    def rows(self, sequence: int) -> int:
        """The rows recorded for request `sequence`; 0 where there is no record."""
        recorded, num_rows = self._ledger[sequence % self.LEDGER_SLOTS]
        return int(num_rows) if recorded == sequence else 0

    def _write_text(self, start: int, text: str) -> None:
        data = text.encode()[: self.TEXT_BYTES - 8]
        self._bytes[start + 8 : start + 8 + len(data)] = np.frombuffer(data, np.uint8)
        self._bytes[start : start + 8].view(np.int64)[0] = len(data)

    def _read_text(self, start: int) -> str:
        num_bytes = int(self._bytes[start : start + 8].view(np.int64)[0])
        return self._bytes[start + 8 : start + 8 + num_bytes].tobytes().decode(errors="replace")


def run_scheduler(plan: CapturePlan, server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *args: Any) -> None:
    """Stands in for SGLang's `run_scheduler_process`: installs the capture, then calls it.

    The argument order up to `tp_rank` is the same in every supported version. Under tensor parallelism every rank
    reads the same full-width states, since reading may complete a sum over the ranks (0.5.23); rank 0 alone copies them.
    """
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process

    if plan.cpu_threads is not None:
        torch.set_num_threads(plan.cpu_threads)
    settle_vector_math()  # before the model's tables are made, which it keeps
    install(SchedulerCapture(plan, writes=tp_rank == 0))
    run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args)


def install(capture: "SchedulerCapture") -> None:
    """Puts the capture around SGLang's model runner and before its logits processor, for every model class.

    What the scheduler dies of at its start is recorded too: SGLang itself only logs it.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    start, load_model = Scheduler.__init__, ModelRunner.load_model
    forward, logits = ModelRunner.forward, LogitsProcessor.forward

    @functools.wraps(start)
    def start_or_report(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            start(self, *args, **kwargs)
        except BaseException:
            capture.report(traceback.format_exc(limit=-3))
            raise

    @functools.wraps(load_model)
    def load_model_then_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        result = load_model(self, *args, **kwargs)
        if not getattr(self, "is_draft_worker", False):
            capture.attach(self.model, load_s=time.monotonic() - started)
        return result

    @functools.wraps(forward)
    def forward_captured(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        capture.begin(forward_batch)
        try:
            result = forward(self, forward_batch, *args, **kwargs)
        except BaseException:
            capture.report(traceback.format_exc(limit=-3))
            raise
        capture.end()
        return result

    @functools.wraps(logits)
    def logits_after_capture(self: Any, input_ids: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        capture.take("final", lambda: [hidden_states])
        return logits(self, input_ids, hidden_states, *args, **kwargs)

    Scheduler.__init__ = start_or_report
    ModelRunner.load_model = load_model_then_attach
    ModelRunner.forward = forward_captured
    LogitsProcessor.forward = logits_after_capture


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request's share of the running batch."""

    ticket: Ticket
    batch_row: int
    num_rows: int
    first_row: int
    """Of the prompt: 0 unless its prefill is chunked."""
    memory: dict[Layer, LayerMemory]
    """Its shard's; empty on a rank that only reads."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    requests: list[_Request]
    num_rows: int
    taken: list[Layer] = field(default_factory=list)
    failed: bool = False
    """Nothing more of it is copied."""


class SchedulerCapture:
    """The capture's state in the scheduler process."""

    def __init__(self, plan: CapturePlan, *, writes: bool):
        self._plan, self._writes = plan, writes
        self._control = ControlPage(plan.control_path)
        self._memories: list[tuple[torch.Tensor, torch.Tensor]] = []  # as the host and as the device address it
        # Of each buffer, for a shard of so many tokens.
        self._by_layer: dict[int, tuple[int, dict[Layer, LayerMemory]]] = {}
        self._batch: _Batch | None = None
        self._rows_done: dict[int, int] = {}  # or begun, of prompts whose prefill is chunked
        self._staging: HostStaging | DeviceStaging = HostStaging()
        self._canary: Canary | None = None

    def attach(self, model: "torch.nn.Module", *, load_s: float) -> None:
        """Hooks the loaded model's blocks and maps the shared memory. Raises: nothing runs yet, so SGLang reports it."""
        decoder = find_decoder(model, self._plan.num_layers)
        for layer in self._plan.layers:
            block = boundary(layer, num_layers=self._plan.num_layers)
            if block is not None:
                module, read = (
                    (decoder.norm, norm_input)
                    if block == self._plan.num_layers
                    else (decoder.layers[block], block_input)
                )
                module.register_forward_pre_hook(self._pre_hook(layer, read), with_kwargs=True)
        self._canary = Canary(model, decoder)
        if not self._writes:
            return
        device = next(model.parameters()).device
        if device.type == "cuda":
            self._staging = DeviceStaging(device)
        memories = map(map_memory, self._plan.buffer_paths)
        self._memories = [(memory, self._staging.expose(memory)) for memory in memories]
        self._control.describe({"architecture": type(model).__name__, "load_s": load_s})

    def _pre_hook(self, layer: Layer, read: "Callable[..., list[torch.Tensor]]") -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.take(layer, lambda: read(module, args, kwargs))

        return hook

    def begin(self, forward_batch: Any) -> None:
        """Notes whose rows the forward pass that now starts computes."""
        self._batch = None
        try:
            self._batch = self._read_batch(forward_batch)
        except Exception:
            self._fail("the batch could not be attributed")

    def take(self, layer: Layer, read: "Callable[[], list[torch.Tensor]]") -> None:
        """Copies each request's rows of one layer to their final place; `read` gives the state's addends, [B, D]."""
        if self._batch is None or layer not in self._plan.layers:
            return
        try:
            addends = read()  # also after a failure of this rank: the others wait for its part of the sum
            if self._writes and not self._batch.failed:
                self._copy(layer, addends, self._batch)
            self._batch.taken.append(layer)
        except Exception:
            self._batch.failed = True
            self._fail(f"layer {layer!r} could not be copied")

    def end(self) -> None:
        """Enters the finished rows in the ledger, once the copies are complete."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        try:
            canary, self._canary = self._canary, None
            disagreements = []
            if canary is not None:
                canary.release()
                disagreements = canary.compare_ranks(self._plan.dtype)  # all ranks take part
            if not self._writes or batch.failed:
                return
            if tuple(batch.taken) != self._plan.layers:
                raise RuntimeError(
                    f"one pass gave layers {batch.taken}; {list(self._plan.layers)} were wanted, each once"
                )
            self._staging.finish()
            if canary is not None:
                self._judge(canary, batch.requests[0], disagreements)
            for request in batch.requests:
                self._control.enter(request.ticket.sequence, request.first_row + request.num_rows)
            self._control.count_pass()
        except Exception:
            self._fail("the pass could not be completed")

    def _read_batch(self, forward_batch: Any) -> _Batch | None:
        tickets = [Ticket.parse(rid) for rid in (forward_batch.rids or [])]
        if not any(tickets):
            return None
        if not all(tickets) or not forward_batch.forward_mode.is_extend():
            raise RuntimeError(
                f"a {forward_batch.forward_mode} batch of requests {forward_batch.rids}; prefill was wanted"
            )
        requests, batch_row = [], 0
        lengths, prefixes = map(list, (forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu))
        for ticket, num_rows, first_row in zip(tickets, map(int, lengths), map(int, prefixes), strict=True):
            done = self._rows_done.get(ticket.sequence, 0)
            if first_row not in (0, done) or first_row + num_rows > ticket.num_tokens:
                raise RuntimeError(
                    f"rows {first_row}..{first_row + num_rows} of a prompt of {ticket.num_tokens} tokens, after {done} rows: "
                    "its first rows were taken from a cache, not computed"
                )
            self._rows_done[ticket.sequence] = first_row + num_rows
            if first_row + num_rows == ticket.num_tokens:
                del self._rows_done[ticket.sequence]
            memory = self._memory_by_layer(ticket) if self._writes else {}
            requests.append(
                _Request(ticket=ticket, batch_row=batch_row, num_rows=num_rows, first_row=first_row, memory=memory)
            )
            batch_row += num_rows
        return _Batch(requests=requests, num_rows=batch_row)

    def _copy(self, layer: Layer, addends: "Sequence[torch.Tensor]", batch: _Batch) -> None:
        import torch

        plan, dtype = self._plan, getattr(torch, self._plan.dtype)
        for addend in addends:
            if getattr(addend, "_sglang_needs_allreduce_fusion", False):
                raise RuntimeError("the state is one rank's partial sum: all-reduce fusion must be off")
            # Graph replay and sharded layouts change the row count; padding may only follow the real rows.
            if addend.dim() != 2 or addend.shape[1] != plan.hidden_size or addend.shape[0] < batch.num_rows:
                raise RuntimeError(
                    f"a state of shape {list(addend.shape)}; [{batch.num_rows}, {plan.hidden_size}] was wanted"
                )
            if addend.dtype != dtype:
                raise RuntimeError(f"a state of {addend.dtype}; {dtype} was wanted: open the engine with that dtype")
        places = [
            Place(
                batch_row=request.batch_row,
                num_rows=request.num_rows,
                memory=request.memory[layer],
                row=request.ticket.row + request.first_row,
            )
            for request in batch.requests
        ]
        self._staging.send(addends, places)

    def _judge(self, canary: Canary, request: _Request, faults: list[str]) -> None:
        """Lets the canary judge its prompt's states, and notes which tokens the LM head may choose after it."""
        states = {layer: memory.host_SD[: request.num_rows] for layer, memory in request.memory.items()}
        faults = faults + canary.judge(states, self._plan.dtype)
        if faults:
            raise RuntimeError("the canary's states are wrong: " + "; ".join(faults))
        choices = canary.choices(states["final"], self._plan.vocab_size) if "final" in states else None
        self._control.describe({**self._control.description, "choices": choices})

    def _memory_by_layer(self, ticket: Ticket) -> dict[Layer, LayerMemory]:
        """A shard's memory; it is cut up once for all of the shard's prompts."""
        import torch

        num_tokens, by_layer = self._by_layer.get(ticket.buffer, (0, {}))
        if num_tokens != ticket.shard_tokens:
            plan, dtype = self._plan, getattr(torch, self._plan.dtype)
            shape = (len(plan.layers), ticket.shard_tokens, plan.hidden_size)
            hosts_LSD, devices_LSD = (
                memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
                for memory in self._memories[ticket.buffer]
            )
            by_layer = {
                layer: LayerMemory(host_SD=host_SD, device_SD=device_SD)
                for layer, host_SD, device_SD in zip(plan.layers, hosts_LSD, devices_LSD, strict=True)
            }
            self._by_layer[ticket.buffer] = ticket.shard_tokens, by_layer
        return by_layer

    def _fail(self, what: str) -> None:
        # The scheduler must live on to answer the request, so that the engine can raise what is recorded here.
        self.report(f"{what}: {traceback.format_exc(limit=-4)}")

    def report(self, error: str) -> None:
        """Records an error for the engine to raise."""
        self._control.report(error)


def find_decoder(model: "torch.nn.Module", num_layers: int) -> "torch.nn.Module":
    """The module that holds the decoder's blocks (``layers``) and final norm (``norm``), wherever the class keeps it.

    Raises:
        RuntimeError: no module, or more than one, has `num_layers` blocks and a norm.
    """
    import torch

    found = {}
    for name, module in model.named_modules():
        blocks = getattr(module, "layers", None)
        if isinstance(blocks, torch.nn.ModuleList) and len(blocks) == num_layers and hasattr(module, "norm"):
            found[name] = module
    if len(found) != 1:
        raise RuntimeError(
            f"hsray: {type(model).__name__} has {len(found)} stacks of {num_layers} blocks with a final norm "
            f"({list(found)}), one was wanted; use engine='transformers'"
        )
    return next(iter(found.values()))
