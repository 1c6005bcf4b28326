"""Which passes a run of `optimize` goes through, and in what order, by target."""

from __future__ import annotations

from qgraph.fused_ops import PASS as FUSING
from qgraph.recipe import Recipe

_LOWERINGS: dict[str, tuple[str, ...]] = {"qdq": ("lower_w8a8", "lower_qdq")}
_FUSED = (
    "lower_w8a8", "lower_matmul_nbits", "lower_matmul_bnb4", "lower_matmul_block_quantized",
    "lower_gather_block_quantized", "lower_qdq",
)  # fmt: skip
"""The lowerings of all other targets: torch reads the ops of ONNX Runtime."""
FUSES_OPS = ("ort-cpu", "ort-cuda")
"""The targets whose runtime has fused ops for norms, activations and attention."""


def pass_names(target: str, recipe: Recipe, *, dry_run: bool = False) -> list[str]:
    """Names of passes in `registry.PASSES`, in the order they run; a dry run measures no cache."""
    names = ["adopt_qdq", "import_weights", "solve", "quantize_rtn", "lower_by_rows"]
    names += ["insert_fp8_qdq", *_LOWERINGS.get(target, _FUSED)]
    names += ["lower_portable"] if target != "qdq" else []
    names += ["cleanup"]
    if target in FUSES_OPS:
        names += [FUSING, "cleanup"]
        names += ["add_cache", "cleanup"] if recipe.add_cache else []
        names += ["quantize_cache"] if recipe.kv_cache and not dry_run else []
    return names
