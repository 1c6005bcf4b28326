"""How activations are rounded in front of a product, as recipes and plans spell it."""

from __future__ import annotations

INT8 = "int8"
"""Bytes with one scale and zero point, those of each call's least and largest value."""
INT8_ROW = "int8-row"
"""Signed bytes with a scale for each row."""
INT8_STATIC = "int8-static"
"""Bytes with one scale and zero point, from calibration."""
INT8_AUTO = "int8-auto"
"""`INT8_STATIC` where that costs little, else `INT8_ROW`; calibration tells."""
FP8 = "fp8"
"""E4M3 with one scale, from calibration."""
FP8_TOKEN = "fp8-token"
"""E4M3 with a scale for each row."""
FP8_KINDS = (FP8, FP8_TOKEN)
STATIC_KINDS = (INT8_STATIC, FP8)
"""Those that cannot be had without calibration data."""
TOP_CODE = 255
"""The largest unsigned byte; 0 is the least, so it also counts the steps of a range."""
