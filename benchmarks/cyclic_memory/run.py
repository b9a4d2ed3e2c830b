"""Activation memory of one process under every schedule: python -m benchmarks.cyclic_memory.run

Starts a process per model with glibc's malloc told to give freed blocks back, reads its PSS from outside meanwhile,
keeps records (JSON) and curves (PNG) under results/ and writes figures.md of what is kept there. Ends with 1 if the ViT
misses what was wanted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cyclic_memory.models import shapes
from benchmarks.cyclic_memory.report import JUDGED, MIB, bars, page
from benchmarks.measuring.bars import missed
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machine

HERE = Path(__file__).parent
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
SAMPLE_SECONDS = 0.02
COLORS = {"concurrent": "#c2570c", "cyclic": "#2563a8", "accumulation": "#777777"}

Curve = list[tuple[float, int]]  # seconds of the monotonic clock, bytes of PSS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(shapes()))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--report", action="store_true", help="only write figures.md, of the records that are there")
    options = parser.parse_args()
    results = HERE / "results"
    for model in () if options.report else options.models:
        name = re.sub(r"\W+", "_", model).lower()
        out = results / f"{name}.json"
        curve = _watch(model, options, out)
        record = {"machine": machine(), **json.loads(out.read_text())}
        out.write_text(json.dumps(record, indent=1) + "\n")
        _draw(record, curve).savefig(out.with_suffix(".png"))
    print(written(HERE, page(results)))
    records = [json.loads(path.read_text()) for path in results.glob("*.json")]
    return int(JUDGED in options.models and bool(missed(bars(records))))


def _watch(model: str, options: argparse.Namespace, out: Path) -> Curve:
    words = ["--model", model, "--samples", str(options.samples), "--out", str(out), "--workers"]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cyclic_memory.job", *words]
    curve: Curve = []
    with subprocess.Popen([*command, *map(str, options.workers)], env=os.environ | MALLOC) as job:
        while job.poll() is None:
            curve.append((time.monotonic(), anonymous_bytes(job.pid)))
            time.sleep(SAMPLE_SECONDS)
    if job.returncode:
        raise RuntimeError(f"cyclic_memory: the job for {model} ended with {job.returncode}; its words are above")
    return curve


def anonymous_bytes(pid: int) -> int:
    """Resident anonymous pages, which these processes share with nobody, so they are its PSS too, told without walking
    all mappings (which takes longer than a layer); 0 for a process that has just gone."""
    try:
        found = re.search(r"^RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(found[1]) * 1024 if found else 0


def _draw(record: dict[str, Any], curve: Curve) -> Figure:
    """Two steps of each, over time as a share of the two; above what the process had before the model was made."""
    numbers = sorted({row["workers"] for row in record["rows"]})
    figure = Figure(figsize=(9, 3.4), dpi=80, layout="constrained")
    panels = figure.subplots(1, len(numbers), squeeze=False)[0]
    for panel, workers in zip(panels, numbers):
        for row in (r for r in record["rows"] if r["workers"] == workers and r["name"] in COLORS):
            run = row["runs"][1]
            points = [(at, pss) for at, pss in curve if run["began"] <= at <= run["ended"]]
            steps = [2 * (at - run["began"]) / (run["ended"] - run["began"]) for at, _ in points]
            above = [(pss - run["before_bytes"]) / MIB for _, pss in points]
            panel.plot(steps, above, color=COLORS[row["name"]], linewidth=1, label=row["name"])
        panel.set_title(f"{record['model']}-shaped, N = {workers}", fontsize=10)
        panel.set_xlabel("steps")
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("MiB of PSS above the bare process")
    panels[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    raise SystemExit(main())
