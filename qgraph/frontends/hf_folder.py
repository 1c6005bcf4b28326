"""A local Hugging Face folder: config.json and safetensors, through transformers.

Nothing is downloaded, no code of the folder runs, no pickle and no file outside it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from qgraph import torch_onnx
from qgraph.errors import InputError
from qgraph.expert_sites import GATHERED
from qgraph.frontends import hf_config, hf_module, hf_weights, torch_export
from qgraph.frontends.torch_export import Loaded
from qgraph.wording import counted, plural

_TOKENS = {0: "batch", 1: "sequence"}
_TARGET = {0: "batch", 1: "target_sequence"}


def load(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    read: Collection[str] = (),
    opset: int | None = None,
) -> Loaded:
    """The model of a folder as an ONNX graph, batch and sequence open.

    Language models map `input_ids` to `logits`; encoders take `attention_mask` too; models of
    an encoder and a decoder also `decoder_input_ids`; vision models `pixel_values`. bfloat16
    weights are read as float32, which holds them exactly: no CPU has kernels for all ops in
    bfloat16. Without a cache: each run computes all positions.

    shapes: name and shape of every weight, where the folder's are quantized: the graph then has
        zeros in their place, float32, which take no memory.
    read: the weights whose values are read nevertheless.
    opset: the newest that may be written; None for 23.

    Raises:
        InputError: no config.json or safetensors, a model that transformers does not know,
            missing, superfluous or quantized weights, or one that cannot be exported.
        MissingExtra: torch or transformers is not installed.
    """
    config = hf_config.read(folder, packed=shapes is not None)
    paths = hf_weights.files(folder) if shapes is None or read else []
    torch_onnx.need({"torch": "torch", "transformers": "hf"}, "reading a Hugging Face folder")
    tensors = hf_weights.read(paths)
    if shapes is not None:
        tensors = _zeros(shapes) | {name: tensors[name] for name in read}
    with torch_onnx.quiet():
        module, notes, gathers = _module(folder, config, tensors)
    feeds, axes = _example(module, folder)
    found = torch_export.load(module, (), feeds, axes, title=folder.name or None, opset=opset)
    return Loaded(found.model, (*notes, *found.notes), gathers)


def parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of the module of a folder; no weight is made.

    Raises:
        InputError, MissingExtra: see `load`.
    """
    config = hf_config.read(folder, packed=True)
    torch_onnx.need({"torch": "torch", "transformers": "hf"}, "reading a Hugging Face folder")
    with torch_onnx.quiet():
        return hf_module.parameter_shapes(folder, config)


def files(folder: Path) -> tuple[Path, ...]:
    """What is read of a folder, besides small files."""
    return (folder / "config.json", *hf_weights.files(folder))


def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A zero for each weight, shown in its shape."""
    import torch

    return {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}


def _module(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[Any, list[str], bool]:
    """The module with the folder's weights, what a user should know, whether it gathers experts."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    half = bool(floats) and all(str(tensor.dtype) == "torch.float16" for tensor in floats)
    module, info = hf_module.load(folder, config, tensors, half)
    hf_module.check_keys(folder, module, tensors, info)
    notes = hf_weights.notes(tensors, half)
    gathers = hf_module.spread_experts(module)
    notes += [GATHERED] if gathers else []
    unused = sorted(info["unexpected_keys"])
    if unused:
        notes.append(
            f"{counted(len(unused), 'tensor')} of {folder} {plural(len(unused), 'has', 'have')} no "
            f"place in its {type(module).__name__} and {plural(len(unused), 'was', 'were')} left "
            f"out: {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''}"
        )
    for part in module.modules():  # encoder and decoder may have configurations of their own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return module.eval(), notes, gathers


def _example(module: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs by name, and which of their axes are open."""
    import inspect

    import torch

    takes = inspect.signature(module.forward).parameters
    main = module.main_input_name
    if main == "pixel_values":
        image = _image(module.config)
        if image is not None:
            return {main: torch.zeros(2, *image)}, {main: {0: "batch"}}
    if main != "input_ids":
        raise InputError(
            f"{folder} holds a {type(module).__name__}, which takes {main}: an example of that "
            "cannot be made up. Load the module, and give it to qgraph.capture with an example"
        )
    ids = torch.arange(14).reshape(2, 7) % module.config.get_text_config().vocab_size
    feeds, axes = {main: ids}, {main: _TOKENS}
    # A decoder alone is causal: what stands behind a token never changes its output.
    if "attention_mask" in takes and ("decoder_input_ids" in takes or not module.can_generate()):
        feeds["attention_mask"], axes["attention_mask"] = torch.ones_like(ids), _TOKENS
    if "decoder_input_ids" in takes:
        feeds["decoder_input_ids"], axes["decoder_input_ids"] = ids[:, :5].clone(), _TARGET
    return feeds, axes


def _image(config: Any) -> tuple[int, int, int] | None:
    """Channels, height and width of a vision model's input."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    sizes = [channels, *(size if isinstance(size, list | tuple) else (size, size))]
    if len(sizes) != 3 or not all(isinstance(each, int) for each in sizes):
        return None
    return sizes[0], sizes[1], sizes[2]
