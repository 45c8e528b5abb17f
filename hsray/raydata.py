"""Ray Data as hsray uses it: connected or started, quiet and patient, rows in order, and a worker's errors as themselves."""

import functools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import pyarrow as pa

from hsray.engine import EngineDied
from hsray.tasks import TASK_RETRIES

if TYPE_CHECKING:
    import ray.data

#: Ray Data writes its own advice into a worker's exception, from here on.
RAY_ADVICE = "Failed to apply UDF transform after"

#: Of a cluster: ``host:port``, with brackets around one of IPv6.
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+):\d{1,5}")

#: How long a cluster may take to accept a connection.
CONNECT_S = 10.0

#: How often it is looked whether Ray is still there.
LOOK_S = 1.0

#: How long the main thread, which alone hears signals, may be busy elsewhere when one has come.
HEARD_S = 10.0

#: A driver waits for a Ray that has gone for a minute, and is then ended by it.
PATIENCE_S = 70.0

#: One thread starts Ray; others wait for it.
_starting = threading.Lock()

#: The address of the Ray that this process started for itself.
_started_here: str | None = None

#: Set once a signal has asked the driver to end.
_interrupted = threading.Event()


class ProcessDied(EngineDied):
    """Ray has lost an actor too often, or with its node."""


@contextmanager
def ray_data() -> Iterator[None]:
    """Ray, connected or started, with Ray Data quiet, patient, and keeping rows in order; restored afterwards."""
    import ray

    with _without_preempting():
        with _starting:
            if not ray.is_initialized():
                with _interruptible():
                    _start_ray()
        with _settings, _interruptible(), _not_waiting_for_the_dead():
            yield


class _Settings:
    """Ray Data's, which are a process's: as hsray needs them while any thread is in here, and then as they were."""

    WANTED: ClassVar[Mapping[str, Any]] = {
        "enable_progress_bars": False,
        "print_on_execution_start": False,
        # A shard may take minutes, and an engine longer to load; Ray would end the build.
        "execution_no_progress_timeout_s": -1,
        "max_errored_blocks": 0,
        "raise_original_map_exception": True,  # otherwise it is wrapped in another, which loses it on its way here
    }

    def __init__(self) -> None:
        self._lock, self._num_threads = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_threads:
                self._before = self._set(self.WANTED, preserve_order=True, log_level=logging.CRITICAL)
            self._num_threads += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_threads -= 1
            if not self._num_threads:
                values, preserve_order, log_level = self._before
                self._set(values, preserve_order=preserve_order, log_level=log_level)

    def _set(
        self, values: Mapping[str, Any], *, preserve_order: bool, log_level: int
    ) -> tuple[dict[str, Any], bool, int]:
        """Gives what they were."""
        import ray.data

        context = ray.data.DataContext.get_current()
        data_logger = logging.getLogger("ray.data")  # what fails is raised here, without Ray's pages around it
        before = (
            {name: getattr(context, name) for name in values},
            context.execution_options.preserve_order,
            data_logger.level,
        )
        for name, value in values.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = preserve_order
        data_logger.setLevel(log_level)
        return before


_settings = _Settings()


@contextmanager
def _without_preempting() -> Iterator[None]:
    """Runs this thread, and the Ray that it starts, without taking a core from a thread at work whenever one of them wakes.

    Ray's idle processes, and Ray Data's loop here, wake a hundred times a second each. Where the engine computes on the same
    cores, all of its threads wait for the one that was interrupted: on two cores SmolLM2, in an actor of an idle Ray, was
    interrupted 620 times a second and made 414 tokens/s; so, 165 times, and 460.
    """
    was_set = _set_batch_policy()
    try:
        yield
    finally:
        if was_set:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _set_batch_policy() -> bool:
    """Whether it could be: another system lacks it, a sandbox may forbid it, and another choice than the default is left alone."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        return False
    return True


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGTERM, with which ``ray job stop`` and Kubernetes begin, interrupt as Ctrl-C does, and neither be lost.

    A handler's exception is lost where Python happens to be in a callback that may not raise, as Ray's driver often is; so
    the signal is remembered as well. Ray's start puts in place one for SIGTERM that exits, which stays there afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _interrupted.clear()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _interrupt)
    if before[signal.SIGINT] is signal.default_int_handler:  # an application's own is left alone
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
        _check_interrupted()
    except Exception as error:  # what follows from an interrupt that was lost: Ray may have ended with it
        if _interrupted.is_set():
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            # One that was not set from Python cannot be set again from there; Ray's takes the default's place for good.
            if callable(handler) or (handler is not None and signal.getsignal(number) is _interrupt):
                signal.signal(number, handler)
        _interrupted.clear()


@contextmanager
def _not_waiting_for_the_dead() -> Iterator[None]:
    """Ends this process, with a line, where the Ray that it started has ended, or any Ray once a signal has asked it to end.

    A signal to a process group, as ``timeout`` and service managers send it, ends a Ray that was started here at once. The
    driver's next call would wait a minute for it, be it the one that takes leave of it, and Ray's core would then end the
    process without a word; at once where it happens to read from the object store, which cannot be helped. A cluster's Ray
    may come back within that minute, so of that it is said, and no more.
    """
    import ray

    address, is_over = ray.get_runtime_context().gcs_address, threading.Event()
    left_at: list[float] = []  # when an interrupt ended the block

    def watch() -> None:
        num_silent = 0
        while not is_over.wait(LOOK_S) and not (left_at and time.monotonic() - left_at[0] > PATIENCE_S):
            if not ray.is_initialized() or ray.get_runtime_context().gcs_address != address:
                return  # it was taken leave of
            num_silent = num_silent + 1 if _is_refused(address) else 0
            if num_silent < 2:
                continue
            is_own = address == _started_here
            # What ended a Ray of our own may have been a signal, of which nothing has been heard yet.
            is_interrupted = bool(left_at) or _interrupted.wait(HEARD_S if is_own else 0)
            if is_over.is_set():
                return
            if is_interrupted or is_own:
                words, status = ("interrupted, and", 128 + signal.SIGINT) if is_interrupted else ("error:", 1)
                _say(f"{words} Ray has ended; say the same again: a build goes on where it was")
                os._exit(status)
            if num_silent == 2:
                _say(
                    f"Ray at {address} does not answer; if it stays away, Ray ends this process in about a minute, without a "
                    "word. Say the same again once there is a cluster: a build goes on where it was"
                )

    threading.Thread(target=watch, name="hsray-dead-ray", daemon=True).start()
    try:
        yield
    finally:
        if _interrupted.is_set() and address == _started_here:
            left_at.append(time.monotonic())
        else:
            is_over.set()


def _is_refused(address: str) -> bool:
    """Whether it is sure that nobody listens there; what is wrong on this side, such as too many open files, says nothing."""
    try:
        _connect(address)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except OSError:
        return False
    return False


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: object) -> NoReturn:
    _interrupted.set()
    raise KeyboardInterrupt


def _check_interrupted() -> None:
    if _interrupted.is_set() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt


def job_name() -> str:
    """What this driver is called in its cluster: the name that ``ray job`` knows, else Ray's number."""
    import ray
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    submitted = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("metadata", {})
    return submitted.get("job_submission_id") or ray.get_runtime_context().get_job_id()


def _start_ray() -> None:
    """Connects to the cluster that RAY_ADDRESS names or that runs here, or starts Ray, with no more words than its errors."""
    import ray

    global _started_here
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ray's C++ core prints a known false alarm for every actor pool (ray-project/ray#57733).
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # A Ray of our own has nobody to give way to, and its dashboard would take a share of the engine's cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    joins = _check_reachable()
    try:
        _for_good(
            functools.partial(ray.init, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
        )
    except ConnectionError as error:
        if "AuthenticationError" not in str(error.__cause__):
            raise
        raise ConnectionError(
            f"{error}: it asks for a token; give this process the same, with RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
            "~/.ray/auth_token"
        ) from error
    except SystemExit as error:  # raised by Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    except Exception as error:
        if type(error) is not Exception:  # Ray's word for a start that takes too long
            raise
        raise TimeoutError(
            f"Ray did not start in its time: the machine is busy, or short of memory; say the same again. Ray says: {error}"
        ) from error
    _started_here = None if joins else ray.get_runtime_context().gcs_address


def _for_good(start: Callable[[], object]) -> None:
    """Calls what starts processes in a thread that lives as long as this process does.

    Ray has Linux kill its processes with their parent, and by that Linux means the thread that started them (prctl(2),
    PR_SET_PDEATHSIG): a Ray that an application's own thread had started would be killed when that thread ended.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    outcome: Future[None] = Future()

    def stay() -> None:
        try:
            start()
        except BaseException as error:
            outcome.set_exception(error)
            return
        outcome.set_result(None)
        threading.Event().wait()

    threading.Thread(target=stay, name="hsray-parent-of-ray", daemon=True).start()
    outcome.result()


def _check_reachable() -> bool:
    """Whether there is a cluster that Ray would join.

    Raises:
        ConnectionError: it is not there; Ray itself would try for minutes.
        ValueError: RAY_ADDRESS is no address of one.
    """
    from ray._private.services import get_ray_address_from_environment

    named = os.environ.get("RAY_ADDRESS", "")
    is_address = ADDRESS.fullmatch(named) and int(named.rpartition(":")[2]) < 1 << 16
    if named not in ("", "auto", "local") and not is_address:
        raise ValueError(
            f"RAY_ADDRESS={named!r} is no address of a Ray cluster: wanted host:port (6379 by default), 'auto', or 'local' for a "
            "Ray of this build's own. To run on a cluster from outside (ray://, http://), hand the build over: ray job submit"
        )
    if named == "auto":  # Ray must say which that is
        return True
    if named == "local" or (address := get_ray_address_from_environment(None, None)) is None:
        return False
    try:
        _connect(address)
    except OSError as error:
        whence = "RAY_ADDRESS names it" if named else "the last `ray start` here left this address"
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); {whence}. Start it, or say RAY_ADDRESS=local "
            "to have a Ray of this build's own; `ray stop` forgets a cluster that has gone"
        ) from error
    return True


def _connect(address: str) -> None:
    """Raises OSError where nobody listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


def blocks_of(dataset: "ray.data.Dataset") -> Iterator[pa.Table]:
    """A Ray dataset's blocks, in order, each as soon as it is there; an error raised in a worker is raised here as itself.

    `iter_batches` would keep each block until the next has come, which may be a shard's time later, and would wait for that
    one before it lets an interrupt end it.
    """
    import ray
    from ray.data.block import BlockAccessor
    from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

    try:
        for bundle in dataset.iter_internal_ref_bundles():
            for entry in bundle.blocks:
                block = BlockAccessor.for_block(ray.get(entry.ref)).to_arrow()
                _check_interrupted()
                if block.num_columns:
                    yield block
    except RayTaskError as error:
        raise _own_error(error) from error
    except RayActorError as error:
        raise ProcessDied(
            f"an engine's process died again and again, or its node has gone; out of memory is the usual cause (the "
            f"kernel's log says so). Saying the same again resumes the build. Ray says: {error}"
        ) from error
    except OutOfMemoryError as error:
        raise ProcessDied(
            "Ray ended the build's processes again and again, since their node ran low on memory, be it theirs or another's; saying "
            f"the same again resumes the build. Ray says: {str(error).splitlines()[0]}"
        ) from error
    except WorkerCrashedError as error:
        raise ProcessDied(
            f"a process that reads or writes files died {TASK_RETRIES + 1} times over one task; out of memory is the usual cause "
            f"(the kernel's log says so). Ray says: {error}"
        ) from error


def _own_error(error: BaseException) -> BaseException:
    """The exception that a worker raised, out of Ray's wrappings."""
    while type(error).__module__.split(".")[0] == "ray":
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is None:
            break
        error = inner
    error.args = tuple(_without_advice(arg) for arg in error.args)
    for name in ("strerror", "filename"):  # an OSError's words are these, not its args
        if isinstance(said := getattr(error, name, None), str):
            if own := _without_advice(said):
                setattr(error, name, own)
            else:
                delattr(error, name)  # a filename that is nothing but advice
    return error


def _without_advice(said: Any) -> Any:
    return said.split(RAY_ADVICE)[0].rstrip("\n") if isinstance(said, str) else said
