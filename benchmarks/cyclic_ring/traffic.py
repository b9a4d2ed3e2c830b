"""How evenly a link is used: what the kernel counted on it in every small bin of time."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.netlab import counted_bytes

BIN_SECONDS = 0.020


@dataclass
class Watch:
    """Reads this host's counter of sent bytes about once a bin, on a thread of its own, inside its `with` block."""

    samples: list[tuple[float, int]] = field(default_factory=list)  # (time.perf_counter(), bytes so far)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        self._sample()
        while not self._over.wait(BIN_SECONDS):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        self.samples.append((time.perf_counter(), counted_bytes().sent_bytes))

    def bins(self, begun: float, ended: float) -> list[int]:
        """Bytes sent in every whole bin between two times; between two samples the link is taken as even."""
        edges = np.arange(begun, ended, BIN_SECONDS)
        times, counts = zip(*self.samples)
        return [int(sent) for sent in np.diff(np.interp(edges, times, counts))]


def peak_over_mean(bins: Sequence[int]) -> float:
    """1 is even. The mean is over all bins, silent ones too."""
    return max(bins) / (sum(bins) / len(bins))
