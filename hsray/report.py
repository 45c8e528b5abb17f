"""What an actor says of a shard it published, and what a build says when it is done."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hsray.float8 import Rounding
from hsray.layers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What an actor says of a published shard."""

    shard: int
    prompts: int
    tokens: int
    host: str
    """The machine that made it, and"""
    pid: int
    """the actor's process there."""
    engine_start_s: float
    """How long the actor's engine took to start, of which"""
    load_s: float
    """loading the model, and"""
    first_request_s: float
    """its first request."""
    started_at: float
    """Unix time at which the shard's capture began."""
    published_at: float
    """Unix time at which the shard was published."""
    attempt: int = 0
    """How often the shard was tried before, in vain: the process died."""
    earlier: str = ""
    """What the engine said of the last such time, if it could."""
    failure: str = ""
    """Why there is no such shard; empty if it was published."""
    captured: bool = False
    """False if the shard was there already, so that nothing was computed."""
    nbytes: int = 0
    """Of the file; 0 if it was there already."""
    digest: str = ""
    """Of what it holds (`hsray.digest`)."""
    rounding: str = "{}"
    """What storing it in eight bits did, of each layer, as the file says it (`hsray.float8.Rounding`)."""
    wait_s: float = 0.0
    """The engine's, for a writer to give memory back."""
    capture_s: float = 0.0
    check_s: float = 0.0
    """Beside the capture of other shards, as are the next two: looking for numbers that are not finite, and the digest."""
    write_s: float = 0.0
    """Making the Parquet file."""
    publish_s: float = 0.0
    """Synchronising or sending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an actor says of a prompt that it tried alone."""

    shard: int
    place: int
    """Which of the shard's prompts, as planned, from 0."""
    prompt_id: str
    num_tokens: int
    failure: str
    """In the engine's own words; empty if its states can be had."""


#: What an engine does, and what its writers do beside it: the parts of a shard's time, each a `Receipt`'s ``.._s``.
ENGINE_PARTS, WRITER_PARTS = ("capture", "wait"), ("check", "write", "publish")


@dataclass(slots=True, kw_only=True)
class BuildReport:
    """What a build did, and what the dataset holds."""

    out: str
    layers: tuple[Layer, ...]
    prompts: int
    tokens: int
    shards: int
    nbytes: int
    """Of all shard files."""
    dropped: int
    """Prompts left out by an explicit policy; listed in ``dropped.parquet`` with their reasons."""
    truncated: int
    """Prompts cut by ``too_long="truncate"``."""
    new_shards: int = 0
    """Captured by this call; the others were there already."""
    new_tokens: int = 0
    retries: int = 0
    """Attempts at shards that ended in vain, with the engine's process; ``events.jsonl`` has their shards."""
    elapsed_s: float = 0.0
    plan_s: float = 0.0
    """Reading and tokenising the prompts, or comparing them with the plan."""
    engine_start_s: float = 0.0
    """Of the slowest engine, of which"""
    load_s: float = 0.0
    """loading the model, and"""
    first_request_s: float = 0.0
    """its first request."""
    first_started_at: float = float("inf")
    """Unix time at which the first new shard's capture began."""
    last_published_at: float = float("-inf")
    """Unix time at which the last new shard was published."""
    rounding: dict[str, Rounding] = field(default_factory=dict)
    """Of new shards in float8_e4m3, by layer: what that did to the states."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of `ENGINE_PARTS` and `WRITER_PARTS`, summed over engines."""

    def add(self, receipt: Receipt) -> None:
        """Counts one more shard."""
        self.nbytes += receipt.nbytes
        if receipt.engine_start_s > self.engine_start_s:
            self.engine_start_s = receipt.engine_start_s
            self.load_s, self.first_request_s = receipt.load_s, receipt.first_request_s
        self.first_started_at = min(self.first_started_at, receipt.started_at)
        self.last_published_at = max(self.last_published_at, receipt.published_at)
        if receipt.captured:
            self.new_shards += 1
            self.new_tokens += receipt.tokens
        for layer, values in json.loads(receipt.rounding).items():
            self.rounding.setdefault(layer, Rounding()).add(Rounding(**values))
        for name in (*ENGINE_PARTS, *WRITER_PARTS):
            self.seconds[name] = self.seconds.get(name, 0.0) + getattr(receipt, f"{name}_s")

    @property
    def capture_wall_s(self) -> float:
        """From the begin of the first new shard to the publication of the last; 0 where there was none."""
        return max(0.0, self.last_published_at - self.first_started_at)

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, engine start apart; 0 where nothing was captured."""
        return self.new_tokens / self.capture_wall_s if self.capture_wall_s else 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.out}: {self.prompts:,} prompts, {self.tokens:,} tokens, {self.shards:,} shards, "
            f"{self.nbytes / 1e6:,.1f} MB; layers {', '.join(map(str, self.layers))}"
        ]
        if self.dropped:
            lines.append(f"{self.dropped:,} prompts dropped, listed in dropped.parquet")
        if self.truncated:
            lines.append(f"{self.truncated:,} prompts cut to the longest allowed")
        if not self.new_shards:
            return "\n".join([*lines, "nothing was left to build: no engine was opened"])
        lines.append(
            f"{self.new_shards:,} shards captured in this run: {self.new_tokens:,} tokens at {self.tokens_per_s:,.0f} tokens/s"
        )
        if self.retries:
            lines.append(
                f"engines' deaths ended {self.retries:,} attempts at shards, which were made again; events.jsonl says which"
            )
        for layer, rounding in self.rounding.items():
            lines.append(
                f"layer {layer} in eight bits: off by {rounding.mean:.2%} of a token, at worst {rounding.worst:.2%}"
            )
        parts = {
            "plan": self.plan_s,
            "engine start": self.engine_start_s,
            "capture and write": self.capture_wall_s,
        }
        parts["other"] = max(0.0, self.elapsed_s - sum(parts.values()))
        lines.append(f"{self.elapsed_s:.1f} s: " + _shares(parts, self.elapsed_s))
        lines.append(
            f"the slowest engine's start: {self.engine_start_s:.1f} s, of which loading the model {self.load_s:.1f} s, "
            f"the first request {self.first_request_s:.1f} s"
        )
        for who, names in (("engines", ENGINE_PARTS), ("writers, beside them,", WRITER_PARTS)):
            seconds = {name: self.seconds[name] for name in names}
            lines.append(f"{who} {sum(seconds.values()):.1f} s: " + _shares(seconds, sum(seconds.values())))
        return "\n".join(lines)


def _shares(seconds: Mapping[str, float], whole_s: float) -> str:
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value / max(whole_s, 1e-9):.0%}" for name, value in ordered)
