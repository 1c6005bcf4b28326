"""Which passes a run of `optimize` goes through, and in what order, by target."""

from __future__ import annotations

from qgraph.fused_ops import PASS as FUSING
from qgraph.recipe import Recipe
from qgraph.traits import traits_of

_SPELLED = ("lower_w8a8", "lower_qdq")
_FUSED = (
    "lower_w8a8", "lower_matmul_nbits", "lower_matmul_bnb4", "lower_matmul_block_quantized",
    "lower_gather_block_quantized", "lower_qdq", "lower_portable",
)  # fmt: skip
"""The lowerings of all other targets: torch reads the ops of ONNX Runtime."""


def pass_names(target: str, recipe: Recipe) -> list[str]:
    """Names of passes in the registry, in the order they run."""
    traits = traits_of(target)
    names = ["adopt_qdq", "import_weights", "solve", "quantize_rtn", "lower_by_rows"]
    names += ["insert_fp8_qdq", *(_SPELLED if traits.spells_qdq else _FUSED), "cleanup"]
    if traits.fuses_ops:
        names += [FUSING, "cleanup"]
        names += ["widen_products"] if traits.widens_products else []  # before it is run as a whole
        names += ["add_cache", "cleanup"] if recipe.add_cache else []
        names += ["quantize_cache"] if recipe.kv_cache else []
    names += ["last_logits"] if recipe.last_logits else []  # the cache is measured on all tokens
    return [*names, "join_branches"]
