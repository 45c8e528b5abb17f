"""Small builds, for tests of what a build leaves."""

import json
import random
from pathlib import Path

import hsray
from hsray.events import NAME as EVENTS_NAME


def unique_prompts(count: int, longest: int, seed: int = 0, vocab_size: int = 1000) -> list[dict]:
    """Prompts of 1 to `longest` tokens, each length and each content its own."""
    chosen = random.Random(seed)
    lengths = [1, 2, longest, *(chosen.randint(1, longest) for _ in range(count - 3))]
    return [
        {"id": f"p{number}", "input_ids": [chosen.randrange(vocab_size) for _ in range(num_tokens)]}
        for number, num_tokens in enumerate(lengths)
    ]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_of(out: Path) -> dict[str, bytes]:
    """Of a dataset, by name; without the log of the runs that made it."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name != EVENTS_NAME]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def build_tiny(tiny: Path, dataset: Path | list, out: Path | str, **changes: object) -> "hsray.pipeline.BuildReport":
    asked = {"model": str(tiny), "layers": [0], "out": out, "engine": "transformers", "progress": False}
    return hsray.build(dataset, **(asked | changes))
