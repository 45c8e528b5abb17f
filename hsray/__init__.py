"""hsray turns prompts into a dataset of a language model's hidden states.

report = hsray.build("prompts.jsonl", model="Qwen/Qwen3-8B", layers=[9, 19, "final"], out="s3://bucket/x")
hsray.read("s3://bucket/x")[0]["hidden_states"][9]      # bfloat16 [T, D]
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["build", "estimate", "preview", "read"]

if TYPE_CHECKING:
    from hsray.estimator import estimate, preview
    from hsray.pipeline import build
    from hsray.reader import read


def __getattr__(name: str) -> Any:
    # Reading needs neither Ray nor an engine, and building needs no reader: each is imported when asked for.
    if name == "build":
        from hsray.pipeline import build

        return build
    if name in ("estimate", "preview"):
        from hsray import estimator

        return getattr(estimator, name)
    if name == "read":
        from hsray.reader import read

        return read
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
