"""draft"""
import argparse, sys, time
from pathlib import Path
from benchmarks.netlab.lab import Lab
from benchmarks.planner.cells import grid
HERE = Path(__file__).parent

def main():
    p = argparse.ArgumentParser(); p.add_argument("--only", default=""); p.add_argument("--again", action="store_true"); p.add_argument("--out", default=str(HERE/"results")); p.add_argument("--seconds", default="8")
    o = p.parse_args()
    for cell in grid():
        if o.only and o.only not in cell.name: continue
        out = Path(o.out) / f"{cell.name}.json"
        out.parent.mkdir(exist_ok=True, parents=True)
        if out.exists() and not o.again: continue
        t = time.time()
        with Lab(cell.workers, cell.mbit_per_second) as lab:
            lab.run([sys.executable, "-W", "ignore", "-m", "benchmarks.planner.job", "--workload", cell.workload, "--seconds", o.seconds, "--out", str(out)], timeout_seconds=300, watch=lambda t: print(t, end=""))
        print(cell.name, f"{time.time()-t:.1f} s", flush=True)
main()
