"""The SGLang platform for machines without a GPU: the real scheduler and models on plain PyTorch CPU kernels.

SGLang's own CPU platform needs AMX kernels that its wheel does not carry. An out-of-tree platform
(entry point group ``sglang.srt.platforms``) takes the portable paths instead: ``torch_native`` attention, no graphs.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.platforms.interface import SRTPlatform


def activate() -> str | None:
    """The entry point: the platform's name, or None where SGLang should look after itself.

    That is where PyTorch sees a GPU, and where the user asked for SGLang's own CPU engine.
    """
    import os

    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "hsray.sglang_cpu:CpuPlatform"


def __getattr__(name: str) -> "type[SRTPlatform]":
    # Made on first use: this module must import without SGLang, and SGLang loads it while it is loading itself.
    if name != "CpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _make_platform()
    return globals()[name]


def _make_platform() -> "type[SRTPlatform]":
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum

    class CpuPlatform(CpuSRTPlatform):
        """Portable CPU inference; every operator takes its ``forward_native``."""

        _enum = PlatformEnum.OOT
        supported_quantization: list[str] = []

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        # 0.5.16 asks for these classes by name; later versions take their own when a platform has no opinion.
        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            return MLATokenToKVPool

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

    with suppress(ImportError):  # Capabilities came with 0.5.20; its CPU platform claims graphs, which need AMX.
        from sglang.srt.platforms.interface import PlatformCapabilities

        CpuPlatform.capabilities = PlatformCapabilities()
        # A platform that still answers these is served with a deprecation warning.
        for name in ("get_mha_kv_pool_cls", "get_mla_kv_pool_cls", "get_paged_allocator_cls"):
            delattr(CpuPlatform, name)
    return CpuPlatform
