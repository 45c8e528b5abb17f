"""Measures how long a resumed build looks at what is there before it goes on, with very many shards, of a token each.

The shards and the log are as a build leaves them that was killed before its end; nothing is computed. On an object store the
making takes far longer than what is measured.

    python pipelines/bench_resume.py --shards 100000
    python pipelines/bench_resume.py --shards 100000 --out s3://bucket/x --storage-options '{"endpoint_url": "http://127.0.0.1:5000"}'
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from random_dataset import plan_random_dataset, publish_shard, receipt_of
from rich.console import Console
from rich.progress import track

from hsray.events import Events
from hsray.flags import parse_object
from hsray.manifest import load_manifest, pending_shards, planned_prompts, published_shards
from hsray.pipeline import made_before
from hsray.store import Store

NUM_THREADS = 8


def make(store: Store, num_shards: int) -> None:
    """A dataset of which all shards but the last are published."""
    manifest = plan_random_dataset(
        store, lengths=[1] * num_shards, layers=[0], num_layers=2, hidden_size=8, shard_bytes=1
    )
    unfinished = list(planned_prompts(manifest, store))[:-1]
    state = {0: torch.zeros(1, 8, dtype=torch.bfloat16)}
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        published = threads.map(lambda prompts: publish_shard(store, manifest, prompts, state), unfinished)
        digests = list(track(published, description="making shards", total=len(unfinished)))
    num_bytes = published_shards(store, manifest.identity.file_format)
    with Events(store, identity_digest=manifest.identity.digest, shards_left=num_shards) as events:
        for shard, digest in enumerate(digests):
            events.receipt(receipt_of(shard, num_bytes[shard], digest))


def main() -> int:
    """Makes the dataset, looks at it, prints the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument("--out", help="an empty folder (default: a temporary one)")
    parser.add_argument("--storage-options", type=parse_object, metavar="JSON", help="as for build.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsray-bench-") as folder:
        out = arguments.out or folder
        make(Store(out, arguments.storage_options), arguments.shards)
        store = Store(out, arguments.storage_options)
        started = time.monotonic()
        manifest = load_manifest(store)
        made = made_before(manifest, store)
        pending = pending_shards(manifest.plan, made)
        elapsed_s = time.monotonic() - started
    assert pending == [arguments.shards - 1]
    Console().print(f"{len(made):,} shards found in {elapsed_s:.1f} s, {1e6 * elapsed_s / len(made):.0f} us each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
