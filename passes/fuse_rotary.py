"""Rotary position embedding, however it is spelled: halves that are turned by an angle."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.passes.attention_heads import unviewed
from qgraph.passes.attention_probe import Cone, Frame, NotComputedError
from qgraph.passes.fusion import Attributes, Builder, FusionContext
from qgraph.passes.matching import is_constant, made_by

_COLUMNS = 8
_FARTHEST = 1 << 22
"""Places that are tried at most."""


@dataclasses.dataclass(frozen=True)
class Rotary:
    """x: `[B, H, S, D]`, turned by the angles whose `cos` and `sin` are views of `[B, S, D]`.

    halved: whether they are `[B, S, D / 2]` instead, each angle once.
    interleaved: whether elements are turned in pairs, not the first half with the second; then
        angles that are not halved are repeated in pairs, too.
    """

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    halved: bool = False
    interleaved: bool = False

    @property
    def repeated(self) -> bool:
        """Whether each angle stands twice, next to itself."""
        return self.interleaved and not self.halved


def rotary_of(value: ir.Value) -> Rotary | None:
    """The embedding that makes `value`: x · cos + (-x₂, x₁) · sin; None where it is none.

    It may be of the first elements alone, with the others joined to them as they are.
    """
    total = made_by(value, "Add")
    if total is None:
        return _of_first_part(value) or _native(value)
    products = [made_by(each, "Mul") for each in total.inputs]
    for plain, turned in (products, products[::-1]):
        found = _matched(plain, turned)
        if found is not None:
            return found
    return None


def _native(value: ir.Value) -> Rotary | None:
    """ONNX's own op, where it takes the angles of each token."""
    node = made_by(value, "RotaryEmbedding")
    if node is None or len(node.inputs) != 3 or None in node.inputs:
        return None
    x, cos, sin = (each for each in node.inputs if each is not None)
    whole = not node.attributes.get_int("rotary_embedding_dim", 0)
    interleaved = bool(node.attributes.get_int("interleaved", 0))
    four = x.shape is not None and len(x.shape) == 4
    return Rotary(x, cos, sin, True, interleaved) if whole and four else None


def _of_first_part(value: ir.Value) -> Rotary | None:
    joined = made_by(value, "Concat")
    if joined is None or len(joined.inputs) != 2 or joined.inputs[0] is None:
        return None
    part = rotary_of(joined.inputs[0])
    whole = _source(part.x) if part is not None else None
    if part is None or whole is None or _source(joined.inputs[1]) is not whole:
        return None
    return dataclasses.replace(part, x=whole)


def _matched(plain: ir.Node | None, turned: ir.Node | None) -> Rotary | None:
    if plain is None or turned is None:
        return None
    for half, sin in (turned.inputs, turned.inputs[::-1]):
        stacked = _stacked(_uncast(half))
        x = _turned(_uncast(half) if stacked is None else stacked)
        places = [at for at, each in enumerate(plain.inputs) if x in (each, _uncast(each))]
        if x is None or sin is None or not places:
            continue
        whole, cos = plain.inputs[places[0]], plain.inputs[1 - places[0]]
        if whole is None or cos is None:
            return None
        return Rotary(whole, cos, sin, interleaved=stacked is not None)
    return None


def _uncast(value: ir.Value | None) -> ir.Value | None:
    """What is cast; halves that change places do so in the type that they came in."""
    node = made_by(value, "Cast")
    return node.inputs[0] if node is not None else value


def _stacked(value: ir.Value | None) -> ir.Value | None:
    """What holds neighbours side by side, `[.., D / 2, 2]`, where `value` `[.., D]` is a view."""
    flat = made_by(value, "Reshape")
    found = flat.inputs[0] if flat is not None else None
    return found if made_by(found, "Concat") is not None else None


def _turned(value: ir.Value | None) -> ir.Value | None:
    """The x of (-x₂, x₁), halves or neighbours."""
    joined = made_by(value, "Concat")
    if joined is None or len(joined.inputs) != 2:
        return None
    first, second = (_apart(each) for each in joined.inputs)
    negated = made_by(first, "Neg")
    halves = [negated.inputs[0] if negated is not None else None, second]
    sources = {_source(half) for half in halves}
    return sources.pop() if len(sources) == 1 else None


def _apart(value: ir.Value | None) -> ir.Value | None:
    """What is put into an axis of its own, where it is."""
    node = made_by(value, "Unsqueeze")
    return node.inputs[0] if node is not None else value


def _source(half: ir.Value | None) -> ir.Value | None:
    node = made_by(half, "Slice", "Split")
    return node.inputs[0] if node is not None else None


@dataclasses.dataclass(frozen=True)
class Table:
    """The angles of a rotary embedding as a table over positions.

    positions: `[B, S]`, the row of each token; None where it is its place, counted from the first.
    sources: the values `[.., D]` of cos and sin; the table is made by the same nodes.
    rows: how many positions it holds. half: columns that a row is cut to, `D / 2`, each `step`th.
    interleaved: whether elements are turned in pairs.
    one_row: whether the graph's own op runs on one row alone, for which it has the angles.
    """

    positions: ir.Value | None
    input: ir.Value
    sources: tuple[ir.Value, ir.Value]
    rows: int
    half: int
    step: int
    interleaved: bool
    one_row: bool


class NoTableError(Exception):
    """The angles depend on more than each token's position; the message says on what."""


def read_table(context: FusionContext, rotary: Rotary, frame: Frame) -> Table:
    """The table behind the angles of `rotary`, tried on positions near and far.

    Raises:
        NoTableError: there is none.
    """
    sources = (rotary.cos, rotary.sin)
    if not rotary.repeated:  # what repeats angles in pairs looks like a view
        sources = (_root(rotary.cos), _root(rotary.sin))
    positions = _positions(sources[0])
    if positions is None:
        raise NoTableError(f"no integer positions behind {sources[0].name}")
    try:
        cone = Cone(context.model, frame, sources, [positions])
    except NotComputedError as error:
        raise NoTableError(f"angles {sources[0].name}: {error}") from None
    key = ("rotary table", cone.signature, rotary.halved, rotary.interleaved, frame)
    if key not in context.memo:
        context.memo[key] = _read_table(context, rotary, cone, positions)
    found: Table | str = context.memo[key]
    if isinstance(found, str):
        raise NoTableError(found)
    return found


def _root(value: ir.Value) -> ir.Value:
    found = unviewed(value, factors=False)
    return value if found is None else found.value


def _read_table(
    context: FusionContext, rotary: Rotary, cone: Cone, positions: ir.Value
) -> Table | str:
    """The table, or why there is none."""
    name, frame = cone.targets[0].name, cone.frame
    if cone.values != [positions]:
        others = ", ".join(str(v.name) for v in cone.values if v is not positions)
        return f"{name} depends on {others or 'no positions'}"
    try:
        rows = min([context.positions, *cone.looked_up])
        table = _angles(cone, np.arange(rows)[None])
        if not _depends_on_place(cone, table):
            return f"{name}: the angles of a token depend on the positions of others"
        place = _is_place(context.model, positions, frame)
    except NotComputedError as error:
        return f"angles {name}: {error}"
    half = table.shape[-1] if rotary.halved else table.shape[-1] // 2
    twice = table[..., :half], table[..., half:]
    if rotary.repeated:
        twice = table[..., ::2], table[..., 1::2]
    if not rotary.halved and not np.array_equal(*twice):
        return f"{name}: the two halves of the angles differ"
    if half % _COLUMNS:
        return f"the kernels turn multiples of {_COLUMNS} elements, not {half}"
    shape = rotary.cos.shape
    one_row = rotary.halved and shape is not None and shape[0] == 1
    if not place and not _is_integer(positions):
        return f"{positions.name} counts in floats, and not on from the cache"
    if not place and not (one_row or _has_rows(positions, frame)):
        return f"{positions.name} {positions.shape} says no positions [B, S] that are places"
    return Table(
        positions=None if place else positions,
        input=positions,
        sources=(cone.targets[0], cone.targets[1]),
        rows=rows,
        half=half,
        step=2 if rotary.repeated else 1,
        interleaved=rotary.interleaved,
        one_row=one_row,
    )


def _has_rows(positions: ir.Value, frame: Frame) -> bool:
    """Whether each row of a batch has positions of its own."""
    shape = positions.shape
    return shape is not None and len(shape) == 2 and (shape[0] != 1 or frame.batch == 1)


def _positions(value: ir.Value) -> ir.Value | None:
    """The positions that angles are made of: behind the first cast to a float, or a Gather.

    They are integers, or a Range of floats. What is asked for its shape alone has no part in it:
    exporters expand rates to rows of a batch, and count to a length.
    """
    pending, seen = [value], set[ir.Value]()
    while pending:
        value = pending.pop()
        node = value.producer()
        if value in seen or node is None or node.domain or node.op_type == "Shape":
            continue
        seen.add(value)
        if node.op_type == "Range" and not _is_integer(value):
            return value
        source = {"Cast": 0, "Gather": 1}.get(node.op_type)
        found = node.inputs[source] if source is not None else None
        if _is_integer(found) and not is_constant(found):
            positions = _unviewed_integer(found)
            if positions is not None and not _is_length(positions):
                return positions
        pending += [each for each in reversed(node.inputs) if each is not None]
    return None


def _is_length(value: ir.Value) -> bool:
    """Whether it is one number, or what a Shape says."""
    node = value.producer()
    return (value.shape is not None and not len(value.shape)) or (
        node is not None and node.op_type == "Shape"
    )


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (ir.DataType.INT64, ir.DataType.INT32)


def _unviewed_integer(value: ir.Value | None) -> ir.Value | None:
    """The positions before views, as soon as they have two dimensions, `[B, S]`."""
    while value is not None:
        if value.shape is not None and len(value.shape) == 2:
            return value
        node = made_by(value, "Unsqueeze", "Reshape", "Expand", "Squeeze", "Cast", "Identity")
        if node is None:
            return value
        value = node.inputs[0]
    return None


def _angles(cone: Cone, positions: Array) -> Array:
    """Angles at these positions: cos and sin, `[2, B, S, D]`."""
    batch, new = positions.shape
    (value,) = cone.values
    assert value.dtype is not None
    fed = positions if len(value.shape or ()) == 2 else positions.reshape(-1)
    given = {value: fed.astype(value.dtype.numpy())}
    found = cone.compute(cone.frame.sizes(batch, new), given)
    return np.stack([array.reshape(batch, new, -1) for array in found])


def _depends_on_place(cone: Cone, table: Array) -> bool:
    """Whether rows of the table are the angles that are computed at other places, near and far."""
    generator = np.random.default_rng(0)
    free = len(cone.values[0].shape or ()) == 2 and not isinstance(cone.frame.batch, int)
    length = table.shape[2]
    for top in (min(9, length), length, *(n + 2 for n in cone.integers if 8 < n + 2 < length)):
        positions = generator.integers(0, top, (2 if free else 1, 7))
        found = _angles(cone, positions)
        if not np.allclose(found, table[:, 0][:, positions], rtol=0, atol=1e-6):
            return False
    return True


def _is_place(model: ir.Model, positions: ir.Value, frame: Frame) -> bool:
    """Whether positions count on from the cache, and depend on nothing else."""
    cone = Cone(model, frame, [positions])
    if cone.values:
        return False
    far = max(cone.integers, default=0) + 2  # a place that is clamped or wrapped is so from there
    for batch, new, past in ((1, 1, 0), (2, 5, 3), (2, 3, 6), (1, far, 0), (1, 2, far)):
        sizes = frame.sizes(batch, new, past)
        if sizes.total > _FARTHEST:
            return False
        (found,) = cone.compute(sizes, {})
        wanted = np.broadcast_to(sizes.past + np.arange(sizes.new), (sizes.batch, sizes.new))
        if not np.array_equal(np.broadcast_to(found, wanted.shape), wanted):
            return False
    return True


def cos_and_sin(builder: Builder, table: Table, frame: Frame) -> list[ir.Value]:
    """The table's two halves `[rows, D / 2]`, made of constants by the nodes that made the angles.

    The runtime computes them once, when it loads the model: the file does not grow, and they are
    the very numbers that the graph computed before.
    """
    return builder.shared(
        ("rotary table", *table.sources, table.rows), lambda inner: _made(inner, table, frame)
    )


def _made(builder: Builder, table: Table, frame: Frame) -> list[ir.Value]:
    int64 = ir.DataType.INT64
    ends = [builder.constant("position", np.array(end, np.int64)) for end in (0, table.rows, 1)]
    places = builder.op("Range", ends, dtype=int64, shape=[table.rows])
    if len(table.input.shape or ()) == 2:
        row = builder.constant("one_row", np.array([1, -1], np.int64))
        places = builder.op("Reshape", [places, row], dtype=int64, shape=[1, table.rows])
    if table.input.dtype != int64 and table.input.dtype is not None:
        to: Attributes = {"to": table.input.dtype.value}
        places = builder.op("Cast", [places], attributes=to, dtype=table.input.dtype)
    cone = Cone(builder.context.model, frame, table.sources, [table.input])
    shape = [1, table.rows] if len(table.input.shape or ()) == 2 else [table.rows]
    angles = cone.copied(
        builder, frame.sizes(1, table.rows), {table.input: places}, {table.input: shape}
    )
    columns = (0, table.half * table.step, -1, table.step)
    ends = [builder.constant("column", np.array([end], np.int64)) for end in columns]
    flat = builder.constant("table", np.array([-1, table.half], np.int64))
    found = []
    for angle in angles:
        half = builder.op("Slice", [angle, *ends], dtype=angle.dtype)
        found.append(
            builder.op("Reshape", [half, flat], dtype=angle.dtype, shape=[table.rows, table.half])
        )
    return found
