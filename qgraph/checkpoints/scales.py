"""Scales as files have them: float16, bfloat16 or float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import Entry
from qgraph.checkpoints.tensors import StoredTensor, finite
from qgraph.formats.base import Array

SCALE_TYPES = (np.float16, ml_dtypes.bfloat16, np.float32)


def scale_dtype(tensor: StoredTensor) -> ir.DataType:
    """The type of an entry's scales (`Entry.scale_dtype`) that are stored in this tensor."""
    return ir.DataType.FLOAT16 if tensor.dtype == np.float16 else ir.DataType.FLOAT


def checked(tensor: StoredTensor, values: Array, row: int = 0) -> Array:
    """Finite scales of a tensor, from its row `row` on: float16, or float32, which holds bfloat16.

    Raises:
        InputError: NaN or infinity among them.
    """
    finite(tensor, values, row)
    return values if tensor.dtype == np.float16 else values.astype(np.float32)


def written_type(entry: Entry) -> np.dtype[Any]:
    """The type in which an entry's scales are written."""
    return np.dtype(entry.scale_dtype.numpy())
