"""Corners of operators in the torch executor, against ONNX Runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest

from qgraph import registry
from qgraph.errors import InputError
from tests.runtimes.torch.one_node import Case, f32, i64, run_onnxruntime

LARGE = np.array([1, 1e30, 1, np.inf, 2], np.float32)
WORDS = np.array([0, 1, 7, 2**63 - 1, 2**63, 2**63 + 5, 2**64 - 1], np.uint64)
PAIRS = np.array(list(itertools.product(WORDS, WORDS[1:])), np.uint64).T
FIRST, SECOND = np.ascontiguousarray(PAIRS[0]), np.ascontiguousarray(PAIRS[1])
ENDS = (-(2**63), -(2**31), -6, -5, -4, -1, 0, 1, 3, 4, 5, 2**31 - 1, 2**31, 2**63 - 1)
STEPS = (1, 2, -1, -2, 2**31, -(2**63), 2**63 - 1)

CASES = {
    "sums before each element": Case("CumSum", (LARGE, np.array(0)), {"exclusive": 1}),
    "sums after each element": Case("CumSum", (LARGE, np.array(0)), {"exclusive": 1, "reverse": 1}),
    "sums of rows": Case("CumSum", (f32(3, 4), np.array(-1)), {"exclusive": 1}),
    "places of a number": Case("NonZero", (np.array(3.0, np.float32),)),
    "no places of a number": Case("NonZero", (np.array(0.0, np.float32),)),
    "an empty range": Case("Range", (np.array(5), np.array(0), np.array(2))),
    "an empty range of floats": Case("Range", tuple(np.array(v, np.float32) for v in (1, 1, 0.5))),
    "a power that is no number": Case("Pow", (abs(f32(5)), np.array(np.nan, np.float32))),
    "an infinite power": Case("Pow", (abs(f32(5)), np.array(np.inf, np.float32))),
    "uint64 less": Case("Less", (FIRST, SECOND)),
    "uint64 greater or equal": Case("GreaterOrEqual", (FIRST, SECOND)),
    "uint64 divided": Case("Div", (FIRST, SECOND)),
    "uint64 remainders": Case("Mod", (FIRST, SECOND)),
    "uint64 remainders of C": Case("Mod", (FIRST, SECOND), {"fmod": 1}),
    "uint64 maximum": Case("Max", (FIRST, SECOND)),
    "uint64 minimum": Case("Min", (FIRST, SECOND)),
}


def opened(model: onnx.ModelProto) -> Any:
    return registry.load("target", "torch").open(model.SerializeToString())


def with_constants(case: Case, constants: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """The model with the inputs of these numbers as constants, and the other feeds."""
    model, feeds = case.model(), case.feeds()
    for i in sorted(constants, reverse=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(feeds.pop(f"x{i}"), f"x{i}"))
        del model.graph.input[i]
    return model, feeds


@pytest.mark.parametrize("name", CASES)
def test_equals_onnxruntime(name: str) -> None:
    """With every input fed, and with all but the first as constants."""
    case = CASES[name]
    for constants in ((), tuple(range(1, len(case.inputs)))):
        check(*with_constants(case, constants))


def check(model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    (found,) = opened(model).run(feeds).values()
    (wanted,) = run_onnxruntime(model, feeds)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_exclusive_products() -> None:
    """An operator of opset 26, which this ONNX Runtime has not."""
    import torch

    from qgraph.runtimes.torch.onnx_ops.reduction import cumprod, cumsum

    x = torch.tensor([2.0, 0.0, 3.0])
    assert cumprod(x, 0, exclusive=1).tolist() == [1, 2, 0]
    assert cumprod(x, 0, exclusive=1, reverse=1).tolist() == [0, 3, 1]
    assert cumsum(x[:0], 0, exclusive=1).shape == (0,)


@pytest.mark.parametrize("step", STEPS)
def test_slices_clamp_their_bounds(step: int) -> None:
    x = np.arange(4, dtype=np.float32)
    case = Case("Slice", (x, i64(0), i64(4), i64(0), i64(step)))
    session, runtime = opened(case.model()), registry.load("target", "ort-cpu")
    theirs = runtime.open(case.model().SerializeToString(), reference=True)
    for begin, stop in itertools.product(ENDS, ENDS):
        feeds = {**case.feeds(), "x1": i64(begin), "x2": i64(stop)}
        (found,), (wanted,) = session.run(feeds).values(), theirs.run(feeds).values()
        assert found.tolist() == wanted.tolist(), (begin, stop)


@pytest.mark.parametrize("step", [-1, -2, 3])
def test_slices_of_shapes_clamp_their_bounds(step: int) -> None:
    for begin, stop in itertools.product((-9, -3, 0, 2, 9, 2**31 - 1), repeat=2):
        text = f"""g (float[A, B, C] x) => (int64[K] y) {{
            b = Constant<value_ints = [{begin}]>()  e = Constant<value_ints = [{stop}]>()
            z = Constant<value_ints = [0]>()  t = Constant<value_ints = [{step}]>()
            s = Shape(x)  y = Slice(s, b, e, z, t) }}"""
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        feeds = {"x": f32(2, 3, 4)}
        (found,) = opened(model).run(feeds).values()
        assert found.tolist() == run_onnxruntime(model, feeds)[0].tolist(), (begin, stop)


def test_a_step_of_zero_is_refused() -> None:
    case = Case("Slice", (f32(4), i64(0), i64(4), i64(0), i64(0)))
    with pytest.raises(InputError, match="step"):
        opened(case.model()).run(case.feeds())


@pytest.mark.parametrize("shape", [(5, 3), (2, 4), (1, 2, 5)])
def test_an_impossible_expand_is_refused(shape: tuple[int, ...]) -> None:
    case = Case("Expand", (f32(2, 3), i64(*shape)))
    with pytest.raises(InputError, match="Expand of an axis of"):
        opened(case.model()).run(case.feeds())


@pytest.mark.parametrize("reduction", ["none", "add", "max", "mul"])
@pytest.mark.parametrize("place", [(0, 3), (0, -4), (2, 0), (-3, 1)])
def test_an_update_beyond_an_axis_is_refused(place: tuple[int, int], reduction: str) -> None:
    inputs = f32(2, 3), np.array([place]), f32(1)
    case = Case("ScatterND", inputs, {"reduction": reduction}, opset=18)
    with pytest.raises(InputError, match="out of bounds"):
        opened(case.model()).run(case.feeds())


@pytest.mark.parametrize("step", ["SequenceInsert(s, x, p)", "SequenceErase(s, p)"])
def test_a_position_beyond_a_sequence_is_refused(step: str) -> None:
    text = f"""g (float[A] x, int64 p) => (float[B] y) {{
        s = SequenceConstruct(x, x)  t = {step}  y = ConcatFromSequence<axis = 0>(t) }}"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    session = opened(model)
    assert session.run({"x": f32(2), "p": np.array(-2)})["y"].shape in ((6,), (2,))
    for position in (3, -3):
        with pytest.raises(InputError, match=f"position {position} in a sequence of 2"):
            session.run({"x": f32(2), "p": np.array(position)})
