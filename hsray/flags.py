"""Values of command-line flags, for argparse's `type=`."""

import argparse
import json
import re
from typing import Any

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes from ``"256MiB"``, ``"1.5GB"`` or ``"1000000"``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write for example 256MiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; errors do not repeat it, since it may hold credentials."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"this is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'a JSON {type(value).__name__}; an object is wanted, for example {{"name": 1}}'
        )
    return value


def parse_engines(text: str) -> int | tuple[int, int]:
    """A number of engines from ``"4"``, or the fewest and the most from ``"2:16"``."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of engines; write for example 4, or 2:16")
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))
