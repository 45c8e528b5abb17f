"""Measures where the time goes: one model and the same prompts through ever more of the road, in one run.

    plain         SGLang alone, one request in flight, nothing captured
    capture       the same with the states of --layers copied to shared memory: a bare loop of `engine.capture_all`
    build         the whole of `hsray.build`, through Ray, to Parquet files
    transformers  Hugging Face Transformers, the same states copied to the host
    lists         SGLang's own `return_hidden_states`: one state, as JSON lists

Engine start is not counted; each engine first runs a few prompts that are not timed either.

    python pipelines/bench.py --model .demo/model --dataset problems.jsonl --prompts 300 --layers 9 19 29 final
    python pipelines/bench.py --model config/ --load-format dummy --lengths 512 2048 8192 mix --layers 1 17 32 -1
    python pipelines/bench.py --model config/ --load-format dummy --lengths mix --requests-in-flight 64 --layers 1 17 32 -1

With --by-turns, plain and capture are measured against each other on a machine that is slower at one time than another.
The loops hand over some prompts at once, of which one runs at a time, or as many as --requests-in-flight. Of a build it also
prints how fast each stage went while it was at work, and which one all others waited for.
"""

import argparse
import asyncio
import functools
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hsray
from hsray.engine import CaptureEngine, EngineOptions, open_engine
from hsray.flags import parse_bytes, parse_object
from hsray.layers import resolve_layers
from hsray.model import describe_model, load_tokenizer
from hsray.report import ENGINE_PARTS, WRITER_PARTS

MIX_MEAN_TOKENS, MIX_MAX_TOKENS = 550, 4096
WARM_UP_PROMPTS = 4

Workload = list[list[int]]
"""Prompts, as token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What ran, and for how long."""

    prompts: int
    tokens: int
    seconds: float
    gpu_mb: int | None = None
    """Memory in use on the first GPU once it had run, by anybody; None where there is none."""
    state_bytes: int = 0
    stages: Mapping[str, float] = field(default_factory=dict)
    """Of a build: seconds by stage, see `hsray.report`."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measurement."""

    road: str
    workload: str
    measured: Measured


def make_workloads(arguments: argparse.Namespace, vocab_size: int) -> dict[str, Workload]:
    """Random prompts of fixed lengths or of the realistic mix, or a dataset's conversations."""
    if arguments.dataset:
        return {arguments.dataset.stem: read_conversations(arguments.dataset, arguments)}
    chosen = random.Random(0)
    workloads: dict[str, Workload] = {}
    for name in arguments.lengths:
        prompts, num_tokens = [], 0
        while num_tokens < arguments.tokens:
            length = mixed_length(chosen) if name == "mix" else int(name)
            prompts.append([chosen.randrange(vocab_size) for _ in range(length)])
            num_tokens += length
        workloads[name] = prompts
    return workloads


def mixed_length(chosen: random.Random) -> int:
    """A conversation's length: log-normal with standard deviation 1 of the logarithm, cut at the maximum."""
    return max(8, min(MIX_MAX_TOKENS, int(chosen.lognormvariate(5.81, 1.0))))  # exp(5.81 + 1/2) is MIX_MEAN_TOKENS


def read_conversations(path: Path, arguments: argparse.Namespace) -> Workload:
    """The first rows of a JSONL file, tokenised; a question and its answer become a conversation."""
    tokenizer = load_tokenizer(arguments.model)
    prompts = []
    with path.open() as file:
        for line, _ in zip(file, range(arguments.prompts), strict=False):
            row = json.loads(line)
            turns = zip(("user", "assistant"), (row.get("question"), row.get("answer")), strict=True)
            messages = row.get("messages") or [{"role": role, "content": content} for role, content in turns]
            prompts.append(tokenizer.apply_chat_template(messages, return_dict=False))
    return prompts


def timed(runs: "list[Callable[[Workload], None]]", prompts: Workload, arguments: argparse.Namespace) -> list[Measured]:
    """Gives the same prompts, some at once, to each of `runs` by turns, until the limit."""
    for run in runs:
        for some in at_once(prompts[:WARM_UP_PROMPTS], arguments.requests_in_flight):
            run(some)
    seconds, num_tokens, done = [0.0] * len(runs), 0, 0
    for turn, some in enumerate(at_once(prompts, arguments.requests_in_flight)):
        for index in sorted(range(len(runs)), reverse=turn % 2 == 1):
            started = time.monotonic()
            runs[index](some)
            seconds[index] += time.monotonic() - started
        done, num_tokens = done + len(some), num_tokens + sum(map(len, some))
        if max(seconds) > arguments.seconds:
            break
    gpu_mb = gpu_memory_mb() if len(runs) == 1 else None
    return [Measured(prompts=done, tokens=num_tokens, seconds=taken_s, gpu_mb=gpu_mb) for taken_s in seconds]


def gpu_memory_mb() -> int | None:
    """MiB in use on the first GPU; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0])


def at_once(prompts: Workload, requests_in_flight: int) -> list[Workload]:
    """The prompts that a loop hands over together, as a build does a shard's; `requests_in_flight` of them run at one time."""
    num = 4 * max(2, requests_in_flight)
    return [prompts[start : start + num] for start in range(0, len(prompts), num)]


def capture_road(name: str, options: EngineOptions) -> Iterator[Callable[[Workload], None]]:
    """A bare loop over an engine; shards are filled and dropped."""
    with open_engine(name, options) as engine:
        yield lambda prompts: capture_and_drop(engine, prompts)


def capture_and_drop(engine: CaptureEngine, prompts: Workload) -> None:
    buffer = engine.buffer(sum(map(len, prompts)))
    engine.capture_all(prompts, into=buffer)
    buffer.release()


def sglang_road(options: EngineOptions, *, lists: bool) -> Iterator[Callable[[Workload], None]]:
    """SGLang without the capture, started with the same arguments; `lists` asks it for hidden states its own way."""
    from sglang.srt.entrypoints.engine import Engine

    from hsray.engine_sglang import engine_arguments

    engine = Engine(**{**engine_arguments(options), "enable_return_hidden_states": lists})
    sampling = {"max_new_tokens": 1 if lists else 0, "temperature": 0}

    def run(prompts: Workload) -> None:
        ask = functools.partial(engine.generate, sampling_params=sampling, return_hidden_states=lists)
        one = options.requests_in_flight == 1
        replies = [ask(input_ids=prompt) for prompt in prompts] if one else ask(input_ids=prompts)
        if lists:
            rows = [len(reply["meta_info"]["hidden_states"][0]) for reply in replies]
            assert rows == [len(prompt) for prompt in prompts]

    try:
        yield run
    finally:
        engine.shutdown()


def measure_build(workload: Workload, options: EngineOptions, arguments: argparse.Namespace) -> Measured:
    """The whole build: seconds from the first shard's begin to the last one's publication."""
    with tempfile.TemporaryDirectory(prefix="hsray-bench-", dir=arguments.folder) as out:
        report = hsray.build(
            [{"id": str(number), "input_ids": prompt} for number, prompt in enumerate(workload)],
            model=arguments.model,
            layers=list(options.layers),
            out=out,
            dtype=arguments.dtype,
            engine_args=options.engine_args,
            tensor_parallel=options.tensor_parallel,
            engines=arguments.engines,
            requests_in_flight=options.requests_in_flight,
            prefill_tokens=options.prefill_tokens,
            shard_bytes=arguments.shard_bytes,
            compression=arguments.compression,
            sort=arguments.sort,
        )
        print(report, file=sys.stderr)
    return Measured(
        prompts=report.prompts,
        tokens=report.new_tokens,
        seconds=report.capture_wall_s,
        state_bytes=report.new_tokens * options.bytes_per_token,
        stages=report.seconds,
    )


def measure(roads: list[str], workloads: dict[str, Workload], options: EngineOptions, arguments: Any) -> list[Figure]:
    """Every workload through each of `roads`, whose engines, where there are several, are open together."""
    if roads == ["build"]:
        results = {name: [measure_build(prompts, options, arguments)] for name, prompts in workloads.items()}
    else:
        makers = {
            "plain": lambda: sglang_road(options, lists=False),
            "lists": lambda: sglang_road(options, lists=True),
            "capture": lambda: capture_road("sglang", options),
            "transformers": lambda: capture_road("transformers", transformers_options(options)),
        }
        opened = [makers[road]() for road in roads]
        runs = [next(road) for road in opened]
        results = {name: timed(runs, prompts, arguments) for name, prompts in workloads.items()}
        for road in opened:
            road.close()
    return [
        Figure(road=road, workload=name, measured=measured)
        for name, every in results.items()
        for road, measured in zip(roads, every, strict=True)
    ]


def measured_together(arguments: argparse.Namespace) -> list[list[str]]:
    """The roads asked for, in groups of one; with --by-turns, plain and capture are a group."""
    turns = [road for road in arguments.roads if arguments.by_turns and road in ("plain", "capture")]
    alone = [[road] for road in arguments.roads if road not in turns]
    return [turns, *alone] if turns else alone


def transformers_options(options: EngineOptions) -> EngineOptions:
    dummy = options.engine_args.get("load_format") == "dummy"
    return replace(options, engine_args={"load_format": "dummy"} if dummy else {})


def show(figures: list[Figure], roads: list[str], console: Console) -> None:
    """A row for each road, however often it was measured: tokens/s, and in brackets its share of the first road's."""
    workloads = list(dict.fromkeys(figure.workload for figure in figures))

    def speed(road: str, workload: str) -> float:
        every = [figure.measured for figure in figures if (figure.road, figure.workload) == (road, workload)]
        return sum(measured.tokens for measured in every) / sum(measured.seconds for measured in every)

    table = Table("tokens/s", *workloads)
    for road in dict.fromkeys(roads):
        speeds = [(speed(road, name), speed(road, name) / speed(roads[0], name)) for name in workloads]
        table.add_row(road, *(f"{found:,.0f} ({share:.3f})" for found, share in speeds))
    console.print(table)


def show_stages(figures: list[Figure], console: Console) -> None:
    """A row for each build: GB/s of states of each stage while it was at work, and how much the engine waited."""
    builds = [figure for figure in figures if figure.measured.stages]
    if not builds:
        return
    stages = (*ENGINE_PARTS[:1], *WRITER_PARTS)
    table = Table("GB/s of states", *stages, "engine waits", "it binds")
    for figure in builds:
        seconds, gigabytes = figure.measured.stages, figure.measured.state_bytes / 1e9
        engine_s = sum(seconds[part] for part in ENGINE_PARTS)
        waits = seconds["wait"] / engine_s
        binds = "writers" if waits > 0.05 else "engine"
        speeds = (f"{gigabytes / max(seconds[stage], 1e-9):.2f}" for stage in stages)
        table.add_row(figure.workload, *speeds, f"{waits:.1%}", binds)
    console.print(table)


def environment() -> dict[str, str]:
    """What the figures were measured on."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return {"device": device} | {name: version(name) for name in ("sglang", "torch", "transformers", "ray")}


def main() -> int:
    """Measures the roads asked for, prints a table, writes JSON."""
    roads = ["plain", "capture", "build", "transformers", "lists"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="a local folder or a hub name; with --load-format dummy a config.json is enough")
    add("--layers", required=True, nargs="+", help="as for build.py")
    add(
        "--roads",
        nargs="+",
        default=roads,
        choices=roads,
        help="which to measure; shares are of the first; one said "
        "twice is measured twice, and is the mean: capture build capture, where the machine is slower at one time than another",
    )
    add(
        "--lengths",
        nargs="+",
        default=["512", "2048", "mix"],
        help="prompt lengths, or mix (log-normal, mean 550, to 4096)",
    )
    add("--tokens", type=int, default=200_000, help="tokens of a workload (default: 200000)")
    add("--seconds", type=float, default=float("inf"), help="stop a loop after this long; a build runs all its tokens")
    add("--dataset", type=Path, help="JSONL of messages, or of question and answer, in place of --lengths")
    add("--prompts", type=int, default=300, help="rows of --dataset (default: 300)")
    add("--dtype", default="auto", help="as for build.py")
    add("--load-format", default="auto", help="dummy: random weights")
    add("--engine-args", type=parse_object, default={}, metavar="JSON", help="for SGLang")
    add("--tensor-parallel", type=int, default=1, metavar="GPUS", help="as for build.py")
    add("--requests-in-flight", type=int, default=1, help="as for build.py (default: 1)")
    add("--prefill-tokens", type=int, default=16_384, help="as for build.py (default: 16384)")
    add("--compression", default="none", help="as for build.py (default: none)")
    add("--sort", default="input", choices=["input", "length"], help="of a build, as for build.py (default: input)")
    add(
        "--by-turns",
        action="store_true",
        help="plain and capture get each prompt in turn, in two engines at once, so that what else the machine does slows "
        "both; it must hold the model twice",
    )
    add("--engines", type=int, help="of a build (default: as for build.py)")
    add("--shard-bytes", type=parse_bytes, default=256 << 20, metavar="BYTES", help="as for build.py")
    add("--folder", type=Path, help="where build writes, in a temporary folder (default: the system's)")
    add("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.load_format != "auto":
        arguments.engine_args["load_format"] = arguments.load_format
    model = describe_model(arguments.model, dtype=arguments.dtype)
    workloads = make_workloads(arguments, model.vocab_size)
    longest = max(len(prompt) for prompts in workloads.values() for prompt in prompts)
    together = (some for prompts in workloads.values() for some in at_once(prompts, arguments.requests_in_flight))
    layers = arguments.layers[0] if len(arguments.layers) == 1 else arguments.layers
    options = EngineOptions(
        model=model,
        layers=resolve_layers(layers, num_layers=model.num_layers),
        max_tokens=longest,
        buffer_tokens=max(sum(map(len, some)) for some in together),
        num_buffers=1,
        tensor_parallel=arguments.tensor_parallel,
        requests_in_flight=arguments.requests_in_flight,
        prefill_tokens=arguments.prefill_tokens,
        engine_args=arguments.engine_args,
    )
    asyncio.set_event_loop(asyncio.new_event_loop())
    figures = []
    for roads in measured_together(arguments):
        measured = measure(roads, workloads, options, arguments)
        print(*measured, sep="\n", file=sys.stderr)
        figures += measured
        if arguments.json:
            rows = [asdict(figure) | {"tokens_per_s": figure.measured.tokens_per_s} for figure in figures]
            arguments.json.write_text(json.dumps({"environment": environment(), "figures": rows}, indent=1) + "\n")
    console = Console(width=120)
    console.print(", ".join(f"{name} {value}" for name, value in environment().items()))
    show(figures, arguments.roads, console)
    show_stages(figures, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
