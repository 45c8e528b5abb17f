"""What several test files need: models, a tokenizer, one Ray."""

import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from pipelines.demo_model import prepare_demo_model
from tests.reference import options_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hsray.engine import CaptureEngine

ROOT = Path(__file__).parent.parent

# How long an example takes says more of who else uses the machine.
hypothesis.settings.register_profile("hsray", deadline=None)
hypothesis.settings.load_profile("hsray")


#: The test files that take longest; the processes that share the tests begin with them, so as to end together.
LONGEST_FILES = ["test_resume.py", "test_engines.py", "test_faults.py", "test_build.py"]


def pytest_configure() -> None:
    # A Ray of these tests' own: one that finds another in its folder joins it, and would end with it.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-")
    os.environ.pop("RAY_ADDRESS", None)
    # As in a Ray that a build starts; otherwise the other test process would have the cores first.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Threads that wait for each other by spinning keep the other process from the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST_FILES.index(item.path.name) if item.path.name in LONGEST_FILES else 9)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=2, help="how often the resume test kills its build (default: 2)")
    parser.addoption(
        "--broken-builds", type=int, default=3, help="datasets published to S3 through a broken network (default: 3)"
    )
    parser.addoption(
        "--resume-engine",
        default="transformers",
        choices=["transformers", "sglang"],
        help="the engine of the builds that the resume test kills (default: transformers, which starts faster)",
    )
    parser.addoption(
        "--conversations",
        type=Path,
        help="a JSONL file of conversations, or of questions and answers, on which masks are compared with Transformers'",
    )


@pytest.fixture(autouse=True)
def own_start_method() -> None:
    """SGLang has the whole process spawn its children, each of which then imports torch anew."""
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct, made once and kept in the repository's folder."""
    return prepare_demo_model(ROOT / ".demo" / "model")


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model: Path) -> "PreTrainedTokenizerBase":
    from hsray.model import load_tokenizer

    return load_tokenizer(str(demo_model))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 blocks, without a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    folder = tmp_path_factory.mktemp("tiny_llama")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_without_weights(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama's config alone."""
    folder = tmp_path_factory.mktemp("config_alone")
    shutil.copy(tiny_llama / "config.json", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 2 of 4 blocks: it scales its embedding, and its norms multiply by 1 + w."""
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    folder = tmp_path_factory.mktemp("tiny_gemma")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Gemma2ForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            model.model.norm.weight.normal_(std=0.3)
        model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads wait for each other longer than the small models compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_sglang(tiny_llama: Path) -> "Iterator[CaptureEngine]":
    """SGLang on the tiny Llama, every layer in float32; started once, as that takes most of a minute."""
    from hsray.engine import open_engine

    with open_engine("sglang", options_for(tiny_llama)) as engine:
        yield engine


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
