"""Which kernel a site gets: candidates in the order of preference, and how they are spelled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from qgraph.capabilities import (
    DEQUANTIZE_LINEAR,
    GATHER_BLOCK_QUANTIZED,
    MATMUL_NBITS,
    Answer,
    Capabilities,
    Query,
)
from qgraph.formats.base import Format
from qgraph.sites import Site

SMALLEST_AUTO_GROUP = 32
"""Groups chosen here are not made smaller than this to divide K."""
PORTABLE = "portable"
"""The kernel of a site that is dequantized block by block in standard operators."""


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
) -> tuple[Answer, Query]:
    """The first kernel that takes the site, in the order of preference, and its parameters.

    Level 4 (int8 activations) first, at the format's own block, then at smaller blocks with
    repeated scales; then level 0. Kernels that are much slower than float are taken only where
    level 0 is asked for.
    """
    wanted: Query | None = None
    first: Answer | None = None
    for query in _candidates(capabilities, site, fmt, accuracy_level):
        wanted = wanted or query
        if query in banned:
            continue
        answer = capabilities.ask(query)
        if answer:
            return answer, query
        if query.block == wanted.block:
            first = answer  # the refusal at the block that was asked for, at the lowest level
    if banned and first is None:
        first = Answer(None, "KERNEL_FAILED_CHECK", "every kernel missed its error bound")
    assert first is not None
    assert wanted is not None
    return first, wanted


def _candidates(
    capabilities: Capabilities, site: Site, fmt: Format, accuracy_level: str
) -> Iterator[Query]:
    assert site.dtype is not None
    dtype = "float32" if site.dtype.name == "FLOAT" else site.dtype.name.lower()
    op = MATMUL_NBITS if site.role != "embedding" else GATHER_BLOCK_QUANTIZED
    base = Query(op, dtype, fmt.bits, fmt.group, 0, fmt.symmetric, site.n, site.k)
    if capabilities.target == "qdq":
        yield dataclasses.replace(base, op=DEQUANTIZE_LINEAR)
        return
    embedding = site.role == "embedding"
    levels = (0,) if embedding else {"auto": (4, 0), "0": (0,), "4": (4,)}[accuracy_level]
    slow = not embedding and accuracy_level == "0"
    for level in levels:
        for block in blocks_of(fmt):
            yield dataclasses.replace(base, block=block, level=level, allow_slow=slow)


def spell_kernel(query: Query) -> str:
    """`MatMulNBits bits=4 block=128 level=4`."""
    name = query.op.partition("::")[2]
    level = f" level={query.level}" if query.op == MATMUL_NBITS else ""
    return f"{name} bits={query.bits} block={query.block}{level}"


def kernel_of(site: Site) -> str:
    """The kernel that a packed site runs, spelled."""
    return PORTABLE if site.state == "portable" else spell_kernel(query_of(site))


def query_of(site: Site) -> Query:
    """The kernel that a fused site runs, as the question that a plan asks."""
    attributes = site.node.attributes
    zeros = site.node.inputs[3] if len(site.node.inputs) > 3 else None
    dtype = (
        "float32" if site.dtype is None or site.dtype.name == "FLOAT" else site.dtype.name.lower()
    )
    return Query(
        GATHER_BLOCK_QUANTIZED if site.role == "embedding" else MATMUL_NBITS,
        dtype,
        attributes.get_int("bits", 4),
        attributes.get_int("block_size", 128 if site.role == "embedding" else 0),
        attributes.get_int("accuracy_level", 0),
        zeros is None,
        site.n,
        site.k,
    )
