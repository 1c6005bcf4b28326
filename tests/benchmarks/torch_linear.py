"""Quantized linears of the torch runtime against bfloat16 and against torch's own int4 kernel.

    python tests/benchmarks/torch_linear.py [--out FILE.json] [--seconds 180]

The linears of Llama 3.1 8B in int4, groups of 128, M in 1 to 128; on a GPU the widest one in FP8,
NF4, MXFP4, MXFP8 and NVFP4 too. On an NVIDIA GPU each measurement is a
CUDA graph over at least 8 copies of the weight, together over four times the L2 cache, timed with
CUDA events; the share of bandwidth is against a device copy timed in the same run. Past M = 64 it
also finds from where dequantizing first is faster, and leaves that to the autotune file. Without a
GPU the CPU backends run, by one thread, on shapes a quarter as wide, over 8 copies. It needs no
network and ends within 4 minutes: what there was no time for is listed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn.functional import linear as float_linear

import qgraph
from qgraph.formats.base import PartSpec, parse
from qgraph.runtimes.torch import autotune, backends
from qgraph.runtimes.torch.backends import Case

RESULT = Path(__file__).parent / "results" / "torch_linear.json"
ROWS = (1, 4, 16, 32, 64, 128)
INT4 = "int4:group=128"
LEVELS = (
    "fp8-e4m3", "fp8-e4m3:scale=block", "fp8-e5m2", "nf4", "nf4:double=true", "mxfp4",
    "mxfp4:order=halves", "mxfp8", "nvfp4",
)  # fmt: skip
CROSSINGS = (128, 256, 512, 1024)
GROUP, COPIES = 128, 8
SHAPES = {
    "down": (4096, 14336),
    "gate, up": (14336, 4096),
    "query, output": (4096, 4096),
    "key, value": (1024, 4096),
}
"""N and K."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
Product = Callable[[int], Tensor]


class Weights:
    """Copies of one weight in every form that is timed."""

    def __init__(self, text: str, n: int, k: int, dtype: torch.dtype) -> None:
        fmt = parse(text)
        self.name, self.n, self.k, self.dtype = fmt.name, n, k, dtype
        self.layout = fmt.function_name.removeprefix("Dequantize")
        specs = fmt.parts(n, k, ir.DataType.FLOAT, fmt.default_layout).values()
        parts = [self._random(spec) for spec in specs]
        self.bytes = sum(part.numel() * part.element_size() for part in parts)
        cache = torch.cuda.get_device_properties(0).L2_cache_size if CUDA else 0
        self.copies = max(COPIES, -(-4 * cache // self.bytes))
        self.parts = [self._on_device(parts) for _ in range(self.copies)]
        w = backends.dequantize(*self.parts[0], k, self.layout, dtype)
        self.floats = [w.clone() for _ in range(COPIES)]
        ints = CUDA and text == INT4
        self.torch_int4 = [self._torch_int4(*part[:2]) for part in self.parts] if ints else []

    def case(self, m: int) -> tuple[Tensor, Case]:
        """An activation of M = `m` rows, and what the rule sees."""
        x = torch.randn(m, self.k, device=DEVICE).to(self.dtype)
        return x, Case.of(x, *self.parts[0], self.k, self.layout)

    def products(self, m: int) -> dict[str, Product]:
        """What is timed at M = `m`: the product with copy number i."""
        x, case = self.case(m)
        chosen = backends.choose(case, m)
        found: dict[str, Product] = {
            "float": lambda i: float_linear(x, self.floats[i % COPIES]),
            self.name: lambda i: self._ours(x, i, chosen),
        }
        if self.torch_int4:
            found["torch int4"] = lambda i: torch.ops.aten._weight_int4pack_mm(
                x, self.torch_int4[i][0], GROUP, self.torch_int4[i][1]
            )
        if not CUDA and chosen != backends.BY_ROWS:
            found[backends.BY_ROWS] = lambda i: self._ours(x, i, backends.BY_ROWS)
        return found

    def crossing(self, m: int) -> dict[str, Product]:
        """Tiles, and dequantizing first, at M = `m`."""
        x, _ = self.case(m)
        tiles = backends.FP8_TILES if self.layout.startswith("Fp8") else backends.TILES
        return {
            name: lambda i, name=name: self._ours(x, i, name)
            for name in (tiles, backends.REFERENCE)
        }

    def _ours(self, x: Tensor, i: int, backend: str) -> Tensor:
        codes, scales, third = self.parts[i]
        return backends.linear(x, codes, scales, third, None, self.k, self.layout, backend)

    def _random(self, spec: PartSpec) -> Tensor:
        """Bytes that are no NaN in any format, or floats."""
        if spec.dtype == ir.DataType.UINT8:
            return torch.randint(0, 120, spec.shape, dtype=torch.uint8)
        return torch.rand(spec.shape) / 100

    def _on_device(self, parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        codes, scales, *rest = (part.to(DEVICE, copy=True) for part in parts)
        if self.layout == "Int4V1":
            scales = scales.to(self.dtype)
        return codes, scales, rest[0] if rest else None

    def _torch_int4(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        swapped = (codes << 4 | codes >> 4).view(self.n, -1)  # high bits first
        packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        steps = torch.stack((scales.t(), torch.zeros_like(scales.t())), -1)
        return packed, steps.contiguous()


def seconds(product: Product, copies: int) -> float:
    """Time of one product, over `copies` copies in turn: the median, on a shared CPU the least."""
    return _cuda_seconds(product, copies) if CUDA else _cpu_seconds(product, copies)


def _cuda_seconds(product: Product, copies: int) -> float:
    for i in range(copies):  # compiles, tunes, repacks
        product(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            product(i)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / copies)
    return statistics.median(times[2:])


def _cpu_seconds(product: Product, copies: int) -> float:
    for i in range(copies):
        product(i)
    times = []
    since = time.perf_counter()
    while len(times) < 2 * copies or (time.perf_counter() - since < 0.2 and len(times) < 400):
        start = time.perf_counter()
        product(len(times) % copies)
        times.append(time.perf_counter() - start)
        if time.perf_counter() - since > 2:
            break
    return min(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.zeros((1 << 30) if CUDA else (1 << 28), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda i: target.copy_(source), 4)


def measure(deadline: float, copy: float) -> Iterator[dict[str, Any]]:
    """A row for each dtype, shape and M; one with "skipped" for what there was no time for."""
    dtypes = (torch.bfloat16,) if CUDA else (torch.bfloat16, torch.float32)
    for dtype in dtypes:
        for name in SHAPES:
            yield from _rows(INT4, name, dtype, deadline, copy)
    if CUDA:
        for text in LEVELS:
            yield from _rows(text, "down", torch.bfloat16, deadline, copy)


def _rows(
    text: str, name: str, dtype: torch.dtype, deadline: float, copy: float
) -> Iterator[dict[str, Any]]:
    n, k = SHAPES[name] if CUDA else (size // 4 for size in SHAPES[name])
    head = {"format": text, "linear": name, "n": n, "k": k}
    head["dtype"] = str(dtype).removeprefix("torch.")
    if time.monotonic() > deadline:
        yield {**head, "skipped": "no time left"}
        return
    weights = Weights(text, n, k, dtype)
    for m in ROWS:
        yield {**head, "m": m, **_row(weights, m, copy)}
    if CUDA:
        yield {**head, "dequantize_from": _crossing(weights, deadline)}


def _row(weights: Weights, m: int, copy: float) -> dict[str, Any]:
    x, case = weights.case(m)
    ours = weights.name
    times = {
        name: seconds(product, weights.copies) for name, product in weights.products(m).items()
    }
    moved = weights.bytes + m * (weights.n + weights.k) * x.element_size()
    ratios = {f"{name} / {ours}": times[name] / times[ours] for name in times if name != ours}
    return {
        "backend": backends.choose(case, m),
        "microseconds": {name: round(value * 1e6, 2) for name, value in times.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "share_of_copy": round(moved / times[ours] / copy, 3),
    }


def _crossing(weights: Weights, deadline: float) -> int | None:
    """The least M of CROSSINGS at which dequantizing first wins; kept for the rule."""
    for m in CROSSINGS:
        if time.monotonic() > deadline:
            return None
        times = {name: seconds(p, COPIES) for name, p in weights.crossing(m).items()}
        tiles = next(name for name in times if name != backends.REFERENCE)
        if times[backends.REFERENCE] < times[tiles]:
            _, case = weights.case(m)
            autotune.remember_rows(case.key, m)
            return m
    return None


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {"qgraph": qgraph.__version__, "torch": torch.__version__}
    if backends.triton_missing() is None:
        import triton

        versions["triton"] = triton.__version__
    if CUDA:
        return {"device": torch.cuda.get_device_name(), "gpu": True, "versions": versions}
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "device": f"CPU ({platform.machine()}, {capability}, one thread)",
        "gpu": False,
        "note": "no GPU was at hand: the CPU backends ran, on shapes a quarter as wide; "
        "nothing here says how fast the Triton kernels are",
        "versions": versions,
    }


def main() -> None:
    """Measure, print a table, write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seconds", type=float, default=180, help="no new linear after that long")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    copy = copy_bandwidth()
    about = {"date": datetime.date.today().isoformat(), **machine()}
    print(f"{about['device']}: copy {copy / 1e9:.1f} GB/s")
    rows = []
    for row in measure(deadline, copy):
        rows.append(row)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    result = {**about, "group": GROUP, "copy_gb_per_second": round(copy / 1e9, 1), "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
