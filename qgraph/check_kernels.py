"""Every kernel on stored bytes: what it gives, and how far that may be off.

Results are compared with float64 products of rows dequantized from the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from qgraph.errors import QGraphError
from qgraph.formats.base import Array
from qgraph.formats.grouping import count_groups, read_scales
from qgraph.formats.output_bound import INT8_HALF_STEP, LEVEL_4_ZEROS, zeros_bound
from qgraph.kernel_ops import MATMUL_NBITS
from qgraph.probe import KernelKey as KernelKey
from qgraph.probe import Kind as Kind
from qgraph.probe import Probe as Probe
from qgraph.probe import dequantized_rows, given_bias, x_type
from qgraph.probe_model import one_site_model
from qgraph.saved_file import CHECK

Run: TypeAlias = Callable[[Path, Sequence[Mapping[str, NDArray[Any]]]], list[dict[str, Array]]]
"""Opens the model at a path and runs it on each of the feeds."""

ROWS = (1, 17)
"""Rows M of the activation: kernels for one row and for many are different code."""
OUTLIER = 1000.0
_CASES = [f"M = {m}{more}" for more in ("", f", one channel × {OUTLIER:.0f}") for m in ROWS]
GATHERED = 256
_RANGE = {"float16": 3e4, "float32": 1e36, "bfloat16": 1e36}
"""Products are kept below this: infinities say nothing of kernels. It is half of what float16
holds, and less of the others: a kernel's sums, zero points in them, are larger than its result."""
_TOP = {"float16": 65504.0}
"""The largest number, where weights come near it."""
_SLACK = {"float32": 1e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding of a product, relative to Σ|ŵ||x|."""
_ROUNDING = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Rounding of one dequantized element, relative to it."""
_TINY = {"float16": 2.0**-24, "float32": 1e-30, "bfloat16": 1e-30}
"""What results may be off whatever their size: in float16, the step of its subnormal numbers."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """ratio: the largest error divided by its bound; up to 1 is right.

    lost: whether it is the weight that is wrong, and no kernel could be right.
    """

    ratio: float
    detail: str = ""
    lost: bool = False

    @property
    def ok(self) -> bool:
        """Within the bound."""
        return self.ratio <= 1


def check_kernel(probe: Probe, model: ir.Model, data: Path, run: Run) -> Verdict:
    """Run one site's kernel on the stored bytes.

    `data` is the data file: the one-node model is written beside it under a longer name, and
    removed whatever happens; where the process is killed, by the next save.
    """
    feeds = _feeds(probe)
    path = data.with_name(f"{data.name}{CHECK}{next(_COUNTER)}.onnx")
    try:
        path.write_bytes(one_site_model(probe, model))
        results = run(path, feeds)
    except QGraphError as error:
        return Verdict(float("inf"), str(error))
    finally:
        path.unlink(missing_ok=True)
    outputs = [next(iter(result.values())) for result in results]
    with np.errstate(all="ignore"):
        return _CHECKS[probe.kind](probe, feeds, outputs)


_COUNTER = itertools.count()


def _feeds(probe: Probe) -> list[dict[str, Array]]:
    if probe.kind == "dequantize":
        return [{}]
    if probe.kind == "gather":
        return [{"x": _indices(probe)}]
    lead = (1,) * (probe.sums.rank - 2) if probe.sums is not None else ()
    return [{"x": x.reshape(*lead, *x.shape)} for x in _activations(probe)]


def _indices(probe: Probe) -> Array:
    """Row numbers `[1, n]`, spread evenly, the first and the last among them, not in order."""
    found = np.unique(np.linspace(0, probe.key.n - 1, GATHERED).astype(np.int64))
    order = np.random.default_rng(0).permutation(len(found))
    return found[order][None].astype(x_type(probe).numpy())


def _activations(probe: Probe) -> Iterator[Array]:
    """Activations `[M, K]` of each of _CASES: Gaussian, then the same with one channel × 1000."""
    key = probe.key
    gauss = np.random.default_rng(0).standard_normal((max(ROWS), key.k)).astype(np.float32)
    outlier = gauss.copy()
    outlier[:, key.k // 3] *= OUTLIER
    largest = probe.weight.largest()
    fitting = 1.0 if probe.integer is None else probe.integer.fitting_scale
    for x in (gauss, outlier):
        reach = largest * fitting * float(np.abs(x).sum(axis=1).max()) / _RANGE[key.dtype]
        scale = fitting * 2.0 ** -max(0, np.ceil(np.log2(max(reach, _TINY["float32"]))))
        for m in ROWS:
            yield (x[:m] * np.float32(scale)).astype(key.dtype)


def _check_linear(probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]) -> Verdict:
    """The bounds of every case, one block of rows of the weight after the other."""
    key = probe.key
    fed = [feed["x"].reshape(-1, key.k) for feed in feeds]
    x = np.concatenate(fed).astype(np.float64)
    wrong = [each.shape for each in got if each.shape[-1] != key.n or not each.size]
    y = np.concatenate([each.reshape(-1, key.n) for each in got]) if not wrong else x
    if wrong or len(y) != len(x):
        return Verdict(float("inf"), f"the result has shape {wrong}, N is {key.n}")
    y = y.astype(np.float64)
    bias = given_bias(probe).astype(np.float64) if key.bias else np.zeros(key.n)
    worst = np.zeros(len(x))
    sizes = np.abs(x).astype(np.float32)
    integer = probe.integer
    rounding = None
    if integer is not None:  # batch by batch: a step may come from all of it
        rounding = np.concatenate([integer.rounding(feed["x"]) for feed in feeds])
        sizes += rounding
    for start, stop in probe.weight.sample():
        addends = probe.weight.addends(start, stop)
        if integer is not None:
            addends = (integer.with_floats(addends[0], start, stop),)
        added = bias[start:stop]
        wanted = x @ functools.reduce(np.add, addends).T.astype(np.float64) + added
        error = np.abs(y[:, start:stop] - wanted)
        reach = [np.abs(each) for each in addends]
        bound = _product_bound(key, sizes, reach, np.abs(added))
        slack = _zeros_slack(probe)
        if slack:
            bound += zeros_bound(sizes, _stored_scales(probe, start, stop), key.block, slack)
        if rounding is not None:
            bound += rounding @ reach[0].T
        ratio = error / (bound + _TINY[key.dtype])
        worst = np.maximum(worst, ratio.max(axis=1))  # NaN stays NaN
    cases = np.repeat(_CASES, [len(each) for each in fed])
    at = int(np.argmax(worst))
    detail = f"the error is {worst[at]:.3g} times its bound at {cases[at]}"
    if not np.isfinite(worst[at]):
        detail = f"the result is no finite number, the product is one, at {cases[at]}"
    return Verdict(_number(worst[at]), detail)


def _product_bound(key: KernelKey, x: Array, addends: Sequence[Array], bias: Array) -> Array:
    """`[M, n]`: how far a product may be off, for addends of |ŵ| `[n, K]` and |x| `[M, K]`.

    Level 4 rounds activations to int8, one scale per block, for the first; all round floats.
    """
    bound = _SLACK[key.dtype] * (x @ functools.reduce(np.add, addends).T + bias)
    if key.level == 4:
        starts = np.arange(0, key.k, key.block or key.k)
        amax = np.maximum.reduceat(x, starts, axis=1)
        sums = np.add.reduceat(addends[0], starts, axis=1, dtype=np.float64)
        bound += amax @ sums.T * INT8_HALF_STEP
    return bound


def _zeros_slack(probe: Probe) -> float:
    """What rounding may leave of zero points, in units of scales by Σ|x|.

    Most where codes are near them. Level 4 takes them away at the end; kernels of bfloat16 keep
    what a zero point is off the middle, times the scale, in that type.
    """
    codes = 1 << probe.node.attributes.get_int("bits", 8)
    if probe.key.level == 4:
        return codes * LEVEL_4_ZEROS
    if probe.key.op == MATMUL_NBITS and not probe.key.symmetric and probe.key.dtype == "bfloat16":
        return codes / 2 * 2.0**-9
    return 0.0


def _stored_scales(probe: Probe, start: int, stop: int) -> Array:
    """`[n, nb]`, those of blocks that repeat a larger group's among them."""
    blocks = count_groups(probe.key.k, probe.key.block)
    return read_scales(probe.weight.typed("scales", start, stop), stop - start, blocks)


def _check_gather(probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]) -> Verdict:
    indices = feeds[0]["x"].reshape(-1)
    rows = np.concatenate([probe.weight.values(int(i), int(i) + 1) for i in indices])
    return _check_elements(probe.key, got[0].reshape(-1, got[0].shape[-1]), rows)


def _check_dequantize(
    probe: Probe, feeds: Sequence[Mapping[str, Array]], got: list[Array]
) -> Verdict:
    wanted = probe.weight.values(0, dequantized_rows(probe))
    first = probe.node.inputs[0]
    producer = first.producer() if first is not None else None
    turned = producer is not None and producer.op_type == "Transpose"
    turned = turned or probe.weight.layout.kind in ("kn", "knu")
    return _check_elements(probe.key, got[0].T if turned else got[0], wanted)


def _check_elements(key: KernelKey, got: Array, wanted: Array) -> Verdict:
    """Elements that are only dequantized are right to the last bit or two of their type."""
    if got.shape != wanted.shape:
        return Verdict(float("inf"), f"the result has shape {got.shape}, not {wanted.shape}")
    most, top = float(np.abs(wanted).max(initial=0)), _TOP.get(key.dtype, np.inf)
    if most > top:
        return Verdict(
            float("inf"),
            f"its largest numbers, rounded, become {most:g}, and {key.dtype} ends at {top:g}",
            lost=True,
        )
    error = np.abs(got.astype(np.float64) - wanted)
    ratio = _number(np.max(error / (_ROUNDING[key.dtype] * np.abs(wanted) + _TINY[key.dtype])))
    return Verdict(ratio, f"a dequantized weight is {ratio:.3g} times its rounding off")


_CHECKS: dict[Kind, Callable[[Probe, Sequence[Mapping[str, Array]], list[Array]], Verdict]] = {
    "linear": _check_linear,
    "gather": _check_gather,
    "dequantize": _check_dequantize,
}


def _number(ratio: np.floating[Any]) -> float:
    """`ratio`, infinite where a kernel gave NaN."""
    return float("inf") if np.isnan(ratio) else float(ratio)
