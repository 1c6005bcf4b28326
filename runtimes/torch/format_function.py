"""Formats without a dequantize of their own in torch: their ONNX function, run by the executor."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from qgraph import registry
from qgraph.errors import InputError
from qgraph.formats.base import function_names, named

_OPSET = 23


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, layout: str) -> Tensor:
    """W `[N, k]`, float16 where the scales are, else float32.

    The function's inputs are the codes, the scales and, if it has a third one, `zeros`.

    Raises:
        InputError: no format has this layout.
    """
    steps = scales.to(torch.float32) if scales.dtype == torch.bfloat16 else scales
    dtype = torch.float16 if scales.dtype == torch.float16 else torch.float32
    parts = (codes, steps) if zeros is None else (codes, steps, zeros)
    with torch.no_grad():
        w: Tensor = _module(layout, k, dtype)(*parts)[0].contiguous()
    return w


@functools.lru_cache(maxsize=64)
def _module(layout: str, k: int, dtype: torch.dtype) -> Any:
    """The format's function as a module; it keeps no weight."""
    import onnx_ir as ir

    from qgraph.runtimes.torch import executor

    wanted = f"Dequantize{layout}"
    found = named(wanted)
    if found is None:
        layouts = [name.removeprefix("Dequantize") for name in function_names()]
        near = registry.did_you_mean(layout, layouts)
        raise InputError(f"no format has the layout {layout!r}{near} (known: {', '.join(layouts)})")
    onnx_type = ir.DataType.FLOAT if dtype == torch.float32 else ir.DataType.FLOAT16
    attributes = {"k": k, "dtype": int(onnx_type)}
    return executor.build_function(found.function(_OPSET), attributes)
