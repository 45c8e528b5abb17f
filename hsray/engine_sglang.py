"""The SGLang engine: a patched offline `sglang.Engine` whose scheduler copies states straight into shared memory.

The scheduler process is started through a function of ours (`hsray.capture.run_scheduler`), so nothing depends on
SGLang's plug-in system, which only logs a plug-in that fails. An engine that opens has proved itself on a canary
prompt; one that could hand out wrong rows refuses to open.
"""

import asyncio
import atexit
import functools
import gc
import logging
import os
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import psutil

from hsray.capture import CapturePlan, ControlPage, Ticket, run_scheduler
from hsray.engine import CaptureEngine, CaptureError, EngineDied, EngineKilled, EngineOptions, ShardBuffer
from hsray.staging import map_memory

#: What keeps a prefill whole, eager and one's own. Each of these, left to SGLang's choice in some supported version,
#: loses rows, mixes prompts or captures a partial sum.
SAFE_ARGS: dict[str, Any] = {
    "disable_radix_cache": True,  # a cached prefix is not computed again, so its rows would be missing
    "enable_mixed_chunk": False,  # adds decode rows to a prefill batch
    "disable_overlap_schedule": True,  # a reply must follow its own pass; slower with one request in flight, too
    # A replayed graph runs no hooks, pads rows and reuses its buffers. Breakable prefill graphs make short prompts one at
    # a time 2.1 to 2.3 times as fast (0.5.16, H200, 128 to 512 tokens); many in flight are faster yet, and keep the hooks.
    "disable_cuda_graph": True,
    "enable_two_batch_overlap": False,  # blocks run as operation lists: hooks do not fire
    "enforce_disable_flashinfer_allreduce_fusion": True,  # blocks would hand on one rank's partial sum
    "allow_auto_truncate": False,
    "speculative_algorithm": None,
    "enable_dp_attention": False,
    "enable_attn_tp_input_scattered": False,  # rows would be sharded over ranks
    "moe_a2a_backend": "none",
    "enable_torch_compile": False,
    "enable_hierarchical_cache": False,
    "enable_pdmux": False,
    "disable_hybrid_swa_memory": True,  # a smaller pool for windowed layers never takes a prompt that fills the cache
    "dp_size": 1,
    "pp_size": 1,
    "skip_tokenizer_init": True,
    "enable_multimodal": False,  # prompts are text; a multimodal checkpoint's language model is what runs
    "skip_server_warmup": True,
}

#: What hsray itself decides, with the way to say it.
OWN_ARGS = {
    "model_path": "model=",
    "revision": "model= with a local folder",
    "json_model_override_args": "an edited config.json in the model's folder",
    "dtype": "dtype=",
    "tp_size": "tensor_parallel=, which also reserves the GPUs",
    "nnodes": "engines= for more machines",
    "node_rank": "engines= for more machines",
    "disaggregation_mode": "nothing: each engine runs its own prefill",
}

#: The request is refused unless its length stays this far below the context and the cache (SGLang keeps a reserve).
TOKEN_RESERVE = 64

#: SGLang's cache must hold this many tokens even where prompts are short.
MIN_PREFILL_TOKENS = 2048

#: SGLang's cache is handed out in pages of at most this many tokens.
PAGE_TOKENS = 64

#: How often a request that has no answer yet makes sure that somebody is there to give one.
LIVENESS_S = 1.0

#: How long closing waits for SGLang's tasks.
CLOSE_S = 10.0

CANARY_TOKENS = 31


class SGLangEngine(CaptureEngine):
    """One SGLang engine; one request in flight, or as many as `EngineOptions.requests_in_flight` allows.

    SGLang's event loop runs in a thread of its own, so several threads may capture at one time; what they ask for is
    served in the order of their calls.

    ``engine_args`` are `sglang.ServerArgs` fields, for example ``attention_backend``; those in `SAFE_ARGS` cannot be
    overridden. Under tensor parallelism each rank is a scheduler process of its own; rank 0 copies the states. SGLang
    handles signals in a process's main thread only, so an engine is opened there.

    Raises:
        ValueError: an engine argument that would make the states wrong.
        EngineDied: SGLang did not start; its own words precede this in the log.
        EngineKilled: a process of it was killed meanwhile.
        CaptureError: the canary's rows are not what the config says.
    """

    name = "sglang"

    def __init__(self, options: EngineOptions):
        self.version = version("sglang")
        self._sequence = count(1)
        self._sglang = None
        self._closing, self._why_closed = threading.Lock(), ""
        num_bytes = options.buffer_tokens * options.bytes_per_token
        with _shared_memory([*[num_bytes] * options.num_buffers, ControlPage.NUM_BYTES]) as (*paths, control_path):
            plan = CapturePlan(
                layers=options.layers,
                num_layers=options.model.num_layers,
                hidden_size=options.model.hidden_size,
                vocab_size=options.model.vocab_size,
                dtype=options.model.dtype,
                buffer_paths=tuple(paths),
                control_path=control_path,
                cpu_threads=None if _has_gpu() else max(1, len(os.sched_getaffinity(0)) // options.tensor_parallel),
            )
            self._control = ControlPage(plan.control_path)
            super().__init__(options, list(map(map_memory, paths)))
            self._belongings = _Belongings()
            try:
                self._sglang = _start(plan, options)
            except Exception as error:
                words = self._control.error or error
                raise self._kind_of_death()(
                    f"SGLang {self.version} did not start on {options.model.model!r}: {words}; engine='transformers' runs "
                    "models that SGLang lacks"
                ) from error
            finally:
                self._belongings.note()
                if self._sglang is None:
                    self._belongings.end()
        self._places = asyncio.Semaphore(options.requests_in_flight)
        self.answered, self._longest_first = time.monotonic(), False
        self._running: dict[asyncio.Task[Any], tuple[Ticket, float]] = {}  # what is asked by which task, and since when
        self._given_up: dict[asyncio.Task[Any], EngineDied] = {}
        self._timeout_s = options.start_timeout_s
        threading.Thread(target=self._sglang.loop.run_forever, name="hsray-sglang", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._watch(), self._sglang.loop)
        started = time.monotonic()
        try:
            self._handshake()
        except BaseException:
            self.close()
            raise
        self._timeout_s = options.request_timeout_s
        self.load_s, self.first_request_s = self._control.description["load_s"], time.monotonic() - started

    @property
    def passes(self) -> int:
        """Forward passes so far, the canary's included; each took one prompt or more."""
        return self._control.passes

    def _kind_of_death(self) -> type[EngineDied]:
        """Whether it died by itself, which it says, or was killed."""
        return EngineKilled if not self._control.error and self._belongings.any_killed() else EngineDied

    def _run(self, prompts: Sequence[np.ndarray], rows: Sequence[int], into: ShardBuffer) -> None:
        tickets = [self._ticket(into, row=row, num_tokens=len(ids_T)) for ids_T, row in zip(prompts, rows, strict=True)]
        self._finish(self._run_all(tickets, prompts))

    def _ticket(self, buffer: ShardBuffer, *, row: int, num_tokens: int) -> Ticket:
        return Ticket(
            sequence=next(self._sequence),
            buffer=buffer.index,
            shard_tokens=buffer.num_tokens,
            row=row,
            num_tokens=num_tokens,
        )

    def _finish(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs `work` on SGLang's event loop, to its end."""
        with self._closing:
            if self._sglang is None:
                work.close()
                raise EngineDied(f"this SGLang engine is closed{self._why_closed}")
            done = asyncio.run_coroutine_threadsafe(work, self._sglang.loop)
        try:
            return done.result()
        except CancelledError as error:
            raise EngineDied(f"this SGLang engine was closed meanwhile{self._why_closed}") from error
        except BaseException as error:
            if not isinstance(error, CaptureError) or isinstance(error, EngineDied):
                self._why_closed = self._why_closed or f": {error}"
                # Interrupted or given up: the scheduler may go on to write into memory that the caller gives back.
                self.close()
            raise

    async def _run_all(self, tickets: Sequence[Ticket], prompts: Sequence[np.ndarray]) -> None:
        """Runs prompts as places in flight come free; a failure is raised once none of them is running any more.

        Prompts of like length go together: a pass pays, in attention, for its longest prompt as many times as it has
        prompts. One call begins with the long ones, the next with the short ones, so that they fit where they meet.
        """
        failures: dict[int, Exception] = {}
        self._longest_first = not self._longest_first
        in_order = sorted(range(len(tickets)), key=lambda index: tickets[index].num_tokens, reverse=self._longest_first)

        async def run(index: int) -> None:
            async with self._places:
                if failures:
                    return
                try:
                    await self._request(tickets[index], prompts[index], max_new_tokens=0)
                except Exception as error:  # raised below, with the prompt's number
                    failures[index] = error

        if self.options.requests_in_flight == 1:
            for index in in_order:  # a task for each would keep the GPU waiting while one hands over to the next
                await run(index)
        else:
            await asyncio.gather(*map(run, in_order))
        if failures:
            first = min(failures)
            raise CaptureError.of(failures[first], prompt=first) from failures[first]

    async def _request(self, ticket: Ticket, input_ids: np.ndarray, *, max_new_tokens: int) -> list[int]:
        """Runs one prompt and checks that its rows are in place; the tokens chosen after it.

        max_new_tokens=0 makes it a prefill and nothing else.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        sglang, task = self._sglang, asyncio.current_task()
        if sglang is None:
            raise EngineDied("this SGLang engine was closed meanwhile")
        if not self._running:
            self._control.forget_error()  # of earlier requests, which have all raised it
        self._running[task] = ticket, time.monotonic()
        try:
            reply = await sglang.async_generate(
                input_ids=input_ids.tolist(), sampling_params=sampling, rid=ticket.rid()
            )
        except asyncio.CancelledError as error:
            if task not in self._given_up:
                raise
            task.uncancel()
            raise self._given_up.pop(task) from error
        finally:
            del self._running[task]
        self.answered = time.monotonic()
        return self._checked(ticket, reply)

    async def _watch(self) -> None:
        """Gives up requests that nobody is there to answer, or to which no answer comes."""
        while True:
            await asyncio.sleep(LIVENESS_S)
            alive = not self._running or self._belongings.alive()
            for task, (ticket, asked) in list(self._running.items()):
                silent_s = time.monotonic() - max(asked, self.answered)
                if silent_s > self._timeout_s:
                    why = EngineDied(
                        f"SGLang gave no answer to a prompt of {ticket.num_tokens} tokens, nor to any other, for "
                        f"{silent_s:.0f} s: it is given up; where that is no time for this model, give a longer "
                        "request_timeout_s"
                    )
                elif not alive:
                    words = self._control.error or "its log says why; a kill by the kernel (memory) leaves no words"
                    why = self._kind_of_death()(
                        f"SGLang's scheduler process died during a prompt of {ticket.num_tokens} tokens: {words}"
                    )
                else:
                    continue
                if task not in self._given_up:
                    self._given_up[task] = why
                    task.cancel()

    def _checked(self, ticket: Ticket, reply: dict[str, Any]) -> list[int]:
        """The tokens of a reply, once it is sure that every row is in place."""
        num_rows, reason = self._control.rows(ticket.sequence), reply["meta_info"].get("finish_reason") or {}
        if num_rows == ticket.num_tokens and reason.get("type") != "abort":
            return reply["output_ids"]
        if self._control.error:
            raise CaptureError(f"a prompt of {ticket.num_tokens} tokens was not captured: {self._control.error}")
        if reason.get("type") == "abort":
            raise CaptureError(f"SGLang refused a prompt of {ticket.num_tokens} tokens: {reason.get('message')}")
        raise CaptureError(f"SGLang computed {num_rows} rows of a prompt of {ticket.num_tokens} tokens")

    def _handshake(self) -> None:
        """Runs the canary: every layer must be written and be what `hsray.canary` sees, by other ways, in the model."""
        import torch

        if self._control.description is None:
            raise CaptureError(f"SGLang {self.version} loaded the model without the capture: it is not supported")
        chunk_tokens = self.options.engine_args.get("chunked_prefill_size", CANARY_TOKENS)  # it is judged in one pass
        num_tokens = min(CANARY_TOKENS, self.options.max_tokens, self.options.buffer_tokens, chunk_tokens)
        vocab_size = self.options.model.vocab_size
        input_ids = (7 * np.arange(num_tokens) + 3) % vocab_size
        buffer = self.buffer(num_tokens)
        for hidden_TD in buffer.states.values():
            hidden_TD.fill_(torch.nan)
        ticket = self._ticket(buffer, row=0, num_tokens=num_tokens)
        buffer.release()
        advice = "use engine='transformers' for this model"
        try:
            chosen = self._finish(self._request(ticket, input_ids, max_new_tokens=1))[0]
        except CaptureError as error:
            words = f"SGLang {self.version} on {self.options.model.architecture}: {error}; {advice}"
            raise type(error)(words) from error
        description = self._control.description
        if description["choices"] is not None and chosen not in description["choices"]:
            raise CaptureError(
                f"SGLang {self.version} on {description['architecture']}: after the canary it chose token {chosen}, but the "
                f"LM head on the captured 'final' scores {description['choices'][:5]} best, so that is not what the head "
                f"reads; {advice}"
            )

    def close(self) -> None:
        with self._closing:  # what was handed to the loop before is cancelled below; nothing is after
            sglang, self._sglang = self._sglang, None
        if sglang is None:
            return
        # SGLang's own shutdown kills every child of this process, whoever started it.
        atexit.unregister(sglang.shutdown)
        watchdog = getattr(sglang.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        with suppress(TimeoutError):  # a task that does not end in time is left; the processes are ended anyway
            asyncio.run_coroutine_threadsafe(_cancel_all(), sglang.loop).result(timeout=CLOSE_S)
        sglang.loop.call_soon_threadsafe(sglang.loop.stop)
        self._belongings.end()


def check_engine_args(engine_args: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument that would make states wrong."""
    for name, instead in OWN_ARGS.items():
        if name in engine_args:
            raise ValueError(f"engine_args[{name!r}] is not for the engine alone to know; say {instead}")
    if engine_args.get("chunked_prefill_size", 1) < 1:
        raise ValueError(
            "engine_args['chunked_prefill_size'] must be positive: without chunks, SGLang 0.5.16 lets Gemma 3 attend to "
            "later tokens; give a size over the longest prompt to keep prompts whole"
        )
    for name, value in engine_args.items():
        if name in SAFE_ARGS and value != SAFE_ARGS[name]:
            raise ValueError(
                f"engine_args[{name!r}]={value!r} would make hidden states wrong or incomplete; hsray needs "
                f"{SAFE_ARGS[name]!r}: leave it out"
            )


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """The `sglang.ServerArgs` fields that an engine is started with; the same with and without the capture."""
    num_tokens = options.max_tokens + TOKEN_RESERVE
    longest_pass = prefill_tokens = max(num_tokens, MIN_PREFILL_TOKENS)
    if options.requests_in_flight > 1:
        # A pass takes prompts until it has `prefill_tokens`, the last one whole.
        prefill_tokens = options.prefill_tokens
        longest_pass += prefill_tokens
    return {
        "model_path": options.model.model,
        "dtype": options.model.dtype,
        "trust_remote_code": options.trust_remote_code,
        "context_length": num_tokens,
        "max_total_tokens": longest_pass + options.requests_in_flight * PAGE_TOKENS,
        "max_prefill_tokens": prefill_tokens,
        # Chunks as long as the longest pass, so nothing is ever cut. Switched off altogether (-1), 0.5.16 attends to
        # later tokens in Gemma 3, whose layers it takes for an encoder's when it sees neither chunks nor graphs.
        "chunked_prefill_size": longest_pass,
        "tp_size": options.tensor_parallel,
        "random_seed": 0,
        "log_level": "error",
        "custom_sigquit_handler": _ignore_sigquit,
        **(_cpu_args(options) if not _has_gpu() else {}),
        **options.engine_args,
        **SAFE_ARGS,
    }


def _start(plan: CapturePlan, options: EngineOptions) -> Any:
    # SGLang refuses a context above the model's own unless told; the reserve is never filled with tokens.
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if not _has_gpu():
        # A thread that spins at a barrier keeps its core from the one it waits for, where others want cores too: a build of
        # SmolLM2 on two cores makes 242 tokens/s so, 236 otherwise (and a bare loop 259, 274 otherwise).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        if options.tensor_parallel > 1:
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores_of_ranks(options.tensor_parallel))
    from sglang.srt.entrypoints.engine import Engine

    class CapturingEngine(Engine):
        run_scheduler_process_func = staticmethod(functools.partial(run_scheduler, plan))

    # SGLang takes the thread's event loop: each engine gets one of its own, which its thread then runs.
    asyncio.set_event_loop(asyncio.new_event_loop())
    try:
        with _logging_kept():
            return CapturingEngine(**engine_arguments(options))
    finally:
        asyncio.set_event_loop(None)


@contextmanager
def _logging_kept() -> Iterator[None]:
    """Leaves the process's logging to the application, where SGLang puts its own handler and level in place of the root's."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []  # SGLang would close them
    try:
        yield
    finally:
        root.handlers, sglang_level = handlers, root.level
        root.setLevel(level)
        logging.getLogger("sglang").setLevel(sglang_level)


def _cores_of_ranks(num_ranks: int) -> str:
    """Each rank's own cores, as SGLang wants them said where ranks outnumber the NUMA nodes: ``"0,1|2,3"``."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        raise CaptureError(
            f"tensor_parallel={num_ranks} without a GPU needs as many cores; this process has {len(cores)}"
        )
    share = len(cores) // num_ranks
    return "|".join(",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(num_ranks))


def _cpu_args(options: EngineOptions) -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.7,  # what others take while the model loads is counted as its own
        "sleep_on_idle": True,  # an idle scheduler would spin on a core that other work needs
        "max_running_requests": max(16, options.requests_in_flight),
    }


def _ignore_sigquit(_signum: int, _frame: Any) -> None:
    """Stands in for SGLang's handler of what a dying child sends, which would kill this process and all its children.

    A Ray actor would vanish without a word. A start that fails raises by itself, and later `SGLangEngine` looks.
    """


async def _cancel_all() -> None:
    """Ends every other task of the running loop, which would otherwise complain that its loop went away."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=LIVENESS_S)


class _Belongings:
    """The processes and ZeroMQ contexts that an engine started; SGLang leaves both behind when its start fails."""

    def __init__(self) -> None:
        self._processes, self._contexts = _child_processes(), _zmq_contexts()
        self._children = set(psutil.Process().children())
        self._others = _multiprocesses()

    def note(self) -> None:
        """Keeps what was started since."""
        self._processes = _child_processes() - self._processes
        self._children = self._processes & set(psutil.Process().children())
        contexts = _zmq_contexts()
        self._contexts = {key: contexts[key] for key in contexts.keys() - self._contexts.keys()}

    def alive(self) -> bool:
        """Whether every process that SGLang started here still runs; what those started comes and goes."""
        return all(_runs(process) for process in self._children)

    def any_killed(self) -> bool:
        """Whether a signal ended one that SGLang started here."""
        known = set(map(id, self._others))
        return any(item.exitcode and item.exitcode < 0 for item in _multiprocesses() if id(item) not in known)

    def end(self) -> None:
        """Kills the processes, and drops messages to them, for which ZeroMQ would wait at exit."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._processes, timeout=30)
        for context in self._contexts.values():
            context.destroy(linger=0)
        self._contexts = {}


def _child_processes() -> set[psutil.Process]:
    """This process's descendants, save Python's resource tracker, which serves all of it."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.add(process)
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _multiprocesses() -> list[BaseProcess]:
    return _objects_of(BaseProcess)


def _zmq_contexts() -> dict[int, Any]:
    import zmq

    contexts = _objects_of(zmq.Context)
    return {id(context): context for context in contexts if not context.closed}


def _objects_of(kind: type) -> list[Any]:
    # SGLang keeps some of them where no attribute leads to, so the garbage collector is asked.
    return [item for item in gc.get_objects() if issubclass(type(item), kind)]


@contextmanager
def _shared_memory(sizes: Sequence[int]) -> Iterator[list[str]]:
    """Pieces of memory of so many bytes, as paths that child processes can map while the block lasts.

    They have no name in any filesystem, so they are gone with their last mapping, however a process ends, and a
    container's small /dev/shm does not bound them.
    """
    descriptors: list[int] = []
    try:
        for num_bytes in sizes:
            descriptors.append(os.memfd_create("hsray"))
            os.posix_fallocate(descriptors[-1], 0, max(num_bytes, 1))  # a write past what fits would be a SIGBUS
        yield [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
