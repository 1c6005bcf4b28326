"""`--for`: the format of each linear by the rows that it will see, measured or by rule.

Few rows (decoding, one token at a time) wait for weights to come from memory: few bits are fast.
Many rows (a prompt) wait for products: integer kernels are fast, and bits decide nothing. A
model for both holds one weight where one serves both cases, else two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from qgraph.activation_kinds import INT8, INT8_AUTO, INT8_ROW
from qgraph.adopted import ADOPTED
from qgraph.capabilities import Capabilities
from qgraph.coverage import LINEAR_ROLES
from qgraph.formats.base import parse
from qgraph.plan import IMPORTED, KEPT, Decision, Many, QuantPlan
from qgraph.planning import ADJUSTED, make_plan
from qgraph.recipe import FLOAT, Recipe
from qgraph.rounded_activations import OF_INTEGER_KERNELS
from qgraph.sites import Site
from qgraph.size_times import RowTimes, SizeTimes
from qgraph.tune_table import Candidate, Measured, Table
from qgraph.wording import counted

FEW, PROMPT = 1, 256
"""The rows that stand for decoding, and for a prompt."""
ROWS: Mapping[str, tuple[int, ...]] = {
    "decode": (FEW,),
    "prefill": (PROMPT,),
    "both": (FEW, 4, 16, 64, PROMPT),
}
"""By purpose, the rows at which kernels are measured."""
TIE = 1.05
"""Another group than the one by default has to be this much faster to be taken."""
NEAR = 1.10
"""One weight serves both cases where it is at most this many times as slow as the best of each."""
FROM_ROWS = 8
"""Without measurements: kernels of packed weights and integer kernels are equally fast at about
4 rows on processors with integer products, and at 16 the latter are three times as fast."""
GROUPS = (32, 64, 128)
_FLOAT = Candidate(FLOAT)
_MEASURED, _RULE = "by measured times", "by rule"
_EIGHT_BITS = "int8"


def candidates_of(
    sites: Sequence[Site], recipe: Recipe, capabilities: Capabilities
) -> list[Candidate]:
    """What is measured: floats, groups of 4 and 8 bits, what is asked for, and bytes by bytes."""
    plan, free = _base(sites, recipe, capabilities)
    groups = [f"{name}:group={group}" for name in ("uint4", _EIGHT_BITS) for group in GROUPS]
    asked = sorted({str(plan[site.name].format) for site in free})
    integer = [Candidate(OF_INTEGER_KERNELS, kind) for kind in (INT8, timed_as(recipe))]
    packed = [Candidate(each) for each in (*groups, *asked)]
    return list(dict.fromkeys([_FLOAT, *packed, *integer]))


def sizes_of(
    sites: Sequence[Site], recipe: Recipe, capabilities: Capabilities
) -> list[tuple[int, int, str, tuple[int, ...]]]:
    """N, K, type and rows of what `--for` has to know: each size of linear in the model once."""
    free = _base(sites, recipe, capabilities)[1]
    sizes = dict.fromkeys((site.n, site.k, dtype_name(site)) for site in free)
    return [(*size, ROWS[recipe.purpose]) for size in sizes]


def _base(
    sites: Sequence[Site], recipe: Recipe, capabilities: Capabilities
) -> tuple[QuantPlan, list[Site]]:
    """The plan without a purpose, and the sites whose format is this module's to choose."""
    plan = make_plan(sites, dataclasses.replace(recipe, activations=FLOAT), capabilities)
    return plan, [site for site in sites if _is_free(plan.of(site.name), site)]


def rounded_by(recipe: Recipe) -> str:
    """How the activations of integer kernels are rounded."""
    return INT8_AUTO if recipe.activations == FLOAT else recipe.activations


def timed_as(recipe: Recipe) -> str:
    """What stands for it where kernels are measured: no scales are slower than those of rows."""
    kind = rounded_by(recipe)
    return INT8_ROW if kind == INT8_AUTO else kind


def dtype_name(site: Site) -> str:
    """The activation's type: `float`, `float16`."""
    return site.dtype.name.lower() if site.dtype is not None else ""


@dataclasses.dataclass(frozen=True)
class PurposePlan:
    """A plan for a purpose, with notes, and the times that decided."""

    plan: QuantPlan
    notes: tuple[str, ...]
    times: tuple[SizeTimes, ...]


def plan_for(
    sites: Sequence[Site],
    recipe: Recipe,
    capabilities: Capabilities,
    table: Table,
    main: ir.Graph,
) -> PurposePlan:
    """The plan for the recipe's purpose; sizes that `table` lacks go by rule, which notes say.

    main: the graph whose sites can have two weights; those of its bodies cannot.

    Raises:
        InputError: see `make_plan`.
    """
    plain = dataclasses.replace(recipe, activations=FLOAT)
    base, free = _base(sites, recipe, capabilities)
    names = [site.name for site in free]
    integer = make_plan(
        sites,
        plain,
        capabilities,
        chosen=dict.fromkeys(names, OF_INTEGER_KERNELS),
        rounded=dict.fromkeys(names, rounded_by(recipe)),
    )
    choose = _Choose(base, integer, recipe, table, main)
    choices = choose.all(free)
    formats = {name: choice.way.format for name, choice in choices.items()}
    kinds = {
        name: rounded_by(recipe) if choice.way == choose.bytes_by_bytes else choice.way.activations
        for name, choice in choices.items()
    }
    plan = make_plan(sites, plain, capabilities, chosen=formats, rounded=kinds)
    double = [site for site in free if choices[site.name].second]
    from_rows = choose.crossing(double, choices) if double else 0
    decisions = [
        choices[item.site].applied(
            item, base[item.site], integer[item.site], from_rows, recipe.purpose
        )
        if item.site in choices
        else item
        for item in plan.decisions
    ]
    plan = dataclasses.replace(plan, recipe=recipe, decisions=tuple(decisions))
    notes = _unmeasured(choices, recipe.purpose, table)
    return PurposePlan(plan, tuple(notes), _times(free, choices))


def _unmeasured(choices: Mapping[str, _Choice], purpose: str, table: Table) -> list[str]:
    """A note on the linears that go by rule, where there are times for others."""
    count = sum(choice.by_rule for choice in choices.values())
    if not count or not table.seconds:
        return []
    return [
        f"--for {purpose} goes by rule for {count} of {counted(len(choices), 'linear')}: what they "
        "could be was not all measured here; --tune measures"
    ]


def _times(sites: Sequence[Site], choices: Mapping[str, _Choice]) -> tuple[SizeTimes, ...]:
    """For each size and choice the times that decided."""
    keys = [(s.n, s.k, measured) for s in sites if (measured := choices[s.name].measured)]
    return tuple(SizeTimes(n, k, count, times) for (n, k, times), count in Counter(keys).items())


def _is_free(decision: Decision | None, site: Site) -> bool:
    """Whether the format of a site is this module's to choose."""
    return (
        decision is not None
        and decision.quantized
        and decision.solver not in (ADOPTED, KEPT, IMPORTED)
        and site.role in LINEAR_ROLES
        and site.state == "float"
    )


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What a site gets.

    second: whether many rows get a weight of their own. slower: whether floats would be faster.
    measured: the times that decided; they are of this machine, and no part of the model.
    by_rule: whether there were no times to decide by.
    """

    way: Candidate
    detail: str
    second: bool = False
    slower: bool = False
    measured: tuple[RowTimes, ...] = ()
    by_rule: bool = False

    def applied(
        self, item: Decision, base: Decision, integer: Decision, from_rows: int, purpose: str
    ) -> Decision:
        """The decision with the choice's reason, and with the second weight.

        base: the decision without a purpose; what it says of its format holds where that is taken.
        """
        if not item.quantized:
            return item
        item = dataclasses.replace(item, purpose=f"for {purpose}: {self.detail}")
        if self.slower and item.reason is None:
            item = dataclasses.replace(item, reason="SLOWER_THAN_FLOAT_AT_M")
        if base.reason == ADJUSTED and base.format == item.format:
            remark = "; ".join(filter(None, (base.remark, item.remark)))
            item = dataclasses.replace(item, reason=item.reason or ADJUSTED, remark=remark)
        if not self.second or not integer.quantized:
            return item
        many = Many(
            from_rows,
            str(integer.format),
            integer.activations,
            integer.kernel,
            integer.packed_bytes,
            integer.outliers,
        )
        size = item.packed_bytes + many.packed_bytes
        return dataclasses.replace(item, many=many, packed_bytes=size)


class _Choose:
    """Chooses for one model. base, integer: the plans of packed weights, and of rounded inputs."""

    def __init__(
        self,
        base: QuantPlan,
        integer: QuantPlan,
        recipe: Recipe,
        table: Table,
        main: ir.Graph,
    ) -> None:
        self.base, self.integer, self.recipe, self.table = base, integer, recipe, table
        self.main = main
        self.bytes_by_bytes = Candidate(OF_INTEGER_KERNELS, timed_as(recipe))

    def all(self, sites: Sequence[Site]) -> dict[str, _Choice]:
        """What each site gets: two weights also where another reader of its activation has two.

        With few rows the activation would be rounded for it alone, as long as its product takes.
        """
        found = {site.name: self.site(site) for site in sites}
        double = {id(site.activation) for site in sites if found[site.name].second}
        beside = [site for site in sites if id(site.activation) in double and self._holds_two(site)]
        beside = [site for site in beside if found[site.name].way == self.bytes_by_bytes]
        return found | {site.name: self._beside(site) for site in beside}

    def _beside(self, site: Site) -> _Choice:
        asked, timed = Candidate(str(self.base[site.name].format)), _Timed(self.table, site)
        ways = [asked, *self._other_groups(site, asked)]
        few = self._decode(site, asked, ways, timed).way
        return self._two(timed, few, [*ways, self.bytes_by_bytes])

    def _two(self, timed: _Timed, few: Candidate, known: Sequence[Candidate]) -> _Choice:
        """A weight of packed bits for few rows, and one of bytes for many."""
        many = timed.choice(self.bytes_by_bytes, known, PROMPT)
        times = (timed.times([few, *known], FEW), *many.measured)
        return _Choice(few, _MEASURED, second=True, slower=many.slower, measured=times)

    def site(self, site: Site) -> _Choice:
        """What one site gets."""
        integer = self.integer[site.name]
        asked = Candidate(str(self.base[site.name].format))
        if integer.format not in (None, OF_INTEGER_KERNELS):
            return _Choice(asked, "--set decides")
        ways = [asked, *self._other_groups(site, asked)]
        if integer.activations is not None:
            ways.append(self.bytes_by_bytes)
        timed = _Timed(self.table, site)
        rows = ROWS[self.recipe.purpose]
        ends = (rows[0], rows[-1])
        integer_too = timed.tried(self.bytes_by_bytes, ends) or self.bytes_by_bytes not in ways
        if not timed.knows(asked, ends) or not integer_too:
            return self._by_rule(site, asked, ways)
        choose = {"decode": self._decode, "prefill": self._prefill, "both": self._both}
        return choose[self.recipe.purpose](site, asked, ways, timed)

    def _by_rule(self, site: Site, asked: Candidate, ways: Sequence[Candidate]) -> _Choice:
        purpose, can = self.recipe.purpose, self.bytes_by_bytes in ways
        if purpose == "prefill" and can:
            many = f"{_RULE}, integer kernels are fast at many rows"
            return _Choice(self.bytes_by_bytes, many, by_rule=True)
        second = purpose == "both" and can and self._holds_two(site)
        detail = f"{_RULE}, few bits are fast at few rows"
        return _Choice(asked, detail, second=second, by_rule=True)

    def _holds_two(self, site: Site) -> bool:
        """Whether the site can have a second weight: those in bodies cannot."""
        return site.scope is self.main

    def _decode(
        self, site: Site, asked: Candidate, ways: Sequence[Candidate], timed: _Timed
    ) -> _Choice:
        packed = [way for way in ways if way.activations == FLOAT]
        return timed.choice(timed.pick(packed, asked, FEW), packed, FEW)

    def _prefill(
        self, site: Site, asked: Candidate, ways: Sequence[Candidate], timed: _Timed
    ) -> _Choice:
        way = timed.pick(ways, asked, PROMPT)
        integer = self.bytes_by_bytes
        # Nearly as fast, a weight of 8 bits is the better one: it loses a hundredth as much.
        near = integer in ways and timed(integer, PROMPT) <= NEAR * timed(way, PROMPT)
        if near and self._is_open():
            way = integer
        return timed.choice(way, ways, PROMPT)

    def _both(
        self, site: Site, asked: Candidate, ways: Sequence[Candidate], timed: _Timed
    ) -> _Choice:
        wide = [Candidate(f"{_EIGHT_BITS}:group={group}") for group in GROUPS]
        known = [w for w in dict.fromkeys([*ways, *wide]) if timed.knows(w, (FEW, PROMPT))]
        best = {rows: min(timed(way, rows) for way in known) for rows in (FEW, PROMPT)}
        near = [w for w in known if all(timed(w, r) <= NEAR * best[r] for r in best)]
        if near:
            one = min(near, key=lambda w: (w != asked, parse(w.format).bits, timed(w, FEW)))
            return self._one_weight(timed, one, known)
        few = self._decode(site, asked, ways, timed).way
        faster = self.bytes_by_bytes in ways
        faster = faster and timed(self.bytes_by_bytes, PROMPT) < timed(few, PROMPT)
        if not faster or not self._holds_two(site):
            return self._one_weight(timed, few, known)
        return self._two(timed, few, known)

    @staticmethod
    def _one_weight(timed: _Timed, way: Candidate, known: Sequence[Candidate]) -> _Choice:
        found = timed.choice(way, known, PROMPT)
        times = (timed.times([way, *known], FEW), *found.measured)
        return dataclasses.replace(found, detail=f"{_MEASURED}, one weight", measured=times)

    def _other_groups(self, site: Site, asked: Candidate) -> list[Candidate]:
        """The same codes with other groups, where the group was left to qgraph."""
        if not self._is_open() or site.role != "linear":
            return []
        name = parse(asked.format).name
        return [Candidate(f"{name}:group={g}") for g in GROUPS if site.k % g == 0]

    def _is_open(self) -> bool:
        """Whether the format was left to qgraph."""
        return self.recipe.format == "auto" and self.recipe.group is None

    def crossing(self, sites: Sequence[Site], choices: Mapping[str, _Choice]) -> int:
        """From how many rows on the second weights are the faster ones, over all of `sites`."""
        known = [
            (timed, choices[site.name].way)
            for site in sites
            if (timed := _Timed(self.table, site)).knows(self.bytes_by_bytes, ROWS["both"])
            and timed.knows(choices[site.name].way, ROWS["both"])
        ]
        if not known:
            return FROM_ROWS
        before, before_rows = 0.0, FEW
        for rows in ROWS["both"]:
            few = sum(timed(way, rows) for timed, way in known)
            many = sum(timed(self.bytes_by_bytes, rows) for timed, _ in known)
            gain = math.log(few / many)
            if gain >= 0:
                if rows == FEW or gain == before:
                    return max(2, rows)
                share = before / (before - gain)
                return math.ceil(float(before_rows * (rows / before_rows) ** share))
            before, before_rows = gain, rows
        return PROMPT


class _Timed:
    """The measured seconds of one site's size."""

    def __init__(self, table: Table, site: Site) -> None:
        self.table, self.size = table, (site.n, site.k, dtype_name(site))

    def __call__(self, way: Candidate, rows: int) -> float:
        """Seconds; infinite where it was not measured, or does not run."""
        found = self.table.seconds.get(Measured(*self.size, way.name, rows))
        return math.inf if found is None else found

    def tried(self, way: Candidate, rows: Sequence[int]) -> bool:
        """Whether it was to be measured at all these numbers of rows; it may not have run."""
        return not self.table.missing(Measured(*self.size, way.name, each) for each in rows)

    def knows(self, way: Candidate, rows: Sequence[int]) -> bool:
        """Whether it was measured at all these numbers of rows."""
        return all(math.isfinite(self(way, each)) for each in rows)

    def pick(self, ways: Sequence[Candidate], asked: Candidate, rows: int) -> Candidate:
        """The fastest; what was asked for where that is nearly as fast."""
        fastest = min(ways, key=lambda way: self(way, rows))
        return asked if self(asked, rows) <= TIE * self(fastest, rows) else fastest

    def times(self, ways: Sequence[Candidate], rows: int) -> RowTimes:
        """Those of `ways`, and of floats, that are known; the first of `ways` is taken."""
        known = [way for way in dict.fromkeys([*ways, _FLOAT]) if math.isfinite(self(way, rows))]
        found = sorted(((way.name, self(way, rows)) for way in known), key=lambda each: each[1])
        return RowTimes(rows, ways[0].name, tuple(found))

    def choice(self, way: Candidate, ways: Sequence[Candidate], rows: int) -> _Choice:
        """A choice with its measured reason, and whether floats are faster."""
        slower = self(way, rows) > TIE * self(_FLOAT, rows)
        return _Choice(way, _MEASURED, slower=slower, measured=(self.times([way, *ways], rows),))
