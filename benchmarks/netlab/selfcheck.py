"""Does the lab tell the truth? Speed and bytes of an all-reduce against what was asked for and the formula.

Run from the root of the repository: `python -m benchmarks.netlab.selfcheck`. Prints a table.

Source of the bytes: Thakur, Rabenseifner, Gropp, 2005: a ring all-reduce of w bytes over N ranks sends
2 w (N - 1) / N bytes per rank.
"""

import json
import os
import statistics
import sys

from benchmarks.netlab.lab import ROOT, Lab

HOSTS = 4
TENSOR_BYTES = 10_000_000
REPETITIONS = 7
SPEEDS = (1000.0, 200.0, 100.0)  # Mbit/s
HEADER = """\
| link, Mbit/s | ms, median (range) | achieved, Mbit/s | of nominal | MB sent by a host (formula) | off by |
| --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    formula_bytes = 2 * TENSOR_BYTES * (HOSTS - 1) / HOSTS
    command = [sys.executable, "-m", "benchmarks.netlab.all_reduce", str(TENSOR_BYTES), str(REPETITIONS)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    print(HEADER)
    with Lab(HOSTS, SPEEDS[0]) as lab:
        for speed in SPEEDS:
            lab.shape(speed)
            finished = lab.run(command, env={"PYTHONPATH": path}, timeout_seconds=120)
            found = json.loads(finished.outputs[0])
            print(_row(speed, found["seconds"], found["sent_bytes"], formula_bytes))


def _row(speed: float, seconds: list[float], sent_bytes: list[float], formula_bytes: float) -> str:
    typical = statistics.median(seconds)
    achieved = formula_bytes * 8 / typical / 1e6
    worst = max(sent_bytes, key=lambda sent: abs(sent - formula_bytes))
    spread = f"{min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f}"
    cells = [
        f"{speed:g}",
        f"{typical * 1e3:.0f} ({spread})",
        f"{achieved:.0f}",
        f"{achieved / speed:.0%}",
        f"{worst / 1e6:.3f} ({formula_bytes / 1e6:.3f})",
        f"{worst / formula_bytes - 1:+.2%}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
