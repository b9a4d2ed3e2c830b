"""Owners chosen, forecast and measured, for a skewed and an even table: python -m benchmarks.owners.run

Needs root and iproute2. Writes figures.md from what was kept; --report writes it and measures nothing. Exit code 1 if
the searched plan's step takes over 5 % longer than the best of the others.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import bars
from benchmarks.measuring.record import machines
from benchmarks.netlab.lab import Lab

HERE = Path(__file__).parent
PAGE, KEPT = HERE / "figures.md", HERE / "results" / "owners.json"
DRAWS = ("skewed", "even")
SEARCHED = "searched"
WITHIN = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="does it work? A tiny table on 2 hosts, nothing is kept")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--mbit", type=float, default=100.0, help="of every link, Mbit/s")
    parser.add_argument("--draw", choices=DRAWS, nargs="+", default=list(DRAWS), help="the other's figures stay")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args()
    hosts = 2 if options.small else options.hosts
    rounds = 1 if options.small else options.rounds
    found = {} if options.small or not KEPT.exists() else json.loads(KEPT.read_text())
    draws = [] if options.report else options.draw
    found |= {draw: _measured(draw, hosts, options.mbit, rounds, options.small) for draw in draws}
    text = page(found)
    print(text)
    if options.small:
        return 0
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(text + "\n")
    return int(any(behind(one["plans"]) > WITHIN for one in found.values()))


def _measured(draw: str, hosts: int, mbit_per_second: float, rounds: int, is_small: bool) -> dict[str, Any]:
    steps = "2" if is_small else "10"
    with TemporaryDirectory() as folder, Lab(hosts, mbit_per_second) as lab:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.owners.job", "--draw", draw, "--steps", steps]
        more = ["--rounds", str(rounds), "--out", str(out), *["--small"] * is_small]
        lab.run([*command, *more], timeout_seconds=900, pin=True)
        found: dict[str, Any] = json.loads(out.read_text())
    return found | {"hosts": hosts, "mbit": mbit_per_second}


def behind(plans: Mapping[str, Mapping[str, Any]]) -> float:
    """By what share of the best other plan's step the searched one's is longer, round by round; the median. A plan that
    is the searched one itself is no other."""
    mine = plans[SEARCHED]
    others = [one["blocks"] for one in plans.values() if one["exchange"] != mine["exchange"]]
    return statistics.median(own / min(rest) - 1 for own, *rest in zip(mine["blocks"], *others, strict=True))


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Where it ran, the table, what each search says of itself, and the bars."""
    ran = {f"{one['hosts']} hosts, {one['mbit']:g} Mbit/s" for one in found.values()}
    head = f"{'; '.join(sorted(ran))}; {machines(one['machine'] for one in found.values())}"
    said = [f"* {draw}: {one['search']}" for draw, one in found.items()]
    judged = [
        bars.Bar(
            f"{draw}: a step of the searched plan, per cent longer than the best that exchanges otherwise",
            f"{100 * WITHIN:g} or less",
            [100 * behind(found[draw]["plans"])] if draw in found else [], lambda it: it <= 100 * WITHIN,
        )
        for draw in DRAWS
    ]  # fmt: skip
    lines = [head, "", table(found), "", "What the searches say of themselves:", "", *said, "", *bars.table(judged)]
    return "\n".join(lines)


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
