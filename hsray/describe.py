"""What a build must know of a model and its tokenizer beforehand, read where it does not stay in a driver's memory.

Transformers brings PyTorch along: 750 MB of a driver that needs neither after a few seconds. So a process of its own reads
them and says what it found, unless this one has Transformers in memory already.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hsray.model import ModelDescription, describe_model, load_tokenizer, tokenizer_digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What the other process's error is here: the first of these that it is.
KINDS = {
    kind.__name__: kind
    for kind in (FileNotFoundError, PermissionError, OSError, ModuleNotFoundError, ImportError, ValueError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A model and its tokenizer."""

    model: ModelDescription
    has_tokenizer: bool
    tokenizer_digest: str
    """With the chat template that is used."""
    chat_template: str
    """All of its templates, one after another; empty if there is none."""


def describe(model: str, *, dtype: str, trust_remote_code: bool, chat_template: str | None) -> Description:
    """Reads a model's config and tokenizer.

    Args:
        chat_template: Jinja, in place of the tokenizer's own.

    Raises:
        FileNotFoundError, ValueError: as `hsray.model.describe_model` does, and what Transformers raises.
    """
    asked = {
        "model": str(model),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "chat_template": chat_template,
    }
    if "transformers" in sys.modules:
        return _read(**asked)
    found = _ask_another_process(asked | {"with_torch": trust_remote_code})
    if "error" in found and not trust_remote_code:  # something in Transformers may need PyTorch for this one
        found = _ask_another_process(asked | {"with_torch": True})
    if "error" in found:
        raise KINDS[found["error"]](found["words"])
    return Description(**{**found, "model": ModelDescription(**found["model"])})


def load_chat_tokenizer(
    model: str, *, trust_remote_code: bool, chat_template: str | None
) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer, with another chat template if one is given; None for a model without a tokenizer."""
    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    if tokenizer is not None and chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _ask_another_process(asked: dict[str, Any]) -> dict[str, Any]:
    # It imports from where this process does, and from nowhere else: the folder it runs in may hold anything.
    command = [sys.executable, "-c", "import sys; sys.path[:] = sys.argv[1:]; from hsray.describe import main; main()"]
    done = subprocess.run([*command, *sys.path], input=json.dumps(asked).encode(), stdout=subprocess.PIPE)
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise ValueError(
            f"model {asked['model']!r} could not be read: the process that read it ended with status {done.returncode}; its "
            "words are above"
        ) from None


def _read(*, model: str, dtype: str, trust_remote_code: bool, chat_template: str | None) -> Description:
    description = describe_model(model, dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = load_chat_tokenizer(description.model, trust_remote_code=trust_remote_code, chat_template=chat_template)
    templates = getattr(tokenizer, "chat_template", None) or ""
    return Description(
        model=description,
        has_tokenizer=tokenizer is not None,
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template="\n".join(templates.values()) if isinstance(templates, dict) else templates,
    )


def main() -> None:
    """Reads what is asked on stdin, and says what it found, or the error, on stdout."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a word: whoever asked says that it was interrupted
    asked = json.load(sys.stdin)
    if not asked.pop("with_torch"):
        # Python's way to say that a module is not there: Transformers then reads configs and tokenizers in a third of the time.
        sys.modules["torch"] = None
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it would say that there are no models
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a model's own code, or a library, may print
    try:
        found = asdict(_read(**asked))
    except Exception as error:
        name = next((name for name, kind in KINDS.items() if isinstance(error, kind)), None)
        words = str(error) if name else f"model {asked['model']!r} could not be read: {type(error).__name__}: {error}"
        found = {"error": name or "ValueError", "words": words}
    with suppress(BrokenPipeError):  # whoever asked is gone
        json.dump(found, told)
        told.close()
