"""A byte-level Llama of 2.8 M weights, trained on the standard library's source.

Weights and exported graphs lie in `tiny/`, so that building it needs no torch:

    python -m qgraph.models.tiny build FOLDER [--dtype float32|float16] [--variant default|plain]
    python -m qgraph.models.tiny train        makes the files in tiny/ again, with torch
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from safetensors.numpy import load_file

from qgraph.errors import InputError

from .build_cache import save
from .download import sha256_of
from .reporting import reported
from .tiny_corpus import batches, bits_per_byte, modules, text
from .torch_onnx import need

__all__ = ["batches", "bits_per_byte", "build", "facts", "modules", "text", "weights"]

DATA = Path(__file__).absolute().parent / "tiny"
DTYPES = ("float32", "float16")
VARIANTS = ("default", "plain")
# On a graph input of an exported skeleton: which weight belongs there, and how it lies.
WEIGHT = "qgraph.weight"
TRANSPOSED = "qgraph.transposed"


def build(folder: Path, dtype: str = "float32", variant: str = "default") -> Path:
    """Write `folder/tiny.onnx` and `tiny.onnx.data`, replacing both, and return the .onnx path.

    The graph maps `input_ids` int64 `[batch, sequence]` to `logits` `[batch, sequence, 256]`.

    Args:
        folder: made if it is missing.
        dtype: of weights, activations and logits; the weights are the same float16 values.
        variant: "default" as torch.onnx.export writes it (weights transposed to `[K, N]`,
            most of them renamed); "plain" is not optimized, at opset 23 (names kept, a
            Transpose before each MatMul). The tied head is stored once in both.

    Raises:
        InputError: an unknown dtype or variant, damaged data, or a folder not writable.
    """
    if dtype not in DTYPES or variant not in VARIANTS:
        raise InputError(
            f"no tiny model of dtype {dtype!r}, variant {variant!r}: "
            f"wanted one of {', '.join(DTYPES)} and one of {', '.join(VARIANTS)}"
        )
    model = _fill(ir.load(DATA / skeleton_name(dtype, variant)), weights(), dtype)
    target = folder.absolute() / "tiny.onnx"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save(model, target)
    except OSError as error:
        raise InputError(f"cannot write the tiny model to {folder}: {error}") from error
    return target


def skeleton_name(dtype: str, variant: str) -> str:
    """The file in `tiny/` that holds the exported graph, its weights still graph inputs."""
    return f"{variant}-{dtype}.onnx"


def weights() -> dict[str, NDArray[np.float16]]:
    """The trained parameters by their torch names, float16; the tied head is `lm_head.weight`.

    Raises:
        InputError: the file's hash is not the one in facts.json.
    """
    path = DATA / "weights.safetensors"
    found, wanted = sha256_of(path), facts()["sha256"]
    if found != wanted:
        raise InputError(f"{path.name} has SHA-256 {found}, wanted {wanted}: reinstall qgraph")
    return load_file(path)


def facts() -> dict[str, Any]:
    """What was noted at training: hash, date, versions, seed, held-out bits per byte."""
    found: dict[str, Any] = json.loads((DATA / "facts.json").read_text(encoding="utf-8"))
    return found


def _fill(model: ir.Model, values: dict[str, NDArray[np.float16]], dtype: str) -> ir.Model:
    """Turn the skeleton's weight inputs into initializers, in place."""
    graph = model.graph
    for value in list(graph.inputs):
        source = value.metadata_props.pop(WEIGHT, None)
        if source is None:
            continue
        array = values[source].astype(dtype)
        if value.metadata_props.pop(TRANSPOSED, None):
            array = np.ascontiguousarray(array.T)
        value.const_value = ir.tensor(array, name=value.name)
        graph.inputs.remove(value)
        graph.register_initializer(value)
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the model, or train it again, and print what was written."""
    parser = argparse.ArgumentParser(prog="python -m qgraph.models.tiny")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="write tiny.onnx and its data")
    building.add_argument("folder", type=Path)
    building.add_argument("--dtype", choices=DTYPES, default="float32")
    building.add_argument("--variant", choices=VARIANTS, default="default")
    training = commands.add_parser("train", help="train and export anew (torch, some minutes)")
    training.add_argument("folder", nargs="?", type=Path, default=DATA)
    chosen = parser.parse_args(arguments)
    with reported():
        if chosen.command == "build":
            print(build(chosen.folder, chosen.dtype, chosen.variant))
            return
        need({"torch": "torch"}, "training the tiny model")
        from .tiny_train import run

        print(json.dumps(run(chosen.folder), indent=1))


if __name__ == "__main__":
    main()
