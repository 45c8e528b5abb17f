"""`convert`: a dataset in another container or compression, shard by shard, through Ray.

The copy is a dataset of its own, with the same plan, and the same contents: each shard's digest is taken again of what is
written, and must be the one that it had. What a converted shard is called follows from the plan, so that saying the same
again makes what is missing.
"""

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from hsray.manifest import (
    Manifest,
    ManifestError,
    check_identity,
    check_shards,
    complete,
    load_complete,
    load_manifest,
    pending_shards,
    published_shards,
)
from hsray.plan import DROPPED_NAME
from hsray.raydata import blocks_of, ray_data
from hsray.shard import FileFormat, ShardError, codec, digested, stamped, write_table
from hsray.shard_file import ShardFile
from hsray.store import Store
from hsray.tasks import map_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did."""

    to: str
    shards: int
    new_shards: int
    """Written by this call; the others were there already."""
    nbytes: int
    """Of all shard files, and before:"""
    nbytes_before: int

    def __str__(self) -> str:
        return (
            f"{self.to}: {self.shards:,} shards, {self.new_shards:,} of them written in this run; "
            f"{self.nbytes / 1e6:,.1f} MB, {self.nbytes / max(1, self.nbytes_before):.2f} of what they were; contents as before"
        )


def convert(
    out: str | os.PathLike[str],
    *,
    to: str | os.PathLike[str],
    file_format: FileFormat = "parquet",
    compression: str = "none",
    storage_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> ConvertReport:
    """Writes a complete dataset again in another container or compression, or resumes doing so.

    Args:
        out: The dataset's folder.
        to: The folder for the copy, on any fsspec target that every node reaches; new, or one begun by the same conversion.
        file_format: Of the copy's shards: ``"parquet"`` or ``"arrow"``.
        compression: Of Parquet shards: ``"none"``, or ``"zstd:1"`` (any level up to 22).
        storage_options: For the filesystem of `out` and `to`; never stored.
        progress: Shows a progress bar.

    Raises:
        ManifestError: `out` holds no complete dataset, or `to` something else.
        ShardError: a shard is damaged, or its content is not what its digest says.
    """
    codec(compression, file_format)
    source, target = Store(out, storage_options), Store(to, storage_options)
    if target.is_private:
        raise ValueError(f"to={target.url!r} is memory of this process alone; give a folder, or an object store")
    before = load_complete(source, purpose="convert")
    after = replace(
        before.reopened(), identity=replace(before.identity, file_format=file_format, compression=compression)
    )
    _begin(before, after, source, target)
    published = published_shards(target, file_format)
    digests = check_shards(after, published, target, receipts={})
    pending = pending_shards(after.plan, published)
    job = {"out": source.url, "to": target.url, "storage_options": storage_options, "before": before, "after": after}
    digests |= _write(job, pending, progress)
    changed = [shard for shard, digest in digests.items() if digest != before.shard_digests[shard]]
    if changed:
        raise ManifestError(f"{target.url!r}: the contents of shards {changed[:8]} are others; give a new to=")
    for folder in ("", "plan", "shards"):
        target.sweep(folder)
    done = complete(after, target, digests)
    return ConvertReport(
        to=target.url,
        shards=after.plan.num_shards,
        new_shards=len(pending),
        nbytes=sum(done.shard_file_bytes),
        nbytes_before=sum(before.shard_file_bytes),
    )


def _begin(before: Manifest, after: Manifest, source: Store, target: Store) -> None:
    """Gives a new folder the plan; checks that of one that was begun."""
    found = load_manifest(target)
    if found is not None:
        check_identity(found.identity, after.identity, target)
        if found.plan is not None:
            return
    replace(after, state="planning", plan=None).save(target)
    names = [file.name for file in before.plan.files]
    for name in [*names, DROPPED_NAME] if before.plan.num_dropped else names:
        target.publish(name, source.read(name))
    after.save(target)


def _write(job: Mapping[str, Any], pending: list[int], progress: bool) -> dict[int, str]:
    """Writes the pending shards, one a task; gives their digests."""
    import ray.data
    from tqdm import tqdm

    if not pending:
        return {}
    digests = {}
    with ray_data():
        rows = [{"shard": shard} for shard in pending]
        shards = ray.data.from_items(rows, override_num_blocks=len(rows))
        receipts = map_batches(shards, _convert_shard, fn_kwargs=job, batch_size=1, num_cpus=1)
        with (
            closing(blocks_of(receipts)) as blocks,
            tqdm(total=len(pending), unit="shard", desc="convert", disable=not progress) as bar,
        ):
            for receipt in (row for block in blocks for row in block.to_pylist()):
                digests[receipt["shard"]] = receipt["digest"]
                bar.update()
    return digests


def _convert_shard(
    batch: pa.Table,
    *,
    out: str,
    to: str,
    storage_options: Mapping[str, Any] | None,
    before: Manifest,
    after: Manifest,
) -> pa.Table:
    [shard] = batch["shard"].to_pylist()
    with closing(ShardFile(Store(out, storage_options), before.expected(shard))) as file:
        schema = stamped(file.schema, shard=shard, identity_digest=after.identity.digest)
        groups = [file.read(group, file.schema.names).select(file.schema.names) for group in range(file.num_groups)]
        table = digested(pa.concat_tables(groups).cast(schema))
        digest = table.schema.metadata[b"hsray.digest"].decode()
        if digest != file.digest:
            raise ShardError(
                f"{file.url}: its content's digest is {digest}; {file.digest} wanted: check, and build again"
            )
        with Store(to, storage_options).staged(after.shard_name(shard)) as sink:
            write_table(table, sink, compression=after.identity.compression, file_format=after.identity.file_format)
    return pa.table({"shard": [shard], "digest": [digest]})
