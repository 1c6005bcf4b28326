"""What attention is told of a cache and of padding: one token at a time, and in half precision."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attentions import LOW, MASKS, computed, text
from fusing import fuse, run

RNG = np.random.default_rng(0)
KV = ("pk", "pv")


def x(rows: int, new: int) -> np.ndarray:
    return RNG.normal(0, 1, (rows, new, 32)).astype(np.float32)


def halved(mask: tuple[str, str], dtype: ir.DataType) -> ir.Model:
    model = ir.from_onnx_text(text(mask).replace(str(LOW), "-60000"))
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.FLOAT:
            value.const_value = ir.tensor(tensor.numpy().astype(dtype.numpy()), name=value.name)
            value.dtype = dtype
    for value in (*model.graph.inputs[:1], *model.graph.outputs):
        value.dtype = dtype
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_padding_in_halves(dtype: str) -> None:
    """The runtime has no bfloat16 to try it with: such a graph stays, whole, with a reason."""
    found = fuse(halved(MASKS["causal and padding"], ir.DataType[dtype.upper()]))
    if dtype == "bfloat16":
        (step,) = [step for step in found.steps if step.rule == "attention"]
        assert (step.outcome, step.reason) == ("kept", "FUSION_FAILED_CHECK")
        assert "ONNX Runtime refuses" in step.detail
        return
    data, mask = x(2, 5).astype(np.float16), np.array([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    made = run(found.after.model, {"x": data, "mask": mask})["y"]
    causal = np.tril(np.ones((1, 1, 5, 5), np.bool_))
    wanted = computed(data, causal & (mask[:, None, None] != 0))
    assert np.abs(made - wanted).max() < 3e-3


def behind_a_cache(new: str) -> str:
    """No mask, two heads of keys and values in front of those of x."""
    body = text().replace("sequence", new)
    for old, put in (
        (" x)", " x, float[batch, 2, past, 16] pk, float[batch, 2, past, 16] pv)"),
        (" y)", " y, float[batch, 2, total, 16] kc, float[batch, 2, total, 16] vc)"),
        ("kt = Transpose<perm = [0, 2, 3, 1]>(k4)",
         "kh = Transpose<perm = [0, 2, 1, 3]>(k4)  kc = Concat<axis = 2>(pk, kh) "
         "kt = Transpose<perm = [0, 1, 3, 2]>(kc)"),
        ("MatMul(p, vh)", "MatMul(p, vc)"),
        ("p0 = ", "vc = Concat<axis = 2>(pv, vh)  p0 = "),
    ):  # fmt: skip
        assert old in body
        body = body.replace(old, put)
    return body


def test_behind_a_cache_one_token_needs_no_mask() -> None:
    found = fuse(behind_a_cache("1"))
    assert found.done == {"attention": 1}
    for rows, past in ((1, 0), (2, 7)):
        cache = {name: RNG.normal(0, 1, (rows, 2, past, 16)).astype(np.float32) for name in KV}
        assert found.difference({"x": x(rows, 1), **cache}) < 1e-5


def test_behind_a_cache_later_tokens_are_not_seen() -> None:
    found = fuse(behind_a_cache("sequence"))
    assert not found.done
    assert "sees later ones" in found.missed["attention"]
