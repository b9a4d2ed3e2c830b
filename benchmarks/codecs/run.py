"""Times every codec on one core, beside torch's own: python -m benchmarks.codecs.run [--small]

Writes results/codecs.json, and its table to figures.md beside that folder. --small: few numbers and one round, to see
that it works; its times say nothing.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.codecs.measure import MILLION, Row, kinds, measured, ours, torchs
from benchmarks.measuring.record import machine

HERE = Path(__file__).parent


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of the page."""
    names = list(rows[0].errors)
    header = [
        "codec",
        "encode, ms/M",
        "decode, ms/M",
        "both as priced",
        "bytes a number",
        *(f"{n} error" for n in names),
    ]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for row in rows:
        cells = [
            row.name,
            f"{row.encode_ms:.2f}",
            f"{row.decode_ms:.2f}",
            f"{row.priced_ms:.2f}" if row.priced_ms else "",
        ]
        cells += [f"{row.bytes_each:.3f}", *(f"{row.errors[name]:.4f}" for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--small", action="store_true")
    asked.add_argument("--out", type=Path, default=HERE / "results" / "codecs.json")
    given = asked.parse_args(arguments)
    torch.set_num_threads(1)
    numbers, rounds = kinds(20_000 if given.small else MILLION), 1 if given.small else 15
    rows = [measured(coding, numbers, rounds) for coding in (*ours(), *torchs())]
    given.out.parent.mkdir(exist_ok=True, parents=True)
    given.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text = "\n".join([f"{machine()}, one thread, {rounds} rounds", "", *table(rows)])
    print(text)
    if not given.small:
        (given.out.parent.parent / "figures.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
