"""hsray turns prompts into a dataset of a language model's hidden states.

report = hsray.build("prompts.jsonl", model="Qwen/Qwen3-8B", layers=[9, 19, "final"], out="s3://bucket/x")
hsray.check("s3://bucket/x", deep=True)
hsray.read("s3://bucket/x")[0]["hidden_states"][9]      # bfloat16 [T, D]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["build", "check", "convert", "estimate", "export", "preview", "read", "verify"]

if TYPE_CHECKING:
    from hsray.audit import check
    from hsray.converter import convert
    from hsray.estimator import estimate, preview
    from hsray.exporter import export
    from hsray.pipeline import build
    from hsray.reader import read
    from hsray.verifier import verify


#: Each is imported when it is asked for: reading needs neither Ray nor an engine, and building no reader.
_HOMES = {
    "build": "pipeline",
    "check": "audit",
    "convert": "converter",
    "estimate": "estimator",
    "export": "exporter",
    "preview": "estimator",
    "read": "reader",
    "verify": "verifier",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"hsray.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
