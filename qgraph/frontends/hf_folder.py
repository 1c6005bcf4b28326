"""A local Hugging Face folder: config.json and safetensors, through transformers.

Nothing is downloaded, no code of the folder runs, no pickle is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qgraph import torch_onnx
from qgraph.errors import InputError
from qgraph.frontends import torch_export
from qgraph.frontends.torch_export import Loaded

_LARGEST_CONFIG = 20_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENS = {0: "batch", 1: "sequence"}
_TARGET = {0: "batch", 1: "target_sequence"}


def load(folder: Path) -> Loaded:
    """The model of a folder as an ONNX graph, batch and sequence open.

    Language models map `input_ids` to `logits`; encoders take `attention_mask` too; models of
    an encoder and a decoder also `decoder_input_ids`; vision models `pixel_values`. bfloat16
    weights are read as float32, which holds them exactly: no CPU has kernels for all ops in
    bfloat16. Without a cache: each run computes all positions.

    Raises:
        InputError: no config.json or safetensors, a model that transformers does not know,
            missing or quantized weights, or one that cannot be exported.
        MissingExtra: torch or transformers is not installed.
    """
    config = _config(folder)
    _check_weights(folder, config)
    torch_onnx.need({"torch": "torch", "transformers": "hf"}, "reading a Hugging Face folder")
    with torch_onnx.quiet():
        module = _module(folder, config)
    feeds, axes = _example(module, folder)
    return torch_export.load(module, (), feeds, axes, title=folder.name or None)


def files(folder: Path) -> tuple[Path, ...]:
    """What is read of a folder, besides small files."""
    return (folder / "config.json", *sorted(folder.glob("*.safetensors")))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise InputError(f"{path} has {path.stat().st_size} bytes; no configuration is so long")
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error}): download it again") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise InputError(
            f"{path} names no model_type: wanted the config.json of a transformers model"
        )
    return found


def _check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse folders without safetensors, adapters, and weights that are quantized already."""
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise InputError(
                f"{folder} holds its weights as pickles ({pickles[0]}), which can run any code: "
                "wanted model.safetensors. Many models have it beside the pickle; else load the "
                "model where you trust it, and save_pretrained writes it"
            )
        raise InputError(f"{folder} has no model.safetensors: download the weights too")
    if (folder / "adapter_config.json").exists():
        raise InputError(f"{folder} holds an adapter: merge it into its model and save that")
    packed = config.get("quantization_config")
    if packed:
        method = packed.get("quant_method", "?") if isinstance(packed, dict) else "?"
        raise InputError(
            f"{folder} holds quantized weights (quant_method {method!r}): capture wants the "
            "float model that they were made from"
        )


def _module(folder: Path, config: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    # transformers 5 calls it dtype; folders written earlier, torch_dtype.
    stored = config.get("dtype") or config.get("torch_dtype")
    half = stored in ("float16", "torch.float16")
    try:
        module, info = _class(transformers, folder, config).from_pretrained(
            str(folder),
            dtype=torch.float16 if half else torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (InputError, MemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InputError(
            f"transformers {transformers.__version__} cannot load {folder}: "
            f"{type(error).__name__}: {(lines or ['no message'])[0][:300]}"
        ) from None
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{folder} lacks {len(missing)} weights of its {type(module).__name__}, such as "
            f"{missing[0]}: download all of its safetensors"
        )
    for part in module.modules():  # encoder and decoder may have configurations of their own
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return module.eval()


def _class(transformers: Any, folder: Path, config: Mapping[str, Any]) -> Any:
    """The class that the folder names, if it is one of transformers' own."""
    named = config.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        code = " and brings its own code, which is not run" if config.get("auto_map") else ""
        raise InputError(
            f"{folder} holds a {config['model_type']!r}, which transformers "
            f"{transformers.__version__} does not know{code}: load the module yourself, and "
            "give it to qgraph.capture"
        )
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind
    causal = any(name.endswith("ForCausalLM") for name in names)
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


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
