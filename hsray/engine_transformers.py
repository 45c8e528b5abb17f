"""The reference engine: Hugging Face Transformers, any device; the truth for tests and for `pipelines/parity.py`.

Shapes: T tokens of a prompt, D hidden size.
"""

import functools
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from hsray.cpu import settle_vector_math
from hsray.engine import CaptureEngine, CaptureError, EngineDied, EngineOptions, ShardBuffer

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

#: What model classes call the norm between the last block and the LM head.
FINAL_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "norm_f", "final_layer_norm")


class TransformersEngine(CaptureEngine):
    """Runs the decoder of an `AutoModel` with `output_hidden_states`.

    Hugging Face's tuple holds embed and layers 0..N-2, then the state after the final norm; layer N-1 is taken from
    what enters that norm. ``engine_args`` go to ``from_pretrained``, save ``device`` (default: CUDA where there is one) and
    ``load_format="dummy"``, which makes random weights of the config's shapes.
    """

    name = "transformers"

    def __init__(self, options: EngineOptions):
        import torch
        import transformers

        started = time.monotonic()
        settle_vector_math()
        engine_args = dict(options.engine_args)
        device = engine_args.pop("device", "cuda" if torch.cuda.is_available() else "cpu")
        self.version = version("transformers")
        config = transformers.AutoConfig.from_pretrained(
            options.model.model, trust_remote_code=options.trust_remote_code
        )
        auto_model = auto_model_class(config)
        load = functools.partial(auto_model.from_pretrained, options.model.model)
        if engine_args.pop("load_format", None) == "dummy":
            load = functools.partial(auto_model.from_config, config)
        with torch.device(device):
            model = load(
                dtype=getattr(torch, options.model.dtype), trust_remote_code=options.trust_remote_code, **engine_args
            )
        self._model = model.to(device).eval()
        self._decoder = self._model.get_decoder()
        self._last_block_1TD: torch.Tensor | None = None
        final_norm(self._decoder).register_forward_pre_hook(self._keep_last_block)
        num_bytes = options.buffer_tokens * options.bytes_per_token
        pin = torch.device(device).type == "cuda"
        memories = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(options.num_buffers)]
        super().__init__(options, memories)
        self.load_s = time.monotonic() - started

    def _run(self, prompts: Sequence[np.ndarray], rows: Sequence[int], into: ShardBuffer) -> None:
        for index, (ids_T, row) in enumerate(zip(prompts, rows, strict=True)):
            try:
                self._run_one(ids_T, into, row)
            except Exception as error:
                failure = CaptureError.of(error, prompt=index)
                if failure is not error and not self._still_computes():
                    failure = CaptureError.of(
                        EngineDied(f"{failure} (and since then the model computes nothing)"), prompt=index
                    )
                raise failure from error
            self.answered = time.monotonic()

    def _still_computes(self) -> bool:
        """Whether what a prompt raised was its own: an accelerator that has failed once fails whatever comes next."""
        import torch

        try:
            with torch.inference_mode():
                hidden_1TD = self._decoder(
                    input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self._model.device), use_cache=False
                ).last_hidden_state
                return bool(hidden_1TD.isfinite().all())
        except Exception:  # that is the answer, whatever it is
            return False

    def _run_one(self, input_ids: np.ndarray, into: ShardBuffer, at: int) -> None:
        import torch

        ids_1T = torch.tensor(input_ids[None], dtype=torch.int64, device=self._model.device)
        with torch.inference_mode():
            output = self._decoder(input_ids=ids_1T, output_hidden_states=True, use_cache=False)
        num_layers = self.options.model.num_layers
        if len(output.hidden_states) != num_layers + 1:
            raise CaptureError(f"Transformers gave {len(output.hidden_states)} states; {num_layers + 1} were wanted")
        for layer, hidden_SD in into.states.items():
            if layer == "final":
                hidden_1TD = output.last_hidden_state
            elif layer == num_layers - 1:
                hidden_1TD = self._last_block_1TD
            else:
                hidden_1TD = output.hidden_states[0 if layer == "embed" else layer + 1]
            wanted = ((1, len(input_ids), hidden_SD.shape[1]), hidden_SD.dtype)
            if (tuple(hidden_1TD.shape), hidden_1TD.dtype) != wanted:
                raise CaptureError(
                    f"Transformers gave layer {layer!r} as {list(hidden_1TD.shape)} {hidden_1TD.dtype}; {wanted} wanted"
                )
            hidden_SD[at : at + len(input_ids)].copy_(hidden_1TD[0])
        self._last_block_1TD = None

    def _keep_last_block(self, _module: "torch.nn.Module", args: tuple[Any, ...]) -> None:
        self._last_block_1TD = args[0]

    def close(self) -> None:
        self._model = self._decoder = None


def auto_model_class(config: "PretrainedConfig") -> Any:
    """The `transformers` auto class that loads a config's model: the language model's, else the multimodal one's."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in getattr(
        config, "auto_map", {}
    ):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def final_norm(decoder: "torch.nn.Module") -> "torch.nn.Module":
    """The norm between a decoder's last block and the LM head.

    Raises:
        CaptureError: there is none under a name that is known.
    """
    for name in FINAL_NORM_NAMES:
        norm = getattr(decoder, name, None)
        if norm is not None:
            return norm
    raise CaptureError(
        f"{type(decoder).__name__} has none of {', '.join(FINAL_NORM_NAMES)}; its last block cannot be told"
    )
