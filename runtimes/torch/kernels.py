"""What the torch executor's kernels take, as rules for plans, and which one runs at which M."""

from __future__ import annotations

import dataclasses

from qgraph.capabilities import GATHER_BLOCK_QUANTIZED, MATMUL_NBITS, KernelRule, Origin, Query

BLOCKS = (16, 32, 64, 128, 256)
_FLOATS = ("float32", "float16", "bfloat16")
_BITS = (2, 4, 8)


def rules(device: str, available: bool) -> tuple[KernelRule, ...]:
    """The kernels on `device` ("cpu" or "cuda"); predicted where it is not `available`.

    The ops are those of ONNX Runtime: one file runs on both. Activations stay floats, which is
    accuracy level 0.
    """
    provider = f"torch {device}"
    origin: Origin = "installed" if available else "predicted"
    ladder = _Ladder(device) if available else None
    return (
        KernelRule(
            MATMUL_NBITS, provider, _FLOATS, _BITS, BLOCKS, origin=origin, by_rows=ladder
        ),
        KernelRule(
            GATHER_BLOCK_QUANTIZED, provider, _FLOATS, _BITS, BLOCKS, origin=origin
        ),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Ladder:
    """What runs at which number of rows, in words."""

    device: str

    def __call__(self, query: Query) -> str:
        import torch

        from qgraph.runtimes.torch.backends import Case, ladder

        kind = "Int" if query.symmetric else "Uint"
        case = Case(
            self.device,
            getattr(torch, query.dtype),
            f"{kind}{query.bits}V1",
            query.bits,
            query.block or query.k,
            "symmetric" if query.symmetric else "asymmetric",
            query.n,
            query.k,
        )
        rungs = ladder(case)
        words = [
            rung.backend if rung.up_to is None else f"M ≤ {rung.up_to}: {rung.backend}"
            for rung in rungs
        ]
        tail = rungs[-1]
        if len(rungs) > 1:
            words[-1] = f"above: {words[-1]}"
        return f"{', '.join(words)} ({tail.why})"
