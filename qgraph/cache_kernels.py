"""Whether a target's attention reads a quantized cache, and what a graph says of its own."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.decoder_graph import cache_bits, cache_readers
from qgraph.errors import InputError
from qgraph.formats.kv_cache import CacheFormat
from qgraph.traits import targets_with, traits_of


def require_cache_kernel(text: str, target: str, *, available: bool) -> None:
    """Refuse a format of the cache that no kernel of the target reads.

    text: as `CacheFormat.parse` takes it. available: whether the target can run here.

    Raises:
        InputError: it says what can be done instead.
    """
    wanted, kinds = CacheFormat.parse(text), traits_of(target).cache_kinds
    if not kinds:
        raise InputError(
            f"--kv-cache is for the targets {targets_with(lambda each: each.cache_kinds)}, whose "
            f"attention reads a quantized cache; the target is {target}"
        )
    if wanted.name not in kinds:
        raise InputError(
            f"--kv-cache {wanted.name}: {target} has no kernel that reads it (ONNX Runtime's are "
            f"for CUDA); take --kv-cache {' or '.join(kinds)}"
        )
    if not available:
        raise InputError(
            f"--kv-cache runs the model on {target}, which is not available here, to see what the "
            "cache spans and what rounding it costs: run it where it is, or take --target ort-cpu"
        )


def cache_notes(model: ir.Model) -> list[str]:
    """How the attentions of a graph keep keys and values, where those are no floats."""
    kinds: dict[str, None] = {}
    size = 0
    for past, node in cache_readers(model):
        if not cache_bits(node) or past.dtype is None or past.shape is None:
            continue
        spread = node.attributes.get_string("k_quant_type", "").lower().replace("_", " ")
        name = "int4" if cache_bits(node) == 4 else past.dtype.name.lower()
        kinds[f"{name}, {spread}"] = None
        heads, width = past.shape[1], past.shape[3]
        if isinstance(heads, int) and isinstance(width, int):
            size += heads * width
    found = " and ".join(kinds)
    return [f"the cache is quantized: {found}; {size:,} bytes a token"] if kinds else []
