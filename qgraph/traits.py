"""What a target is, whatever is installed and whichever kernels it has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from qgraph import registry


@dataclasses.dataclass(frozen=True)
class Traits:
    """What plan and passes do for one kind of target and not for another.

    A runtime declares them once, in its own file; kernels, which depend on what is installed, are
    its `Capabilities`.

    spells_qdq: weights are written as DequantizeLinear in front of standard operators, which any
        ONNX runtime can run; which kernel it takes, and at which accuracy level, is its own choice.
        Else linears become fused ops, and what no kernel takes the portable form.
    fuses_ops: the runtime has fused ops for norms, activations and attention, and the latter keeps
        a cache.
    widens_products: products of float16 beside ops in float32 alone give wrong results, see the
        pass `widen_products`.
    asymmetric_is_slow: the fast kernels take no zero points, so `auto` is a symmetric format.
    release_bound: the target is ONNX Runtime, or may be; its oldest release that runs a graph can
        be told, and one can be asked for.
    cache_kinds: the names of the formats in which its attention reads a cache, see `CacheFormat`;
        ONNX Runtime 1.32's.
    experts_in_float: why routed experts stay in float; empty where they are dequantized one by one
        in a Loop over those that a run hits.
    """

    spells_qdq: bool = False
    fuses_ops: bool = False
    widens_products: bool = False
    asymmetric_is_slow: bool = False
    release_bound: bool = False
    cache_kinds: tuple[str, ...] = ()
    experts_in_float: str = ""


def traits_of(target: str) -> Traits:
    """The traits of a target that is known by its name; its runtime need not be installed.

    Raises:
        InputError: the registry has no such target.
    """
    found: Traits = registry.load("target", target).traits
    return found


def targets_with(trait: Callable[[Traits], object]) -> str:
    """The names of the targets for which `trait` is true, as messages list them."""
    return ", ".join(name for name in registry.names("target") if trait(traits_of(name)))
