"""Measures the plan alone: short conversations to shards, against the tokenizer alone on the same conversations.

The tokenizer alone is `apply_chat_template`, which renders and tokenises, in as many processes as Ray has cores, and nothing
else: no mask, no ids, no files.

    python pipelines/bench_prompts.py --model .demo/model --conversations 1000000 --cores 2
"""

import argparse
import json
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import ray

import hsray
from hsray.model import load_tokenizer

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
]
BATCH_ROWS = 256


def conversations(count: int, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """A question of 5 to 25 words and an answer of 5 to 40."""
    chosen = random.Random(seed)
    for _ in range(count):
        question, answer = (" ".join(chosen.choices(WORDS, k=chosen.randint(5, most))) for most in (25, 40))
        yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def tokenizer_alone(model: str, count: int, seed: int) -> float:
    """Seconds that one process needs for its share, of the tokenizer's own work."""
    tokenizer = load_tokenizer(model)
    chats = conversations(count, seed)
    elapsed_s = 0.0
    while batch := list(islice(chats, BATCH_ROWS)):
        started = time.perf_counter()
        tokenizer.apply_chat_template(batch, return_dict=True)
        elapsed_s += time.perf_counter() - started
    return elapsed_s


def measure(model: str, count: int, cores: int, folder: Path) -> dict[str, float]:
    """Seconds of the plan and of the tokenizer alone, and the driver's memory."""
    path = folder / "conversations.jsonl"
    with path.open("w") as file:
        for number, messages in enumerate(conversations(count)):
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as processes:
        share = -(-count // cores)
        alone_s = max(processes.map(tokenizer_alone, [model] * cores, [share] * cores, range(cores)))
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    started = time.perf_counter()
    found = hsray.estimate(str(path), model=model, layers=["final"])
    plan_s = time.perf_counter() - started
    driver_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    ray.shutdown()
    return {
        "prompts": found.prompts,
        "tokens": found.tokens,
        "alone_s": alone_s,
        "plan_s": plan_s,
        "driver_mb": driver_mb,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures once and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokenizer and chat template are used")
    parser.add_argument("--conversations", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="Ray's cores, and the tokenizer's processes (default: 2)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.model, arguments.conversations, arguments.cores, Path(folder))
    print(
        f"{found['prompts']:,} conversations, {found['tokens']:,} tokens: tokenizer alone {found['alone_s']:.1f} s, plan "
        f"{found['plan_s']:.1f} s ({found['plan_s'] / found['alone_s']:.2f} times), driver at most {found['driver_mb']:,.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
