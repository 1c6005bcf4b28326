"""The one list of what exists: formats, solvers, passes, checkpoint layouts, runtimes, targets.

A new entry costs one file and one line here. Entries are imported at first use, so that
`import qgraph` loads neither torch nor a runtime.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any, Literal

from qgraph.errors import InputError

Kind = Literal["format", "solver", "pass", "checkpoint", "runtime", "target"]

_ENTRIES: dict[Kind, dict[str, str]] = {
    "format": {
        "int4": "qgraph.formats.integer_groups:INT4",
        "uint4": "qgraph.formats.integer_groups:UINT4",
        "int8": "qgraph.formats.integer_groups:INT8",
        "uint8": "qgraph.formats.integer_groups:UINT8",
        "int2": "qgraph.formats.integer_groups:INT2",
        "uint2": "qgraph.formats.integer_groups:UINT2",
        "int8-row": "qgraph.formats.integer_groups:INT8_ROW",
        "int4-row": "qgraph.formats.integer_groups:INT4_ROW",
        "int8-pairs": "qgraph.formats.pairs:INT8_PAIRS",
        "fp8-e4m3": "qgraph.formats.fp8:E4M3",
        "fp8-e5m2": "qgraph.formats.fp8:E5M2",
        "nf4": "qgraph.formats.bitsandbytes:NF4",
        "fp4": "qgraph.formats.bitsandbytes:FP4",
        "mxfp4": "qgraph.formats.mx:MXFP4",
        "mxfp8": "qgraph.formats.mx:MXFP8",
        "nvfp4": "qgraph.formats.nvfp4:NVFP4",
    },
    "solver": {
        "rtn": "qgraph.passes.quantize_rtn:Rtn",
        "gptq": "qgraph.passes.quantize_gptq:Gptq",
        "awq": "qgraph.passes.quantize_awq:Awq",
        "smoothquant": "qgraph.passes.quantize_smoothquant:Smoothquant",
        "clip": "qgraph.passes.quantize_clip:Clip",
        "hqq": "qgraph.passes.quantize_hqq:Hqq",
        "weighted": "qgraph.passes.quantize_weighted:Weighted",
        "auto": "qgraph.passes.quantize_auto:Auto",
    },
    "pass": {
        "adopt_qdq": "qgraph.passes.adopt_qdq:AdoptQdq",
        "import_weights": "qgraph.passes.import_weights:ImportWeights",
        "solve": "qgraph.passes.solve:Solve",
        "quantize_rtn": "qgraph.passes.quantize_rtn:QuantizeRtn",
        "lower_w8a8": "qgraph.passes.lower_w8a8:LowerW8A8",
        "insert_fp8_qdq": "qgraph.passes.insert_fp8_qdq:InsertFp8Qdq",
        "lower_by_rows": "qgraph.passes.lower_by_rows:LowerByRows",
        "lower_matmul_nbits": "qgraph.passes.lower_matmul_nbits:LowerMatMulNBits",
        "lower_matmul_bnb4": "qgraph.passes.lower_matmul_bnb4:LowerMatMulBnb4",
        "lower_matmul_block_quantized": (
            "qgraph.passes.lower_matmul_block_quantized:LowerMatMulBlockQuantized"
        ),
        "lower_gather_block_quantized": (
            "qgraph.passes.lower_gather_block_quantized:LowerGatherBlockQuantized"
        ),
        "lower_qdq": "qgraph.passes.lower_qdq:LowerQdq",
        "lower_portable": "qgraph.passes.lower_portable:LowerPortable",
        "fuse_transformer": "qgraph.passes.fuse_transformer:FuseTransformer",
        "add_cache": "qgraph.passes.add_cache:AddCache",
        "quantize_cache": "qgraph.passes.quantize_cache:QuantizeCache",
        "last_logits": "qgraph.passes.last_logits:LastLogits",
        "widen_products": "qgraph.passes.widen_products:WidenProducts",
        "join_branches": "qgraph.passes.join_branches:JoinBranches",
        "cleanup": "qgraph.passes.cleanup:Cleanup",
    },
    "checkpoint": {
        "gptq": "qgraph.checkpoints.gptq:V1",
        "gptq_v2": "qgraph.checkpoints.gptq:V2",
        "awq": "qgraph.checkpoints.awq:AWQ",
        "compressed-tensors": "qgraph.checkpoints.compressed_tensors:COMPRESSED_TENSORS",
        "fp8": "qgraph.checkpoints.fp8:FP8",
        "mxfp4": "qgraph.checkpoints.mxfp4:MXFP4_EXPERTS",
        "bitsandbytes": "qgraph.checkpoints.bitsandbytes:BITSANDBYTES",
        "modelopt": "qgraph.checkpoints.modelopt:MODELOPT",
        "gguf": "qgraph.checkpoints.gguf:GGUF",
    },
    "runtime": {
        "ort": "qgraph.runtimes.ort:OrtRuntime",
        "torch": "qgraph.runtimes.torch.runtime:TorchRuntime",
    },
    "target": {
        "ort-cpu": "qgraph.runtimes.ort:CPU",
        "ort-cuda": "qgraph.runtimes.ort:CUDA",
        "qdq": "qgraph.runtimes.ort:QDQ",
        "torch": "qgraph.runtimes.torch.runtime:HERE",
        "torch-cpu": "qgraph.runtimes.torch.runtime:CPU",
        "torch-cuda": "qgraph.runtimes.torch.runtime:CUDA",
    },
}


def names(kind: Kind) -> tuple[str, ...]:
    """The names of one kind, in the order of the list."""
    return tuple(_ENTRIES[kind])


def load(kind: Kind, name: str) -> Any:
    """Import and return the entry `name` of `kind`.

    Raises:
        InputError: no such entry; the message says what there is and which name is nearest.
    """
    entries = _ENTRIES[kind]
    if name not in entries:
        known = ", ".join(entries) or "none yet"
        raise InputError(f"no {kind} named {name!r}{did_you_mean(name, entries)} (known: {known})")
    module, _, attribute = entries[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the names nearest to `name` in any case, or nothing.

    One that differs in case alone is it; those that begin with `name` come before others.
    """
    folded: dict[str, list[str]] = {}
    for each in known:
        folded.setdefault(each.casefold(), []).append(each)
    asked = name.casefold()
    if asked in folded:
        found = [asked]
    else:
        longer = [key for key in folded if len(asked) > 1 and key.startswith(asked)]
        close = difflib.get_close_matches(asked, folded, n=3, cutoff=0.5)
        found = [*longer, *(key for key in close if key not in longer)]
    near = [each for key in found for each in folded[key]][:3]
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
