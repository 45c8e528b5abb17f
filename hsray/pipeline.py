"""The Ray Data graph, top to bottom: prompts to a plan, the plan's pending shards to engines, receipts to a report.

Only plan rows and receipts pass through Ray. The states never do: the actor that captured a shard writes and
publishes it, on a writer thread, while it captures the next one. A receipt is yielded after its object is published,
and a task that Ray retries skips what is already there, so a shard is never lost, doubled or made again.
"""

import logging
import operator
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

import hsray
from hsray.engine import MAX_REQUESTS_IN_FLIGHT, EngineDied, EngineName, EngineOptions, check_engine_args
from hsray.layers import LayersSpec, resolve_layers
from hsray.manifest import NAME as MANIFEST_NAME
from hsray.manifest import (
    Identity,
    Manifest,
    ManifestError,
    check_identity,
    check_inventory,
    check_shards,
    complete,
    identity_differences,
    load_manifest,
    pending_shards,
    published_shards,
)
from hsray.model import DTYPE_BYTES, ModelDescription, describe_model, load_tokenizer, tokenizer_digest
from hsray.plan import DROPPED_NAME, PlanFile, PlanOptions, digest_rows, read_plan_file, write_plan
from hsray.prompts import PromptOptions, read_rows, tokenize_rows
from hsray.prompts import digest_rows as digest_dataset
from hsray.report import BuildReport, Receipt
from hsray.shard import codec, shard_schema
from hsray.store import Store
from hsray.worker import CaptureJob, CaptureWorker

if TYPE_CHECKING:
    import ray.data

logger = logging.getLogger(__name__)

#: Shards that an actor writes at one time, while it captures another: one core writes about 1 GB/s, and a GPU's engine
#: may make more. Without a GPU the cores are the engine's, and it makes less.
GPU_WRITERS, CPU_WRITERS = 2, 1

#: How often an actor that dies is started again, and its tasks with it; Ray Data itself would do so for ever.
RETRIES = 2

#: Ray Data writes its own advice into a worker's exception, from here on.
RAY_ADVICE = "\nFailed to apply UDF transform after"


def build(
    dataset: "str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | ray.data.Dataset",
    *,
    model: str,
    layers: LayersSpec,
    out: str | os.PathLike[str],
    engine: EngineName = "sglang",
    engine_args: Mapping[str, Any] | None = None,
    tensor_parallel: int = 1,
    engines: int | None = None,
    requests_in_flight: int = 1,
    prefill_tokens: int = 16_384,
    dtype: str = "auto",
    max_tokens: int | None = None,
    too_long: Literal["error", "drop"] = "error",
    shard_bytes: int = 256 << 20,
    compression: str = "none",
    request_timeout_s: float = 1800.0,
    storage_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> BuildReport:
    """Builds a dataset of a model's hidden states for every token of every prompt, or resumes one.

    Args:
        dataset: JSONL or Parquet files (paths, globs, lists of them), a list of dicts, or a ``ray.data.Dataset``.
            A row has ``messages`` (rendered by the model's chat template), ``text``, or ``input_ids`` (with
            ``loss_mask`` if wanted), and may have an ``id``.
        model: A local folder or a hub name, readable by every node.
        layers: What to keep of each token: block outputs ``0..N-1`` (negative counts from the end), ``"embed"``,
            ``"final"``, or a preset, ``"eagle3"`` or ``"speculators-v1"``; see `hsray.layers`.
        out: The dataset's folder, on any fsspec target that every node reaches. Building there again resumes.
        engine: ``"sglang"``, or ``"transformers"`` for models that SGLang lacks.
        engine_args: Arguments for the engine itself, such as ``{"attention_backend": "triton"}`` for SGLang.
        tensor_parallel: GPUs of one node that share the model in each engine.
        engines: Engine actors; by default as many as the cluster's GPUs allow, and one where there is none.
        requests_in_flight: Prompts that an engine is given at one time, to compute in one pass. One keeps every number
            reproducible to the last bit; more pays where prompts are short, below about 2,000 tokens on a GPU, and best
            with shards of several passes.
        prefill_tokens: Tokens at which such a pass takes no more prompts.
        dtype: What the engine computes in and the states are stored in: ``"auto"`` (the checkpoint's),
            ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        max_tokens: The longest prompt allowed; by default the model's context.
        too_long: What to do about a longer one: ``"error"``, or ``"drop"`` (counted, listed in ``dropped.parquet``).
        shard_bytes: States in one shard, about; an engine's host holds up to three of them (four with several requests
            in flight).
        compression: Of the shards: ``"none"``, or ``"zstd:1"`` (any level up to 22).
        request_timeout_s: An engine that answers nothing for so long ends the build.
        storage_options: For the filesystem of `dataset` and `out`; never stored.
        trust_remote_code: Lets the model's own code run.
        progress: Shows a progress bar.

    Raises:
        PromptError: a row that cannot be used, by file and line.
        ManifestError: `out` holds something else, or another dataset than the one asked for.
        CaptureError: the engine did not start, or gave what must not be stored.
    """
    started = time.monotonic()
    if too_long not in ("error", "drop"):
        raise ValueError(f"too_long={too_long!r}; wanted 'error' or 'drop'")
    check_engine_args(engine, engine_args or {})
    codec(compression)
    requests_in_flight = _count("requests_in_flight", requests_in_flight)
    prefill_tokens = _count("prefill_tokens", prefill_tokens)
    if not isinstance(request_timeout_s, int | float) or not request_timeout_s > 0:
        raise ValueError(f"request_timeout_s={request_timeout_s!r}; give a number of seconds above 0")
    if requests_in_flight > MAX_REQUESTS_IN_FLIGHT:
        raise ValueError(f"requests_in_flight={requests_in_flight}; give 1 up to {MAX_REQUESTS_IN_FLIGHT}")
    engines = None if engines is None else _count("engines", engines)
    tensor_parallel = _count("tensor_parallel", tensor_parallel)
    for name, value in (("tensor_parallel", tensor_parallel), ("requests_in_flight", requests_in_flight)):
        if engine == "transformers" and value != 1:
            raise ValueError(f"{name}={value} is for engine='sglang'; engine='transformers' takes one GPU, one prompt")
    shard_bytes = _count("shard_bytes", shard_bytes)
    description = describe_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
    max_tokens = description.max_tokens if max_tokens is None else _count("max_tokens", max_tokens)
    if max_tokens > description.max_tokens:
        raise ValueError(f"max_tokens={max_tokens}; the model's context is {description.max_tokens}: give 1 up to that")
    wanted = Identity(
        model=description.model,
        config_digest=description.config_digest,
        weights_digest=description.weights_digest,
        tokenizer_digest=tokenizer_digest(load_tokenizer(model, trust_remote_code=trust_remote_code)),
        num_layers=description.num_layers,
        hidden_size=description.hidden_size,
        layers=resolve_layers(layers, num_layers=description.num_layers),
        dtype=description.dtype,
        engine=engine,
        engine_args=dict(engine_args or {}),
        tensor_parallel=tensor_parallel,
        requests_in_flight=requests_in_flight,
        prefill_tokens=prefill_tokens,
        shard_bytes=shard_bytes,
        compression=compression,
        max_tokens=max_tokens,
        too_long=too_long,
        prompts_digest=None,
        plan_digest=None,
    )
    store = Store(out, storage_options)
    if store.is_private:
        raise ValueError(f"out={store.url!r} is memory of this process alone; give a folder, or an object store")
    manifest = _open_dataset(store, wanted)
    with quiet_ray():
        with _forgotten_on_error(manifest, store):
            manifest = _plan(manifest, dataset, store, description, trust_remote_code, storage_options)
        planned = time.monotonic()
        published = published_shards(store)
        if manifest.state != "complete" or len(published) != manifest.plan.num_shards:
            digests = check_shards(manifest, published, store)
        pending = pending_shards(manifest.plan, published)
        report = _report(manifest, store)
        report.plan_s = planned - started
        if pending:
            pool = _Pool.of(manifest, engines, num_pending=len(pending))
            of_this_run = {"trust_remote_code": trust_remote_code, "request_timeout_s": request_timeout_s}
            job = _capture_job(manifest, description, store, storage_options, pool.writers_each, of_this_run)
            digests |= _capture(job, manifest, pending, pool, report, progress)
    for folder in ("", "plan", "shards"):
        store.sweep(folder)
    if manifest.state != "complete" or pending:
        manifest = complete(manifest, store, digests)
    check_inventory(manifest, published_shards(store), store)
    report.nbytes = sum(manifest.shard_file_bytes)
    report.elapsed_s = time.monotonic() - started
    logger.info("%s", report)
    return report


def _count(name: str, value: Any) -> int:
    """A keyword that counts, as an int (numpy's are taken too)."""
    if value is None:
        raise ValueError(f"{name}=None; leave it out, or give a number")
    if not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{name}={value!r}; give a whole number from 1 up")
    return operator.index(value)


def _open_dataset(store: Store, wanted: Identity) -> Manifest:
    """The stored manifest, checked against the request, or a new one, published.

    A manifest whose plan was never finished, or whose engines never made a shard, binds nobody: a request for something
    else takes its place.
    """
    manifest = load_manifest(store)
    if manifest is not None and manifest.state != "planning":
        # Listed only where it decides: a large dataset's listing takes seconds.
        same = not identity_differences(manifest.identity, wanted)
        if same or manifest.state == "complete" or published_shards(store):
            check_identity(manifest.identity, wanted, store)
            return manifest
    elif published_shards(store):
        raise ManifestError(
            f"{store.url!r} holds shards but no finished plan: another build may be planning there, or its manifest was "
            "lost; wait for it, restore the manifest, or give another out="
        )
    store.check_writable()
    manifest = Manifest(state="planning", identity=wanted)
    manifest.save(store)
    return manifest


def _plan(
    manifest: Manifest,
    dataset: Any,
    store: Store,
    model: ModelDescription,
    trust_remote_code: bool,
    storage_options: Mapping[str, Any] | None,
) -> Manifest:
    """Writes the plan, or, where there is one, checks that the dataset is still the planned one."""
    rows = read_rows(dataset, storage_options=storage_options)
    identity = manifest.identity
    if manifest.plan is not None:
        with closing(blocks_of(digest_dataset(rows))) as blocks:
            digest = digest_rows(blocks)
        check_identity(identity, replace(identity, prompts_digest=digest), store)
        return manifest
    value_bytes = model.hidden_size * DTYPE_BYTES[model.dtype]
    prompts = tokenize_rows(
        rows,
        PromptOptions(
            model=model.model,
            trust_remote_code=trust_remote_code,
            vocab_size=model.vocab_size,
            max_tokens=identity.max_tokens,
            too_long=identity.too_long,
        ),
    )
    options = PlanOptions(
        bytes_per_token=len(identity.layers) * value_bytes,
        value_bytes_per_token=value_bytes,
        shard_bytes=identity.shard_bytes,
        max_tokens=identity.max_tokens,
    )
    _forget_plan(store)
    with closing(blocks_of(prompts)) as blocks:
        manifest = manifest.with_plan(write_plan(blocks, store, options))
    manifest.save(store)
    return manifest


@contextmanager
def _forgotten_on_error(manifest: Manifest, store: Store) -> Iterator[None]:
    """Leaves nothing of a dataset whose plan could not be made."""
    try:
        yield
    except BaseException:
        if manifest.plan is None:
            _forget_plan(store)
            if store.exists(MANIFEST_NAME):
                store.remove(MANIFEST_NAME)
        raise


def _forget_plan(store: Store) -> None:
    store.remove_folder("plan")
    if store.exists(DROPPED_NAME):
        store.remove(DROPPED_NAME)


def _capture_job(
    manifest: Manifest,
    model: ModelDescription,
    store: Store,
    storage_options: Mapping[str, Any] | None,
    num_writers: int,
    of_this_run: Mapping[str, Any],
) -> CaptureJob:
    """The job that a dataset's identity asks for; `of_this_run`: options of the engine that are no part of it."""
    identity, plan = manifest.identity, manifest.plan
    about = {
        "format_version": "1",
        "layers": ",".join(map(str, identity.layers)),
        "dtype": identity.dtype,
        "hidden_size": str(identity.hidden_size),
        "model": identity.model,
        "version": hsray.__version__,
        "engine": identity.engine,
    }
    options = EngineOptions(
        model=model,
        layers=identity.layers,
        max_tokens=plan.longest_prompt,
        buffer_tokens=max(plan.shard_tokens),
        tensor_parallel=identity.tensor_parallel,
        requests_in_flight=identity.requests_in_flight,
        prefill_tokens=identity.prefill_tokens,
        engine_args=identity.engine_args,
        **of_this_run,
    )
    return CaptureJob(
        engine=identity.engine,
        options=replace(options, num_buffers=options.shards_in_capture + num_writers),
        out=store.url,
        storage_options=storage_options,
        schema=shard_schema(identity.layers, hidden_size=identity.hidden_size, dtype=identity.dtype, metadata=about),
        compression=identity.compression,
        identity_digest=identity.digest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """The engine actors, as the cluster allows."""

    engines: int
    gpus_each: int
    cpus_each: int
    writers_each: int

    @classmethod
    def of(cls, manifest: Manifest, engines: int | None, *, num_pending: int) -> "_Pool":
        """As many actors as were asked for or the GPUs allow, and no more than there are shards for."""
        import ray

        resources = ray.cluster_resources()
        num_gpus, num_cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        gpus_each = manifest.identity.tensor_parallel if num_gpus else 0
        if engines is None:
            engines = max(1, num_gpus // gpus_each) if gpus_each else 1
        engines = min(engines, num_pending)
        writers_each = GPU_WRITERS if num_gpus else CPU_WRITERS
        return cls(
            engines=engines,
            gpus_each=gpus_each,
            cpus_each=max(1, min(writers_each, num_cpus // engines)),
            writers_each=writers_each,
        )


def _capture(
    job: CaptureJob, manifest: Manifest, pending: list[int], pool: _Pool, report: BuildReport, progress: bool
) -> dict[int, str]:
    """Streams the pending shards to the engine actors, one a task, and gathers their receipts; gives their digests."""
    import ray.data
    from ray.util.annotations import RayDeprecationWarning
    from tqdm import tqdm

    files = plan_files_of(manifest.plan.files, pending)
    names: list[str] = []
    tasks_each = job.options.num_buffers + 1  # some capture, others write, and one more stands ready for the engine
    with warnings.catch_warnings():
        # Ray Data 2.60 has no other way yet to bound an actor's restarts and to name it.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        receipts = (
            ray.data.from_items(files, override_num_blocks=len(files))
            # It takes next to nothing, and the engines may hold every core.
            .map_batches(_read_plan, fn_kwargs={"job": job}, batch_size=1, batch_format="pyarrow", num_cpus=0)
            .map_batches(
                CaptureWorker,
                fn_constructor_args=(job,),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=pool.cpus_each,
                num_gpus=pool.gpus_each,
                max_restarts=RETRIES,
                max_task_retries=RETRIES,
                ray_remote_args_fn=lambda: names.append(f"hsray-{uuid.uuid4().hex}") or {"name": names[-1]},
                compute=ray.data.ActorPoolStrategy(
                    size=pool.engines,
                    max_concurrent_calls_per_actor=tasks_each,
                    enable_true_multi_threading=True,
                    max_tasks_in_flight_per_actor=tasks_each + 2,
                ),
            )
        )
    receipts.context.target_max_block_size = 1  # a block for each row: one shard a task, and its receipt at once
    receipts.context.execution_options.preserve_order = False
    digests: dict[int, str] = {}
    num_tokens = sum(manifest.plan.shard_tokens[shard] for shard in pending)
    with (
        _killed_on_error(names),
        tqdm(total=num_tokens, unit="tok", unit_scale=True, desc="hidden states", disable=not progress) as bar,
    ):
        for block in blocks_of(receipts):
            for receipt in (Receipt(**row) for row in block.to_pylist()):
                report.add(receipt)
                digests[receipt.shard] = receipt.digest
                bar.start_t = report.first_started_at  # the engine's start says nothing of the time left
                bar.set_postfix_str(
                    f"{report.new_shards}/{len(pending)} shards, {report.nbytes / 1e6:,.0f} MB", refresh=False
                )
                bar.update(receipt.tokens)
    return digests


@contextmanager
def _killed_on_error(names: list[str]) -> Iterator[None]:
    """Ends the actors of a run that fails. Ray ends them once they are garbage, which an error's traceback puts off; a
    next run in this process would wait for their GPUs for ever."""
    import ray

    try:
        yield
    except BaseException:
        for name in names:
            with suppress(ValueError):  # it has ended by itself
                ray.kill(ray.get_actor(name))
        raise


def plan_files_of(files: Sequence[PlanFile], pending: list[int]) -> list[dict[str, Any]]:
    """The plan files that hold some shards, each with the numbers of those."""
    waiting = set(pending)
    rows = []
    for file in files:
        shards = [s for s in range(file.first_shard, file.first_shard + file.num_shards) if s in waiting]
        if shards:
            rows.append({**asdict(file), "shards": shards})
    return rows


def _read_plan(batch: pa.Table, *, job: CaptureJob) -> Iterator[pa.Table]:
    """The pending rows of a plan file, one by one."""
    store = Store(job.out, job.storage_options)
    for row in batch.to_pylist():
        file = PlanFile(**{item.name: row[item.name] for item in fields(PlanFile)})
        plan = read_plan_file(store, file)
        for shard in row["shards"]:
            yield plan.slice(shard - file.first_shard, 1)


def _report(manifest: Manifest, store: Store) -> BuildReport:
    plan = manifest.plan
    return BuildReport(
        out=store.url,
        layers=manifest.identity.layers,
        prompts=sum(plan.shard_prompts),
        tokens=sum(plan.shard_tokens),
        shards=plan.num_shards,
        nbytes=0,
        dropped=plan.num_dropped,
    )


def blocks_of(dataset: "ray.data.Dataset") -> Iterator[pa.Table]:
    """A Ray dataset's blocks, in order; an error raised in a worker is raised here as itself."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        for block in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            if block.num_columns:
                yield block
    except RayTaskError as error:
        raise _own_error(error) from error
    except RayActorError as error:
        raise EngineDied(
            f"an engine's process died again and again ({RETRIES} new starts), without a word of its own; out of memory is "
            f"the usual cause (the kernel's log says so). Ray says: {error}"
        ) from error


def _own_error(error: BaseException) -> BaseException:
    """The exception that a worker raised, out of Ray's wrappings."""
    while type(error).__module__.split(".")[0] == "ray":
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is None:
            break
        error = inner
    error.args = tuple(arg.split(RAY_ADVICE)[0] if isinstance(arg, str) else arg for arg in error.args)
    for name in ("strerror", "filename"):  # an OSError's words are these, not its args
        if isinstance(getattr(error, name, None), str):
            setattr(error, name, getattr(error, name).split(RAY_ADVICE)[0])
    return error


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Ray, connected or started, with Ray Data quiet, patient, and keeping rows in order; restored afterwards."""
    import ray
    import ray.data

    if not ray.is_initialized():
        _start_ray()
    context = ray.data.DataContext.get_current()
    wanted = {
        "enable_progress_bars": False,
        "print_on_execution_start": False,
        # A shard may take minutes, and an engine longer to load; Ray would end the build.
        "execution_no_progress_timeout_s": -1,
        "max_errored_blocks": 0,
    }
    before = {name: getattr(context, name) for name in wanted}
    before_order = context.execution_options.preserve_order
    data_logger = logging.getLogger("ray.data")
    before_level = data_logger.level
    try:
        for name, value in wanted.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = True
        data_logger.setLevel(logging.ERROR)
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
        context.execution_options.preserve_order = before_order
        data_logger.setLevel(before_level)


def _start_ray() -> None:
    """Connects to the cluster that RAY_ADDRESS names or that runs here, or starts Ray, with no more words than its errors."""
    import ray

    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    # Ray's C++ core prints a known false alarm for every actor pool (ray-project/ray#57733).
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # A Ray of our own has nobody to give way to, and its dashboard would take a share of the engine's cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
