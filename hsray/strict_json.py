"""JSON in which no object has a key twice: Python's own reader would keep the last value, and say nothing."""

import json
from typing import Any


def load_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: an object has a key twice; it is named.
    """
    if text.startswith("\ufeff"):
        raise json.JSONDecodeError("a byte order mark, which is no part of it", text, 0)
    return _decode(text)


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice, and only one value can be meant: leave one out")
    return value


#: `json.loads` would make another decoder for each text, which takes as long as to read a short one.
_decode = json.JSONDecoder(object_pairs_hook=_as_dict).decode
