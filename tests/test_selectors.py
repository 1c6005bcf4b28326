"""Selectors that match nothing: the nearest names, whole or a part of them."""

from __future__ import annotations

import dataclasses

import pytest

from qgraph.errors import InputError
from qgraph.selectors import check


@dataclasses.dataclass(frozen=True)
class Row:
    """A site by its names."""

    names: tuple[str, ...]
    role: str = "linear"


SITES = [
    Row((f"node_linear_{3 * layer + at}", f"model.layers.{layer}.self_attn.{name}.weight"))
    for layer in range(4)
    for at, name in enumerate(("k_proj", "q_proj", "v_proj"))
] + [Row(("lm_head", "lm_head.weight"), "head"), Row(("node_embedding",), "embedding")]


@pytest.mark.parametrize(
    "text, near",
    [
        ("*q_prj*", "did you mean 'q_proj'"),
        ("*.q_prj", "did you mean 'q_proj'"),
        ("model.layers.1.self_attn.q_prj.weight", "model.layers.1.self_attn.q_proj.weight"),
        ("*self_atn*", "did you mean 'self_attn'"),
        ("lm_haed", "did you mean 'lm_head'"),
        ("node_linear_99", "did you mean 'node_linear_9'"),
    ],
)
def test_the_nearest_are_named(text: str, near: str) -> None:
    with pytest.raises(InputError, match="matches no site") as told:
        check([text], SITES)
    assert near in str(told.value)
    assert "node_embedding" not in str(told.value), "the first of the alphabet says nothing"
    assert "there are 27 names: `qgraph explain MODEL --all`" in str(told.value)


def test_what_is_like_no_name() -> None:
    with pytest.raises(InputError, match=r"'\*zzzzzz\*' matches no site \(there are 27 names"):
        check(["*zzzzzz*"], SITES)
