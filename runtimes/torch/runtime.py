"""The runtime of the targets `torch`, `torch-cpu` and `torch-cuda`: the executor on one device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

from qgraph.capabilities import Capabilities
from qgraph.errors import InputError, MissingExtra
from qgraph.runtimes.base import Feeds, KernelRun, Model, Runtime, ValueSpec
from qgraph.runtimes.ort_session import model_inputs
from qgraph.runtimes.torch.session import NodeKey, TorchSession, open_session

MEASURED_ON = "2.13"
"""The torch that the kernels were measured on."""


@dataclasses.dataclass(frozen=True)
class TorchRuntime(Runtime):
    """torch, with the custom ops of `qgraph.runtimes.torch.ops`, on the CPU or on CUDA.

    device: "cpu", "cuda", or "" for CUDA where this machine has it, else the CPU.
    """

    device: str = ""

    def capabilities(self) -> Capabilities:
        """See `Runtime.capabilities`."""
        from qgraph.runtimes.torch.kernels import rules

        device = self._device()
        found = rules(device, self.available())
        return Capabilities(
            self.target, _provider(device), self._title(), found,
            simulates_fp8=device == "cpu", traits=self.traits,
        )  # fmt: skip

    def open(
        self,
        model: Model,
        *,
        reference: bool = False,
        accuracy_level: int = 4,
        threads: int = 0,
        spinning: bool = True,
    ) -> TorchSession:
        """See `Runtime.open`.

        The executor runs nodes as written and computes with float activations: `reference` and
        `accuracy_level` ask for nothing else. torch has one pool of threads for the process,
        which does not spin; `threads` above zero sets its size.
        """
        self._need()
        if threads:
            import torch

            torch.set_num_threads(threads)
        return open_session(model, self._device())

    def profile(self, model: Model, feeds: Feeds, *, runs: int = 10) -> list[KernelRun]:
        """See `Runtime.profile`: each node alone, in eager mode."""
        session = self.open(model)
        device = self._device()
        times: defaultdict[NodeKey, list[float]] = defaultdict(list)
        for at in range(runs + 1):
            seconds: defaultdict[NodeKey, float] = defaultdict(float)
            for key, spent in session.timed(feeds, _clock(device)):
                seconds[key] += spent
            if at:
                for key, spent in seconds.items():
                    times[key].append(spent)
        return [
            KernelRun(node, op, domain, _provider(device), 1, 1e6 * statistics.median(each))
            for (node, op, domain), each in times.items()
        ]

    def level_difference(
        self, bits: int, block: int, dtype: str = "float32", symmetric: bool = True
    ) -> float:
        """See `Runtime.level_difference`: activations stay floats, there are no levels."""
        return 0.0

    def installed(self) -> bool:
        """See `Runtime.installed`."""
        return importlib.util.find_spec("torch") is not None

    def available(self) -> bool:
        """See `Runtime.available`."""
        return self.installed() and (self._device() == "cpu" or _has_cuda())

    def inputs(self, model: Model) -> tuple[ValueSpec, ...]:
        """See `Runtime.inputs`."""
        return model_inputs(model)

    def _device(self) -> str:
        if self.device:
            return self.device
        return "cuda" if self.installed() and _has_cuda() else "cpu"

    def _need(self) -> None:
        if not self.installed():
            raise MissingExtra("torch", "torch", f"the target {self.target}")
        if not self.available():
            raise InputError(
                f"the target {self.target} needs CUDA, which torch {_version()} does not find on "
                "this machine: use --target torch-cpu, or install a CUDA build of torch"
            )

    def _title(self) -> str:
        if not self.installed():
            return f"torch {MEASURED_ON} (not installed)"
        return f"torch {_version()}{'' if self.available() else ' (without CUDA)'}"


def _provider(device: str) -> str:
    return f"torch {device}"


@functools.cache
def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _version() -> str:
    import torch

    return str(torch.__version__).partition("+")[0]


def _clock(device: str) -> Callable[[], float]:
    """Seconds, once the device has done what it was asked."""
    if device == "cpu":
        return time.perf_counter
    import torch

    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized


CPU = TorchRuntime("torch-cpu", "torch cpu", device="cpu")
CUDA = TorchRuntime("torch-cuda", "torch cuda", device="cuda")
HERE = TorchRuntime("torch", "torch")
