"""What int8 activations cost a linear, as calibration inputs tell."""

from __future__ import annotations

import numpy as np

from qgraph.passes.level_check import level_cost

K = 64


def test_what_all_outputs_of_a_head_share_hides_no_error() -> None:
    """A channel that is huge and gives each output the same: argmax does not see it."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((200, K)).astype(np.float32), np.eye(K, dtype=np.float32)
    x[:, 3] *= 1000
    weight[:, 3] = 1
    linear, head = (level_cost(x, weight, 32, role) for role in ("linear", "head"))
    assert not linear.too_much
    assert head.too_much
    assert "of what tells outputs apart" in str(head)
    assert not level_cost(x, weight[:1], 32, "head").too_much  # one output: nothing to tell apart
