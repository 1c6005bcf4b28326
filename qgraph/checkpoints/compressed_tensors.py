"""compressed-tensors, as llm-compressor writes and vLLM loads it.

One name for several formats, told apart by a linear's tensors (`compressed_tensors_weights`):
pack-quantized and int-quantized integers, float-quantized FP8, NVFP4, MXFP4 and MXFP8. A
checkpoint may mix them; `config_groups` says which modules have which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import Checkpoint, CheckpointLayout, Entry, TensorSpec, unquantized
from qgraph.checkpoints.compressed_tensors_schemes import Scheme, scheme_of, schemes_reason
from qgraph.checkpoints.compressed_tensors_weights import read_weight
from qgraph.checkpoints.fp8 import read_fp8
from qgraph.checkpoints.integers import GroupedEntry, contradictions
from qgraph.checkpoints.tensors import Stored
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.wording import counted, plural

_WEIGHT_PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
)
_ACTIVATION_PARTS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
)
_REFUSED = ("sparse-bitmask", "sparse-24-bitmask", "marlin-24", "mxfp6-pack-quantized")
MIXED = "mixed-precision"


class CompressedTensors(CheckpointLayout):
    """See `CheckpointLayout`."""

    name = "compressed-tensors"
    default_format = "int4:group=128"

    def detect(self, stored: Stored) -> bool:
        """See `CheckpointLayout.detect`."""
        said = stored.quantization
        own = self.name if "config_groups" in said else ""
        return bool(said.get("quant_method", own) == self.name)

    def read(self, stored: Stored) -> Checkpoint:
        """See `CheckpointLayout.read`."""
        said = stored.quantization
        groups = _groups(said)
        _check_formats(stored, said, groups)
        _check_transforms(stored, said)
        weighed = groups[0].get("weights") if len(groups) == 1 else None
        arguments = weighed if isinstance(weighed, Mapping) else {}
        entries: dict[str, Entry] = {}
        used: set[str] = set()
        for module, parts in stored.modules((*_WEIGHT_PARTS, *_ACTIVATION_PARTS)).items():
            weights = {name: tensor for name, tensor in parts.items() if name in _WEIGHT_PARTS}
            entry = read_weight(stored, module, weights, arguments) if weights else None
            if entry is not None:
                entries[entry.name] = entry
                used |= {tensor.name for tensor in parts.values()}
        left = {name: tensor for name, tensor in stored.tensors.items() if name not in used}
        rest = read_fp8(
            dataclasses.replace(stored, tensors=left), self.name, arguments.get("block_structure")
        )
        entries |= rest.entries
        ordered = {name: entries[name] for name in _in_file_order(stored, entries)}
        warnings = _contradictions(arguments, ordered)
        loose = [name for name in rest.floats if name.endswith(".weight_scale")]
        if loose:
            lie, read = plural(len(loose), "lies", "lie"), plural(len(loose), "is read", "are read")
            saved = plural(
                len(loose), "it was saved before it was", "they were saved before they were"
            )
            warnings.append(
                f"{counted(len(loose), 'weight has', 'weights have')} scales and {lie} in float, "
                f"such as {loose[0]}: {saved} compressed, and {read} as floats, not rounded"
            )
        if any(group.get("input_activations") for group in groups):
            warnings.append(
                "its activations are to be quantized too, which is up to the runtime: the "
                "weights alone are read"
            )
        return Checkpoint(
            stored.path, self.name, ordered, rest.floats, stored.config, tuple(warnings)
        )

    def scale_dtype(self, source: np.dtype[Any]) -> ir.DataType:
        """See `CheckpointLayout.scale_dtype`: the weight's own, in which loaders hold them."""
        return {
            np.dtype(np.float16): ir.DataType.FLOAT16,
            np.dtype(ml_dtypes.bfloat16): ir.DataType.BFLOAT16,
        }.get(source, ir.DataType.FLOAT)

    def can_write(self, entry: Entry) -> str | None:
        """See `CheckpointLayout.can_write`."""
        return schemes_reason(entry)

    def specs(self, entry: Entry) -> dict[str, TensorSpec]:
        """See `CheckpointLayout.specs`."""
        return scheme_of(entry).specs(entry)

    def write(self, entry: Entry) -> dict[str, Array]:
        """See `CheckpointLayout.write`."""
        return scheme_of(entry).write(entry)

    def config(self, entries: Sequence[Entry], floats: Sequence[str]) -> dict[str, Any]:
        """See `CheckpointLayout.config`; several formats become several groups, by names."""
        kinds: dict[str, tuple[Scheme, list[Entry]]] = {}
        for entry in entries:
            found = kinds.setdefault(entry.format.spell(), (scheme_of(entry), []))
            found[1].append(entry)
        groups = {}
        for number, (scheme, members) in enumerate(kinds.values()):
            names = [entry.name.removesuffix(".weight") for entry in members]
            groups[f"group_{number}"] = {
                "targets": ["Linear"] if len(kinds) == 1 else names,
                "format": scheme.name,
                "input_activations": scheme.activations(members[0]),
                "output_activations": None,
                "weights": scheme.arguments(members[0]),
            }
        formats = {str(group["format"]) for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else MIXED,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": unquantized(floats),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def _groups(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The groups of modules that the configuration describes; presets, by name, are left out."""
    found = said.get("config_groups")
    values = found.values() if isinstance(found, Mapping) else ()
    return [group for group in values if isinstance(group, Mapping)]


def _check_formats(
    stored: Stored, said: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse what packs otherwise: sparse weights, and formats that have no place here."""
    sparse = said.get("sparsity_config")
    names = [said.get("format"), *(group.get("format") for group in groups)]
    if isinstance(sparse, Mapping) and sparse:
        names.append(sparse.get("format"))
    for name in names:
        if name in _REFUSED:
            raise InputError(
                f"{stored.path} is compressed as {name!r}, which cannot be read: load it where it "
                "was made and save it as pack-quantized"
            )


def _check_transforms(stored: Stored, said: Mapping[str, Any]) -> None:
    """Refuse rotations of activations, without which the weights are not those of the model.

    Those of weights ("weight_input", "weight_output") are part of what is stored.
    """
    transforms = said.get("transform_config")
    for group in _groups(transforms if isinstance(transforms, Mapping) else {}):
        applied = group.get("apply")
        for place in applied if isinstance(applied, list) else ():
            where = place.get("location") if isinstance(place, Mapping) else None
            if not str(where).startswith("weight_"):
                raise InputError(
                    f"{stored.path} has a transform_config with {group.get('type')!r} at "
                    f"{where!r}: activations are to be rotated as the model runs, which no graph "
                    "here does; wanted a checkpoint without, or with rotations of weights alone"
                )


def _in_file_order(stored: Stored, entries: Mapping[str, Entry]) -> list[str]:
    """The names of entries in the order in which their first tensor lies in the file."""
    places = {name: at for at, name in enumerate(stored.tensors)}
    firsts = {
        entry.name: min(places[tensor.name] for tensor in entry.stored.values())
        for entry in entries.values()
    }
    return sorted(firsts, key=lambda name: firsts[name])


def _contradictions(said: Mapping[str, Any], entries: Mapping[str, Entry]) -> list[str]:
    """Where the configuration of all weights contradicts the tensors, which are right."""
    integers = [entry for entry in entries.values() if isinstance(entry, GroupedEntry)]
    packed = [entry for entry in integers if "weight_packed" in entry.stored]
    size = said.get("group_size") or None
    return [
        *contradictions(said.get("num_bits"), None, packed),
        *contradictions(None, size, [] if size == -1 else integers),
    ]


COMPRESSED_TENSORS = CompressedTensors()
