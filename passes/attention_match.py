"""An attention, understood: where its heads come from, its cache, its mask, its positions."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from qgraph.passes.attention_core import Core, OtherwiseError, guarded, result_of
from qgraph.passes.attention_heads import Heads, Scaled, fixed, heads_of, rank, unviewed
from qgraph.passes.attention_mask import Mask, NoMaskError, read_mask
from qgraph.passes.attention_past import Joined, joined_of
from qgraph.passes.attention_probe import Frame
from qgraph.passes.fuse_rotary import NoTableError, Rotary, Table, read_table, rotary_of
from qgraph.passes.fusion import FusionContext
from qgraph.passes.matching import made_by
from qgraph.wording import counted


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention, understood.

    result: the value that takes the new op's result.
    query, key, value: where the heads come from, before rotary embedding and cache.
    untabled: why a rotary embedding stays in front of the op.
    length: how many tokens are looked at, as the graph names it.
    heads, groups, size: of query heads, of heads of keys and values, elements of each.
    """

    core: Core
    result: Heads
    query: Heads
    key: Heads
    value: Heads
    past: tuple[Joined, Joined] | None
    table: Table | None
    untabled: str
    mask: Mask
    frame: Frame
    length: int | str
    heads: int
    groups: int
    size: int
    scale: float

    @property
    def summary(self) -> str:
        """What it is, in words."""
        words = [
            counted(self.heads, "head")
            + (f" over {self.groups}" if self.groups != self.heads else "")
        ]
        words += (
            [f"rotary embedding of {counted(self.table.rows, 'position')}"] if self.table else []
        )
        words += ["cache"] if self.past else []
        words += ["causal"] if self.mask.causal else []
        words += [f"window of {self.mask.window}"] if self.mask.window else []
        words += [f"padding {self.mask.kept.words}".strip()] if self.mask.padding else []
        words += ["bias"] if self.mask.bias is not None else []
        if self.mask.padding is not None and guarded(self.core):
            words += ["a token that sees nothing gets a mean of values, not 0"]
        return ", ".join(words)


def understood(context: FusionContext, core: Core) -> Attention:
    """What is around a softmax.

    Raises:
        OtherwiseError: its heads or its cache are in no known order.
        NoMaskError: its mask is none that the kernels know.
    """
    node = core.node
    size = fixed(core.query, 3)
    if size is None:
        raise OtherwiseError(node, f"how long the heads in {core.query.name} are is not known")
    queries, keys = unviewed(core.query), unviewed(core.key)
    values = unviewed(core.value, factors=False)
    assert queries is not None and keys is not None and values is not None
    past = _past(node, joined_of(keys.value), joined_of(values.value))
    new = past[0].new if past else keys.value
    groups = fixed(past[0].past, 1) if past else None
    frame = _frame(node, core.query, past)
    turned = rotary_of(queries.value), rotary_of(new)
    table = _table(context, turned, frame) or _wider(queries.value)
    if not isinstance(table, Table):
        turned = (None, None)
    query = _heads(node, core.query, queries, turned[0], fixed(core.query, 1), size)
    key = _heads(node, past[0].new if past else core.key, unviewed(new), turned[1], groups, size)
    groups = groups or _count(key[0], size)
    value = _heads(
        node, past[1].new if past else core.value, None, None, groups, size, factors=False
    )
    return Attention(
        core, result_of(core), query[0], key[0], value[0], past,
        table if isinstance(table, Table) else None, table if isinstance(table, str) else "",
        _mask(context, core, frame), frame, _length(key[0], frame),
        _count(query[0], size), groups, size,
        core.factor * query[1] * key[1] * (keys.factor if past or turned[1] else 1.0),
    )  # fmt: skip


def _past(node: ir.Node, key: Joined | None, value: Joined | None) -> tuple[Joined, Joined] | None:
    if (key is None) != (value is None):
        raise OtherwiseError(node, "only one of keys and values has a cache")
    return (key, value) if key is not None and value is not None else None


def _heads(
    node: ir.Node,
    value: ir.Value,
    end: Scaled | None,
    turned: Rotary | None,
    count: int | None,
    size: int,
    factors: bool = True,
) -> tuple[Heads, float]:
    """Where heads come from, behind a rotary embedding at `end`; factors on the way."""
    found = heads_of(turned.x if turned else value, count, size, factors)
    if found is None:
        raise OtherwiseError(node, f"the heads in {value.name} are made in no known order")
    return found[0], found[1] * (end.factor if turned and end else 1.0)


def _length(keys: Heads, frame: Frame) -> int | str:
    """The tokens that are looked at: those of the cache and the new ones, or another text's."""
    if frame.past is not None:
        return f"{frame.past} + {frame.new}"
    dims = keys.value.shape
    found = None if dims is None else _named(dims[2 if keys.layout == "heads first" else 1])
    return frame.new if found is None else found


def _count(heads: Heads, size: int) -> int:
    axis = {"packed": 2, "tokens first": 2, "heads first": 1}[heads.layout]
    dim = fixed(heads.value, axis)
    assert dim is not None  # the layout was told by it
    return dim // size if heads.layout == "packed" else dim


def _frame(node: ir.Node, query: ir.Value, past: tuple[Joined, Joined] | None) -> Frame:
    """The names of the dimensions, of queries `[B, H, S, D]` and the cache."""
    cached = past[0].past.shape if past is not None else None
    dims = [_named(dim) for dim in query.shape or ()]
    length = _named(cached[2]) if cached is not None else None
    if len(dims) != 4 or dims[0] is None or dims[2] is None or (past and length is None):
        raise OtherwiseError(node, f"the dimensions {query.shape} of {query.name} have no names")
    found = Frame(dims[0], dims[2], length)
    names = [name for name in (found.batch, found.new, found.past) if isinstance(name, str)]
    if len(found.names) < len(names):
        raise OtherwiseError(node, f"one name stands for several of the lengths {', '.join(names)}")
    return found


def _named(dim: int | ir.SymbolicDim) -> int | str | None:
    return dim if isinstance(dim, int) else dim.value


def _table(
    context: FusionContext, turned: tuple[Rotary | None, Rotary | None], frame: Frame
) -> Table | str | None:
    """The table that turns queries and keys alike; in words, why what turns them stays in front."""
    first, second = turned
    if first is None or second is None:
        return None if first is second else "only one of queries and keys is turned"
    try:
        table = read_table(context, first, frame)
        same = read_table(context, second, frame) is table
    except NoTableError as error:
        return str(error)
    return table if same else "queries and keys are turned by different angles"


def _wider(value: ir.Value) -> str | None:
    """Why what turns `value` stays in front, where casts are between."""
    source: ir.Value | None = value
    while (cast := made_by(source, "Cast")) is not None:
        source = cast.inputs[0]
    if source is None or source is value or rotary_of(source) is None:
        return None
    return f"{value.name} is turned in {source.dtype}, and rounded behind it"


def _mask(context: FusionContext, core: Core, frame: Frame) -> Mask:
    """The mask of the scores; one that is none of the known kinds is added as the graph has it.

    Raises:
        NoMaskError: there are several of them, or it is none that can be added; or it lets a token
            behind a cache see later ones, where the op looks back alone.
    """
    one = frame.past is not None and frame.new == 1  # nothing comes after it
    try:
        found = read_mask(context, core.terms, frame)
    except NoMaskError:
        biased = _with_bias(context, core, frame)
        if biased is None or (frame.past is not None and not (biased.causal or core.causal or one)):
            raise
        found = biased
    causal = found.causal or core.causal or one
    if frame.past is not None and not causal:
        raise NoMaskError("a token behind the cache sees later ones, which no op with a cache does")
    return dataclasses.replace(found, causal=causal)


def _with_bias(context: FusionContext, core: Core, frame: Frame) -> Mask | None:
    """The mask that all terms but one make, and that one as it is; None where there is none."""
    for index, term in enumerate(core.terms):
        others = (*core.terms[:index], *core.terms[index + 1 :])
        try:
            found = read_mask(context, others, frame)
        except NoMaskError:
            continue
        added = term.kind == "add" and term.value.dtype == core.query.dtype
        if added and rank(term.value) == 4 and found.padding is None:
            return dataclasses.replace(found, bias=term.value)
    return None
