"""`check`: whether a dataset is whole, shard by shard, through Ray; and making what is not ready to be built again."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields
from typing import Any

import pyarrow as pa

from hsray.digest import content_digest, value_bytes
from hsray.manifest import Manifest, ManifestError, load_manifest
from hsray.plan import PlanFile, read_plan_file, shard_number
from hsray.raydata import blocks_of, ray_data
from hsray.rounds import plan_files_of
from hsray.shard import ShardError, ShardPrompts, all_finite, state_columns
from hsray.shard_file import ShardFile
from hsray.store import Store
from hsray.tasks import map_batches

#: Shards of a task at the most: each task reads a plan file, of some 70 MB.
TASK_SHARDS = 32

RESULT_SCHEMA = pa.schema([("shard", pa.int32()), ("problem", pa.string())])


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """What a check found."""

    out: str
    shards: int
    """Planned."""
    file_bytes: int
    """Of the shards that were read."""
    deep: bool
    bad_shards: dict[int, str] = field(default_factory=dict)
    """What is wrong with which shard, in order."""
    other_problems: list[str] = field(default_factory=list)
    """With the plan's files, and with files that belong to no shard; no build mends these."""
    removed: list[int] = field(default_factory=list)
    """Of the bad shards: those that were there, and were removed for the next build to make again."""
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the dataset was found whole."""
        return not self.bad_shards and not self.other_problems

    def __str__(self) -> str:
        lines = [*self.bad_shards.values(), *self.other_problems]
        looked = "contents and digests" if self.deep else "contents, without --deep not their digests,"
        lines.append(
            f"{self.out}: {len(self.bad_shards):,} of {self.shards:,} shards are not as they must be ({looked} of "
            f"{self.file_bytes / 1e6:,.1f} MB read in {self.elapsed_s:.1f} s)"
            if not self.ok
            else f"{self.out}: all {self.shards:,} shards are as they must be ({looked} of {self.file_bytes / 1e6:,.1f} MB read "
            f"in {self.elapsed_s:.1f} s)"
        )
        if self.removed:
            lines.append(f"removed {len(self.removed):,} shards; build again, with the same words, to make them anew")
        return "\n".join(lines)


def check(
    out: str,
    *,
    deep: bool = False,
    repair: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> CheckReport:
    """Checks every shard of a dataset: that it is there, its size, schema, ids, tokens and masks, and finite numbers.

    Args:
        out: The dataset's folder, which every node reaches.
        deep: Also digests what the shards hold and compares with the inventory: it finds numbers that changed to others.
        repair: Removes bad shards, so that the next build makes them again.
        storage_options: For the filesystem of `out`; never stored.
        progress: Shows a progress bar.

    Raises:
        ManifestError: `out` holds no dataset, or its manifest is damaged.
        OSError: the filesystem failed, which says nothing about a shard.
    """
    started = time.monotonic()
    store = Store(out, storage_options)
    manifest = load_manifest(store)
    if manifest is None or manifest.plan is None:
        raise ManifestError(f"{store.url!r} holds no dataset with a plan; build it first")
    report = CheckReport(out=store.url, shards=manifest.plan.num_shards, file_bytes=0, deep=deep)
    published = _list_shards(store, manifest, report)
    to_read = sorted(set(published).difference(report.bad_shards))
    report.file_bytes = sum(published[shard] for shard in to_read)
    _read_shards(store, storage_options, manifest, to_read, report, progress)
    report.bad_shards = dict(sorted(report.bad_shards.items()))
    if repair:
        report.removed = sorted(set(published).intersection(report.bad_shards))
        _remove(store, manifest, report)
    report.elapsed_s = time.monotonic() - started
    return report


def _list_shards(store: Store, manifest: Manifest, report: CheckReport) -> dict[int, int]:
    """The planned shards that are there, with their bytes; reports those that are missing or of another size."""
    published = {}
    for name, num_bytes in store.list("shards").items():
        shard = shard_number(name, manifest.identity.file_format)
        if shard is None or shard >= manifest.plan.num_shards:
            report.other_problems.append(f"{store.url}/shards/{name} was not planned; move it away")
        else:
            published[shard] = num_bytes
    for shard in range(manifest.plan.num_shards):
        if shard not in published:
            report.bad_shards[shard] = f"{store.url}/{manifest.shard_name(shard)} is not there"
        elif manifest.shard_file_bytes and published[shard] != manifest.shard_file_bytes[shard]:
            report.bad_shards[shard] = (
                f"{store.url}/{manifest.shard_name(shard)} has {published[shard]} bytes; the inventory says "
                f"{manifest.shard_file_bytes[shard]}"
            )
    return published


def _read_shards(
    store: Store,
    storage_options: Mapping[str, Any] | None,
    manifest: Manifest,
    shards: list[int],
    report: CheckReport,
    progress: bool,
) -> None:
    """Reads shards on the cluster's cores and reports what is wrong with them."""
    import ray
    import ray.data
    from tqdm import tqdm

    if not shards:
        return
    with ray_data():
        each = max(1, min(TASK_SHARDS, len(shards) // (4 * int(ray.cluster_resources().get("CPU", 1)))))
        tasks = [
            {**row, "shards": row["shards"][start : start + each]}
            for row in plan_files_of(manifest.plan.files, shards)
            for start in range(0, len(row["shards"]), each)
        ]
        job = {"out": store.url, "storage_options": storage_options, "manifest": manifest, "deep": report.deep}
        rows = ray.data.from_items(tasks, override_num_blocks=len(tasks))
        results = map_batches(rows, _check_task, fn_kwargs=job, batch_size=1)
        with (
            closing(blocks_of(results)) as blocks,
            tqdm(total=len(shards), unit="shard", desc="check", disable=not progress) as bar,
        ):
            for row in (row for block in blocks for row in block.to_pylist()):
                if row["shard"] is None:
                    report.other_problems.append(row["problem"])
                    continue
                bar.update()
                if row["problem"]:
                    report.bad_shards[row["shard"]] = row["problem"]


def _check_task(
    batch: pa.Table, *, out: str, storage_options: Mapping[str, Any] | None, manifest: Manifest, deep: bool
) -> Iterator[pa.Table]:
    """A row for each shard of some rows of tasks: its number, and what is wrong with it, or null."""
    store, skipped = Store(out, storage_options), manifest.skipped_places
    for task in batch.to_pylist():
        file = PlanFile(**{item.name: task[item.name] for item in fields(PlanFile)})
        try:
            plan = read_plan_file(store, file)
        except ValueError as error:
            rows = [{"shard": None, "problem": f"{error} ({len(task['shards'])} shards were not checked)"}]
        else:
            rows = []
            for shard in task["shards"]:
                prompts = ShardPrompts.from_plan(plan, shard - file.first_shard).without(skipped.get(shard, ()))
                rows.append({"shard": shard, "problem": shard_problem(store, manifest, shard, prompts, deep)})
        yield pa.Table.from_pylist(rows, schema=RESULT_SCHEMA)


def shard_problem(store: Store, manifest: Manifest, shard: int, prompts: ShardPrompts, deep: bool) -> str | None:
    """What is wrong with a published shard, if anything: it should hold `prompts`, finite states, and its own digest."""
    try:
        file = ShardFile(store, manifest.expected(shard))
    except (ShardError, FileNotFoundError) as error:
        return str(error)
    with closing(file):
        try:
            _check_prompts(file, prompts)
            stored = manifest.identity.stored_dtype
            for layer in manifest.identity.layers:
                numbers, *scales = state_columns(layer, stored)
                parts = [(value_bytes(chunk), stored) for chunk in file.column(numbers).chunks]
                for chunk in (chunk for name in scales for chunk in file.column(name).chunks):
                    parts.append((chunk.flatten().to_numpy(), "float32"))
                if not all(all_finite(values, dtype) for values, dtype in parts):
                    return f"{file.url}, layer {layer!r}: NaN or infinite numbers"
            if (
                deep
                and (found := content_digest((name, file.column(name)) for name in file.schema.names)) != file.digest
            ):
                return f"{file.url}: its content's digest is {found}; {file.digest} wanted"
        except ShardError as error:
            return str(error)
    return None


def _check_prompts(file: ShardFile, prompts: ShardPrompts) -> None:
    planned = {
        "prompt_id": prompts.prompt_ids,
        "num_tokens": pa.array(prompts.lengths),
        "input_ids": prompts.input_ids,
        "loss_mask": prompts.loss_masks,
    }
    for name, wanted in planned.items():
        found = file.column(name)
        if not found.equals(pa.chunked_array([wanted.cast(found.type)])):
            raise ShardError(f"{file.url}, column {name!r}: not what the plan says")


def _remove(store: Store, manifest: Manifest, report: CheckReport) -> None:
    """Removes bad shards, once the manifest says that the dataset is not complete."""
    if report.bad_shards and manifest.state == "complete":
        manifest.reopened().save(store)
    for shard in report.removed:
        store.remove(manifest.shard_name(shard))
