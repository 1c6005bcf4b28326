"""What happened, as data: steps, and the one list of reason codes.

Passes append steps, `explain` renders them. The JSON is versioned: `"schema": 1`, additions only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

SCHEMA = 1

Outcome = Literal["done", "refused", "kept", "changed", "failed"]
"""done: rewritten. refused: could not be. kept: the user or the plan wanted it as it is.
changed: done otherwise than planned. failed: a check found it wrong."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """A stable code with what it means and the way out."""

    code: str
    meaning: str
    hint: str


_REASONS = (
    Reason(
        "WEIGHT_NOT_CONSTANT",
        "the weight is computed by the graph from constants and inputs",
        "fold constants before quantizing, or feed the weight as an initializer",
    ),
    Reason(
        "WEIGHT_RANK",
        "the weight, or the activation, has a rank that the fused kernel does not take",
        "export the layer as a 2-D linear, or leave it in float",
    ),
    Reason(
        "WEIGHT_ON_THE_LEFT",
        "the constant is the first operand of the MatMul, so outputs run along the rows of "
        "the activation",
        "write the layer as MatMul(x, W), or leave it in float",
    ),
    Reason(
        "WEIGHT_VIEW",
        "the constant reaches the linear through ops that are no plain view of it",
        "fold constants before quantizing",
    ),
    Reason(
        "WEIGHT_TYPE",
        "the weight is neither float32, float16 nor bfloat16",
        "convert the model to float32 or float16 first",
    ),
    Reason(
        "WEIGHT_TOO_SMALL",
        "the weight is smaller than `--min-elements`: quantizing it saves almost nothing",
        "lower --min-elements",
    ),
    Reason(
        "FLOAT_IN_CHECKPOINT",
        "the imported checkpoint holds this weight in float",
        "nothing to do; `qgraph optimize` on the result quantizes it too",
    ),
    Reason(
        "NEEDS_NEWER_RUNTIME",
        "the kernel, or the fused op, is newer than the oldest ONNX Runtime that has to run the "
        "result: the installed one, or the one of --min-runtime",
        "a newer --min-runtime; for a weight also what the detail names",
    ),
    Reason("EXCLUDED", "an option or the recipe keeps it in float", "change what the detail names"),
    Reason(
        "GROUP_DOES_NOT_DIVIDE",
        "the row length is no multiple of the group, and this target cannot pad",
        "choose a group that divides K, or a target that pads (ort-cpu)",
    ),
    Reason(
        "GROUP_ADJUSTED",
        "the group asked for does not divide the row, and the best 4-bit format was left to "
        "qgraph: a smaller group that divides it makes a smaller file, and a more exact one",
        "to have the group as it is, padded, name the format: --format uint4 --group N",
    ),
    Reason(
        "BLOCK_UNSUPPORTED",
        "the kernel does not take this block size",
        "choose a group of 16, 32, 64, 128 or 256, or `row`",
    ),
    Reason(
        "BITS_UNSUPPORTED",
        "the kernel does not take this width",
        "choose a width that the message names",
    ),
    Reason(
        "LEVEL_UNSUPPORTED",
        "the kernel has no int8 compute for these bits and block, so level 4 would change nothing",
        "--accuracy-level auto takes the level that the kernel has",
    ),
    Reason(
        "DTYPE_HAS_NO_KERNEL",
        "no kernel of the target takes this activation type",
        "convert the model to float32 or float16",
    ),
    Reason(
        "OPSET_TOO_OLD",
        "the model's opset is too old for the target's spelling and cannot be raised",
        "export again at opset 21 or later (25 for 2 bits)",
    ),
    Reason(
        "FLOAT_ZERO_POINT_IS_SLOW",
        "float zero points have no integer kernel on the CPU",
        "choose integer zero points",
    ),
    Reason(
        "LEVEL_FAILED_CHECK",
        "int8 activations (accuracy level 4) missed their error bound here",
        "nothing to do: the next kernel was taken, or floats where there is none; "
        "--accuracy-level 0 avoids level 4 everywhere, and 4 keeps it",
    ),
    Reason(
        "KERNEL_FAILED_CHECK",
        "the kernel's result on this machine is outside its error bound",
        "nothing to do: the next kernel was taken; please report processor and runtime version",
    ),
    Reason(
        "SHARED_WITH",
        "the packed weight is stored once and shared with another site",
        "nothing to do",
    ),
    Reason(
        "OVERRIDABLE_INPUT",
        "the weight was also a graph input, which a caller could override; it is now a constant",
        "nothing to do, unless you feed weights at run time: then exclude it",
    ),
    Reason(
        "GRAPH_OUTPUT",
        "the weight is a graph output, so its float values must stay",
        "remove the output from the export",
    ),
    Reason(
        "NON_FINITE_WEIGHT",
        "the weight holds NaN or infinity",
        "repair the checkpoint, or keep this weight in float with --exclude",
    ),
    Reason(
        "WEIGHT_LOST",
        "quantizing would leave nothing of the weight, or infinities: its scales are below what "
        "their type holds, its codes have too few bits, or its largest numbers are rounded beyond "
        "their type",
        "convert a float16 model to float32; or take more bits, smaller groups, or a solver with "
        "calibration data",
    ),
    Reason(
        "FP32_FALLBACK_KERNEL",
        "the kernel converts to float32 and back at each call",
        "keep the model in float32 on this target",
    ),
    Reason(
        "SLOWER_THAN_FLOAT_AT_M",
        "the kernel is slower than float for prompts of many rows",
        "accuracy level 4, where the detail says level 0; else float for the site, where prompts "
        "decide: --set 'SITE=float'",
    ),
    Reason(
        "DQ_MULTIPLE_READERS",
        "a DequantizeLinear is read by ops that cannot be fused, so its codes stay beside the "
        "packed copy",
        "exclude the site, or remove the other reader",
    ),
    Reason(
        "DQ_GRANULARITY",
        "the scales of this DequantizeLinear do not run along the rows of the linear's weight",
        "quantize along the input channels (blocks) or the output channels (per row)",
    ),
    Reason(
        "ACTIVATION_QUANTIZED",
        "the activation comes quantized to 8 bits too, which the runtime fuses into an integer "
        "kernel that is faster than one with packed weights",
        "nothing to do; quantize the float model instead to store its weights in 4 bits",
    ),
    Reason(
        "ACTIVATION_UNSUPPORTED",
        "activations cannot be rounded as asked: the target has no kernel for it, or calibration "
        "does not see this one",
        "another --activations, or float for this site with --set",
    ),
    Reason(
        "GEMM_ALPHA_BETA",
        "Gemm's beta multiplies a bias that the graph computes, which the fused kernel cannot say",
        "export the layer with beta = 1",
    ),
    Reason(
        "HALF_CONVERTED",
        "another reader needs the float weight, so the float copy stays in the file",
        "include the other reader, or exclude this site",
    ),
    Reason(
        "SEPARATE_COPY",
        "sites that share one weight have different formats, so the file holds a copy for each",
        "give all sites of the weight one format",
    ),
    Reason(
        "SOLVER_FELL_BACK",
        "the solver could not better rounding to nearest here, so the weight is rounded",
        "more, or more varied, calibration data; the step says why",
    ),
    Reason(
        "NO_FUSED_KERNEL",
        "no kernel of the target computes on weights in this format",
        "--dequantize-at-load: the file stays small, memory and speed are those of floats; or a "
        "format that every target has kernels for: int4, uint4 or int8",
    ),
    Reason(
        "SLOW_KERNEL",
        "a general kernel takes the site, slower than the ones that the target has for others",
        "the detail says what the fast kernels want",
    ),
    Reason(
        "SLOWER_THAN_FLOAT",
        "the target computes on this format, several times slower than on floats",
        "--dequantize-at-load: the file stays small, memory and speed are those of floats; or a "
        "fast format: uint4, or --activations int8-row for 8 bits",
    ),
    Reason(
        "LARGER_THAN_FORMAT",
        "the file holds the weight as 8-bit integers, which a fast kernel reads: about twice the "
        "format's own size",
        "--prefer size holds it as the format packs it, and dequantizes it at each call, slowly; "
        "uint4 is small and fast",
    ),
    Reason(
        "ACTIVATION_SIMULATED",
        "activations are rounded to FP8, and multiplied as floats: the target has no FP8 products, "
        "so this costs time and gains none",
        "run the file where FP8 is multiplied (CUDA, TensorRT); for speed here --activations "
        "int8-row",
    ),
    Reason(
        "SATURATES_HERE",
        "the kernel multiplies uint8 by int8, which saturates on this processor: wrong results",
        "optimize the float model with qgraph, or run the file on a processor with VNNI",
    ),
    Reason(
        "FUSION_MISSED",
        "the ops look like a pattern that has a fused op, and are not it",
        "the detail names the nearest spelling and where it differs",
    ),
    Reason(
        "FUSION_FAILED_CHECK",
        "the fused op does not compute what the ops that it would replace compute",
        "nothing to do: they stay as they are; please report the model's exporter and version",
    ),
    Reason(
        "CUDA_ASYMMETRIC",
        "CUDA's fast int4 kernels take symmetric weights only",
        "--format int4 for --target ort-cuda",
    ),
    Reason(
        "CUDA_N_NOT_MULTIPLE",
        "CUDA's fast kernels want N to be a multiple of 64 (4 bits) or 32 (8 bits)",
        "nothing to do: the slower kernel is used",
    ),
)
REASONS: dict[str, Reason] = {reason.code: reason for reason in _REASONS}


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that a pass did to one site, or why it did not.

    error: the relative weight error ‖W − Ŵ‖/‖W‖ (Frobenius) where it is known.
    """

    pass_name: str
    rule: str
    site: str
    outcome: Outcome
    reason: str | None = None
    detail: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    error: float | None = None

    def __post_init__(self) -> None:
        assert self.reason is None or self.reason in REASONS, self.reason


@dataclasses.dataclass
class Report:
    """All steps of one run, with the effective configuration and the totals."""

    configuration: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: list[Step] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    totals: dict[str, Any] = dataclasses.field(default_factory=dict)

    def extend(self, steps: Iterable[Step]) -> None:
        """Append steps, in the order in which they happened."""
        self.steps.extend(steps)

    def of(self, site: str) -> list[Step]:
        """The steps of one site."""
        return [step for step in self.steps if step.site == site]

    def to_json(self) -> dict[str, Any]:
        """The versioned form that `--report` writes."""
        return {
            "schema": SCHEMA,
            "configuration": self.configuration,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "notes": self.notes,
            "totals": self.totals,
        }
