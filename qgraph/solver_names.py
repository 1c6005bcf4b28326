"""How solvers compose: `awq+clip+gptq` scales channels, then chooses ranges, then codes."""

from __future__ import annotations

import itertools
from typing import Literal, get_args

from qgraph import registry
from qgraph.errors import InputError

Role = Literal["choice", "scaling", "ranges", "codes"]
ROLES: tuple[Role, ...] = get_args(Role)


def parts_of(spec: str) -> tuple[str, ...]:
    """The names in a composed solver.

    Raises:
        InputError: an unknown name, two of one kind, or names that are out of order.
    """
    names = tuple(name.strip() for name in spec.split("+"))
    roles = [ROLES.index(registry.load("solver", name).role) for name in names]
    if len(names) > 1 and 0 in roles:
        choice = names[roles.index(0)]
        raise InputError(f"solver {spec!r}: {choice} chooses the others by itself; give it alone")
    for at, (one, other) in enumerate(itertools.pairwise(roles)):
        if one == other:
            raise InputError(
                f"solver {spec!r}: {names[at]} and {names[at + 1]} both choose the "
                f"{ROLES[one]}; give one of them"
            )
        if one > other:
            right = "+".join(name for _, name in sorted(zip(roles, names, strict=True)))
            raise InputError(
                f"solver {spec!r}: wanted scaling, ranges and codes in this order: {right}"
            )
    return names


def needs_data(spec: str) -> bool:
    """Whether a composed solver cannot work without calibration data."""
    return any(registry.load("solver", name).needs_data for name in parts_of(spec))


def without_data(spec: str) -> str:
    """What a composed solver says where it has no calibration data; "" where it needs none."""
    if not needs_data(spec):
        return ""
    return (
        f"the solver {spec} needs calibration data: --calibrate FILE (text with --tokenizer, .npz "
        "or .jsonl), --calibrate self for a language model's own text, or --solver hqq or rtn, "
        "which need none"
    )


def needs_activations(spec: str) -> bool:
    """Whether a part of a composed solver has nothing to do where activations stay floats."""
    return any(registry.load("solver", name).needs_activations for name in parts_of(spec))


def known() -> str:
    """What users may write, for help and error messages."""
    return ", ".join(registry.names("solver"))
