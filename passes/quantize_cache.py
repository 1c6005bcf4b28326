"""The cache of keys and values in 8 or 4 bits, by scales from calibration data."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NoReturn, TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.attention_inputs import GROUPED_QUERY
from qgraph.calibration import Calibration
from qgraph.decoder_graph import CACHE_BITS, CACHING, cache_bits, names_cache
from qgraph.divergence import kl_divergence
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.formats.kv_cache import CacheFormat
from qgraph.graph import Graph
from qgraph.held_out import fewer, rows_in, samples_of, split
from qgraph.ort_versions import STORED_CACHE_BIAS, STORED_CACHE_HALF, Version, spell
from qgraph.paired import find_logits
from qgraph.passes.add_cache import MASK, POSITIONS
from qgraph.passes.base import Context, Pass
from qgraph.passes.cache_noise import move, rounds_activations
from qgraph.passes.cache_offsets import take_off
from qgraph.passes.cache_ranges import (
    Cached,
    CacheRanges,
    cached,
    observe,
)
from qgraph.passes.one_kernel import waiting
from qgraph.report import Step
from qgraph.rewrite import Rewriter
from qgraph.row_branches import within
from qgraph.wording import counted

_SCALES = GROUPED_QUERY.place("k_scale"), GROUPED_QUERY.place("v_scale")
_KINDS = ("k_quant_type", "v_quant_type")
_SPREAD = {"tensor": "PER_TENSOR", "channel": "PER_CHANNEL"}
_TOLD = 0.1
"""The share of a divergence from which on its noise is told."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """How an attention keeps keys and values: their scales, and what is taken off values first."""

    keys: Array
    values: Array
    offset: Array | None


Scales: TypeAlias = Mapping[str, Kept]
"""By attention."""


@dataclasses.dataclass(frozen=True, eq=False)
class CacheFinding:
    """What calibration found, kept while the passes run again.

    tokens: that the scales were found on. divergence: KL(float cache ‖ this one) in nats a token,
        on `held` tokens; None for a model without logits. noise: what moving all that attention
        reads by a millionth costs there; None where activations are not rounded. apart: whether
        those tokens were held out.
    bytes_before, bytes_after: of the cache, for each token.
    """

    format: CacheFormat
    scales: Scales
    tokens: int
    divergence: float | None
    noise: float | None
    held: int
    apart: bool
    bytes_before: int
    bytes_after: int

    @property
    def line(self) -> str:
        """What the run says of it."""
        sizes = f"{self.bytes_before:,} → {self.bytes_after:,} bytes a token"
        found = f"kv cache: {self.format.name}, one scale a {self.format.scale}, {sizes}"
        if self.divergence is None:
            return found
        where = "held out" if self.apart else "of the calibration itself: there is one sample"
        noise = ""
        if self.noise is not None and self.noise >= _TOLD * self.divergence:
            noise = f"; rounded activations make {self.noise:.2g} of any change, however small"
        return (
            f"{found}; KL divergence {self.divergence:.2g} from the same model with a float cache, "
            f"on {counted(self.held, 'token')} {where}{noise}"
        )

    def to_json(self) -> dict[str, object]:
        """For the report's totals."""
        found = dataclasses.asdict(self)
        del found["scales"], found["format"]
        return {"format": self.format.name, "scale": self.format.scale, **found}


@dataclasses.dataclass(frozen=True)
class QuantizeCache(Pass):
    """Attention that keeps floats keeps codes, and reads them as codes times scales.

    before:  GroupQueryAttention(q, k, v, past.key, past.value, …) → y, present.key, present.value
    after:   GroupQueryAttention<bits, per channel>(q, k, v, past.key (int8), past.value (int8),
             …, k_scale, v_scale) → y, present.key (int8), present.value (int8)
    """

    name: ClassVar[str] = "quantize_cache"
    tokens: int = 8192
    """Calibration tokens that the scales are found on, at most (whole samples)."""
    held: int = 1024
    """Tokens held out that the divergence is measured on, at most (whole samples, one at least)."""

    def run(self, graph: Graph, context: Context) -> list[Step]:
        """Quantize the cache of every attention, or refuse the graph with what stands against."""
        asked = context.plan.recipe.kv_cache
        if not asked:
            return []
        wanted, found = CacheFormat.parse(asked), _attentions(graph.model)
        _require(found, context.capabilities.oldest)
        sizes = [_sizes(each, wanted) for each in found]
        if context.calibration is None or waiting(context.findings):
            return []  # it is said that it can be; what is measured is the model as it will be
        if context.findings.cache is None:
            before, after = (sum(each) for each in zip(*sizes, strict=True))
            measured = self._measure(graph.model, wanted, context.calibration)
            context.findings.cache = CacheFinding(wanted, *measured, before, after)
        finding: CacheFinding = context.findings.cache
        _rewrite(graph.model, wanted, finding.scales)
        return [
            Step(self.name, "cache", each.name, "done", None, _detail(wanted, finding, each), *size)
            for each, size in zip(found, sizes, strict=True)
        ]

    def _measure(
        self, model: ir.Model, wanted: CacheFormat, data: Calibration
    ) -> tuple[Scales, int, float | None, float | None, int, bool]:
        """The scales, and what the cache that they make costs: see `CacheFinding`."""
        several = sum(map(rows_in, data.batches)) > 1
        seen, held = split(data) if several else (data, data)
        seen, held = fewer(seen, self.tokens, cut=False), fewer(held, self.held, cut=False)
        with tempfile.TemporaryDirectory(prefix="qgraph-") as folder:
            path = Path(folder) / "float.onnx"
            ir.save(model, path, external_data="float.data")
            spans = _spans(path, seen, wanted)
            scales = {
                name: Kept(wanted.scales(each.keys), wanted.scales(each.values), each.offset)
                for name, each in spans.items()
            }
            found = _divergence(path, wanted, scales, held)
        return scales, seen.tokens, *found, several


def _detail(wanted: CacheFormat, finding: CacheFinding, attention: Cached) -> str:
    """What a step says of one attention."""
    words = f"{wanted.name}, one scale a {wanted.scale}"
    less = finding.scales[attention.name].offset is not None
    return f"{words}; values less those that all first tokens have" if less else words


def _sizes(attention: Cached, wanted: CacheFormat) -> tuple[int, int]:
    """Bytes of one token in the cache of an attention, as it is and as it is wanted.

    Raises:
        InputError: see `CacheFormat.width`.
    """
    dtype = attention.pasts[0].dtype
    assert dtype is not None
    count = 2 * attention.heads
    return count * attention.size * dtype.bitwidth // 8, count * wanted.width(attention.size)


def _attentions(model: ir.Model) -> list[Cached]:
    """Every attention with a cache, in order.

    Raises:
        InputError: there is none, or one whose cache cannot be quantized.
    """
    pasts = [value for value in model.graph.inputs if _is_past(value)]
    found = [node for node in model.graph if node.op_type == CACHING and _past(node)]
    if not found:
        reader = next((node for value in pasts for node, _ in value.uses()), None)
        if reader is None:
            _refuse("the model has no cache: add one with --add-cache, or export it with one")
        if hidden := within(model, (CACHING,)):
            _refuse(f"attentions are not where they can be changed: {hidden}")
        _refuse(
            f"no attention became {CACHING}: {reader.name} ({reader.op_type}) reads the cache, and "
            "`qgraph explain` says what was fused and what was not"
        )
    for node in found:
        _check(node)
    for value in pasts:
        readers = [node for node, _ in value.uses() if node not in found]
        if readers:
            _refuse(
                f"{value.name} is read by {readers[0].name} ({readers[0].op_type}), no attention "
                f"that was fused into {CACHING}; `qgraph explain` says why it was not"
            )
    return [cached(node) for node in found]


def _is_past(value: ir.Value) -> bool:
    return value.shape is not None and names_cache(value.name, len(value.shape))


def _past(node: ir.Node) -> bool:
    both = len(node.inputs) > GROUPED_QUERY.place("past_value")
    return both and GROUPED_QUERY.read(node, "past_key") is not None


def _check(node: ir.Node) -> None:
    """Refuse an attention whose past or present is more than its own."""
    if cache_bits(node):
        _refuse(f"the cache of {node.name} is quantized already: start from the float model")
    for value in GROUPED_QUERY.pasts(node):
        assert value is not None
        others = [other for other, _ in value.uses() if other is not node]
        if not value.is_graph_input() or others:
            what = f"is also read by {others[0].name}" if others else "is no input of the model"
            _refuse(f"the past {value.name} of {node.name} {what}")
        if value.dtype not in _FLOATS:
            _refuse(f"the past {value.name} of {node.name} is {value.dtype}, not floats")
    for value in GROUPED_QUERY.presents(node):
        if not value.is_graph_output() or value.uses():
            _refuse(f"the present {value.name} of {node.name} is no output of the model alone")


def _require(found: Sequence[Cached], oldest: Version) -> None:
    """Refuse what the oldest runtime that has to run the result does not read beside codes."""
    half = [each for each in found if each.pasts[0].dtype == ir.DataType.FLOAT16]
    biased = [each for each in found if GROUPED_QUERY.read(each.node, "attention_bias") is not None]
    for those, since, what, other in (
        (half, STORED_CACHE_HALF, "computes in float16", "a float32 model"),
        (biased, STORED_CACHE_BIAS, "adds a mask to scores", "a model without padding"),
    ):
        if those and oldest < since:
            _refuse(
                f"{those[0].name} {what}, where a cache of codes is read right since ONNX Runtime "
                f"{spell(since)}, and {spell(oldest)} has to run it: a newer one, or {other}"
            )


def _refuse(why: str) -> NoReturn:
    raise InputError(f"--kv-cache: {why}")


def _rewrite(model: ir.Model, wanted: CacheFormat, scales: Scales) -> None:
    """Give every attention its scales, and its past and present their types."""
    rewriter = Rewriter(model)
    for each in _attentions(model):
        node = each.node
        node.resize_inputs(max(len(node.inputs), _SCALES[1] + 1))
        kept = scales[each.name]
        arrays = (kept.keys, kept.values)
        for at, array, present in zip(_SCALES, arrays, each.presents, strict=True):
            node.replace_input_with(at, rewriter.constant(f"{present.name}.scale", array))
        node.attributes.add(ir.AttrInt64(CACHE_BITS, wanted.bits))
        for kind in _KINDS:
            node.attributes.add(ir.AttrString(kind, _SPREAD[wanted.scale]))
        if kept.offset is not None:
            take_off(rewriter, each, kept.offset)
        width = wanted.width(each.size)
        for value in (*each.pasts, *each.presents):
            value.type = ir.TensorType(wanted.data_type)
            if value.shape is not None:
                value.shape = ir.Shape([*value.shape[:-1], width])


def _spans(path: Path, data: Calibration, wanted: CacheFormat) -> dict[str, CacheRanges]:
    """What the caches of the model at `path` span over calibration data."""
    model = ir.load(path)
    found = _attentions(model)
    model.graph.outputs[:] = [value for each in found for value in each.presents]
    inputs = list(model.graph.inputs)
    feeds = (_completed(inputs, *each) for each in zip(data.batches, data.masks, strict=True))
    return observe(found, data.run(_beside(path, model, "spans"), feeds), data, wanted)


def _divergence(
    path: Path,
    wanted: CacheFormat,
    scales: Scales,
    data: Calibration,
) -> tuple[float | None, float | None, int]:
    """KL(float cache ‖ quantized cache) of the model at `path`, its noise, and on how many tokens.

    The noise is None where the model rounds no activations: there is none worth telling.
    """
    model = ir.load(path)
    attentions = _attentions(model)
    pasts: dict[str, tuple[Array, Array | float]] = {}
    for attention in attentions:
        kept = scales[attention.name]
        off = 0.0 if kept.offset is None else kept.offset[:, None]
        pasts |= {str(attention.pasts[0].name): (kept.keys, 0.0)}
        pasts |= {str(attention.pasts[1].name): (kept.values, off)}
    presents = {value.name for attention in attentions for value in attention.presents}
    shapes = [(str(v.name), tuple(v.shape or ())) for v in model.graph.outputs
              if v.name not in presents and v.dtype in _FLOATS]  # fmt: skip
    logits = find_logits(shapes, model)
    if logits is None:
        return None, None, 0
    inputs = list(model.graph.inputs)
    samples = list(samples_of(data))  # one by one: logits of several at once take much memory
    masks = [sample[MASK].astype(bool) if MASK in sample else None for sample in samples]
    feeds = [_completed(inputs, *each) for each in zip(samples, masks, strict=True)]

    def apart(other: ir.Model, given: Iterable[Mapping[str, Array]]) -> Array:
        results = data.run(path, feeds), data.run(_beside(path, other, "other"), given)
        found = []
        for one, two, mask in zip(*results, masks, strict=True):
            kl = kl_divergence(one[logits], two[logits])
            found.append(kl[mask] if mask is not None and mask.shape == kl.shape else kl.ravel())
        return np.concatenate(found)

    noise = None
    if rounds_activations(model):
        moved = ir.load(path)
        move(moved)
        noise = max(0.0, float(apart(moved, feeds).mean()))
    _rewrite(model, wanted, scales)
    rounded = (
        {name: _rounded(x, wanted, *pasts[name]) if name in pasts else x for name, x in f.items()}
        for f in feeds
    )
    kl = apart(model, rounded)
    return float(kl.mean()), noise, len(kl)


def _rounded(x: Array, wanted: CacheFormat, scales: Array, offset: Array | float) -> Array:
    """A past that was given in floats, as the quantized cache holds it."""
    return wanted.quantize(x - offset, scales)


def _beside(path: Path, model: ir.Model, name: str) -> Path:
    """The graph of `model`, whose weights are those at `path`, as a file beside it."""
    other = path.with_name(f"{name}.onnx")
    other.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    return other


def _rows(batch: Mapping[str, Array]) -> Array:
    """The tokens `[rows, T]` of a batch."""
    tokens = [a for a in batch.values() if a.ndim == 2 and np.issubdtype(a.dtype, np.integer)]
    return tokens[0] if tokens else np.empty((1, 0), np.int64)


def _completed(
    inputs: Sequence[ir.Value], batch: Mapping[str, Array], mask: Array | None
) -> dict[str, Array]:
    """A batch for a model that was given a cache: mask, positions, and pasts of no tokens."""
    tokens = _rows(batch)
    valid = np.ones(tokens.shape, np.int64) if mask is None else mask.astype(np.int64)
    made = {MASK: valid, POSITIONS: np.maximum(np.cumsum(valid, -1) - 1, 0)}
    found: dict[str, Array] = {}
    for value in inputs:
        name = value.name or ""
        if value.is_initializer():
            continue
        if name in batch:
            found[name] = batch[name]
        elif name in made:
            found[name] = made[name]
        elif _is_past(value):
            assert value.shape is not None and value.dtype is not None
            heads, size = (int(str(value.shape[axis])) for axis in (1, 3))
            found[name] = np.zeros((len(tokens), heads, 0, size), value.dtype.numpy())
    return found
