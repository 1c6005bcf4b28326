"""Write a synthetic float32 decoder-shaped model with external data: OUTPUT GIGABYTES."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH, HIDDEN, VOCABULARY = 2048, 8192, 65536


def main(output: Path, gigabytes: float) -> None:
    """A tied embedding of 537 MB and pairs of linears up to `gigabytes`."""
    data = output.with_name(output.name + ".data")
    rng = np.random.default_rng(0)
    nodes, tensors = [helper.make_node("Gather", ["embed", "ids"], ["x0"], "embed")], []
    with data.open("wb") as file:

        def weight(name: str, rows: int, columns: int) -> None:
            tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[rows, columns])
            tensor.data_location = TensorProto.EXTERNAL
            length = 4 * rows * columns
            for key, value in (
                ("location", data.name), ("offset", file.tell()), ("length", length)
            ):  # fmt: skip
                tensor.external_data.add(key=key, value=str(value))
            for start in range(0, rows, 1024):
                count = min(1024, rows - start)
                file.write(rng.standard_normal((count, columns), np.float32).tobytes())
            tensors.append(tensor)

        weight("embed", VOCABULARY, WIDTH)
        layer = 0
        while file.tell() < gigabytes * 1e9:
            weight(f"layers.{layer}.up", WIDTH, HIDDEN)
            weight(f"layers.{layer}.down", HIDDEN, WIDTH)
            nodes += [
                helper.make_node(
                    "MatMul", [f"x{layer}", tensors[-2].name], [f"u{layer}"], f"up{layer}"
                ),
                helper.make_node(
                    "MatMul", [f"u{layer}", tensors[-1].name], [f"x{layer + 1}"], f"down{layer}"
                ),
            ]
            layer += 1
    nodes += [
        helper.make_node("Transpose", ["embed"], ["head"], "head_t", perm=[1, 0]),
        helper.make_node("MatMul", [f"x{layer}", "head"], ["logits"], "head"),
    ]
    graph = helper.make_graph(
        nodes,
        "synthetic",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
        [
            helper.make_tensor_value_info(
                "logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]
            )
        ],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    output.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(output))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
