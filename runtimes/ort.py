"""ONNX Runtime: the targets `ort-cpu` and `ort-cuda`, and `qdq`, which any runtime can run.

`qdq` spells quantized weights as DequantizeLinear; the CPU runs it here for checks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from qgraph.capabilities import Capabilities
from qgraph.ort_versions import installed
from qgraph.runtimes.base import Feeds, KernelRun, Model, Runtime, Session, ValueSpec
from qgraph.runtimes.ort_kernels import (
    CPU_PROVIDER,
    CUDA_PROVIDER,
    MEASURED_ON,
    available_providers,
    installed_version,
    known_ops,
    rules,
)
from qgraph.runtimes.ort_levels import level_difference, level_is_real
from qgraph.runtimes.ort_session import model_inputs, open_session
from qgraph.traits import Traits

if TYPE_CHECKING:
    from qgraph.runtimes.decoding import Decoder, DecoderIO

__all__ = [
    "CPU",
    "CUDA",
    "QDQ",
    "OrtRuntime",
    "level_difference",
    "level_is_real",
]


@dataclasses.dataclass(frozen=True)
class OrtRuntime(Runtime):
    """ONNX Runtime on one execution provider."""

    target: str = "ort-cpu"
    provider: str = CPU_PROVIDER

    def capabilities(self) -> Capabilities:
        """See `Runtime.capabilities`."""
        return Capabilities(
            self.target, self.provider, self._title(), rules(self.target), folds=True,
            known_ops=known_ops(self.provider), oldest=installed(installed_version()),
            # What runs a Q/DQ graph nobody knows.
            simulates_fp8=self.provider == CPU_PROVIDER and not self.traits.spells_qdq,
            traits=self.traits,
        )  # fmt: skip

    def open(
        self,
        model: Model,
        *,
        reference: bool = False,
        accuracy_level: int = 4,
        threads: int = 0,
        spinning: bool = True,
    ) -> Session:
        """See `Runtime.open`."""
        return open_session(
            model,
            providers=self._providers(),
            reference=reference,
            accuracy_level=accuracy_level,
            threads=threads,
            spinning=spinning,
        )

    def decoder(self, session: Session, io: DecoderIO, *, shared: bool = False) -> Decoder:
        """See `Runtime.decoder`; on the CPU the cache is never copied."""
        from qgraph.runtimes.ort_decoding import OrtDecoder
        from qgraph.runtimes.ort_session import OrtSession

        if not io.cache or self.provider != CPU_PROVIDER or not isinstance(session, OrtSession):
            return super().decoder(session, io, shared=shared)
        return OrtDecoder(session, io, shared)

    def profile(self, model: Model, feeds: Feeds, *, runs: int = 10) -> list[KernelRun]:
        """See `Runtime.profile`."""
        from qgraph.runtimes.ort_profile import profile_model

        return profile_model(model, feeds, runs=runs, providers=self._providers())

    def load(self, model: Model) -> None:
        """See `Runtime.load`; without optimizing and prepacking, which cost time and memory.

        A Q/DQ graph is optimized: fusing it is where a runtime goes wrong.
        """
        plain = not self.traits.spells_qdq
        open_session(model, providers=self._providers(), reference=plain, prepack=not plain)

    def installed(self) -> bool:
        """See `Runtime.installed`."""
        return installed_version() is not None

    def available(self) -> bool:
        """See `Runtime.available`."""
        return self.installed() and self.provider in available_providers()

    def level_difference(
        self, bits: int, block: int, dtype: str = "float32", symmetric: bool = True
    ) -> float:
        """See `Runtime.level_difference`; only the CPU has levels."""
        if self.provider != CPU_PROVIDER:
            return 0.0
        return level_difference(bits, block, dtype, symmetric)

    def inputs(self, model: Model) -> tuple[ValueSpec, ...]:
        """See `Runtime.inputs`."""
        return model_inputs(model)

    def _providers(self) -> tuple[str, ...]:
        """The target's provider, then the CPU for what it has no kernel for."""
        return tuple(dict.fromkeys((self.provider, CPU_PROVIDER)))

    def _title(self) -> str:
        version = installed_version()
        if version is None:
            return f"ONNX Runtime {MEASURED_ON} (not installed)"
        if self.provider not in available_providers():
            return f"ONNX Runtime {version} (without {self.provider})"
        return f"ONNX Runtime {version}"


CPU = OrtRuntime(
    "ort-cpu",
    CPU_PROVIDER,
    Traits(fuses_ops=True, widens_products=True, release_bound=True, cache_kinds=("int8", "int4")),
)
CUDA = OrtRuntime(
    "ort-cuda",
    CUDA_PROVIDER,
    Traits(
        fuses_ops=True,
        asymmetric_is_slow=True,
        release_bound=True,
        cache_kinds=("int8", "int4", "fp8"),
    ),
)
QDQ = OrtRuntime(
    "qdq",
    CPU_PROVIDER,
    Traits(
        spells_qdq=True,
        release_bound=True,
        experts_in_float=(
            "DequantizeLinear in front of routed experts would dequantize all of them at each run"
        ),
    ),
)
