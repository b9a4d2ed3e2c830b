"""Owners chosen, forecast and measured, for a skewed and an even table: python -m benchmarks.owners.run

Needs root and iproute2. Exit code 1 if the searched plan's step takes over 10 % longer than the best of the others.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
DRAWS = ("skewed", "even")
SEARCHED = "searched"
WITHIN = 0.10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny table on 2 hosts, nothing is kept")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=100.0, help="of every link, Mbit/s")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "owners.json")
    options = parser.parse_args()
    hosts = 2 if options.small else options.hosts
    found = {draw: _measured(draw, hosts, options.mbit, options.small) for draw in DRAWS}
    print(table(found))
    for draw, one in found.items():
        print(f"\n{draw}: {one['search']}")
    print(f"\n{hosts} hosts, {options.mbit:g} Mbit/s; {found[DRAWS[0]]['machine']}")
    if options.small:
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(behind(one["plans"]) > WITHIN for one in found.values()))


def _measured(draw: str, hosts: int, mbit_per_second: float, is_small: bool) -> dict[str, Any]:
    steps, rounds = ("2", "1") if is_small else ("10", "5")
    with TemporaryDirectory() as folder, Lab(hosts, mbit_per_second) as lab:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.owners.job", "--draw", draw, "--steps", steps]
        more = ["--rounds", rounds, "--out", str(out), *["--small"] * is_small]
        lab.run([*command, *more], timeout_seconds=900, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def behind(plans: Mapping[str, Mapping[str, Any]]) -> float:
    """By what share of the best other plan's step the searched one's is longer, round by round; the median. A plan that
    is the searched one itself is no other."""
    mine = plans[SEARCHED]
    others = [one["blocks"] for one in plans.values() if one["exchange"] != mine["exchange"]]
    return statistics.median(own / min(rest) - 1 for own, *rest in zip(mine["blocks"], *others, strict=True))


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """found: by draw."""
    lines = ["| table | plan | exchange | forecast ms | measured ms (lowest-highest) |", "| --- " * 5 + "|"]
    for draw, one in found.items():
        for name, row in one["plans"].items():
            figures = f"{1e3 * row['forecast']:.1f} | {_spread(row['blocks'])}"
            lines.append(f"| {draw} | {name} | {row['exchange']} | {figures} |")
    return "\n".join(lines)


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f})"


if __name__ == "__main__":
    raise SystemExit(main())
