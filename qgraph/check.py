"""The numeric check of a model whose data is written and not yet renamed.

Every site's stored bytes are read back and compared with what they were made from; every kernel
that the model uses runs on stored bytes, at one row and at many, and is compared with float64
products. What is outside its bound is wrong on this machine, whatever the runtime says.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from qgraph.block_sums import block_sums
from qgraph.capabilities import FLOAT_ACTIVATIONS
from qgraph.check_kernels import KernelKey, Probe, Run, Verdict, check_kernel
from qgraph.formats.base import Part
from qgraph.integer_sites import integer_product
from qgraph.kernel_ops import KernelOp
from qgraph.kernel_ops import reading_op as reading_op
from qgraph.lost_weights import LOST, Coarse, raised
from qgraph.progress import Progress, Silent
from qgraph.quant_tensor import QuantTensor
from qgraph.stored_weight import StoredWeight, WrittenData, stored_weight

THREADS = 2
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class SiteCheck:
    """What the check found for one site.

    kernel_key: the kernel that the site runs.
    code: LEVEL_FAILED_CHECK, KERNEL_FAILED_CHECK, WEIGHT_LOST where the kernel's type does not
        hold the weight, or BYTES where the stored weight itself is wrong; None where all is right.
    worst_ratio: the largest error of the kernel divided by its bound; NaN where it did not run.
    weight_error: ‖W − Ŵ‖/‖W‖ (Frobenius) over the rows that were read back.
    output_error: the same of the outputs on calibration data, where a solver measured it. It may
        be small where the weight's is large: solvers choose codes by the outputs.
    coarse: what float16 scales cost the weight, at the first of its sites.
    """

    site: str
    kernel_key: KernelKey
    ok: bool
    code: str | None
    worst_ratio: float
    weight_error: float
    detail: str = ""
    output_error: float | None = None
    coarse: Coarse | None = None

    @property
    def lost(self) -> str:
        """Why nothing of the weight is left, as a sentence; empty where something is."""
        measured = self.output_error is not None
        error = self.output_error if self.output_error is not None else self.weight_error
        if not self.ok or error <= LOST:
            return ""
        what = "its outputs on calibration data are" if measured else "the quantized weight is"
        return (
            f"{what} {error:.0%} off: its scales underflow, or its codes have too few bits for it"
        )


def check_model(
    model: ir.Model, data: WrittenData, run: Run | None, progress: Progress | None = None
) -> list[SiteCheck]:
    """Check every site of a lowered model that reads a quantized weight.

    Args:
        model: its initializers are the `QuantTensor`s that `data` was written from.
        data: the written file.
        run: runs a model file; None checks the stored bytes alone.
        progress: one unit per weight and per kernel.
    """
    progress = progress or Silent()
    probes = list(_probes(model, data))
    weights = {probe.weight.name: probe.weight for probe in probes}
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = list(_advancing(pool.map(_check_bytes, weights.values()), progress))
        stored = dict(zip(weights, found, strict=True))
        sound = [probe for probe in probes if stored[probe.weight.name].ok]
        # Kernels that an unsound weight alone would run need no verdict: its sites fail anyway.
        chosen = {probe.key: probe for probe in reversed(sound)} if run is not None else {}

        def check(probe: Probe) -> Verdict:
            assert run is not None
            return check_kernel(probe, model, data.path, run)

        verdicts = list(_advancing(pool.map(check, chosen.values()), progress, len(weights)))
    kernels = dict(zip(chosen, verdicts, strict=True))
    return [
        _site_check(site, probe, stored[probe.weight.name], kernels.get(probe.key))
        for probe in probes
        for site in probe.sites
    ]


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """worst: the largest |w − ŵ| divided by its bound. error: ‖W − Ŵ‖/‖W‖.

    raised: groups whose scale float16 has no smaller one for, of `groups` that were read.
    """

    worst: float
    error: float
    detail: str = ""
    raised: int = 0
    groups: int = 0

    @property
    def ok(self) -> bool:
        """Within the bound."""
        return self.worst <= 1


def _check_bytes(weight: StoredWeight) -> _Bytes:
    """Compare the stored rows of one weight with its source."""
    worst, error, norm = 0.0, 0.0, 0.0
    coarse, groups, detail = 0, 0, ""
    for start, stop in weight.sample():
        try:
            with np.errstate(all="ignore"):  # damaged scales may be anything
                rows = weight.rows(start, stop)
                found = weight.source.deviation(start, stop, rows)
        except ValueError as wrong:
            return _Bytes(math.inf, math.nan, f"rows {start} to {stop}: {wrong}")
        ratio = math.inf if math.isnan(found.worst) else found.worst
        if ratio > worst:
            worst = ratio
            detail = f"rows {start} to {stop} are {worst:.3g} times their rounding bound off"
        error += found.error_sq
        norm += found.norm_sq
        coarse, groups = coarse + raised(rows.scales), groups + rows.scales.size
    weight.source.release()
    return _Bytes(worst, math.sqrt(error / norm) if norm else 0.0, detail, coarse, groups)


def _site_check(site: str, probe: Probe, stored: _Bytes, verdict: Verdict | None) -> SiteCheck:
    """The verdicts on the bytes and on the kernel as one."""
    ratio = verdict.ratio if verdict else math.nan
    if not stored.ok:
        detail = f"the stored weight {probe.weight.name} is wrong: {stored.detail}"
        return SiteCheck(site, probe.key, False, "BYTES", ratio, stored.error, detail)
    if verdict is not None and not verdict.ok:
        code = "LEVEL_FAILED_CHECK" if probe.key.level else "KERNEL_FAILED_CHECK"
        code, detail = ("WEIGHT_LOST", "") if verdict.lost else (code, f"{probe.key}: ")
        detail += verdict.detail
        return SiteCheck(site, probe.key, False, code, ratio, stored.error, detail)
    detail = verdict.detail if verdict else ""
    outputs = probe.weight.source.output_error
    first = site == probe.sites[0]
    coarse = Coarse(site, stored.raised, stored.groups, stored.error) if first else None
    return SiteCheck(site, probe.key, True, None, ratio, stored.error, detail, outputs, coarse)


def _advancing(results: Iterable[_T], progress: Progress, done: int = 0) -> Iterator[_T]:
    """`results`, each a unit of progress after the `done` ones."""
    for count, result in enumerate(results, done + 1):
        yield result
        progress.advance(count)


_VIEWS = {"Transpose", "Reshape", "Identity", "Cast", "Squeeze", "Unsqueeze"}


def _probes(model: ir.Model, data: WrittenData) -> Iterator[Probe]:
    """Every node that reads a quantized weight, in all bodies."""
    for graph in model.graphs():
        for node in graph:
            op = reading_op(node)
            found = _parts(node, op) if op is not None else {}
            if op is not None and any(part == "codes" for part, _, _ in found.values()):
                yield _probe(node, op, found, data)


def _parts(node: ir.Node, op: KernelOp) -> dict[int, tuple[Part, str, QuantTensor]]:
    """Input index → part, name and tensor of a weight that was quantized in this run."""
    found: dict[int, tuple[Part, str, QuantTensor]] = {}
    for index in op.parts.values():
        value = node.inputs[index] if index < len(node.inputs) else None
        producer = value.producer() if value is not None else None
        if producer is not None and producer.op_type in ("Reshape", "Transpose", "Gather"):
            value = producer.inputs[0]
        tensor = value.const_value if value is not None else None
        if value is not None and isinstance(tensor, QuantTensor):
            found[index] = (tensor.part, value.name or "", tensor)
    return found


def _probe(
    node: ir.Node, op: KernelOp, found: dict[int, tuple[Part, str, QuantTensor]], data: WrittenData
) -> Probe:
    names = {part: name for part, name, _ in found.values()}
    tensors = {part: tensor for part, _, tensor in found.values()}
    sums = block_sums(node)
    minimums = sums.minimums.const_value if sums is not None else None
    if sums is not None and isinstance(minimums, QuantTensor):
        names["minimums"], tensors["minimums"] = sums.minimums.name or "", minimums
    weight = stored_weight(names, tensors, data)
    source = weight.source
    integer = integer_product(node)
    x = op.read(node, "x") if op.kind == "linear" else None
    x = x if integer is None else integer.x
    dtype = x.dtype if x is not None and x.dtype is not None else source.scale_dtype
    key = KernelKey(
        f"{node.domain or 'ai.onnx'}::{node.op_type}",
        source.n,
        source.k,
        source.format.bits,
        weight.block,
        "zeros" not in weight.parts,
        np.dtype(dtype.numpy()).name,
        node.attributes.get_int("accuracy_level", 0),
        op.read(node, "bias") is not None,
        source.format.numbers,
        sums is not None,
        FLOAT_ACTIVATIONS if integer is None else integer.activations,
        0 if integer is None else len(integer.columns),
    )
    whole = op.kind == "dequantize" and not _is_gathered(op.read(node, "codes"))
    sites = tuple(_readers(node)) if whole else (node.name or "",)
    positions = {index: part for index, (part, _, _) in found.items()}
    return Probe(
        sites, node, key, op.kind, weight, positions, op.x, op.bias, sums, integer, data.tensors
    )


def _is_gathered(codes: ir.Value | None) -> bool:
    """Whether the rows to dequantize are picked first: the portable form of an embedding."""
    producer = codes.producer() if codes is not None else None
    return producer is not None and producer.op_type == "Gather"


def _readers(node: ir.Node) -> Iterator[str]:
    """The names of the nodes that use a dequantized weight, through views of it."""
    for use in node.outputs[0].uses():
        if use.node.op_type in _VIEWS:
            yield from _readers(use.node)
        else:
            yield use.node.name or ""
