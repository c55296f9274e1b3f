"""How fast this machine is, measured in a fraction of a second, and how long a merge would take."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch

from mergekit_rotation.insight.workspace import Cost
from mergekit_rotation.symmetry import linear_assignment, svd
from mergekit_rotation.symmetry.assignment import MANY

_FILE = 1 << 24


@dataclass(frozen=True)
class Pace:
    """Rates of this machine.

    Attributes
    ----------
    products : float
        Multiplications and additions of matrix products per second, float32.
    passes : float
        Bytes per second that elementwise steps read.
    factors : float
        Seconds of a singular value decomposition of size n, over n^3.
    assigned : float
        Seconds of an assignment of n neurons without likeness, over n^2.
    written : float
        Bytes per second to a temporary file.
    startup : float
        Seconds from the start of this process until the merge was planned.
    """

    products: float
    passes: float
    factors: float
    assigned: float
    written: float
    startup: float

    @classmethod
    def measured(cls) -> "Pace":
        """Measure all rates."""
        startup = time.time() - psutil.Process().create_time()
        generator = torch.Generator().manual_seed(0)
        a = torch.randn(512, 512, generator=generator)
        b = torch.randn(1 << 20, generator=generator)
        heads = torch.randn(8, 64, 64, generator=generator, dtype=torch.float64)
        scores = torch.randn(MANY, MANY, generator=generator)
        return cls(
            products=2 * 512**3 / _seconds(lambda: a @ a),
            passes=b.nbytes / _seconds(lambda: (b - 1).square().sum()),
            factors=_seconds(lambda: svd(heads)) / (8 * 64**3),
            assigned=_seconds(lambda: linear_assignment(scores)) / MANY**2,
            written=_FILE / _seconds(_write),
            startup=startup,
        )

    def seconds(
        self, costs: Sequence[Cost], read: float, written: float, merged: float
    ) -> tuple[float, float]:
        """Return how long a merge takes: if everything fits, and with full assignments.

        Parameters
        ----------
        costs : sequence of Cost
        read, written : float
            Bytes of weights; those read count as a pass, as if they lay in memory.
        merged : float
            Bytes that merge methods make.
        """
        least = self.startup + written / self.written
        least += (read + merged + sum(cost.passes for cost in costs)) / self.passes
        least += sum(cost.products for cost in costs) / self.products
        least += sum(cost.factors for cost in costs) * self.factors
        full = sum(cost.assigned for cost in costs) * self.assigned
        full += sum(cost.unlike for cost in costs) / self.products
        return least, least + full


def _seconds(call: Callable[[], object]) -> float:
    """Return the shortest of a few times that a call takes, after one that warms up."""
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return max(min(times[1:]), 1e-9)


def _write() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(_FILE))
        file.flush()
        os.fsync(file.fileno())
