"""int4 linears of the torch runtime against bfloat16 and against torch's own int4 kernel.

    python tests/benchmarks/torch_linear.py [--out FILE.json] [--seconds 180]

The linears of Llama 3.1 8B, groups of 128, M in 1 to 128. On an NVIDIA GPU each measurement is a
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

import torch
from torch import Tensor
from torch.nn.functional import linear as float_linear

import qgraph
from qgraph.runtimes.torch import autotune, backends
from qgraph.runtimes.torch.backends import Case

RESULT = Path(__file__).parent / "results" / "torch_linear.json"
ROWS = (1, 4, 16, 32, 64, 128)
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

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n, self.k, self.dtype = n, k, dtype
        codes = torch.randint(0, 256, (n, k // GROUP, GROUP // 2), dtype=torch.uint8)
        scales = (torch.rand(n, k // GROUP) / 100).to(dtype)
        self.bytes = codes.numel() + scales.numel() * scales.element_size()
        cache = torch.cuda.get_device_properties(0).L2_cache_size if CUDA else 0
        self.copies = max(COPIES, -(-4 * cache // self.bytes))
        self.parts = [(codes.to(DEVICE), scales.to(DEVICE)) for _ in range(self.copies)]
        w = backends.dequantize(*self.parts[0], None, k, "Int4V1", dtype)
        self.floats = [w.clone() for _ in range(COPIES)]
        self.torch_int4 = [self._torch_int4(*part) for part in self.parts] if CUDA else []

    def products(self, m: int) -> dict[str, Product]:
        """What is timed at M = `m`: the product with copy number i."""
        x = torch.randn(m, self.k, device=DEVICE).to(self.dtype)
        case = Case.of(x, *self.parts[0], None, self.k, "Int4V1")
        found: dict[str, Product] = {
            "float": lambda i: float_linear(x, self.floats[i % COPIES]),
            "int4": lambda i: self._ours(x, i, backends.choose(case, m)),
        }
        if CUDA:
            found["torch int4"] = lambda i: torch.ops.aten._weight_int4pack_mm(
                x, self.torch_int4[i][0], GROUP, self.torch_int4[i][1]
            )
            return found
        other = backends.BY_ROWS if backends.choose(case, m) != backends.BY_ROWS else None
        if other:
            found[other] = lambda i: self._ours(x, i, other)
        return found

    def crossing(self, m: int) -> dict[str, Product]:
        """Tiles, and dequantizing first, at M = `m`."""
        x = torch.randn(m, self.k, device=DEVICE).to(self.dtype)
        return {
            name: lambda i, name=name: self._ours(x, i, name)
            for name in (backends.TILES, backends.REFERENCE)
        }

    def _ours(self, x: Tensor, i: int, backend: str) -> Tensor:
        return backends.linear(x, *self.parts[i], None, None, self.k, "Int4V1", backend)

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
        for name, (n, k) in SHAPES.items():
            n, k = (n, k) if CUDA else (n // 4, k // 4)
            head = {"linear": name, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")}
            if time.monotonic() > deadline:
                yield {**head, "skipped": "no time left"}
                continue
            weights = Weights(n, k, dtype)
            for m in ROWS:
                yield {**head, "m": m, **_row(weights, m, copy)}
            if CUDA:
                yield {**head, "dequantize_from": _crossing(weights, deadline)}


def _row(weights: Weights, m: int, copy: float) -> dict[str, Any]:
    x = torch.empty(m, weights.k, device=DEVICE, dtype=weights.dtype)
    case = Case.of(x, *weights.parts[0], None, weights.k, "Int4V1")
    times = {
        name: seconds(product, weights.copies) for name, product in weights.products(m).items()
    }
    moved = weights.bytes + m * (weights.n + weights.k) * x.element_size()
    ratios = {f"{name} / int4": times[name] / times["int4"] for name in times if name != "int4"}
    return {
        "backend": backends.choose(case, m),
        "microseconds": {name: round(value * 1e6, 2) for name, value in times.items()},
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "share_of_copy": round(moved / times["int4"] / copy, 3),
    }


def _crossing(weights: Weights, deadline: float) -> int | None:
    """The least M of CROSSINGS at which dequantizing first wins; kept for the rule."""
    for m in CROSSINGS:
        if time.monotonic() > deadline:
            return None
        times = {name: seconds(p, COPIES) for name, p in weights.crossing(m).items()}
        if times[backends.REFERENCE] < times[backends.TILES]:
            x = torch.empty(m, weights.k, device=DEVICE, dtype=weights.dtype)
            case = Case.of(x, *weights.parts[0], None, weights.k, "Int4V1")
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
