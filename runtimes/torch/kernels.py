"""What the torch executor's kernels take, as rules for plans, and which one runs at which M."""

from __future__ import annotations

import dataclasses

from qgraph import registry
from qgraph.capabilities import INTEGERS, KernelRule, Origin, Query
from qgraph.formats.base import variants
from qgraph.kernel_ops import GATHER_BLOCK_QUANTIZED, MATMUL_NBITS, OWN_LINEAR

BLOCKS = (16, 32, 64, 128, 256)
_FLOATS = ("float32", "float16", "bfloat16")
_BITS = (2, 4, 8)
_FLOAT_ZEROS = "uint-float"


def rules(device: str, available: bool) -> tuple[KernelRule, ...]:
    """The kernels on `device` ("cpu" or "cuda"); predicted where it is not `available`.

    Integers have the ops of ONNX Runtime: one file runs on both. Other formats have their own
    function, whose call torch takes as a whole, and any ONNX runtime as written. Activations stay
    floats, which is accuracy level 0.
    """
    provider = f"torch {device}"
    origin: Origin = "installed" if available else "predicted"
    ladder = _Ladder(device) if available else None
    return (
        KernelRule(
            MATMUL_NBITS, provider, _FLOATS, _BITS, BLOCKS, numbers=(*INTEGERS, _FLOAT_ZEROS),
            origin=origin, by_rows=ladder,
        ),
        KernelRule(GATHER_BLOCK_QUANTIZED, provider, _FLOATS, _BITS, BLOCKS, origin=origin),
        KernelRule(
            OWN_LINEAR, provider, _FLOATS, tuple(range(1, 9)), numbers=_others(), origin=origin,
            by_rows=ladder,
        ),
    )  # fmt: skip


def _others() -> tuple[str, ...]:
    """The kinds of number that are no integers, of all formats."""
    found = [
        fmt.numbers
        for name in registry.names("format")
        for fmt in variants(registry.load("format", name))
    ]
    return tuple(dict.fromkeys(each for each in found if each not in (*INTEGERS, _FLOAT_ZEROS)))


@dataclasses.dataclass(frozen=True)
class _Ladder:
    """What runs at which number of rows, in words."""

    device: str

    def __call__(self, query: Query) -> str:
        import torch

        from qgraph.runtimes.torch.backends import Case, ladder
        from qgraph.runtimes.torch.dequantize import codes_of

        layout, bits = f"{'Int' if query.symmetric else 'Uint'}{query.bits}V1", query.bits
        if query.op == OWN_LINEAR:
            layout = query.function.removeprefix("Linear")
            kind = codes_of(layout)
            bits = kind.bits if kind is not None else 0
        case = Case(
            self.device,
            getattr(torch, query.dtype),
            layout,
            bits,
            query.block or query.k,
            "float" if query.numbers == _FLOAT_ZEROS
            else "symmetric" if query.symmetric else "asymmetric",
            query.n,
            query.k,
        )  # fmt: skip
        rungs = ladder(case)
        words = [
            rung.backend if rung.up_to is None else f"M ≤ {rung.up_to}: {rung.backend}"
            for rung in rungs
        ]
        tail = rungs[-1]
        if len(rungs) > 1:
            words[-1] = f"above: {words[-1]}"
        return f"{', '.join(words)} ({tail.why})"
