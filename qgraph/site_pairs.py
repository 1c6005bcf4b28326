"""The sites that two models share: the value that each gives, and what has no counterpart.

Where the candidate holds several linears in one, each is paired with the rows that are its own:
in the order of `holds` in the metadata.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from qgraph.check import reading_op
from qgraph.model_metadata import read_metadata, site_entries
from qgraph.sites import Site, find_sites

_NAMED = 4
"""Sites that a note names, of those that it counts."""


@dataclasses.dataclass(frozen=True)
class SharedSite:
    """A site of both models, and the value that is its output in each.

    weight: its name in the reference.
    op, candidate_op: its operator in the reference and in the candidate.
    format: what the candidate's metadata says of it; None for float, or where it says nothing.
    width: elements per token.
    reference, candidate: the sites themselves.
    rows: the channels of `candidate_value` that are its own; None where all are.
    bias: what is added to the reference's product up to `value`, `[N]`; None where nothing is.
    """

    name: str
    weight: str
    role: str
    op: str
    candidate_op: str
    format: str | None
    value: str
    candidate_value: str
    width: int
    reference: Site
    candidate: Site
    rows: tuple[int, int] | None = None
    bias: ir.Value | None = None


@dataclasses.dataclass(frozen=True)
class Paired:
    """The sites of two models. notes: what is not paired: how many sites, which, and why."""

    shared: tuple[SharedSite, ...]
    notes: tuple[str, ...] = ()


def paired_sites(reference: ir.Model, candidate: ir.Model) -> Paired:
    """The sites that both models have, in the reference's order, and what is said of the others."""
    return _Pairing(reference, candidate).result()


class _Pairing:
    """Sites by name, those of the candidate also by the names of those that they hold."""

    def __init__(self, reference: ir.Model, candidate: ir.Model) -> None:
        every = {_name(site): site for site in find_sites(reference)}
        self.first = {n: s for n, s in every.items() if s.node.graph is reference.graph}
        self.second = {_name(site): site for site in find_sites(candidate)}
        self.inner = [n for n, s in every.items() if n not in self.first]
        self.main = candidate.graph
        self.made = {output.name for node in candidate.graph for output in node.outputs}
        self.entries = site_entries(read_metadata(candidate))
        self.held: dict[str, tuple[Site, tuple[int, int]]] = {}
        self.unclear = dict[str, str]()
        for name, site in self.second.items():
            self._divide(name, site)

    def _divide(self, name: str, site: Site) -> None:
        """Give each linear that a site holds its rows, where the sizes are those of the site."""
        names = self.entries.get(name, {}).get("holds")
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            return
        sizes = [self._rows_of(each) for each in names]
        at = 0
        if sum(sizes) != site.n or 0 in sizes or len(set(names)) < len(names):
            self.unclear |= dict.fromkeys(names, name)
            return
        for each, size in zip(names, sizes, strict=True):
            self.held[each] = site, (at, at + size)
            at += size

    def _rows_of(self, name: str) -> int:
        """The rows of a linear; 0 where they are not known, or known to be two numbers."""
        noted, site = self.entries.get(name, {}).get("n"), self.first.get(name)
        known = {n for n in (noted, site.n if site is not None else None) if type(n) is int}
        return known.pop() if len(known) == 1 and min(known) > 0 else 0

    def result(self) -> Paired:
        shared: list[SharedSite] = []
        lost: dict[str, list[str]] = {}
        for name, site in self.first.items():
            found = self._pair(name, site)
            if isinstance(found, str):
                lost.setdefault(found, []).append(name)
            else:
                shared.append(found)
        if inner := [name for name in self.inner if name not in self.held]:
            lost[_IN_BODIES] = inner
        if not shared and set(lost) <= {_GONE}:
            return Paired((), (f"no site has one name in both models{_COMPARED_WITH}",))
        return Paired(tuple(shared), tuple(_told(why, names) for why, names in lost.items()))

    def _pair(self, name: str, site: Site) -> SharedSite | str:
        """A site with its counterpart, or why it has none."""
        rows: tuple[int, int] | None = None
        twin = self.second.get(name)
        if twin is None:
            if name in self.unclear:
                return _UNCLEAR.format(self.unclear[name])
            if name not in self.held:
                return _GONE
            twin, rows = self.held[name]
        found = self._values(site, twin, rows)
        if isinstance(found, str):
            return found
        value, candidate_value, bias = found
        spelled = self.entries.get(name, {}).get("format")
        return SharedSite(
            name=name,
            weight=site.weight_name,
            role=site.role,
            op=site.op,
            candidate_op=twin.op,
            format=spelled if isinstance(spelled, str) else None,
            value=value,
            candidate_value=candidate_value,
            width=site.n if not site.gathers else site.k,
            reference=site,
            candidate=twin,
            rows=rows,
            bias=bias,
        )

    def _values(
        self, site: Site, twin: Site, rows: tuple[int, int] | None
    ) -> tuple[str, str, ir.Value | None] | str:
        """What to read of both, a bias in both or in neither; and what the reference adds."""
        value = site.output
        if rows is None and value.name in self.made:
            # The op that stands for a site may be followed by a Slice or a Cast.
            return value.name or "", value.name or "", None
        given, biased = twin.output, _adds(twin)
        if twin.node.graph is not self.main:
            return _IN_BODIES
        bias: ir.Value | None = None
        if biased and not _adds(site):
            behind = _bias_behind(value, site.n)
            if behind is None:
                return _BIAS
            value, bias = behind
        elif _adds(site) and not biased:
            behind = _bias_behind(given, twin.n)
            if behind is None:
                return _BIAS
            given, _ = behind
        return value.name or "", given.name or "", bias


_GONE = "have no site of their name in the candidate"
_IN_BODIES = "stand in bodies of If, Loop or Scan"
_BIAS = "have a bias in one of the models that cannot be found in the other"
_UNCLEAR = "became one, {}, and the metadata does not say which rows are whose"
_COMPARED_WITH = ": no site was compared. Compare with the model that the candidate was made from"


def _told(why: str, names: Sequence[str]) -> str:
    """`3 sites stand in bodies of If, Loop or Scan: not compared (a, b, c)`."""
    more = ["…"] if len(names) > _NAMED else []
    return f"{len(names)} sites {why}: not compared ({', '.join([*names[:_NAMED], *more])})"


def _name(site: Site) -> str:
    """The site's name; a nameless node is called as capture calls it."""
    return site.name or f"{site.op}_{site.node.outputs[0].name}"


def _adds(site: Site) -> bool:
    """Whether a site's own op adds a bias."""
    op = reading_op(site.node)
    at = 2 if site.op == "Gemm" else op.bias if op is not None else None
    return at is not None and any(value is not None for value in site.node.inputs[at : at + 1])


def _followed(value: ir.Value, n: int) -> Iterator[tuple[ir.Value, ir.Value | None]]:
    """A product, then what comes of it by Casts and constants `[n]`, each with what was added."""
    added: ir.Value | None = None
    while True:
        yield value, added
        found = {use.node for use in value.uses()}
        reader = found.pop() if len(found) == 1 else None
        if reader is None or reader.domain or reader.op_type not in ("Cast", "Add"):
            return
        added = None
        if reader.op_type == "Add":
            others = [each for each in reader.inputs if each is not None and each is not value]
            added = others[0] if len(others) == 1 else None
            if added is None or added.const_value is None or added.const_value.size != n:
                return
        value = reader.outputs[0]


def _bias_behind(value: ir.Value, n: int) -> tuple[ir.Value, ir.Value] | None:
    """The sum of a product and a constant `[n]` right behind it, and that constant."""
    return next(((each, added) for each, added in _followed(value, n) if added is not None), None)
