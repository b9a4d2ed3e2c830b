"""Runs every distinct line to type of `armillary advise`: one a method, on the first workload that it applies to."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OWN = "own_models.py"
SMALL = ("recommender", "vision", "language_model", "translation")
WORKLOADS = (f"{OWN} --set kind=chain", f"{OWN} --set kind=blocks", *(f"{name} --small" for name in SMALL))
ARMILLARY = [sys.executable, "-W", "ignore", "-c", "from armillary.cli.main import main; main()"]
TORCHRUN = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_SECONDS = 300


def rows(workload: str, folder: Path) -> list[dict]:
    asked = [*ARMILLARY, "advise", *shlex.split(workload), "--workers", "2", "--gbit", "0.1", "--json"]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    return [row for row in json.loads(done.stdout)["rows"] if row["applies"]]


def command(row: dict, folder: Path) -> list[str]:
    if row["shell"]:
        words = shlex.split(row["shell"])[1:]
        return [*ARMILLARY, *words, *(["--steps", "2"] if words[0] == "train" else [])]
    script = folder / "advised.py"
    script.write_text(row["python"] + "\n")
    return [*(TORCHRUN if "under torchrun" in row["python"] else [sys.executable, "-W", "ignore"]), str(script)]


def main(wanted: list[str]) -> int:
    done, failed = set(), 0
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            shutil.copy(Path(__file__).with_name(OWN), folder)
            for row in rows(workload, folder):
                method = row["method"]
                if method in done or (wanted and method not in wanted):
                    continue
                done.add(method)
                began = time.perf_counter()
                ran = subprocess.run(
                    command(row, folder), cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS
                )
                seconds = time.perf_counter() - began
                said = (
                    "runs"
                    if ran.returncode == 0
                    else f"FAILS ({ran.returncode}):\n{ran.stdout[-800:]}{ran.stderr[-1500:]}"
                )
                print(f"advice: {method} on {workload}: {said}, {seconds:.0f} s", flush=True)
                failed += ran.returncode != 0
    print(f"advice: {len(done)} methods, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
