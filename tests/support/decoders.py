"""Small models that can be computed in numpy: decoders and an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, HIDDEN, LENGTH = 96, 80, 160, 12
Weights = dict[str, np.ndarray]


def weights(noise: float = 0.0) -> Weights:
    rng, other = np.random.default_rng(0), np.random.default_rng(1)
    shapes = {
        "embed.weight": (VOCABULARY, WIDTH, 1.0),
        "up.weight": (WIDTH, HIDDEN, 9.0),
        "down.weight": (HIDDEN, WIDTH, 13.0),
        "head.weight": (WIDTH, VOCABULARY, 9.0),
    }
    made = {}
    for name, (*shape, scale) in shapes.items():
        made[name] = rng.standard_normal(shape) / scale
        made[name] += noise * other.standard_normal(shape) / scale
    return {name: array.astype(np.float32) for name, array in made.items()}


def forward(w: Weights, ids: np.ndarray) -> Weights:
    """Every site's output, float64."""
    embed = w["embed.weight"][ids].astype(np.float64)
    up = embed @ w["up.weight"]
    down = np.maximum(up, 0) @ w["down.weight"]
    return {"embed": embed, "up": up, "down": down, "head": down @ w["head.weight"]}


def decoder(
    path: Path,
    w: Weights | None = None,
    *,
    names: bool = True,
    external: bool = False,
    ids: str = "input_ids",
    shape: tuple[str | int, str | int] = ("B", "T"),
    logits: str = "logits",
) -> Path:
    """Embedding, two linears and a head."""
    w = weights() if w is None else w
    nodes = [
        helper.make_node("Gather", ["embed.weight", ids], ["h"], "embed"),
        helper.make_node("MatMul", ["h", "up.weight"], ["u"], "up"),
        helper.make_node("Relu", ["u"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "down.weight"], ["d"], "down"),
        helper.make_node("MatMul", ["d", "head.weight"], [logits], "head"),
    ]
    for node in nodes if not names else ():
        node.ClearField("name")
    size = w["head.weight"].shape[1]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(ids, TensorProto.INT64, shape)],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, [*shape, size])],
        [numpy_helper.from_array(array, name) for name, array in w.items()],
    )
    save(graph, path, external)
    return path


def save(graph: onnx.GraphProto, path: Path, external: bool = False) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.parent.mkdir(exist_ok=True)
    options: dict[str, Any] = {
        "save_as_external_data": external, "location": path.name + ".data", "size_threshold": 0,
    }  # fmt: skip
    onnx.save(model, path, **(options if external else {}))
    return path


def tokens(samples: int = 3, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(2).integers(0, VOCABULARY, (samples, length))


def encoder(path: Path, noise: float = 0.0, name: str = "last_hidden_state") -> Path:
    w = weights(noise)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "up.weight"], ["u"], "up"),
            helper.make_node("Relu", ["u"], ["r"]),
            helper.make_node("MatMul", ["r", "down.weight"], [name], "down"),
            helper.make_node("ReduceMean", [name], ["pooled"], axes=[1], keepdims=0),
            helper.make_node("ArgMax", [name], ["best"], axis=-1),
        ],
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "T", WIDTH])],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "T", WIDTH]),
            helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["B", WIDTH]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["B", "T", 1]),
        ],
        [numpy_helper.from_array(w[n], n) for n in ("up.weight", "down.weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path
