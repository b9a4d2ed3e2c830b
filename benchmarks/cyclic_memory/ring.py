"""Sum of PSS over N processes on one host, a ring against DDP: python -m benchmarks.cyclic_memory.ring

Both run with micro-batches of 1 and of several samples; the difference is what grows with samples. PSS is read from
outside. Writes figures.md of what is kept under results/.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cyclic_memory.report import MIB, page
from benchmarks.cyclic_memory.run import COLORS, MALLOC, anonymous_bytes
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machine

HERE = Path(__file__).parent
WORKERS, SAMPLE_SECONDS = 4, 0.005
NAMES = {"ddp": "concurrent", "ring": "cyclic"}  # what each mode is in the colours of the other pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--pace-milliseconds", type=float, default=20, help="of a link's forward; 0: unpaced")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "workers": WORKERS, "samples": options.samples}
    found["pace_milliseconds"] = options.pace_milliseconds
    for mode in NAMES:
        found[mode] = {
            str(samples): _watch(mode, samples, options.pace_milliseconds / 1e3) for samples in (1, options.samples)
        }
    (HERE / "results" / "ring.json").write_text(json.dumps(found) + "\n")
    _draw(found).savefig(HERE / "results" / "ring.png")
    print(written(HERE, page(HERE / "results")))


def _watch(mode: str, samples: int, pace_seconds: float) -> list[tuple[float, int]]:
    """(seconds since the last process began its steps, sum of PSS) until the first process ended them."""
    out = HERE / "results" / "spans.json"
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    words = ["--mode", mode, "--samples", str(samples), "--pace-seconds", str(pace_seconds), "--out", str(out)]
    job = ["-m", "benchmarks.cyclic_memory.ring_job", *words]
    curve: list[tuple[float, int]] = []
    with subprocess.Popen([*launch, *job], env=os.environ | MALLOC) as started:
        while started.poll() is None:
            children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            curve.append((time.monotonic(), sum(anonymous_bytes(int(child)) for child in children)))
            time.sleep(SAMPLE_SECONDS)
    if started.returncode:
        raise RuntimeError(f"cyclic_memory: {mode} ended with {started.returncode}; its words are above")
    spans = json.loads(out.read_text())["spans"]
    out.unlink()
    began, ended = max(first for first, _ in spans), min(last for _, last in spans)
    return [(at - began, pss) for at, pss in curve if began <= at <= ended]


def _draw(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(7, 3.2), dpi=80, layout="constrained")
    panel = figure.subplots()
    for mode, color in NAMES.items():
        curve = found[mode][str(found["samples"])]
        panel.plot(
            [at for at, _ in curve], [pss / MIB for _, pss in curve], color=COLORS[color], label=mode, linewidth=1
        )
    panel.set(xlabel="seconds", ylabel="MiB of PSS, 4 processes", ylim=(0, None), title="ViT-B/16-shaped, N = 4")
    panel.grid(alpha=0.3)
    panel.legend()
    return figure


if __name__ == "__main__":
    main()
