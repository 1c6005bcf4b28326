"""bitsandbytes on processors with AVX512-BF16, where its 4-bit product rounds to bfloat16."""

from __future__ import annotations

from typing import Any

_SWITCH = "support_avx512bf16_for_cpu"


def in_float32(module: Any) -> Any:
    """`module`, whose linears of bitsandbytes multiply in float32 whatever the processor has."""
    for each in module.modules():
        if hasattr(each, _SWITCH):
            setattr(each, _SWITCH, False)
    return module
