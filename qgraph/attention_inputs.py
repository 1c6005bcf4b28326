"""What ONNX Runtime's ops of attention read and give, in its words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from qgraph.op_inputs import CONTRIB, OpInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx_ir as ir

Told = Literal[
    "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key",
    "past_value", "past_sequence_length", "cache_indirection", "seqlens_k",
    "total_sequence_length", "cos_cache", "sin_cache", "position_ids", "head_sink", "k_scale",
    "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AttentionOp(OpInputs[Told]):
    """One op: its result comes first, then what its cache has become."""

    def place(self, what: Told) -> int:
        """The place of an input that the op is known to read."""
        return self.inputs.index(what)

    def pasts(self, node: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
        """The keys and values of earlier tokens that a node is given."""
        return self.read(node, "past_key"), self.read(node, "past_value")

    def presents(self, node: ir.Node) -> Sequence[ir.Value]:
        """Those with the new ones behind, where a node gives them."""
        return node.outputs[1:3]


GROUPED_QUERY = AttentionOp(
    f"{CONTRIB}::GroupQueryAttention",
    (
        "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
        "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale",
        "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens",
    ),
)  # fmt: skip
MULTI_HEAD = AttentionOp(
    f"{CONTRIB}::MultiHeadAttention",
    (
        "query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key",
        "past_value", "past_sequence_length", "cache_indirection",
    ),
)  # fmt: skip
