"""Whether dynamic_shapes names axes that the examples have; torch answers with an IndexError."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qgraph.errors import InputError


def check(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any, name: str
) -> None:
    """Refuse axes that an example does not have; everything else is left to torch.

    Args:
        module: whose forward takes the examples.
        args: examples by position.
        kwargs: examples by name.
        shapes: as torch.export takes dynamic_shapes.
        name: what the module is called.

    Raises:
        InputError: names the input, the axis and the example's shape.
    """
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # torch says what does not fit
        return
    given = (
        shapes if isinstance(shapes, Mapping) else dict(zip(bound, _parts(shapes), strict=False))
    )
    for key, example in bound.items():
        for place, axis, shape in _wrong(example, given.get(key), key):
            raise InputError(
                f"{name} cannot be exported: dynamic_shapes opens axis {axis!r} of {place}, whose "
                f"example has the shape {shape}: its axes are {_axes(len(shape))}"
            )


def _parts(shapes: Any) -> Sequence[Any]:
    return shapes if isinstance(shapes, list | tuple) else ()


def _wrong(example: Any, shapes: Any, place: str) -> Iterator[tuple[str, Any, list[int]]]:
    """Where dynamic_shapes names an axis that is none: the input, the axis, its shape."""
    if hasattr(example, "shape") and isinstance(shapes, Mapping):
        for axis in shapes:
            rank = len(example.shape)
            if not isinstance(axis, int) or not -rank <= axis < rank:
                yield place, axis, list(example.shape)
    elif isinstance(example, Mapping) and isinstance(shapes, Mapping):
        for key in example.keys() & shapes.keys():
            yield from _wrong(example[key], shapes[key], f"{place}[{key!r}]")
    elif isinstance(example, list | tuple):
        for index, (part, shape) in enumerate(zip(example, _parts(shapes), strict=False)):
            yield from _wrong(part, shape, f"{place}[{index}]")


def _axes(rank: int) -> str:
    return f"0 to {rank - 1}" if rank > 1 else "0" if rank else "none"
