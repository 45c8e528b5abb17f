"""A build, top to bottom: prompts to a plan, the plan's pending shards through `hsray.rounds` to engines, and an inventory."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hsray
from hsray.engine import EngineName, EngineOptions
from hsray.events import Events, receipts
from hsray.layers import LayersSpec
from hsray.lease import Lease, held
from hsray.manifest import (
    LEASE_NAME,
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
from hsray.manifest import NAME as MANIFEST_NAME
from hsray.plan import DROPPED_NAME, Plan, digest_rows, write_plan
from hsray.prompts import digest_rows as digest_dataset
from hsray.prompts import tokenize_rows
from hsray.raydata import blocks_of, job_name, ray_data
from hsray.report import BuildReport
from hsray.request import Request, settle
from hsray.rounds import Pool, Rounds, nodes_of_cluster
from hsray.shard import FileFormat, shard_schema
from hsray.sources import read_rows
from hsray.store import Store
from hsray.worker import CaptureJob

if TYPE_CHECKING:
    import ray.data

logger = logging.getLogger(__name__)


def build(
    dataset: "str | Path | Sequence[str | Path] | Sequence[Mapping[str, Any]] | ray.data.Dataset",
    *,
    model: str,
    layers: LayersSpec,
    out: str | os.PathLike[str],
    engine: EngineName = "sglang",
    engine_args: Mapping[str, Any] | None = None,
    tensor_parallel: int = 1,
    engines: int | tuple[int, int] | None = None,
    requests_in_flight: int = 1,
    prefill_tokens: int = 16_384,
    dtype: str = "auto",
    columns: Mapping[str, str] | None = None,
    chat_template: str | Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    train_on: Literal["all", "last"] = "all",
    rewritten_history: Literal["error", "split"] = "error",
    untrained: Literal["error", "drop", "keep"] = "error",
    max_tokens: int | None = None,
    too_long: Literal["error", "drop", "truncate"] = "error",
    duplicates: Literal["keep", "drop"] = "keep",
    sort: Literal["input", "length"] = "input",
    shard_bytes: int = 256 << 20,
    file_format: FileFormat = "parquet",
    compression: str = "none",
    request_timeout_s: float = 1800.0,
    max_attempts: int = 3,
    on_failure: Literal["stop", "skip"] = "stop",
    storage_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> BuildReport:
    """Builds a dataset of a model's hidden states for every token of every prompt, or resumes one.

    Args:
        dataset: JSONL, JSON, Parquet or Arrow files (paths, globs, lists of them, on any fsspec target), a folder of
            ``datasets.save_to_disk``, a list of dicts, a ``datasets.Dataset`` or a ``ray.data.Dataset``. `hsray.shapes`
            lists the shapes of row; the first row's is the dataset's. A row may have an ``id``.
        model: A local folder or a hub name, readable by every node.
        layers: What to keep of each token: block outputs ``0..N-1`` (negative counts from the end), ``"embed"``,
            ``"final"``, ranges such as ``"0:32:4"``, or a preset, ``"eagle3"``, ``"speculators-v1"``, ``"dflash:5"`` or
            ``"all"``; see `hsray.layers`. What they come to is logged, and shown with the progress.
        out: The dataset's folder, on any fsspec target that every node reaches. Building there again resumes.
        engine: ``"sglang"``, or ``"transformers"`` for models that SGLang lacks.
        engine_args: Arguments for the engine itself, such as ``{"attention_backend": "triton"}`` for SGLang.
        tensor_parallel: GPUs of one node that share the model in each engine.
        engines: Engine actors; by default as many as the cluster's GPUs allow, and one where there is none. Those that have
            no room wait for nodes that join later, which an autoscaler sees. ``(2, 16)``: two, and more, up to 16, when
            there is room for one.
        requests_in_flight: Prompts that an engine is given at one time, to compute in one pass. One keeps every number
            reproducible to the last bit; more pays where prompts are short, below about 2,000 tokens on a GPU, and best
            with shards of several passes.
        prefill_tokens: Tokens at which such a pass takes no more prompts.
        dtype: What the engine computes in and the states are stored in: ``"auto"`` (the checkpoint's),
            ``"bfloat16"``, ``"float16"`` or ``"float32"``. With ``"float8_e4m3"`` they are computed in the checkpoint's and stored
            in eight bits, each token scaled; a reader gives bfloat16.
        columns: What the rows call a shape's columns, where not by their own names, and their ids:
            ``{"question": "query", "answer": "reply", "id": "uuid"}``.
        chat_template: A file with a Jinja template in place of the tokenizer's own.
        template_kwargs: What the template is told besides, such as ``{"enable_thinking": False}``.
        train_on: The assistant messages that the loss mask marks: ``"all"``, or the ``"last"`` of each conversation.
        rewritten_history: What to do about a conversation whose earlier turns the template renders otherwise once later
            ones follow (most drop old reasoning): ``"error"``, or ``"split"`` it into a prompt for each assistant message.
        untrained: What to do about a prompt of which no token is trained on: ``"error"``, ``"drop"`` or ``"keep"``.
        max_tokens: The longest prompt allowed; by default the model's context.
        too_long: What to do about a longer one: ``"error"``, ``"drop"``, or ``"truncate"`` (its end is cut off, and it is
            dropped if nothing that is trained on is left).
        duplicates: What to do about a prompt with the tokens and mask of an earlier one: ``"keep"`` or ``"drop"``. Whatever
            is dropped is counted, and listed in ``dropped.parquet`` with its reason.
        sort: The order of the prompts: the ``"input"``'s, or by ``"length"``, the longest first.
        shard_bytes: States in one shard, about; an engine's host holds up to three of them (four with several requests
            in flight).
        file_format: Of the shards: ``"parquet"``, or ``"arrow"`` (IPC files, which training from a local disk maps).
        compression: Of Parquet shards: ``"none"``, or ``"zstd:1"`` (any level up to 22).
        request_timeout_s: An engine that answers nothing for so long is killed, and its shard tried again; one that
            starts, if it computes nothing, or has no answer to its first prompt, for so long, and two minutes at least.
        max_attempts: How often a shard is tried whose engine dies, before its prompts are tried one by one.
        on_failure: What to do about a prompt whose states cannot be had, since its engine dies of it, refuses it, or makes
            numbers that are not finite: ``"stop"``, with an error that names it; or ``"skip"`` it, and list it in
            ``dropped.parquet`` with the engine's own words.
        storage_options: For the filesystem of `dataset` and `out`; never stored.
        trust_remote_code: Lets the model's own code run.
        progress: Shows a progress bar.

    Raises:
        PromptError: a row that cannot be used, by file and line.
        ManifestError: `out` holds something else, or another dataset than the one asked for.
        LeaseError: another driver is building there.
        CaptureError: the engine did not start, or gave what must not be stored; a `PromptFailed` names the prompt.
    """
    started = time.monotonic()
    request = settle(
        model=model,
        layers=layers,
        engine=engine,
        engine_args=engine_args,
        tensor_parallel=tensor_parallel,
        engines=engines,
        requests_in_flight=requests_in_flight,
        prefill_tokens=prefill_tokens,
        dtype=dtype,
        columns=columns,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        train_on=train_on,
        rewritten_history=rewritten_history,
        untrained=untrained,
        max_tokens=max_tokens,
        too_long=too_long,
        duplicates=duplicates,
        sort=sort,
        shard_bytes=shard_bytes,
        file_format=file_format,
        compression=compression,
        request_timeout_s=request_timeout_s,
        max_attempts=max_attempts,
        on_failure=on_failure,
        trust_remote_code=trust_remote_code,
    )
    _show_layers(layers, request.identity, progress)
    store = Store(out, storage_options)
    if store.is_private:
        raise ValueError(f"out={store.url!r} is memory of this process alone; give a folder, or an object store")
    if not store.exists(LEASE_NAME):  # a driver's that is building there: `held` names it
        load_manifest(store)  # raises where the folder holds something else, before anything is written to it
    with ray_data(), held(store, job=job_name()) as lease:
        report = _build(dataset, request, store.guarded(lease.check), lease, storage_options, progress)
    report.elapsed_s = time.monotonic() - started
    logger.info("%s", report)
    return report


def _build(
    dataset: Any,
    request: Request,
    store: Store,
    lease: Lease,
    storage_options: Mapping[str, Any] | None,
    progress: bool,
) -> BuildReport:
    """A build in a folder that is this driver's alone; the store sees to that whenever it is written to."""
    started = time.monotonic()
    manifest = _open_dataset(store, request.identity)
    with _forgotten_on_error(manifest, store, lease):
        if manifest.state != "complete":
            _check_room(request)
        manifest = _plan(manifest, dataset, store, request, storage_options, progress)
    digests = made_before(manifest, store)
    pending = pending_shards(manifest.plan, digests)
    num_bytes: Sequence[int] = ()
    report = _report(manifest, store)
    report.plan_s = time.monotonic() - started
    if pending:
        job = _capture_job(manifest, request, store, storage_options)
        with Events(store, identity_digest=manifest.identity.digest, shards_left=len(pending)) as events:
            rounds = Rounds(job, manifest, store, lease, report, events, engines=request.engines, progress=progress)
            digests |= rounds.capture(pending)
        manifest, num_bytes = rounds.manifest, rounds.num_bytes
    for folder in ("", "plan", "shards"):
        store.sweep(folder)
    if manifest.state != "complete" or pending:
        _check_plan_is_there(manifest, store)
        manifest = complete(manifest, store, digests, num_bytes=num_bytes)
    check_inventory(manifest, published_shards(store, manifest.identity.file_format), store)
    report.nbytes = sum(manifest.shard_file_bytes)
    return report


def _check_room(request: Request) -> None:
    """Raises ValueError where no node of the cluster has room for an engine, before the plan costs time."""
    Pool.of(nodes_of_cluster(), tensor_parallel=request.identity.tensor_parallel, engines=request.engines, num_tasks=1)


def _check_plan_is_there(manifest: Manifest, store: Store) -> None:
    """Raises ManifestError where files of the plan were removed meanwhile: without them nobody can check the shards."""
    found = store.list("plan")
    gone = [file.name for file in manifest.plan.files if file.name.removeprefix("plan/") not in found]
    if gone:
        raise ManifestError(
            f"{store.url!r}: {len(gone)} of {len(manifest.plan.files)} files of the plan were removed during the build "
            f"({', '.join(gone[:3])}); restore them and build again, or build to another out="
        )


def made_before(manifest: Manifest, store: Store) -> dict[int, str]:
    """The shards that are there, which are this dataset's: number -> digest. Raises as `check_shards` does."""
    num_planned = manifest.plan.num_shards
    published = published_shards(store, manifest.identity.file_format, num_planned=num_planned)
    if manifest.state == "complete":  # its inventory has them all
        known = dict(enumerate(zip(manifest.shard_file_bytes, manifest.shard_digests, strict=True)))
    else:
        known = receipts(store, identity_digest=manifest.identity.digest)
    return check_shards(manifest, published, store, receipts=known)


def _show_layers(asked: LayersSpec, wanted: Identity, progress: bool) -> None:
    """Says what the layers asked for came to, before anything costs time."""
    words = f"layers={asked!r} of {wanted.num_layers} blocks: {', '.join(map(str, wanted.layers))}"
    logger.info("%s", words)
    if progress:
        print(words, file=sys.stderr)


def _open_dataset(store: Store, wanted: Identity) -> Manifest:
    """The stored manifest, checked against the request, or a new one, published.

    A manifest whose plan was never finished, or whose engines never made a shard, binds nobody: a request for something
    else takes its place.
    """
    manifest = load_manifest(store)
    if manifest is not None and manifest.state != "planning":
        # Listed only where it decides: a large dataset's listing takes seconds.
        same = not identity_differences(manifest.identity, wanted)
        if same or manifest.state == "complete" or published_shards(store, manifest.identity.file_format):
            check_identity(manifest.identity, wanted, store)
            return manifest
    elif published_shards(store, wanted.file_format):
        raise ManifestError(
            f"{store.url!r} holds shards but no finished plan: another build may be planning there, or its manifest was "
            "lost; wait for it, restore the manifest, or give another out="
        )
    manifest = Manifest(state="planning", identity=wanted)
    manifest.save(store)
    return manifest


def _plan(
    manifest: Manifest,
    dataset: Any,
    store: Store,
    request: Request,
    storage_options: Mapping[str, Any] | None,
    progress: bool,
) -> Manifest:
    """Writes the plan, or, where there is one, checks that the dataset is still the planned one."""
    rows = read_rows(dataset, storage_options=storage_options)
    identity = manifest.identity
    if manifest.plan is not None:
        check_identity(identity, replace(identity, prompts_digest=digest_of(rows)), store)
        return manifest
    _forget_plan(store)
    manifest = manifest.with_plan(make_plan(rows, request, store, on_shape=_say_shape if progress else None))
    manifest.save(store)
    return manifest


def digest_of(rows: "ray.data.Dataset") -> str:
    """The digest of a dataset's rows, in their own order."""
    with closing(blocks_of(digest_dataset(rows))) as blocks:
        return digest_rows(blocks)


def make_plan(
    rows: "ray.data.Dataset", request: Request, store: Store | None, *, on_shape: Callable[[str, str], None] | None
) -> Plan:
    """The plan of a dataset's rows, written if there is a store; `on_shape` is told the rows' shape and the first's place."""
    options = request.plan_options
    # In another order than the rows' own their digest must be taken beforehand, so that a resumed build finds the same.
    digest = None if request.prompts.sort == "input" or store is None else digest_of(rows)
    with closing(blocks_of(tokenize_rows(rows, request.prompts))) as blocks:
        return write_plan(blocks, store, replace(options, prompts_digest=digest, on_shape=on_shape))


def _say_shape(shape: str, source: str) -> None:
    print(f"{source}: a row of shape {shape!r}; every row is read as one", file=sys.stderr)


@contextmanager
def _forgotten_on_error(manifest: Manifest, store: Store, lease: Lease) -> Iterator[None]:
    """Leaves nothing of a dataset whose plan could not be made, unless another build has gone on with the folder."""
    try:
        yield
    except BaseException:
        if manifest.plan is None and not lease.is_lost and load_manifest(store) == manifest:
            _forget_plan(store)
            store.remove(MANIFEST_NAME)
        raise


def _forget_plan(store: Store) -> None:
    store.remove_folder("plan")
    if store.exists(DROPPED_NAME):
        store.remove(DROPPED_NAME)


def _capture_job(
    manifest: Manifest,
    request: Request,
    store: Store,
    storage_options: Mapping[str, Any] | None,
) -> CaptureJob:
    """The job that a dataset's identity asks for, with what of the request is no part of it."""
    identity, plan = manifest.identity, manifest.plan
    about = {
        "format_version": "1",
        "layers": ",".join(map(str, identity.layers)),
        "dtype": identity.stored_dtype,
        "hidden_size": str(identity.hidden_size),
        "model": identity.model,
        "version": hsray.__version__,
        "engine": identity.engine,
    }
    options = EngineOptions(
        model=request.model,
        layers=identity.layers,
        max_tokens=plan.longest_prompt,
        buffer_tokens=max(plan.shard_tokens),
        tensor_parallel=identity.tensor_parallel,
        requests_in_flight=identity.requests_in_flight,
        prefill_tokens=identity.prefill_tokens,
        engine_args=identity.engine_args,
        trust_remote_code=request.prompts.trust_remote_code,
        request_timeout_s=request.request_timeout_s,
    )
    return CaptureJob(
        engine=identity.engine,
        options=options,
        out=store.url,
        storage_options=storage_options,
        schema=shard_schema(
            identity.layers, hidden_size=identity.hidden_size, dtype=identity.stored_dtype, metadata=about
        ),
        stored_dtype=identity.stored_dtype,
        file_format=identity.file_format,
        compression=identity.compression,
        identity_digest=identity.digest,
        skipped=manifest.skipped_places,
        max_attempts=request.max_attempts,
        on_failure=request.on_failure,
    )


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
        truncated=plan.num_truncated,
    )
