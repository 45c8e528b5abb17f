"""Measures the plan alone: short conversations to shards, against the tokenizer alone on the same conversations.

The tokenizer alone is Transformers' call of it on the rendered texts, 256 at a time, in as many processes as Ray has cores: no
render, no mask, no ids, no files. It is timed before the plan and after it, since others may use the machine; so is
`apply_chat_template`, which renders too. Ray's start, by a plan of a few conversations beforehand, is shown for itself.

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

import numpy as np
import ray

import hsray
from hsray.estimator import Estimate
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


def tokenizer_alone(model: str, count: int, seed: int) -> tuple[float, float]:
    """Seconds that one process needs for its share: to tokenise rendered texts, and to render and tokenise."""
    tokenizer = load_tokenizer(model)
    chats = conversations(count, seed)
    tokenise_s = both_s = 0.0
    while batch := list(islice(chats, BATCH_ROWS)):
        texts = tokenizer.apply_chat_template(batch, tokenize=False)
        started = time.perf_counter()
        tokenizer(texts, add_special_tokens=False)
        tokenised = time.perf_counter()
        tokenizer.apply_chat_template(batch, return_dict=True)
        tokenise_s += tokenised - started
        both_s += time.perf_counter() - tokenised
    return tokenise_s, both_s


def alone(model: str, count: int, cores: int) -> np.ndarray:
    """The slowest process's seconds, of `tokenizer_alone`'s two."""
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as processes:
        share = -(-count // cores)
        return np.max(list(processes.map(tokenizer_alone, [model] * cores, [share] * cores, range(cores))), axis=0)


def plan(model: str, path: Path, count: int) -> tuple[float, Estimate]:
    """Seconds of a plan of so many conversations, which are written to a file beforehand."""
    with path.open("w") as file:
        for number, messages in enumerate(conversations(count)):
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    started = time.perf_counter()
    found = hsray.estimate(str(path), model=model, layers=["final"])
    return time.perf_counter() - started, found


def main(argv: Sequence[str] | None = None) -> int:
    """Measures once and prints a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokenizer and chat template are used")
    parser.add_argument("--conversations", type=int, default=1_000_000, help="how many (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=2, help="Ray's cores, and the tokenizer's processes (default: 2)")
    arguments = parser.parse_args(argv)
    model, count, cores = arguments.model, arguments.conversations, arguments.cores
    before = alone(model, count, cores)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.jsonl"
        ray.init(
            address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        start_s, _ = plan(model, path, 4 * BATCH_ROWS)
        plan_s, found = plan(model, path, count)
        driver_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        ray.shutdown()
    tokenise_s, both_s = (before + alone(model, count, cores)) / 2
    print(
        f"{found.prompts:,} conversations, {found.tokens:,} tokens: plan {plan_s:.1f} s, and {start_s:.1f} s to start; tokenizer "
        f"alone {tokenise_s:.1f} s ({plan_s / tokenise_s:.2f} times, {(plan_s + start_s) / tokenise_s:.2f} with the start), "
        f"apply_chat_template {both_s:.1f} s ({plan_s / both_s:.2f} times); driver at most {driver_mb:,.0f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
