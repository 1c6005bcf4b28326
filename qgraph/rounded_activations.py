"""Which weights are multiplied with rounded activations."""

from __future__ import annotations

import onnx_ir as ir

from qgraph.activation_kinds import FP8, FP8_KINDS, FP8_TOKEN
from qgraph.errors import InputError
from qgraph.formats.base import Format, Layout, parse

OF_INTEGER_KERNELS = "int8-pairs"
"""The weights that are multiplied with activations rounded to integers where no others are asked
for: those that the fastest kernels of every processor multiply exactly."""
OF_FP8 = "fp8-e4m3"
"""Those that are multiplied with FP8 activations."""
FP8_WORDS = {
    FP8: "activations in FP8, one scale from calibration",
    FP8_TOKEN: "activations in FP8, one scale for each token",
}
"""What the plan says of them."""


def reads_rows(fmt: Format) -> bool:
    """Whether integer kernels read the format: 8 bits, one scale to a row, no zero points."""
    try:
        return bool(fmt.parts(1, 1, ir.DataType.FLOAT, Layout("kn")))
    except InputError:
        return False


def weights_of(activations: str) -> Format:
    """The weights that are multiplied with rounded activations."""
    return parse(OF_FP8 if activations in FP8_KINDS else OF_INTEGER_KERNELS)


def are_multiplied(fmt: Format, activations: str) -> bool:
    """Whether weights in `fmt` are multiplied with activations that are rounded so."""
    if activations in FP8_KINDS:
        return fmt.numbers == weights_of(activations).numbers
    return reads_rows(fmt)


def require_rounded(fmt: Format, activations: str, asked: str) -> None:
    """Refuse weights in a format that no kernel multiplies with activations rounded so.

    Raises:
        InputError: it is such a format; `asked` is the option that rounds.
    """
    if not are_multiplied(fmt, activations):
        raise InputError(
            f"{asked} and the format {fmt.spell()} contradict each other: products of bytes want "
            f"weights in {weights_of(activations).spell()}; leave the format out, or the "
            "activations in float"
        )
