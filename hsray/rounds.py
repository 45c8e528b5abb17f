"""Pending shards to engine actors, through Ray Data, until each is published or a prompt is to blame.

Only plan rows and receipts pass through Ray. The states never do: the actor that captured a shard writes and
publishes it, on a writer thread, while it captures the next one. A receipt is yielded after its object is published,
and a task that Ray retries skips what is already there, so a shard is never lost, doubled or made again.

A shard during which the process died `max_attempts` times is set aside, and with it the others that were there each time.
Their prompts are tried one by one; what fails ends the build or is left out; and the shards are made without it.
"""

import uuid
import warnings
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pyarrow as pa

from hsray.attempts import given_up
from hsray.engine import EngineDied, PromptFailed
from hsray.events import Events
from hsray.lease import Lease
from hsray.manifest import Manifest, Skipped, published_shards
from hsray.plan import PlanFile, read_plan_file
from hsray.raydata import ProcessDied, blocks_of
from hsray.report import BuildReport, Receipt, Verdict
from hsray.store import Store
from hsray.tasks import map_batches
from hsray.worker import CaptureJob, CaptureWorker, ProbeWorker

#: Shards that an actor writes at one time, while it captures another: one core writes about 1 GB/s, and a GPU's engine
#: may make more. Without a GPU the cores are the engine's, and it makes less.
GPU_WRITERS, CPU_WRITERS = 2, 1

#: Up to so many shards, each is a task. More share tasks, one after another in each: Ray keeps some kilobytes about a task
#: until the last has ended.
MAX_TASKS = 10_000

#: After which Ray gives a task up: by itself it never would. While a node goes it may send one there ten times.
MOST_RETRIES = 100

#: So many shards that failed, and none that was made, are enough to look at their prompts.
HOPELESS = 3

#: Files of the plan that are read at one time: one that the engines are given shards of, and the next.
PLAN_READERS = 2

#: What the plan takes in memory for a shard, and for each prompt and each token in it, about.
PLAN_ROW_BYTES, PLAN_PROMPT_BYTES, PLAN_TOKEN_BYTES = 50, 40, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The engine actors, as the cluster allows."""

    fewest: int
    most: int
    gpus_each: int
    cpus_each: int
    writers_each: int

    @classmethod
    def of(
        cls,
        nodes: Sequence[tuple[int, int]],
        *,
        tensor_parallel: int,
        engines: int | tuple[int, int] | None,
        num_tasks: int,
    ) -> "Pool":
        """As many actors as were asked for or the GPUs allow, and no more than there are tasks for.

        Args:
            nodes: The GPUs and the CPUs of each.
            tensor_parallel: GPUs of one node that an actor takes, where there are GPUs.
            engines: Actors, or the fewest and the most.
            num_tasks: What there is for them to do.

        Raises:
            ValueError: no node has room for one, and Ray would wait for such a node for ever.
        """
        gpus_each = tensor_parallel if any(gpus for gpus, _ in nodes) else 0
        hosts = [(gpus // gpus_each, cpus) for gpus, cpus in nodes if gpus >= gpus_each] if gpus_each else []
        if gpus_each and not hosts:
            raise ValueError(
                f"tensor_parallel={gpus_each}: no node has so many GPUs; the most that one has is {max(gpus for gpus, _ in nodes)}. "
                "Give a smaller tensor_parallel, or the cluster a larger node"
            )
        if engines is None:
            engines = sum(held for held, _ in hosts) or 1
        fewest, most = (
            min(number, num_tasks) for number in ((engines, engines) if isinstance(engines, int) else engines)
        )
        writers_each = GPU_WRITERS if gpus_each else CPU_WRITERS
        return cls(
            fewest=fewest,
            most=most,
            gpus_each=gpus_each,
            # A node's CPUs must do for as many engines as its GPUs.
            cpus_each=min([writers_each, *(cpus // held for held, cpus in hosts)]),
            writers_each=writers_each,
        )


def nodes_of_cluster() -> list[tuple[int, int]]:
    """The GPUs and the CPUs of each of Ray's nodes."""
    import ray

    return [
        (int(node["Resources"].get("GPU", 0)), int(node["Resources"].get("CPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


class Rounds:
    """The rounds in which a build's shards are made."""

    def __init__(
        self,
        job: CaptureJob,
        manifest: Manifest,
        store: Store,
        lease: Lease,
        report: BuildReport,
        events: Events,
        *,
        engines: int | tuple[int, int] | None,
        progress: bool,
    ):
        self.manifest = manifest
        """The stored one; it says which prompts were left out meanwhile."""
        self._job, self._store, self._lease, self._report, self._engines = job, store, lease, report, engines
        self._events, self._progress = events, progress
        self._digests: dict[int, str] = {}
        self.num_bytes = array("q", bytes(8 * manifest.plan.num_shards))
        """Of the file of each shard that was made, as its writer said; 0 of others. Compact, for millions of them."""

    def capture(self, pending: list[int]) -> dict[int, str]:
        """Has shards made and published; gives their digests.

        Raises:
            PromptFailed: a prompt's states cannot be had, and none may be left out.
            EngineDied: the engines die, and no prompt is to blame.
        """
        from tqdm import tqdm

        num_tokens = sum(self.manifest.plan.shard_tokens[shard] for shard in pending)
        self._num_pending = len(pending)
        with tqdm(
            total=num_tokens, unit="tok", unit_scale=True, desc="hidden states", disable=not self._progress
        ) as self._bar:
            return self._capture(pending)

    def _capture(self, pending: list[int]) -> dict[int, str]:
        while set(pending) - self._digests.keys():
            suspects = self._make(pending)
            if suspects:
                self._leave_out([verdict for verdict in self._probe(list(suspects)) if verdict.failure])
                suspects = self._make(sorted(suspects), apart=True)
            if suspects:
                shard, words = min(suspects.items())
                raise EngineDied(f"shard {shard} cannot be made, though each of its prompts alone can: {words}")
        return self._digests

    def _make(self, pending: Sequence[int], *, apart: bool = False) -> dict[int, str]:
        """Has shards made, as many at one time as may be, or `apart`; gives those that failed, and why.

        A round ends early when an actor has died too often, or has gone with its node. Another follows so long as each
        gets something done. One in which nothing but failures comes is given up, not gone through for every shard.
        """
        failed: dict[int, str] = {}
        self._job = replace(self._job, turn=uuid.uuid4().hex)  # what failed before has as many attempts again
        while waiting := sorted(set(pending) - self._digests.keys() - failed.keys()):
            try:
                with closing(self._rows(CaptureWorker, waiting, apart=apart)) as rows:
                    for row in rows:
                        receipt = Receipt(**row)
                        self._events.receipt(receipt)
                        self._report.retries += receipt.attempt
                        if not receipt.failure:
                            self._count(receipt)
                            continue
                        failed[receipt.shard] = receipt.failure
                        if self._is_hopeless(failed, apart=apart):
                            return failed
            except ProcessDied as error:
                self._events.note("lost", error=str(error))
                if not set(waiting).isdisjoint(self._digests.keys() | failed.keys()):
                    continue
                # What the actors said last may have been lost with the round, though not what is kept outside of it.
                lost = sorted(given_up(self._job.turn, self._job.max_attempts).items())
                for shard, failure in lost[:HOPELESS]:  # of any others the next round says it
                    self._events.note("failed", shard=shard, failure=failure)
                    failed[shard] = failure
                published = set(waiting) & published_shards(self._store, self.manifest.identity.file_format).keys()
                if not published and set(waiting).isdisjoint(failed):
                    raise
                if not published and self._is_hopeless(failed, apart=apart):
                    return failed
        return failed

    def _is_hopeless(self, failed: Mapping[int, str], *, apart: bool) -> bool:
        """Whether nothing but failures comes."""
        return len(failed) >= HOPELESS and not (self._report.new_shards or apart)

    def _count(self, receipt: Receipt) -> None:
        self._report.add(receipt)
        self._digests[receipt.shard], self.num_bytes[receipt.shard] = receipt.digest, receipt.nbytes
        self._bar.start_t = self._report.first_started_at  # the engine's start says nothing of the time left
        self._bar.set_postfix_str(
            f"{self._report.new_shards}/{self._num_pending} shards, {self._report.nbytes / 1e6:,.0f} MB"
            + (f", {self._report.retries} tried again" if self._report.retries else ""),
            refresh=False,
        )
        self._bar.update(receipt.tokens)

    def _probe(self, shards: Sequence[int]) -> list[Verdict]:
        """Tries each prompt of some shards alone; up to the first that fails, where that ends the build."""
        left: dict[int, list[int]] = {}
        for shard in shards:
            left_out = self.manifest.skipped_places.get(shard, ())
            places = set(range(self.manifest.plan.shard_prompts[shard] + len(left_out)))
            left[shard] = sorted(places.difference(left_out))
        verdicts: list[Verdict] = []
        while any(left.values()):
            before = len(verdicts)
            try:
                with closing(self._rows(ProbeWorker, [*left], places=left, apart=True)) as rows:
                    for row in rows:
                        verdicts.append(Verdict(**row))
                        left[row["shard"]].remove(row["place"])
                        if verdicts[-1].failure and self._job.on_failure == "stop":
                            return verdicts
            except ProcessDied as error:
                self._events.note("lost", error=str(error))
                if len(verdicts) == before:
                    raise
        return sorted(verdicts, key=lambda verdict: (verdict.shard, verdict.place))

    def _leave_out(self, bad: Sequence[Verdict]) -> None:
        """Ends the build, or leaves prompts out of the dataset, as was asked for."""
        if not bad:
            return
        if self._job.on_failure == "stop":
            first = bad[0]
            raise PromptFailed.of_stopped(
                f"prompt {first.prompt_id!r} of shard {first.shard}, {first.num_tokens} tokens: {first.failure}"
                + (f" (and {len(bad) - 1} more prompts)" if len(bad) > 1 else "")
            )
        skipped = [
            Skipped(
                shard=verdict.shard,
                place=verdict.place,
                prompt_id=verdict.prompt_id,
                num_tokens=verdict.num_tokens,
                reason=verdict.failure,
            )
            for verdict in bad
        ]
        self.manifest = self.manifest.without(skipped, self._store)
        for item in skipped:
            self._events.drop(**asdict(item))
        self._report.prompts -= len(bad)
        self._report.dropped += len(bad)
        self._report.tokens -= sum(verdict.num_tokens for verdict in bad)
        self._job = replace(self._job, skipped=self.manifest.skipped_places)

    def _rows(
        self,
        worker: type[CaptureWorker],
        shards: Sequence[int],
        *,
        places: Mapping[int, Sequence[int]] | None = None,
        apart: bool,
    ) -> Iterator[dict[str, Any]]:
        """What the actors say of shards, or of prompts at some `places` of each, as soon as they say it."""
        import ray.data
        from ray.util.annotations import RayDeprecationWarning

        num_tasks = len(shards) if places is None else sum(map(len, places.values()))
        pool = Pool.of(
            nodes_of_cluster(),
            tensor_parallel=self.manifest.identity.tensor_parallel,
            engines=self._engines,
            num_tasks=num_tasks,
        )
        options = self._job.options
        options = replace(options, num_buffers=options.shards_in_capture + pool.writers_each)
        job = replace(self._job, options=options)
        # Some capture, others write, and one more stands ready for the engine.
        tasks_each = 1 if apart else options.num_buffers + 1
        files = plan_files_of(self.manifest.plan.files, shards)
        names: list[str] = []
        # It takes next to nothing, and the engines may hold every core; unbounded, it would be a process for each file.
        planned = map_batches(
            ray.data.from_items(files, override_num_blocks=len(files)),
            _read_plan,
            fn_kwargs={"job": job, "places": places},
            batch_size=1,
            num_cpus=0,
            compute=ray.data.TaskPoolStrategy(size=min(PLAN_READERS, len(files))),
        )
        with warnings.catch_warnings():
            # Ray Data 2.60 has no other way yet to bound an actor's restarts and to name it.
            warnings.simplefilter("ignore", RayDeprecationWarning)
            said = planned.map_batches(
                worker,
                fn_constructor_args=(job,),
                batch_size=1,
                batch_format="pyarrow",
                num_cpus=pool.cpus_each,
                num_gpus=pool.gpus_each,
                # A task gives up by itself before Ray does, as does an engine that cannot start (`hsray.attempts`); an actor's
                # deaths may be several shards' doing, and its nodes'.
                max_restarts=4 * job.max_attempts,
                max_task_retries=MOST_RETRIES,
                ray_remote_args_fn=lambda: names.append(f"hsray-{uuid.uuid4().hex}") or {"name": names[-1]},
                compute=ray.data.ActorPoolStrategy(
                    min_size=pool.fewest,
                    max_size=pool.most,
                    max_concurrent_calls_per_actor=tasks_each,
                    enable_true_multi_threading=True,
                    max_tasks_in_flight_per_actor=tasks_each if apart else tasks_each + 2,
                ),
            )
        # A block is a task; of one byte it has one row: one shard, whose receipt comes at once. A death counts against a whole
        # task, so what is under suspicion has one of its own.
        shared = num_tasks > MAX_TASKS and places is None and not apart
        said.context.target_max_block_size = max(1, self._plan_bytes(shards) // MAX_TASKS) if shared else 1
        said.context.execution_options.preserve_order = False
        # Ray would ask for an engine more at 1.75 tasks a slot, which is more than an actor is given, and end one at half a task,
        # which a few short shards bring about: it would end and start engines all the time.
        scaling = said.context.autoscaling_config
        scaling.actor_pool_util_upscaling_threshold, scaling.actor_pool_util_downscaling_threshold = 1.0, -1.0
        with _killed_on_error(names):
            for block in blocks_of(said):
                self._lease.check()
                yield from block.to_pylist()

    def _plan_bytes(self, shards: Sequence[int]) -> int:
        """What some shards' rows of the plan take, about."""
        plan = self.manifest.plan
        return sum(
            PLAN_ROW_BYTES + PLAN_PROMPT_BYTES * plan.shard_prompts[shard] + PLAN_TOKEN_BYTES * plan.shard_tokens[shard]
            for shard in shards
        )


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


def plan_files_of(files: Sequence[PlanFile], pending: Sequence[int]) -> list[dict[str, Any]]:
    """The plan files that hold some shards, each with the numbers of those."""
    waiting = set(pending)
    rows = []
    for file in files:
        shards = [s for s in range(file.first_shard, file.first_shard + file.num_shards) if s in waiting]
        if shards:
            rows.append({**asdict(file), "shards": shards})
    return rows


def _read_plan(batch: pa.Table, *, job: CaptureJob, places: Mapping[int, Sequence[int]] | None) -> Iterator[pa.Table]:
    """The pending rows of a plan file, one by one: one for a shard, or for each of its prompts that is wanted alone."""
    store = Store(job.out, job.storage_options)
    for row in batch.to_pylist():
        file = PlanFile(**{item.name: row[item.name] for item in fields(PlanFile)})
        plan = read_plan_file(store, file)
        for shard in row["shards"]:
            for place in [None] if places is None else places[shard]:
                yield plan.slice(shard - file.first_shard, 1).append_column("place", pa.array([place], pa.int32()))
