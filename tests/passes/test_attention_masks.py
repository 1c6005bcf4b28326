"""Masks at the numbers and the lengths where they change what they hide."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from attentions import MASKS, PLACES, computed, text
from fusing import Fused, fuse, run

from qgraph.passes.attention_padding import NOT_ZERO, Kept, critical, kept_of, pairs_of

RNG = np.random.default_rng(0)
NUMBERS = np.array([-1, 0, 1, 2, 3, 49, 50, 51])
TESTS = {
    "mask == 1": ("kept = Equal(mask, c)", 1, "where it is 1"),
    "ids != 50": ("hides = Equal(mask, c)  kept = Not(hides)", 50, "where it is not 50"),
    "ids != 0": ("hides = Equal(mask, c)  kept = Not(hides)", 0, ""),
    "mask > 0": ("kept = Greater(mask, c)", 0, "where it is above 0"),
    "place >= 0": ("kept = GreaterOrEqual(mask, c)", 0, "where it is above -1"),
    "kind < 3": ("kept = Less(mask, c)", 3, "where it is not above 2"),
}
"""How `kept` is made of the mask and a number; how the step tells of it."""
KEPT = {
    "mask == 1": NUMBERS == 1,
    "ids != 50": NUMBERS != 50,
    "ids != 0": NUMBERS != 0,
    "mask > 0": NUMBERS > 0,
    "place >= 0": NUMBERS >= 0,
    "kind < 3": NUMBERS < 3,
}


def x(rows: int, new: int) -> np.ndarray:
    return RNG.normal(0, 1, (rows, new, 32)).astype(np.float32)


def hidden_by(test: str, number: int, causal: bool) -> tuple[str, str]:
    once = f"c = Constant<value_int = {number}>()  {test}  seen = Unsqueeze(kept, middle)"
    both = "  both = And(causal, seen)  low = Where(both, zero, lowest)"
    alone = "  low = Where(seen, zero, lowest)"
    mask = "Identity(mask)".join(["  as_given = ", "  "])
    return (PLACES if causal else "") + once + (both if causal else alone) + mask, (
        "masked = Add(scores, low)"
    )


def padding(kept: np.ndarray, rows: int, new: int) -> np.ndarray:
    """Numbers of all kinds, behind one that lets its token be seen."""
    found = RNG.choice(NUMBERS, (rows, new))
    found[:, 0] = RNG.choice(NUMBERS[kept], rows)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", TESTS)
def test_padding_hides_by_the_number_that_the_graph_compares_with(name: str, causal: bool) -> None:
    test, number, words = TESTS[name]
    found = fuse(text(hidden_by(test, number, causal)))
    (step,) = [step for step in found.steps if step.outcome == "done"]
    assert f"padding {words}".strip() in step.detail
    assert ("where" in step.detail) == bool(words)
    data, mask = x(6, 9), padding(KEPT[name], 6, 9)
    seen = np.isin(mask, NUMBERS[KEPT[name]])[:, None, None, :]
    seen = seen & (np.tril(np.ones((9, 9), np.bool_)) if causal else np.ones((9, 9), np.bool_))
    made = run(found.after.model, {"x": data, "mask": mask})["y"]
    assert np.abs(made - computed(data, seen)).max() < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_arithmetic_on_a_mask_is_kept_as_it_is(causal: bool) -> None:
    """(1 − mask) · −10000 adds to the scores of a token whose mask is 2: no mask, but a bias."""
    once, step = MASKS["padding"]
    if causal:
        once, step = PLACES + once, "less = Where(causal, scores, lowest)  masked = Add(less, low)"
    found = fuse(text((once, step)))
    assert found.done == {"attention": 1}
    assert ("causal" in found.steps[-1].detail) == causal
    for mask in (np.array([[1, 1, 0, 1, 0]]), np.array([[1, 2, 0, -1, 1]])):
        assert found.difference({"x": x(1, 5), "mask": mask}) < 1e-5


def with_table(table: np.ndarray, step: str) -> Fused:
    once = (
        "shape = Shape(x)  n = Gather(shape, one)  nn = Concat<axis = 0>(n, n) "
        "zeros = Concat<axis = 0>(first, first)  axes = Concat<axis = 0>(two, three) "
        "keep = Slice(table, zeros, nn, axes)"
    )
    body = text((once, step)).replace("x) =>", "x, bool[1, 1, 48, 48] table) =>")
    body = body.replace(
        "int64[1] one =", "int64[1] two = {2}, int64[1] three = {3}, int64[1] one ="
    )
    model = ir.from_onnx_text(body)
    value = next(value for value in model.graph.inputs if value.name == "table")
    value.const_value = ir.tensor(table[None, None], name="table")
    model.graph.inputs.remove(value)
    model.graph.register_initializer(value)
    return fuse(model)


def test_a_window_in_a_table_is_found() -> None:
    causal = np.tril(np.ones((48, 48), np.bool_))
    found = with_table(causal & ~np.tril(causal, -20), "masked = Where(keep, scores, lowest)")
    assert found.done == {"attention": 1}
    assert "window of 20" in found.steps[-1].detail
    for new in (9, 48):
        assert found.difference({"x": x(1, new)}) < 1e-5
    plain = with_table(causal, "masked = Where(keep, scores, lowest)")
    assert "window" not in plain.steps[-1].detail
    assert plain.difference({"x": x(1, 48)}) < 1e-5


def test_a_hole_in_a_table_is_not_overlooked() -> None:
    table = np.tril(np.ones((48, 48), np.bool_))
    table[30:, 25] = False
    chosen = with_table(table, "masked = Where(keep, scores, lowest)")
    assert "neither causal nor padding nor a window" in chosen.missed["attention"]
    added = with_table(table, "low = Where(keep, zero, lowest)  masked = Add(scores, low)")
    assert "bias" in added.steps[-1].detail
    for found in (chosen, added):
        assert found.difference({"x": x(1, 40)}) < 1e-5


@pytest.mark.parametrize("blocks", ["Div", "Mod"])
def test_blocks_of_tokens_are_not_taken_for_all(blocks: str) -> None:
    """A token sees 4 blocks of 8 at most: no constant says 32."""
    once = (
        PLACES
        + f"""eight = Constant<value_int = 8>()  four_i = Constant<value_int = 4>()
        places = {blocks}(column, eight)  others = {blocks}(row, eight)
        gap = Sub(places, others)  near = Less(gap, four_i)  both = And(causal, near)
        low = Where(both, zero, lowest)"""
    )
    found = fuse(text((once, "masked = Add(scores, low)")))
    assert "neither causal nor padding nor a window" in found.missed["attention"]
    assert found.difference({"x": x(1, 70)}) < 1e-5


@pytest.mark.parametrize("test", [Kept("Equal", 7.0, False), Kept("Less", 0.5, False), NOT_ZERO])
def test_a_test_is_found_from_what_pairs_of_tokens_see(test: Kept) -> None:
    numbers = critical([test.number], ir.DataType.FLOAT)
    given = np.concatenate(list(pairs_of(numbers, 5, 2)))[: len(numbers) ** 2]
    seen = test(given)
    seen[~seen.any(1)] = True  # a token that sees nothing is given everything
    found = kept_of(seen, numbers)
    assert isinstance(found, Kept)
    array = np.array(numbers)
    assert np.array_equal(found(array), test(array))
    assert kept_of(np.zeros_like(seen), numbers) == "none of its numbers lets a token be seen"
    odd = np.isin(given, numbers[::2])
    assert "neither a number nor a bound" in str(kept_of(odd, numbers))


def test_numbers_around_a_constant_stay_within_the_type() -> None:
    assert critical([200], ir.DataType.UINT8) == [0, 1, 2, 199, 200, 201, 210]
    assert critical([300], ir.DataType.UINT8) == [0, 1, 2]
    assert critical([], ir.DataType.INT64) == [-10, -1, 0, 1, 2, 11]
    assert critical([5], ir.DataType.BOOL) == [0, 1]
    assert {0.5, 4.999999, 5.000001} <= set(critical([5], ir.DataType.FLOAT))
