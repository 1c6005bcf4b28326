"""An activation whose channels are gathered in the order of a weight's stored columns."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qgraph.rewrite import Rewriter
from qgraph.sites import Site


def gather_channels(
    site: Site,
    order: np.ndarray,
    rewriter: Rewriter,
    made: dict[tuple[int, bytes], ir.Value],
) -> None:
    """Let the site read its activation's channels in `order` (int64 `[K]`).

    made: what was gathered before, by activation and order; one node serves all its readers.
    """
    activation = site.activation
    key = (id(activation), order.tobytes())
    if key not in made:
        indices = rewriter.constant(f"{site.name}/order", order.astype(np.int64))
        node = rewriter.node(
            "Gather",
            [activation, indices],
            name=f"{site.name}/gather",
            attributes={"axis": -1},
            dtype=activation.dtype,
            shape=activation.shape,
        )
        rewriter.insert_before(site.node, [node])
        made[key] = node.outputs[0]
    position = next(at for at, v in enumerate(site.node.inputs) if v is activation)
    site.node.replace_input_with(position, made[key])
