"""A module of transformers with the weights of a folder; nothing but those is loaded."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qgraph.errors import InputError, one_line
from qgraph.frontends import hf_config, hf_weights
from qgraph.wording import counted


def load(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], half: bool
) -> tuple[Any, dict[str, Any]]:
    """The module, and transformers' account of the keys.

    Args:
        folder: for messages.
        config: what its config.json says.
        tensors: its weights, by name.
        half: whether the module is float16, in place of float32.

    Raises:
        InputError: transformers does not know the model, or cannot load it.
    """
    import torch
    import transformers

    kind = _class(transformers, folder, config)
    try:
        with _offline():
            module, info = kind.from_pretrained(
                None,
                config=_config(kind, config),
                state_dict=dict(tensors),
                dtype=torch.float16 if half else torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                # A mismatch is then in the account; else only in a report that is printed.
                ignore_mismatched_sizes=True,
            )
    except (InputError, MemoryError):
        raise
    except Exception as error:
        # What follows points at a report that is not shown.
        reason = " ".join(str(error).split(" For details look at")[0].split())[:300]
        raise InputError(
            f"transformers {transformers.__version__} cannot load {folder}: "
            f"{type(error).__name__}: {reason or 'no message'}"
        ) from None
    return module, info


def parameter_shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of the module that a configuration describes.

    Raises:
        InputError: transformers does not know the model, or cannot build it.
    """
    import torch
    import transformers

    kind = _class(transformers, folder, config)
    try:
        with torch.device("meta"):
            module = kind(_config(kind, config))
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"transformers {transformers.__version__} cannot build the model of {folder}: "
            f"{type(error).__name__}: {one_line(error)}"
        ) from None
    return {name: tuple(each.shape) for name, each in module.named_parameters()}


def spread_experts(module: Any) -> bool:
    """Have a mixture of experts compute in ops that ONNX has; whether it is one.

    transformers' default is a product of groups of tokens, grouped_mm, of which ONNX has none,
    and its loop over the experts that are hit depends on the data. Batched products of gathered
    weights are the same function.
    """
    routed = any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())
    if not routed or not getattr(module, "_can_set_experts_implementation", lambda: False)():
        return False
    module.set_experts_implementation("batched_mm")
    return True


def check_keys(
    folder: Path, module: Any, tensors: Mapping[str, Any], info: Mapping[str, Any]
) -> None:
    """Refuse weights that are missing, of another shape or type, or more than the module has.

    Raises:
        InputError: names the first such weight.
    """
    name, prefix = type(module).__name__, f"{module.base_model_prefix}."
    for key, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise InputError(
            f"{folder} holds {key} with shape {list(found)}, where the {name} of its config.json "
            f"has {list(wanted)}: the two do not belong together"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise InputError(
            f"{folder} lacks {counted(len(missing), 'weight')} of its {name}, such as "
            f"{missing[0]}: download all of its safetensors"
        )
    own = {key for key, item in module.named_parameters() if item.is_floating_point()}
    own |= {key.removeprefix(prefix) for key in own}
    hf_weights.check_types(folder, tensors, own)
    for key in sorted(info["unexpected_keys"]):
        parts = key.split(".")
        owners = [".".join(parts[:end]) for end in range(1, len(parts))]
        if any(f"{owner}.weight" in own for owner in owners):
            raise InputError(
                f"{folder} holds {key}, which the {name} of its config.json does not compute "
                "with: without it the results would differ. Merge an adapter into the model, or "
                "correct config.json"
            )


def _config(kind: Any, config: Mapping[str, Any]) -> Any:
    """The configuration as the class reads it, which takes nested ones apart."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(hf_config.cleaned(config)))
        return kind.config_class.from_pretrained(place, local_files_only=True)


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
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if is_model and getattr(kind, "config_class", None) is not None:
            return kind
    causal = any(name.endswith("ForCausalLM") for name in names)
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING if causal else transformers.MODEL_MAPPING
    wanted = transformers.CONFIG_MAPPING[config["model_type"]]
    found = classes.get(wanted, None)
    if found is None:
        raise InputError(
            f"{folder} holds a {config['model_type']!r} and names no class of transformers "
            f"{transformers.__version__} in `architectures`, which its config.json must have"
        )
    return found[0] if isinstance(found, tuple) else found


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """No request to the hub, whatever a model's code asks for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
