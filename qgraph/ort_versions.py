"""The first ONNX Runtime that has a feature, and how a node shows that it needs it.

Every version here, and in `kernel_ops`, was found by running small models, whose results are known,
on the CPU of builds from OLDEST to NEWEST; tests/benchmarks/old_runtimes.py does that again. Only
what is never written here (norms in attention, caches of a window, packed layouts), or needs a GPU
(blocks of FP8 and FP4), is by the lists of inputs and attributes of those builds. What came before
OLDEST counts as of OLDEST.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from qgraph.attention_inputs import GROUPED_QUERY, MULTI_HEAD, Told
from qgraph.errors import InputError
from qgraph.kernel_ops import CONTRIB_OPS, DEQUANTIZE_LINEAR, KERNEL_OPS, NBITS, KernelOp

if TYPE_CHECKING:
    import onnx_ir as ir

Version: TypeAlias = tuple[int, int]
OLDEST: Version = (1, 20)
NEWEST: Version = (1, 32)
QUERY_LENGTHS: Version = (1, 32)
"""Since when GroupQueryAttention is told how many of the tokens are new (query_seqlens)."""
ATTENTION_BIAS: Version = (1, 22)
"""Since when it is told positions and what is added to scores."""
WITHOUT_CACHE: Version = (1, 27)
"""Since when it does without a past."""
WITHOUT_ZEROS: Version = (1, 28)
"""Since when a Transpose behind a DequantizeLinear without zero points is right.

Before, it is moved in front by a QuantizeLinear without them, which makes uint8 of any codes: the
model is refused, or, with one scale for the tensor, computes something else without a word.
"""
STORED_CACHE: Version = (1, 27)
"""Since when its cache may be codes and scales."""
STORED_CACHE_BIAS: Version = (1, 28)
"""Since when it may be so beside attention_bias; 1.27 adds the first row's to all of a batch."""
STORED_CACHE_HALF: Version = (1, 29)
"""Since when it may be so where attention computes in float16."""

OPSETS: dict[int, Version] = {
    22: (1, 21), 23: (1, 23), 24: (1, 24), 25: (1, 24), 26: (1, 25), 27: (1, 32),
    28: (1, 32),
}  # fmt: skip
IR_VERSIONS: dict[int, Version] = {11: (1, 23), 12: (1, 24), 13: (1, 24), 14: (1, 32)}
ONNX = ("", "ai.onnx")
_GROUPED, _MULTI_HEAD = GROUPED_QUERY.op_type, MULTI_HEAD.op_type
_DEQUANTIZE = KERNEL_OPS[DEQUANTIZE_LINEAR]
_BARE = "DequantizeLinear without zero points behind which a Transpose stands"


def parse_version(text: str) -> Version:
    """`1.27`, or `1.27.2`: a release's first two numbers; patches add no feature.

    Raises:
        InputError: it is none, or one that was not tried.
    """
    found = re.fullmatch(r"(\d{1,3})\.(\d{1,3})(\.\d+)?", text)
    version = (int(found[1]), int(found[2])) if found else None
    if version is None or not OLDEST <= version <= NEWEST:
        what = "is no version" if version is None else "was not tried"
        raise InputError(
            f"min runtime {text!r} {what}: wanted an ONNX Runtime from {spell(OLDEST)} to "
            f"{spell(NEWEST)}, as in 1.27"
        )
    return version


def installed(text: str | None) -> Version:
    """The version of an installed build, as far as it is known: NEWEST for all that is newer."""
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return NEWEST if found is None else min(NEWEST, (int(found[1]), int(found[2])))


def spell(version: Version) -> str:
    """`1.27`."""
    return f"{version[0]}.{version[1]}"


def opset_since(opset: int) -> Version | None:
    """The first that reads a model of this opset; None where NEWEST does not."""
    return _of_number(OPSETS, opset)


def newest_opset(text: str) -> int | None:
    """The newest that a release reads, named as `parse_version` takes it; None for no release."""
    if not text:
        return None
    return _newest(OPSETS, parse_version(text))


def newest_read(version: Version) -> tuple[int, int]:
    """The newest opset and the newest IR version that a release reads."""
    return _newest(OPSETS, version), _newest(IR_VERSIONS, version)


def ir_since(version: int) -> Version | None:
    """The first that reads a model of this IR version; None where NEWEST does not."""
    return _of_number(IR_VERSIONS, version)


def _newest(table: dict[int, Version], version: Version) -> int:
    return max((n for n, since in table.items() if since <= version), default=min(table) - 1)


def _of_number(table: dict[int, Version], number: int) -> Version | None:
    return None if number > max(table) else table.get(number, OLDEST)


def kernel_since(op: str, bits: int, level: int = 0, dtype: str = "float32") -> Version:
    """The first with a kernel of packed weights, codes lying in bytes.

    op: its name without a domain. level: the accuracy level of MatMulNBits.
    """
    known = CONTRIB_OPS.get(op)
    listed = known.since if known is not None else ()
    return next((each.release for each in listed if each.holds(bits, level, dtype)), OLDEST)


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that nodes of one op of `com.microsoft` may have.

    what: in words, behind the op's name. has: whether a node has it.
    """

    op: str
    since: Version
    what: str
    has: Callable[[ir.Node], bool]


def _told(what: Told) -> Callable[[ir.Node], bool]:
    """Whether an attention is given an input."""
    return lambda node: GROUPED_QUERY.read(node, what) is not None


def _set(name: str) -> Callable[[ir.Node], bool]:
    return lambda node: name in node.attributes


def _is_shared(node: ir.Node) -> bool:
    """Whether one bias `[B, 1, S, T]` serves all heads."""
    bias = MULTI_HEAD.read(node, "attention_bias")
    heads = node.attributes.get_int("num_heads", 1)
    return bias is not None and bias.shape is not None and bias.shape[1] == 1 < heads


def _is_half(node: ir.Node) -> bool:
    """Whether a node computes in float16, as far as the graph says it."""
    return any(v is not None and v.dtype is not None and v.dtype.name == "FLOAT16"
               for v in (node.inputs[0], node.outputs[0]))  # fmt: skip


def _is_bare(node: ir.Node) -> bool:
    """Whether it dequantizes other codes than uint8 without zero points, for a Transpose."""
    codes, turned = node.inputs[0], {use.node.op_type for use in node.outputs[0].uses()}
    byte = codes is not None and codes.dtype is not None and codes.dtype.name == "UINT8"
    blocks, zeros = node.attributes.get_int("block_size", 0), _DEQUANTIZE.read(node, "zeros")
    return "Transpose" in turned and not (blocks or byte or zeros is not None)


FEATURES = (
    Feature(_GROUPED, QUERY_LENGTHS, "with query_seqlens", _told("query_seqlens")),
    Feature(
        _GROUPED, (1, 30), "that looks ahead", lambda node: not node.attributes.get_int("causal", 1)
    ),
    Feature(_GROUPED, (1, 30), "with a cache of its window", _set("sliding_window_cache")),
    Feature(_GROUPED, (1, 28), "that norms queries and keys", _told("q_norm_weight")),
    Feature(
        _GROUPED, STORED_CACHE_HALF, "with a quantized cache in float16",
        lambda node: _told("k_scale")(node) and _is_half(node),
    ),
    Feature(
        _GROUPED, STORED_CACHE_BIAS, "with a quantized cache and attention_bias",
        lambda node: _told("k_scale")(node) and _told("attention_bias")(node),
    ),
    Feature(_GROUPED, STORED_CACHE, "with a quantized cache", _told("k_scale")),
    Feature(_GROUPED, WITHOUT_CACHE, "without a cache", lambda node: not _told("past_key")(node)),
    Feature(
        _GROUPED, (1, 24), "with a window",
        lambda node: node.attributes.get_int("local_window_size", -1) > 0,
    ),
    Feature(_GROUPED, (1, 23), "with sinks", _told("head_sink")),
    Feature(_GROUPED, ATTENTION_BIAS, "with attention_bias", _told("attention_bias")),
    Feature(_GROUPED, ATTENTION_BIAS, "with position_ids", _told("position_ids")),
    Feature(_MULTI_HEAD, (1, 21), "with one attention_bias for all heads", _is_shared),
    Feature(NBITS.op_type, (1, 28), "with packed layouts", _set("weight_prepacked")),
)  # fmt: skip
_TRIED = frozenset({
    *CONTRIB_OPS, _GROUPED, _MULTI_HEAD, "SkipSimplifiedLayerNormalization",
    "SkipLayerNormalization", "Gelu", "FastGelu", "QuickGelu", "RotaryEmbedding",
})  # fmt: skip
"""What has been run; of all of `com.microsoft`, these are what graphs are fused into here."""


def features_of(node: ir.Node) -> list[tuple[Version, str]] | None:
    """What a node of ONNX or `com.microsoft` needs, and since when there is that.

    None for one of the latter that was never tried.
    """
    op = node.op_type
    if node.domain in ONNX:
        return [(WITHOUT_ZEROS, _BARE)] if op == "DequantizeLinear" and _is_bare(node) else []
    if op not in _TRIED:
        return None
    packed = CONTRIB_OPS.get(op)
    found = [_packed(node, packed) if packed is not None and packed.since else (OLDEST, op)]
    return found + [
        (each.since, f"{op} {each.what}") for each in FEATURES if each.op == op and each.has(node)
    ]


def _packed(node: ir.Node, op: KernelOp) -> tuple[Version, str]:
    codes, dtype = op.read(node, "codes"), node.outputs[0].dtype
    kind = codes.dtype.name if codes is not None and codes.dtype is not None else ""
    if op.kind == "gather" and kind in ("INT4", "UINT4"):
        return OLDEST, op.op_type
    bits, level = op.number(node, "bits"), op.number(node, "accuracy_level")
    half = "float16" if dtype is not None and dtype.name == "FLOAT16" else "float32"
    since = kernel_since(op.op_type, bits, level, half)
    words = op.op_type + (f" of {bits} bits" if "bits" in op.attributes else "")
    if any(each.bits == bits and each.level not in (None, level) for each in op.since):
        words += " at accuracy level 0"
    return since, words + (" in float16" if half == "float16" else "")
