"""Compares hsray's SGLang states with Transformers', family by family, on small random-weight models of the real classes.

Truth is the Transformers model in float32 over the same bfloat16 weights. A family passes in bfloat16 if, layer by layer,
SGLang's relative error is at most 1.25 times that of Transformers' own bfloat16 run; in float32, if it is at most 1e-5.
With --tensor-parallel, SGLang on one GPU is what several are compared with, under the same bars.

    python pipelines/parity.py --dtype float32                                   # on a CPU
    python pipelines/parity.py --engine-args '{"attention_backend": "triton"}'   # on a GPU
"""

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hsray import engine_sglang
from hsray.engine import CaptureError, EngineName, EngineOptions, open_engine
from hsray.engine_transformers import auto_model_class
from hsray.flags import parse_object
from hsray.layers import Layer, resolve_layers
from hsray.model import describe_model

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

#: Bars: bfloat16 against Transformers' own bfloat16 error, float32 against nothing.
BF16_RATIO = 1.25
FLOAT32_ERROR = 1e-5

#: Published checkpoints' config.json names these, SGLang reads them, and Transformers' classes leave them out.
LEFT_OUT = ("moe_layer_freq", "scoring_func", "topk_method", "swiglu_limit", "hidden_act")

VOCAB_SIZE = 8192
#: Ids from here on stand for images in the multimodal models.
TEXT_TOKENS = 8000
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "max_position_embeddings": 40960,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MOE = {"moe_intermediate_size": 384, "num_experts_per_tok": 8, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """One layer of one family: relative errors (Frobenius) against the truth."""

    family: str
    tokens: int
    layer: Layer
    sglang: float
    """Against the truth; under tensor parallelism, against SGLang on one GPU."""
    transformers: float
    """Of Transformers in the same dtype against the truth; 0 in float32, where it is the truth."""
    passes: bool


def families() -> Mapping[str, Callable[[], "PretrainedConfig"]]:
    """A small config for each family: few blocks, the real class with its real head and expert structure."""
    import transformers as hf

    return {
        "llama": lambda: hf.LlamaConfig(**COMMON),
        "mistral": lambda: hf.MistralConfig(**COMMON, sliding_window=None),
        "qwen2": lambda: hf.Qwen2Config(**COMMON),
        "qwen3": lambda: hf.Qwen3Config(**COMMON, head_dim=128),
        "qwen3-moe": lambda: hf.Qwen3MoeConfig(**COMMON, **MOE, head_dim=128, num_experts=32),
        "mixtral": lambda: hf.MixtralConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2),
        "deepseek-v3": _deepseek_v3,
        "gemma2": lambda: hf.Gemma2Config(**_gemma(), hidden_act="gelu_pytorch_tanh"),
        "gemma3": lambda: hf.Gemma3TextConfig(**_gemma(), sliding_window=512),
        "gpt-oss": _gpt_oss,
        "glm4-moe": lambda: hf.Glm4MoeConfig(
            **(COMMON | MOE), n_routed_experts=32, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1,
            head_dim=128, attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, routed_scaling_factor=2.5,
        ),
        "phi3": lambda: hf.Phi3Config(**(COMMON | {"num_key_value_heads": 16})),
        "olmo2": lambda: hf.Olmo2Config(**COMMON),
        "gemma3-multimodal": _gemma3_multimodal,
        "qwen3-vl": _qwen3_vl,
        "kimi-k2.5": _deepseek_v3,
    }  # fmt: skip


def _deepseek_v3() -> "PretrainedConfig":
    import transformers as hf

    return hf.DeepseekV3Config(
        **(COMMON | MOE | {"num_key_value_heads": 16}), n_routed_experts=32, n_shared_experts=1, n_group=4, topk_group=2,
        first_k_dense_replace=1, q_lora_rank=384, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, routed_scaling_factor=2.5,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 1024,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip


def _gpt_oss() -> "PretrainedConfig":
    import transformers as hf

    return hf.GptOssConfig(
        **(COMMON | {"intermediate_size": 1024}), num_local_experts=32, num_experts_per_tok=4, head_dim=64, sliding_window=128,
        swiglu_limit=7.0,
    )  # fmt: skip


def _gemma3_multimodal() -> "PretrainedConfig":
    import transformers as hf

    vision = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"vision_use_head": False}
    return hf.Gemma3Config(
        text_config=_gemma() | {"sliding_window": 512}, vision_config=vision | {"image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4, boi_token_index=8000, eoi_token_index=8001, image_token_index=8002,
    )  # fmt: skip


def _qwen3_vl() -> "PretrainedConfig":
    import transformers as hf

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "patch_size": 16}
    return hf.Qwen3VLConfig(
        text_config=COMMON | {"head_dim": 128, "rope_parameters": rope},
        vision_config=vision | {"out_hidden_size": 1024, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        image_token_id=8002, video_token_id=8003, vision_start_token_id=8000, vision_end_token_id=8001,
    )  # fmt: skip


def _gemma() -> dict[str, Any]:
    return COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 256, "tie_word_embeddings": True}


def make_model(family: str, folder: Path) -> Path:
    """Saves a random model as its family publishes them; returns the folder that Transformers reads."""
    if family == "kimi-k2.5":
        save_random(families()[family](), folder / "text")
        wrap_as_kimi(folder / "text", folder)
        return folder / "text"
    save_random(families()[family](), folder)
    if family == "gemma3-multimodal":
        rename_weights(folder, folder, lambda name: name.replace("vision_tower.", "vision_tower.vision_model."))
    return folder


def wrap_as_kimi(text: Path, folder: Path) -> None:
    """A Kimi-K2.5 checkpoint around a DeepSeek-V3 text model, without weights for its vision tower, which text needs not."""
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "media_placeholder_token_id": 8002,
        "text_config": json.loads((text / "config.json").read_text()),
        "vision_config": {
            # As published, and as SGLang 0.5.16 renames some of them.
            "vt_hidden_size": 128,
            "vt_intermediate_size": 256,
            "vt_num_hidden_layers": 2,
            "vt_num_attention_heads": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "text_hidden_size": 1024,
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rename_weights(text, folder, lambda name: f"language_model.{name}")


def rename_weights(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Writes a folder's weights to another, or the same, under other names."""
    from safetensors.torch import load_file, save_file

    weights = {rename(name): values for name, values in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def save_random(config: "PretrainedConfig", folder: Path) -> None:
    """Saves a random model of a config in bfloat16, every vector away from its default, so that none goes unnoticed."""
    import torch

    torch.manual_seed(0)
    model = auto_model_class(config).from_config(config)
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if values.dim() == 1 and "rotary" not in name:
                values.add_(0.1 * torch.randn_like(values))
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    for name in LEFT_OUT:
        if hasattr(config, name):
            saved[name] = getattr(config, name)
    (folder / "config.json").write_text(json.dumps(saved, indent=1))


def states(
    engine: EngineName,
    model: str | Path,
    dtype: str,
    prompts: list[list[int]],
    engine_args: Mapping[str, Any],
    tensor_parallel: int = 1,
) -> "list[dict[Layer, torch.Tensor]]":
    """Every layer of each prompt, layer -> [T, D]."""
    import torch

    longest = max(map(len, prompts))
    description = describe_model(str(model), dtype=dtype)
    options = EngineOptions(
        model=description,
        layers=resolve_layers(["embed", *range(description.num_layers), "final"], num_layers=description.num_layers),
        max_tokens=longest,
        buffer_tokens=longest,
        num_buffers=1,
        tensor_parallel=tensor_parallel,
        engine_args=engine_args,
    )
    with open_engine(engine, options) as opened:
        captured = [opened.capture_alone(input_ids) for input_ids in prompts]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return captured


def compare(family: str, arguments: argparse.Namespace) -> list[LayerError]:
    """A family's errors, prompt by prompt and layer by layer."""
    import torch

    chosen = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, TEXT_TOKENS, (count,), generator=chosen).tolist() for count in arguments.tokens]
    reference = {"attn_implementation": "eager"}  # the only one with every family's soft caps and sinks
    dtype, engine_args = arguments.dtype, arguments.engine_args
    with tempfile.TemporaryDirectory(prefix="hsray-parity-") as folder:
        text = make_model(family, Path(folder))
        truth = states("transformers", text, "float32", prompts, reference)
        own = truth if dtype == "float32" else states("transformers", text, dtype, prompts, reference)
        base = truth
        if arguments.tensor_parallel > 1:
            base = states("sglang", folder, dtype, prompts, engine_args)
        ours = states("sglang", folder, dtype, prompts, engine_args, arguments.tensor_parallel)
    errors = []
    for number, num_tokens in enumerate(arguments.tokens):
        for layer, truth_TD in truth[number].items():
            error = relative_error(ours[number][layer], base[number][layer])
            own_error = relative_error(own[number][layer], truth_TD)
            bar = FLOAT32_ERROR if dtype == "float32" else max(BF16_RATIO * own_error, FLOAT32_ERROR)
            errors.append(
                LayerError(
                    family=family,
                    tokens=num_tokens,
                    layer=layer,
                    sglang=error,
                    transformers=own_error,
                    passes=error <= bar,
                )
            )
    return errors


def relative_error(found_TD: "torch.Tensor", truth_TD: "torch.Tensor") -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((found_TD.double() - truth_TD.double()).norm() / truth_TD.double().norm())


def show(errors: list[LayerError], console: Console) -> None:
    """A row for each family and layer."""
    table = Table("family", "tokens", "layer", "SGLang", "Transformers", "ratio", "")
    for row in errors:
        ratio = f"{row.sglang / row.transformers:.2f}" if row.transformers else ""
        verdict = "right" if row.passes else "[bold red]WRONG[/]"
        table.add_row(
            row.family, str(row.tokens), str(row.layer), f"{row.sglang:.2e}", f"{row.transformers:.2e}", ratio, verdict
        )
    console.print(table)


def main() -> int:
    """Compares the families asked for; exit status 1 if one is wrong or does not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--families", nargs="+", default=list(families()), choices=list(families()), metavar="FAMILY")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--tokens", nargs="+", type=int, default=[700], help="the prompts' lengths (default: 700)")
    add("--tensor-parallel", type=int, default=1, metavar="GPUS", help="compare this many with one")
    add(
        "--without",
        nargs="+",
        default=[],
        choices=list(engine_sglang.SAFE_ARGS),
        metavar="SWITCH",
        help="leave these of hsray's safe switches at SGLang's own defaults, to see what they are for",
    )
    add("--engine-args", type=parse_object, default={}, metavar="JSON", help="for SGLang")
    add("--json", type=Path, help="also write the errors here")
    arguments = parser.parse_args()
    for name in arguments.without:
        del engine_sglang.SAFE_ARGS[name]
    console, errors, refused = Console(), [], {}
    for family in arguments.families:
        try:
            errors += compare(family, arguments)
        except CaptureError as error:
            refused[family] = str(error)
            console.print(Text.assemble((f"{family} was refused: ", "bold red"), str(error)))
            continue
        show([row for row in errors if row.family == family], console)
    if arguments.json:
        content = {"errors": [asdict(row) for row in errors], "refused": refused}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if errors and not refused and all(row.passes for row in errors) else 1


if __name__ == "__main__":
    sys.exit(main())
