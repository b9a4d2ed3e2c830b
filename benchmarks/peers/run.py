"""All contenders on one case, heat by heat: python -m benchmarks.peers.run --case lm8 --rate 100mbit --rate 1gbit

On the network lab, in the environment that `make peers-env` made. Keeps JSON under results/; `report.py` reads it.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="by the lab, all alike")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    entry = entries()[options.case]
    rates = [mbit_of(rate) for rate in options.rate] if options.rate else list(entry.rates)
    options.out.mkdir(exist_ok=True)
    for mbit in rates:
        found = whole([_heat(options, mbit, heat) for heat in range(len(entry.heats))])
        path = options.out / f"{options.case}_{mbit:g}mbit.json"
        path.write_text(json.dumps({**found, "pinned": options.pin, "whole packets": True}, indent=1) + "\n")


def _heat(options: argparse.Namespace, mbit: float, heat: int) -> Mapping[str, Any]:
    """In a job of its own: what contenders never give back would be missing in the next."""
    with tempfile.TemporaryDirectory() as folder, Lab(entries()[options.case].workers, 0, whole_packets=True) as lab:
        part = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.job", "--case", options.case]
        command += ["--only", options.only, "--rounds", str(options.rounds), "--folder", folder, "--out", str(part)]
        watch = granting(lab.shape, partial(print, flush=True))
        command += ["--mbit", str(mbit), "--heat", str(heat)]
        lab.run(command, timeout_seconds=1200, pin=options.pin, watch=watch)
        found: Mapping[str, Any] = json.loads(part.read_text())
        return found


def whole(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The heats of one case at one rate, together: `truth` is that of the longest, which begins as the others do."""
    longest = max((part["truth"] for part in parts), key=len)
    refused = {name: why for part in parts for name, why in part["refused"].items()}
    return {**parts[0], "truth": longest, "refused": refused, "heats": [one for part in parts for one in part["heats"]]}


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
