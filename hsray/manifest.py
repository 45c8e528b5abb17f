"""What a dataset is, whether a request is the same dataset, and what of it is still missing.

``manifest.json`` is published before anything else and names the dataset's identity; its state goes from
``planning`` (the plan is being written) through ``building`` to ``complete`` (every shard is there, with its bytes and
its digest).
It holds no time and no random name, so the same build always ends with the same bytes.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal, get_args

from hsray.float8 import FLOAT8
from hsray.layers import resolve_layers
from hsray.model import DTYPE_BYTES
from hsray.plan import Plan, PlanFile, list_dropped, read_plan_file, shard_name, shard_number, shard_stem
from hsray.shard import FileFormat, ShardPrompts
from hsray.shard_file import ExpectedShard, check_shard
from hsray.store import Store

NAME = "manifest.json"

#: Beside it while a build runs; see `hsray.lease`.
LEASE_NAME = "lease.json"

#: Footers read at a time; on an object store each is a round trip.
CHECK_THREADS = 16

#: Names of a power of ten of shards begin alike.
LISTED_TOGETHER = 10_000

#: Of the shards that receipts vouch for, so many footers are read all the same: every one, up to that number.
VOUCHED_READ = 1000

FORMAT_VERSION = 3

#: No count of a manifest reaches this; its bytes then fit 64 bits.
MAX_COUNT = 1 << 48


class ManifestError(ValueError):
    """The folder holds another dataset, none, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes a dataset this one. Two builds with equal identities make the same files.

    (But for the last bits where several requests are in flight: which of them share a pass is a matter of timing.)
    """

    model: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    num_layers: int
    hidden_size: int
    layers: tuple[int | str, ...]
    dtype: str
    """What the engine computes in."""
    stored_dtype: str
    """The same, or ``"float8_e4m3"``."""
    engine: str
    engine_args: Mapping[str, Any]
    tensor_parallel: int
    requests_in_flight: int
    prefill_tokens: int
    shard_bytes: int
    file_format: str
    compression: str
    max_tokens: int
    too_long: str
    prompt_options: Mapping[str, Any]
    """The other keywords that decide what becomes of a row; the chat template is in `tokenizer_digest`."""
    prompts_digest: str | None
    """None until the plan is written."""
    plan_digest: str | None

    def __post_init__(self) -> None:
        # As they read back from JSON, so that asking in the same words finds the same identity.
        for name in ("engine_args", "prompt_options"):
            try:
                object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))
            except TypeError as error:
                raise ValueError(f"{name}={getattr(self, name)!r} must be what JSON can hold: {error}") from error

    @property
    def read_dtype(self) -> str:
        """What a reader is given unless it asks for another."""
        return "bfloat16" if self.stored_dtype == FLOAT8 else self.stored_dtype

    @property
    def digest(self) -> str:
        """SHA-256 over all of it; each shard carries it, so that none passes for another dataset's."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A planned prompt that was left out since its states cannot be had."""

    shard: int
    place: int
    """Which of the shard's prompts, as planned, from 0."""
    prompt_id: str
    num_tokens: int
    reason: str
    """In the engine's own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of ``manifest.json``."""

    state: Literal["planning", "building", "complete"]
    identity: Identity
    plan: Plan | None = None
    """Its counts are without what was `skipped`; its files, and the identity, are as planned."""
    skipped: tuple[Skipped, ...] = ()
    """In the plan's order."""
    shard_file_bytes: tuple[int, ...] | None = None
    """Of each shard's file; None until complete."""
    shard_digests: tuple[str, ...] | None = None
    """Of what each shard holds (`hsray.digest`); None until complete."""

    def with_plan(self, plan: Plan) -> "Manifest":
        """The manifest once the plan is written."""
        identity = replace(self.identity, prompts_digest=plan.prompts_digest, plan_digest=plan.digest)
        return replace(self, state="building", identity=identity, plan=plan)

    @property
    def skipped_places(self) -> dict[int, tuple[int, ...]]:
        """Of the shards that lack some of the planned prompts: which."""
        places: dict[int, tuple[int, ...]] = {}
        for item in self.skipped:
            places[item.shard] = (*places.get(item.shard, ()), item.place)
        return places

    def without(self, skipped: Sequence[Skipped], store: Store) -> "Manifest":
        """The manifest of a dataset that more prompts are left out of, published, and the prompts listed before.

        From here on a resumed build leaves out the same, whatever the engine does with them then.
        """
        prompts, tokens = list(self.plan.shard_prompts), list(self.plan.shard_tokens)
        for item in skipped:
            prompts[item.shard] -= 1
            tokens[item.shard] -= item.num_tokens
        plan = replace(
            self.plan,
            shard_prompts=tuple(prompts),
            shard_tokens=tuple(tokens),
            num_dropped=self.plan.num_dropped + len(skipped),
        )
        every = sorted((*self.skipped, *skipped), key=lambda item: (item.shard, item.place))
        fewer = replace(self, plan=plan, skipped=tuple(every))
        list_dropped(
            store, [(self.shard_name(item.shard), item.prompt_id, item.num_tokens, item.reason) for item in every]
        )
        fewer.save(store)
        return fewer

    def reopened(self) -> "Manifest":
        """The manifest of a dataset of which shards are to be made again."""
        return replace(self, state="building", shard_file_bytes=None, shard_digests=None)

    def expected(self, shard: int) -> ExpectedShard:
        """What a planned shard must be."""
        return ExpectedShard(
            shard=shard,
            identity_digest=self.identity.digest,
            layers=self.identity.layers,
            hidden_size=self.identity.hidden_size,
            dtype=self.identity.stored_dtype,
            file_format=self.identity.file_format,
            num_prompts=self.plan.shard_prompts[shard],
            num_tokens=self.plan.shard_tokens[shard],
            digest=None if self.shard_digests is None else self.shard_digests[shard],
        )

    def shard_name(self, shard: int) -> str:
        """The object that holds a shard."""
        return shard_name(shard, self.identity.file_format)

    def save(self, store: Store) -> None:
        """Publishes the manifest."""
        content = {"format": "hsray", "format_version": FORMAT_VERSION, **asdict(self)}
        store.publish(NAME, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def load_manifest(store: Store) -> Manifest | None:
    """Reads the manifest of a folder; None where the folder is empty or absent.

    Raises:
        ManifestError: the folder holds something else, or the manifest is damaged or of another version.
    """
    try:
        text = store.read(NAME)
    except NotADirectoryError:
        raise ManifestError(f"{store.url!r} is a file; give an out= that is a folder, or new") from None
    except FileNotFoundError:
        names = sorted(set(store.list()) - {LEASE_NAME})
        if names:
            raise ManifestError(
                f"{store.url!r} is not empty and holds no {NAME} (found {', '.join(names[:5])}); give an out= that is "
                "empty, new, or an hsray dataset"
            ) from None
        return None
    try:
        content = json.loads(text)
        version = content["format_version"]
        manifest = _parse(content) if version == FORMAT_VERSION else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(
            f"{store.url}/{NAME} is damaged ({type(error).__name__}: {error}); restore it, or build to another out="
        ) from error
    if manifest is None:
        raise ManifestError(
            f"{store.url!r} is a dataset of format version {version!r}, and this hsray's is {FORMAT_VERSION}: read it with the "
            "hsray that made it, or build anew in another folder"
        )
    return manifest


def load_complete(store: Store, *, purpose: str) -> Manifest:
    """The manifest of a dataset that is whole: complete, and its shards there with the inventory's bytes.

    Raises:
        ManifestError: it is not; `purpose` is the verb for what was wanted of it.
    """
    manifest = load_manifest(store)
    if manifest is None or manifest.state != "complete":
        raise ManifestError(f"{store.url!r} holds no complete dataset; build it to its end, then {purpose} it")
    check_inventory(manifest, published_shards(store, manifest.identity.file_format), store)
    return manifest


def planned_prompts(manifest: Manifest, store: Store, shards: Collection[int] | None = None) -> Iterator[ShardPrompts]:
    """The prompts of each shard (of `shards` alone, if given) in the plan's order, without those that were skipped.

    Of the plan, one file at a time is held.
    """
    skipped = manifest.skipped_places
    for file in manifest.plan.files:
        numbers = range(file.first_shard, file.first_shard + file.num_shards)
        wanted = [shard for shard in numbers if shards is None or shard in shards]
        table = read_plan_file(store, file) if wanted else None
        for shard in wanted:
            yield ShardPrompts.from_plan(table, shard - file.first_shard).without(skipped.get(shard, ()))


def check_identity(stored: Identity, wanted: Identity, store: Store) -> None:
    """Raises ManifestError, with both sides of each difference, unless a request is the stored dataset's."""
    differences = identity_differences(stored, wanted)
    if differences:
        raise ManifestError(
            f"{store.url!r} holds another dataset than the one asked for:\n" + "\n".join(differences) + "\n"
            "Ask for the same to resume it, or give another out="
        )


def identity_differences(stored: Identity, wanted: Identity) -> list[str]:
    """A line for each difference; what the request does not know yet (the plan) is not compared."""
    pairs = {item.name: (getattr(stored, item.name), getattr(wanted, item.name)) for item in fields(Identity)}
    there, here = pairs.pop("prompt_options")  # each is a keyword of its own to whoever asks
    pairs |= {name: (there.get(name), here.get(name)) for name in sorted({*there, *here})}
    return [
        f"  {name}: the dataset has {there!r}, this build asks for {here!r}"
        for name, (there, here) in pairs.items()
        if here is not None and there is not None and there != here
    ]


def published_shards(store: Store, file_format: str, *, num_planned: int = 0) -> dict[int, int]:
    """The shards that are there: number -> file bytes.

    Args:
        num_planned: How many there are at most, if that is known: very many are listed faster then, by their names; a file of
            another name may not be seen.

    Raises:
        ManifestError: ``shards/`` holds a file that is no shard.
    """
    shards = {}
    if num_planned > LISTED_TOGETHER:
        firsts = range(0, num_planned, LISTED_TOGETHER)
        digits = len(str(LISTED_TOGETHER)) - 1
        found = store.list_prefixes("shards", [shard_stem(first)[:-digits] for first in firsts])
    else:
        found = store.list("shards")
    for name, num_bytes in found.items():
        shard = shard_number(name, file_format)
        if shard is None:
            raise ManifestError(f"{store.url}/shards/{name} is not of this dataset; move it away")
        if not num_bytes:
            raise ManifestError(f"{store.url}/shards/{name} is empty; remove it, and build again to restore it")
        shards[shard] = num_bytes
    return shards


def check_inventory(manifest: Manifest, published: Mapping[int, int], store: Store) -> None:
    """Raises ManifestError unless a complete dataset's shards are all there, with the bytes of its inventory."""
    if manifest.state != "complete":
        return
    for shard, num_bytes in enumerate(manifest.shard_file_bytes):
        if published.get(shard) != num_bytes:
            raise ManifestError(
                f"{store.url}/{manifest.shard_name(shard)} is {published.get(shard, 'not there')}{' bytes' * (shard in published)}; "
                f"the inventory says {num_bytes} bytes: remove it if it is there, and build again to restore it"
            )


def pending_shards(plan: Plan, published: Iterable[int]) -> list[int]:
    """The planned shards that are not published, in order."""
    return sorted(set(range(plan.num_shards)).difference(published))


def check_shards(
    manifest: Manifest, published: Mapping[int, int], store: Store, *, receipts: Mapping[int, tuple[int, str]]
) -> dict[int, str]:
    """The digests of the published shards: number -> digest.

    A shard's footer is read, unless a receipt of an earlier run vouches for a file of its size; of those, some are read.

    Args:
        published: Number -> file bytes.
        receipts: Number -> (file bytes, digest), as `hsray.events.receipts` gives them.

    Raises:
        ManifestError: some were not planned.
        ShardError: one is not this dataset's, or has other prompts. Its name alone would let another's pass for it.
    """
    plan, shards = manifest.plan, sorted(published)
    extra = [manifest.shard_name(shard) for shard in shards if shard >= plan.num_shards]
    if extra:
        raise ManifestError(
            f"{store.url!r} holds {len(extra)} shards that were not planned ({', '.join(extra[:3])}); the plan has "
            f"{plan.num_shards}: move them away"
        )
    digests = {
        shard: receipts[shard][1] for shard in shards if shard in receipts and receipts[shard][0] == published[shard]
    }
    sample = set(list(digests)[:: max(1, -(-len(digests) // VOUCHED_READ))])

    def read(some: Iterable[int]) -> dict[int, str]:
        some = list(some)
        with ThreadPoolExecutor(CHECK_THREADS) as threads:
            found = threads.map(lambda shard: check_shard(store, manifest.expected(shard)), some)
            return dict(zip(some, found, strict=True))

    found = read(shard for shard in shards if shard in sample or shard not in digests)
    if any(found[shard] != digests[shard] for shard in sample):  # then no receipt is to be trusted
        found |= read(shard for shard in digests if shard not in sample)
    return digests | found


def complete(
    manifest: Manifest, store: Store, digests: Mapping[int, str], *, num_bytes: Sequence[int] = ()
) -> Manifest:
    """Publishes the complete manifest, with the inventory, once every planned shard is there.

    Args:
        digests: Of what each shard holds, by number.
        num_bytes: Of each shard's file, as its writer said; 0 where nobody did.

    Raises:
        ManifestError: a shard is missing or has another size, or one is there that was not planned, or another build has
            taken the folder.
    """
    current = load_manifest(store)
    if current is not None and current.identity != manifest.identity:
        raise ManifestError(
            f"{store.url!r}: another build has begun a dataset there meanwhile; give one of the two another out, and "
            "build again"
        )
    published = published_shards(store, manifest.identity.file_format)
    missing = pending_shards(manifest.plan, published)
    extra = sorted(set(published).difference(range(manifest.plan.num_shards)))
    if missing or extra:
        raise ManifestError(
            f"{store.url!r}: {len(missing)} planned shards are missing ({[manifest.shard_name(s) for s in missing[:3]]}), "
            f"{len(extra)} were not planned ({[manifest.shard_name(s) for s in extra[:3]]}); build again, and move the latter away"
        )
    for shard, said in enumerate(num_bytes):
        if said and published[shard] != said:
            raise ManifestError(
                f"{store.url}/{manifest.shard_name(shard)} is {published[shard]} bytes, and was {said} when it was published: "
                "something else has changed it; remove it, and build again to make it anew"
            )
    done = replace(
        manifest,
        state="complete",
        shard_file_bytes=tuple(published[shard] for shard in range(len(published))),
        shard_digests=tuple(digests[shard] for shard in range(len(published))),
    )
    done.save(store)
    return done


def _parse(content: dict[str, Any]) -> Manifest:
    if content["format"] != "hsray":
        raise ValueError(f"format {content['format']!r}, wanted 'hsray'")
    if content["state"] not in ("planning", "building", "complete"):
        raise ValueError(f"state {content['state']!r}")
    identity = dict(content["identity"])
    if not isinstance(identity["layers"], list):
        raise ValueError("its layers are no list")
    missing = [
        name for name, value in identity.items() if value is None and name not in ("prompts_digest", "plan_digest")
    ]
    if missing:
        raise ValueError(f"its identity has no {', '.join(missing)}")
    identity["layers"] = tuple(identity["layers"])
    if identity["file_format"] not in get_args(FileFormat):
        raise ValueError(f"its file_format is {identity['file_format']!r}")
    if identity["stored_dtype"] not in (identity["dtype"], FLOAT8):
        raise ValueError(f"its stored_dtype is {identity['stored_dtype']!r}")
    if identity["dtype"] not in DTYPE_BYTES or not _are_counts([identity["hidden_size"], identity["num_layers"]]):
        raise ValueError("its dtype is not known, or its model has no size")
    if resolve_layers(identity["layers"], num_layers=identity["num_layers"]) != identity["layers"]:
        raise ValueError("its layers are not in order")
    plan = _parse_plan(content["plan"]) if content["plan"] is not None else None
    sizes, digests = content["shard_file_bytes"], content["shard_digests"]
    manifest = Manifest(
        state=content["state"],
        identity=Identity(**identity),
        plan=plan,
        skipped=tuple(Skipped(**item) for item in content["skipped"]),
        shard_file_bytes=tuple(sizes) if sizes is not None else None,
        shard_digests=tuple(digests) if digests is not None else None,
    )
    if manifest.state != "planning" and (plan is None or plan.digest != manifest.identity.plan_digest):
        raise ValueError("its plan is not the one its identity names")
    counts = [count for item in manifest.skipped for count in (item.shard, item.place, item.num_tokens)]
    if not _are_counts(counts) or any(item.shard >= plan.num_shards for item in manifest.skipped):
        raise ValueError("it leaves out prompts of shards that were not planned")
    if plan is not None and sum(plan.shard_prompts) + len(manifest.skipped) != sum(plan.length_histogram):
        raise ValueError("its plan's counts of prompts do not agree")
    if manifest.state == "complete":
        if not (_are_counts(sizes) and _are_texts(digests) and len(sizes) == len(digests) == plan.num_shards):
            raise ValueError("it is complete without an inventory of every shard")
    elif sizes is not None or digests is not None:
        raise ValueError("it has an inventory of shards before it is complete")
    return manifest


def _parse_plan(content: dict[str, Any]) -> Plan:
    values = dict(content)
    values["files"] = tuple(PlanFile(**file) for file in values["files"])
    for name in ("shard_prompts", "shard_tokens", "length_histogram"):
        values[name] = tuple(values[name])
    plan = Plan(**values)
    if not all(_are_counts(content[name]) for name in ("shard_prompts", "shard_tokens", "length_histogram")):
        raise ValueError("its plan's counts are no counts")
    if [file.name for file in plan.files] != [f"plan/{number:06d}.parquet" for number in range(len(plan.files))]:
        raise ValueError("its plan's files have other names than a plan's")
    first_shards = [0, *accumulate(file.num_shards for file in plan.files)]
    if len(plan.shard_prompts) != plan.num_shards or first_shards != [
        *(f.first_shard for f in plan.files),
        plan.num_shards,
    ]:
        raise ValueError("its plan's counts do not agree")
    for prompts, tokens in zip(plan.shard_prompts, plan.shard_tokens, strict=True):
        if prompts > tokens or (tokens and not prompts):
            raise ValueError(f"its plan has a shard of {prompts} prompts and {tokens} tokens")
    return plan


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_COUNT for value in values)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
