"""What a target's kernels take, as rules that a runtime fills in and plan and passes ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias

from qgraph.kernel_ops import MATMUL_NBITS
from qgraph.op_inputs import bare_name
from qgraph.ort_versions import NEWEST, Version, kernel_since, opset_since, spell
from qgraph.traits import Traits

Origin = Literal["installed", "predicted"]

NEWER = "NEEDS_NEWER_RUNTIME"
"""The reason code of what the oldest runtime that was asked for does not have."""
INTEGERS = ("int", "uint")
FLOAT_ACTIVATIONS = "float"


@dataclasses.dataclass(frozen=True)
class KernelRule:
    """One kernel of one execution provider, and the sites it takes.

    dtypes: activation types ("float32", "float16", "bfloat16").
    levels: accuracy levels that the kernel honours; 4 computes in int8.
    blocks: block sizes along K; empty means any.
    slow: an order of magnitude slower than float; taken only by a query that allows it.
    remark: the reason code that a site of this kernel carries, where it works at a cost.
    fallback: a general kernel behind faster ones that take fewer sites.
    self_test: measures on this machine whether the kernel honours (level, bits, block, dtype).
    by_rows: says which code runs at which number of rows M of the activation.
    numbers: the kinds of number that the codes may be, as formats name them.
    activations: how the graph may have quantized what the kernel multiplies, see `Recipe`.
    """

    op: str
    provider: str
    dtypes: tuple[str, ...]
    bits: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    levels: tuple[int, ...] = (0,)
    symmetric_only: bool = False
    n_multiple: int = 1
    k_whole_blocks: bool = False
    min_opset: int = 1
    slow: bool = False
    origin: Origin = "installed"
    note: str = ""
    remark: str | None = None
    fallback: bool = False
    numbers: tuple[str, ...] = INTEGERS
    activations: tuple[str, ...] = (FLOAT_ACTIVATIONS,)
    self_test: Callable[[int, int, int, str], bool] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    by_rows: Callable[[Query], str] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def has_level(self, query: Query) -> bool:
        """Whether the kernel honours the query's accuracy level."""
        if query.level not in self.levels:
            return False
        if self.self_test is None or query.level == 0:
            return True
        return self.self_test(query.level, query.bits, query.block, query.dtype)


@dataclasses.dataclass(frozen=True)
class Query:
    """A site's question: may this op run with these parameters?"""

    op: str
    dtype: str
    bits: int
    block: int
    level: int = 0
    symmetric: bool = True
    n: int = 0
    k: int = 0
    numbers: str = "int"
    activations: str = FLOAT_ACTIVATIONS
    allow_slow: bool = dataclasses.field(default=False, compare=False)
    function: str = dataclasses.field(default="", compare=False)
    """The format's `linear_name`, for kernels that know the portable form."""
    sums: bool = False
    """Whether minimums of groups, times sums of the activation, are added behind the kernel."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The kernel that takes the site, or the reason code and detail of the nearest refusal.

    A kernel may come with a reason too: what it costs, or why a faster one did not take the site.
    """

    rule: KernelRule | None
    reason: str | None = None
    detail: str = ""
    since: Version | None = None
    """The first release with the kernel, where the oldest that has to run it has none."""

    def __bool__(self) -> bool:
        return self.rule is not None


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The kernels of one target, in the order of preference.

    folds: whether the runtime computes what depends on constants alone once, at load.
    known_ops: every operator that the provider has a kernel for, `DOMAIN::NAME`; empty where that
        is not known.
    oldest: the oldest ONNX Runtime that has to run the result: the installed one, or an older one
        that was asked for.
    simulates_fp8: whether FP8 activations are multiplied as floats; False where nobody knows.
    traits: what the target is, whatever is installed.
    """

    target: str
    provider: str
    runtime: str
    rules: tuple[KernelRule, ...]
    folds: bool = False
    known_ops: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    oldest: Version = NEWEST
    simulates_fp8: bool = False
    traits: Traits = dataclasses.field(default_factory=Traits)

    def has_op(self, op: str) -> bool:
        """Whether there is a kernel of `op`; one of ONNX's own has no domain, or `ai.onnx`."""
        return (op if "::" in op else f"ai.onnx::{op}") in self.known_ops

    def ops(self, numbers: str) -> tuple[str, ...]:
        """The operators with kernels for codes of a kind, in the order of preference."""
        return tuple(dict.fromkeys(r.op for r in self.rules if numbers in r.numbers))

    def multiplies(self, activations: str) -> bool:
        """Whether there is any kernel for activations that the graph quantizes so."""
        return any(activations in rule.activations for rule in self.rules)

    def ask(self, query: Query) -> Answer:
        """The first rule that takes `query`, else what all of the nearest ones refuse."""
        rules = [rule for rule in self.rules if rule.op == query.op]
        if not rules:
            return Answer(None, "NO_FUSED_KERNEL", f"{self.runtime} has no kernel for {query.op}")
        rules = [rule for rule in rules if query.numbers in rule.numbers]
        if not rules:
            op = bare_name(query.op)
            detail = f"{self.runtime} has no kernel for {query.numbers} codes in {op}"
            return Answer(None, "NO_FUSED_KERNEL", detail)
        rules, refused = self._old_enough(rules, query)
        if refused is not None:
            return refused
        for code, takes, refusal in _CRITERIA:
            left = [rule for rule in rules if takes(rule, query)]
            if not left:
                where = f"{query.op.partition('::')[2]} on {rules[0].provider}"
                return Answer(None, code, f"{where} {refusal(rules, query)}")
            rules = left
        taken = rules[0]
        if not taken.fallback:
            return Answer(taken, taken.remark, taken.note)
        faster = [
            r
            for r in self.rules
            if r.op == query.op and query.bits in r.bits and query.numbers in r.numbers
        ]
        slower, why = _first_failure(faster[: faster.index(taken)], query)
        return Answer(taken, slower or taken.remark, f"{taken.note}: {why}" if why else taken.note)

    def _old_enough(
        self, rules: list[KernelRule], query: Query
    ) -> tuple[list[KernelRule], Answer | None]:
        """The rules that the oldest runtime has, or the refusal where it has none of them."""
        left = [rule for rule in rules if _since(rule, query) <= self.oldest]
        if left:
            return left, None
        first = min(_since(rule, query) for rule in rules)
        op, level = bare_name(query.op), f", level {query.level}" * (query.op == MATMUL_NBITS)
        detail = came_later(f"{op} of {query.bits} bits{level}", first, self.oldest)
        return [], Answer(None, NEWER, detail, first)


def came_later(what: str, since: Version, oldest: Version) -> str:
    """What is said of something newer than the oldest release that has to run a graph."""
    return f"{what} came with ONNX Runtime {spell(since)}, and {spell(oldest)} has to run it"


def _since(rule: KernelRule, query: Query) -> Version:
    """The first release with the kernel of a rule, for what is asked."""
    op = bare_name(rule.op)
    first = opset_since(rule.min_opset) or NEWEST
    return max(first, kernel_since(op, query.bits, query.level, query.dtype))


def _first_failure(rules: list[KernelRule], query: Query) -> tuple[str | None, str]:
    """Why none of `rules` takes `query`; nothing where there are none."""
    for code, takes, refusal in _CRITERIA:
        left = [rule for rule in rules if takes(rule, query)]
        if rules and not left:
            known = "SLOW_KERNEL" if code in ("DTYPE_HAS_NO_KERNEL", "BLOCK_UNSUPPORTED") else code
            return known, f"the fast one {refusal(rules, query)}"
        rules = left
    return None, ""


_Takes: TypeAlias = Callable[[KernelRule, Query], bool]
_Refusal: TypeAlias = Callable[[list[KernelRule], Query], str]

_CRITERIA: tuple[tuple[str, _Takes, _Refusal], ...] = (
    (
        "ACTIVATION_UNSUPPORTED",
        lambda rule, query: query.activations in rule.activations,
        lambda rules, query: (
            f"takes {_union(r.activations for r in rules)} activations, not {query.activations}"
        ),
    ),
    (
        "DTYPE_HAS_NO_KERNEL",
        lambda rule, query: query.dtype in rule.dtypes,
        lambda rules, query: f"takes {_union(r.dtypes for r in rules)}, not {query.dtype}",
    ),
    (
        "BITS_UNSUPPORTED",
        lambda rule, query: query.bits in rule.bits,
        lambda rules, query: f"takes {_union(r.bits for r in rules)} bits, not {query.bits}",
    ),
    (
        "BLOCK_UNSUPPORTED",
        lambda rule, query: not rule.blocks or query.block in rule.blocks,
        lambda rules, query: (
            f"takes blocks of {_union(r.blocks for r in rules)}, not {query.block}"
        ),
    ),
    (
        "LEVEL_UNSUPPORTED",
        lambda rule, query: rule.has_level(query),
        lambda rules, query: (
            f"has no accuracy level {query.level} at {query.bits} bits, block {query.block}"
        ),
    ),
    (
        "SLOWER_THAN_FLOAT_AT_M",
        lambda rule, query: query.allow_slow or not rule.slow,
        lambda rules, query: f"at {query.bits} bits, level {query.level}: {rules[0].note}",
    ),
    (
        "CUDA_ASYMMETRIC",
        lambda rule, query: query.symmetric or not rule.symmetric_only,
        lambda rules, query: "takes symmetric weights only",
    ),
    (
        "CUDA_N_NOT_MULTIPLE",
        lambda rule, query: query.n % rule.n_multiple == 0,
        lambda rules, query: f"wants N a multiple of {rules[0].n_multiple}, not {query.n}",
    ),
    (
        "GROUP_DOES_NOT_DIVIDE",
        lambda rule, query: not (rule.k_whole_blocks and query.block and query.k % query.block),
        lambda rules, query: f"cannot pad K = {query.k} to blocks of {query.block}",
    ),
)


def _union(values: Iterable[tuple[object, ...]]) -> str:
    """Every value once: `2, 4, 8`."""
    distinct = {value for each in values for value in each}
    return ", ".join(str(value) for value in sorted(distinct, key=lambda v: (len(str(v)), str(v))))
