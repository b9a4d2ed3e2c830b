"""All contenders on one case: python -m benchmarks.peers.run --case lm8 --rate 100mbit --rate 1gbit

On the network lab, in the environment that `make peers-env` made. Keeps JSON under results/; `report.py` reads it.
"""

import argparse
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.netlab.asking import granting
from benchmarks.netlab.lab import Lab
from benchmarks.peers.heats import entries

HERE = Path(__file__).parent
UNITS = {"mbit": 1.0, "gbit": 1000.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, choices=list(entries()))
    parser.add_argument("--rate", action="append", help="such as 100mbit or 1gbit; 0mbit is unshaped. Default: all")
    parser.add_argument("--only", default="", help="contenders, parted by commas; the rest is left out")
    parser.add_argument("--rounds", type=int, default=0, help="at most so many a heat; 0 is the case's own")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    entry = entries()[options.case]
    rates = [mbit_of(rate) for rate in options.rate] if options.rate else list(entry.rates)
    options.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Lab(entry.workers, 0) as lab:
        words = ["--case", options.case, "--only", options.only, "--rounds", str(options.rounds), "--folder", folder]
        words += ["--out", str(options.out)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.job", *words]
        watch = granting(lab.shape, partial(print, flush=True))
        for mbit in rates:  # a job each: what a contender never gives back would be missing in the next
            lab.shape(0)  # of the rehearsal; the job asks for its own
            lab.run([*command, "--mbit", str(mbit)], timeout_seconds=1800, watch=watch)


def mbit_of(rate: str) -> float:
    """
    Raises:
        ValueError: no such rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"peers: no rate {rate!r}; want a number and mbit or gbit, such as 100mbit")
    return float(match[1]) * UNITS[match[2]]


if __name__ == "__main__":
    main()
