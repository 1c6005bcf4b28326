"""Which kernel a site gets: candidates in the order of preference, and how they are spelled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from qgraph.activation_kinds import INT8, INT8_AUTO, INT8_ROW, INT8_STATIC
from qgraph.capabilities import FLOAT_ACTIVATIONS, INTEGERS, Answer, Capabilities, KernelRule, Query
from qgraph.formats.base import Format, Layout, parse
from qgraph.kernel_ops import (
    CONTRIB_OPS,
    DEQUANTIZE_LINEAR,
    DYNAMIC_QUANTIZE_MATMUL,
    GATHER_BLOCK_QUANTIZED,
    INTEGER_MATMULS,
    KERNEL_OPS,
    MATMUL_BNB4,
    MATMUL_INTEGER_TO_FLOAT,
    MATMUL_NBITS,
    OWN_DEQUANTIZE,
    OWN_LINEAR,
)
from qgraph.op_inputs import bare_name
from qgraph.sites import Site

SMALLEST_AUTO_GROUP = 32
"""Groups chosen here are not made smaller than this to divide K."""
BNB4_TYPES = {"fp4": 0, "nf4": 1}
"""MatMulBnb4's attribute `quant_type`."""
FOLDING_ENTRY = "session.disable_quant_qdq=1"
"""The session entry with which ONNX Runtime computes DequantizeLinear of constants at load."""
SATURATES = "SATURATES_HERE"
"""What a kernel of signed codes carries where their products leave 16 bits, unless codes fit."""
PORTABLE = "portable"
"""The kernel of a site that is dequantized block by block in standard operators."""
EXPERTS_COST = "the experts that a run hits are dequantized one by one in standard operators"
PORTABLE_COST = "dequantized block by block at each call: 10 to 30 times the time of a float MatMul"


def dividing_group(k: int, group: int) -> int:
    """The largest group up to `group` that divides `k`, so that no kernel pads its last block.

    For formats that are chosen here (`auto`): on SmolLM2 (K = 576) groups of 128 are padded to
    640 columns, and the file is larger than with groups of 64, and less exact. Groups below 32
    cost more than the padding; then `group` stays, as it does where the user names the format.
    """
    candidate = group
    while candidate >= SMALLEST_AUTO_GROUP:
        if k % candidate == 0:
            return candidate
        candidate //= 2
    return group


def blocks_of(fmt: Format) -> tuple[int, ...]:
    """Kernel block sizes that hold this format: its group, then divisors whose scales repeat."""
    if fmt.group == 0:
        return (128, 64, 32, 256, 16)
    return tuple(b for b in (fmt.group, fmt.group // 2, fmt.group // 4, fmt.group // 8) if b >= 16)


def best_kernel(
    capabilities: Capabilities,
    site: Site,
    fmt: Format,
    accuracy_level: str,
    banned: frozenset[Query] = frozenset(),
    prefer: str = "speed",
    at_load: bool = False,
    activations: str = FLOAT_ACTIVATIONS,
) -> tuple[Answer, Query]:
    """The first kernel that takes the site, in the order of preference, and its parameters.

    Level 4 (int8 activations) first, at the format's own block, then at smaller blocks with
    repeated scales; then level 0. Kernels that are much slower than float are taken only where
    level 0 is asked for. Formats that are no integers are asked for as such where the target has
    an op for them; else, where `prefer` is `speed`, as the integers that they can be written as.
    at_load: linears are to be dequantized when the model is loaded, whatever the kernels take.
    activations: how the graph is to quantize what the site multiplies, see `Recipe`; where that
        kernel is banned, the site multiplies floats. FP8 is floats again before a kernel reads it.
    """
    if activations in _OF_ACTIVATIONS:
        answer, query = _of_bytes(capabilities, site, fmt, activations)
        if query not in banned:
            return answer, query
    if at_load and not site.gathers and not capabilities.traits.spells_qdq:
        return _at_load(capabilities, site, fmt)
    wanted: Query | None = None
    first: Answer | None = None
    missed: list[Query] = []
    for query in _candidates(capabilities, site, fmt, accuracy_level, prefer):
        wanted = wanted or query
        if query in banned:
            missed.append(query)
            continue
        answer = capabilities.ask(query)
        if answer:
            return answer, query
        if query.block == wanted.block and not _came_later(answer, first):
            first = answer  # the refusal at the block that was asked for, at the lowest level
    if missed:  # that is why; the other kernels never were there to be taken
        others = f"; of the others: {first.detail}" if first is not None else ""
        first = Answer(None, "KERNEL_FAILED_CHECK", f"{_missed(missed)}{others}")
    assert first is not None
    assert wanted is not None
    return first, wanted


def _came_later(answer: Answer, other: Answer | None) -> bool:
    """Whether a kernel came with a later release than another one that the oldest has not."""
    if other is None or other.since is None or answer.since is None:
        return False
    return answer.since > other.since


def _missed(queries: Sequence[Query]) -> str:
    names = [spell_kernel(query) for query in queries]
    verb = "misses its error bound" if len(names) == 1 else "miss their error bounds"
    return f"{', '.join(names)} {verb} here"


def _at_load(capabilities: Capabilities, site: Site, fmt: Format) -> tuple[Answer, Query]:
    """The plain function in front of the op; a runtime that folds constants runs it once."""
    query = _query(OWN_DEQUANTIZE, site, fmt)
    rule = KernelRule(
        OWN_DEQUANTIZE,
        capabilities.provider,
        ("float32", "float16"),
        (fmt.bits,),
        numbers=(fmt.numbers,),
        origin=capabilities.rules[0].origin,
    )
    return dataclasses.replace(capabilities, rules=(rule,)).ask(query), query


def _query(op: str, site: Site, fmt: Format) -> Query:
    """What `op` is asked for at the format's own group, without int8 activations."""
    assert site.dtype is not None
    return Query(
        op, _dtype(site), fmt.bits, fmt.group, 0, fmt.symmetric, site.n, site.k,
        numbers=fmt.numbers, function=fmt.linear_name,
    )  # fmt: skip


def _dtype(site: Site) -> str:
    """The activation's type as rules spell it; float32 where the graph does not say."""
    name = "FLOAT" if site.dtype is None else site.dtype.name
    return "float32" if name == "FLOAT" else name.lower()


def _of_bytes(
    capabilities: Capabilities, site: Site, fmt: Format, activations: str
) -> tuple[Answer, Query]:
    """The kernel for quantized activations: of signed codes where their products fit 16 bits.

    With other signed ones processors without VNNI saturate, and a file may go to any of them; the
    kernels of unsigned codes take half as long again.
    """
    spelled = capabilities.traits.spells_qdq
    op = DEQUANTIZE_LINEAR if spelled else _OF_ACTIVATIONS[activations]
    query = _query(op, site, fmt)
    numbers = "int" if fmt.fits_16_bits else "uint"
    query = dataclasses.replace(query, activations=activations, numbers=numbers)
    if query.dtype == "float16" and op != DEQUANTIZE_LINEAR:  # the lowering casts around it
        query = dataclasses.replace(query, dtype="float32")
    if not capabilities.multiplies(activations):
        detail = f"{capabilities.runtime} has no kernel for {activations} activations"
        return Answer(None, "ACTIVATION_UNSUPPORTED", detail), query
    answer = capabilities.ask(query)
    return (Answer(answer.rule) if answer.reason == SATURATES else answer), query


_OF_ACTIVATIONS = {
    INT8: DYNAMIC_QUANTIZE_MATMUL,
    INT8_ROW: MATMUL_INTEGER_TO_FLOAT,
    INT8_STATIC: MATMUL_INTEGER_TO_FLOAT,
    INT8_AUTO: MATMUL_INTEGER_TO_FLOAT,
}


def _candidates(
    capabilities: Capabilities, site: Site, fmt: Format, accuracy_level: str, prefer: str
) -> Iterator[Query]:
    embedding = site.gathers
    own = _query(GATHER_BLOCK_QUANTIZED if embedding else MATMUL_NBITS, site, fmt)
    if capabilities.traits.spells_qdq:
        yield dataclasses.replace(own, op=DEQUANTIZE_LINEAR)
        return
    integers = fmt.as_integers
    plain = integers is not None and integers[0] == "blocks"
    if not plain:
        ops = [op for op in capabilities.ops(fmt.numbers) if op in _OF_LINEARS and not embedding]
        yield from (dataclasses.replace(own, op=op) for op in ops)
        dtypes = ("float32",) if embedding else ("float32", "float16")
        larger = prefer == "speed" and site.role != "experts"  # which are most of a model
        if integers is None or not larger or own.dtype not in dtypes:
            yield from [] if ops else [own]  # for the reason why not
            return
        # float16 does not hold the scales of these: the lowering casts the activation.
        own = dataclasses.replace(own, bits=integers[1], numbers="int", dtype="float32")
    levels = (0,) if embedding else {"auto": (4, 0), "0": (0,), "4": (4,)}[accuracy_level]
    slow = not embedding and accuracy_level == "0" and plain
    asked = [own]
    if fmt.as_sums and not embedding:  # kernels of symmetric integers, and faster than float zeros
        asked.insert(0, dataclasses.replace(own, symmetric=True, numbers="int", sums=True))
    for each in asked:
        for level in levels:
            for block in blocks_of(fmt) if plain else (fmt.group,):
                yield dataclasses.replace(each, block=block, level=level, allow_slow=slow)


_OF_LINEARS = {
    DEQUANTIZE_LINEAR,
    *(op.name for op in KERNEL_OPS.values() if op.kind == "linear" and not op.is_integer),
} - {MATMUL_NBITS}
"""Ops that can stand for a linear, apart from those of integers. An embedding's DequantizeLinear
would dequantize the whole table for a few rows."""


def layout_of(fmt: Format, query: Query) -> Layout:
    """How the parts of a weight lie for the kernel of `query`."""
    kind, integers = KERNEL_OPS[query.op].layout, fmt.as_integers
    if kind == "kn" or query.activations != FLOAT_ACTIVATIONS:
        return Layout("kn" if query.numbers == "int" else "knu")
    if kind == "blocks" and integers is not None:
        return Layout("sums" if query.sums else integers[0], query.block)
    return Layout(kind) if kind and kind != "blocks" else fmt.default_layout


def is_portable(unfused: str, fmt: Format) -> bool:
    """Whether a weight that no kernel takes is dequantized block by block, by `Recipe.unfused`.

    Left to qgraph (`auto`), formats that are no integers are: who asks for one wants it, and
    few targets have kernels.
    """
    return unfused == PORTABLE or (unfused == "auto" and fmt.numbers not in INTEGERS)


def spell_kernel(query: Query) -> str:
    """`MatMulNBits bits=4 block=128 level=4`, `DequantizeAtLoad codes=mxfp4 block=32`."""
    name = bare_name(query.op) + ("AtLoad" if query.op == OWN_DEQUANTIZE else "")
    if query.activations != FLOAT_ACTIVATIONS:
        return f"{name} uint8 × {query.numbers}8{_SCALES[query.activations]}"
    level = f" level={query.level}" if query.op == MATMUL_NBITS else ""
    codes = f"bits={query.bits}" if query.numbers in INTEGERS else f"codes={query.numbers}"
    block = f" block={query.block}" if query.block or query.numbers in INTEGERS else ""
    sums = " zeros=sums" if query.sums else ""
    return f"{name} {codes}{block}{level}{sums}"


@dataclasses.dataclass(frozen=True)
class SpelledKernel:
    """What the spelling of a kernel says: its op, the block and the level where it has them."""

    op: str
    block: int | None = None
    level: int | None = None


def read_kernel(text: str) -> SpelledKernel:
    """What `spell_kernel` wrote, or PORTABLE.

    Raises:
        ValueError: a parameter that is no number, or no parameter.
    """
    op, *words = text.split(" ")
    found = dict(word.split("=") for word in words if "=" in word)
    block, level = (int(found[key]) if key in found else None for key in ("block", "level"))
    return SpelledKernel(op, block, level)


_SCALES = {
    INT8: "", INT8_ROW: " rows=dynamic", INT8_STATIC: " static", INT8_AUTO: " scales=auto",
}  # fmt: skip
"""Where the scales of the activation come from."""


def format_of(query: Query) -> str:
    """The format that the kernel of `query` reads, spelled."""
    if query.op in INTEGER_MATMULS:
        return "int8-row" if query.symmetric else "uint8:group=row"
    if only := KERNEL_OPS[query.op].format:
        return only
    if query.numbers in BNB4_TYPES:
        return f"{query.numbers}:group={query.block}"
    floats = ",zero=float" if query.sums or query.numbers == "uint-float" else ""
    kind = "int" if query.symmetric and not query.sums else "uint"
    return f"{kind}{query.bits}:group={query.block}{floats}"


def kernel_of(site: Site) -> str:
    """The kernel that a packed site runs, spelled."""
    return PORTABLE if site.state == "portable" else spell_kernel(query_of(site))


def spell_many(from_rows: int, kernel: str) -> str:
    """What runs a site's second weight, beside its own kernel."""
    return f"from {from_rows} rows {kernel}"


def own_query(site: Site, fmt: Format) -> Query:
    """What a site in the portable form asks of a runtime that may know it as a whole."""
    return _query(OWN_LINEAR, site, fmt)


def query_of(site: Site) -> Query:
    """The kernel that a fused site runs, as the question that a plan asks."""
    node, op, dtype = site.node, CONTRIB_OPS[site.op], _dtype(site)
    if site.integer is not None:
        product = site.integer
        return Query(
            op.name, dtype, 8, 0, 0, product.symmetric, site.n, site.k,
            product.numbers, activations=product.activations,
        )  # fmt: skip
    if op.format:
        fmt = parse(op.format)
        return Query(op.name, dtype, fmt.bits, fmt.group, n=site.n, k=site.k, numbers=fmt.numbers)
    block = op.number(node, "block_size")
    if op.name == MATMUL_BNB4:
        numbers = "nf4" if op.number(node, "quant_type") == BNB4_TYPES["nf4"] else "fp4"
        return Query(op.name, dtype, 4, block, n=site.n, k=site.k, numbers=numbers)
    zeros = op.read(node, "zeros")
    floats = zeros is not None and zeros.dtype is not None and zeros.dtype.is_floating_point()
    return Query(
        op.name,
        dtype,
        op.number(node, "bits"),
        block,
        op.number(node, "accuracy_level"),
        zeros is None,
        site.n,
        site.k,
        numbers="int" if zeros is None else "uint-float" if floats else "uint",
        sums=site.sums is not None,
    )
