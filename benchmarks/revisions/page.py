"""The page of two revisions, from the newest whole runs: python -m benchmarks.revisions.page   (measures nothing)"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.record import machines

__all__ = ["keep_memory", "keep_steps", "memory_head", "memory_row", "steps_head", "steps_row"]

HERE = Path(__file__).parent
STEPS, MEMORY = HERE / "results" / "steps.json", HERE / "results" / "memory.json"
MIB = 2**20

Found = Mapping[str, Any]  # older, newer, steps, machine; cases: by name
Peaks = Sequence[int]  # bytes, by rank


def keep_steps(found: Found) -> None:
    """And writes the page anew."""
    _keep(STEPS, found)


def keep_memory(found: Found) -> None:
    """And writes the page anew."""
    _keep(MEMORY, found)


def _keep(path: Path, found: Found) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    (HERE / "figures.md").write_text(_page())


def _page() -> str:
    """A section for each of the two records that is there."""
    lines: list[str] = []
    for path, head, row in ((STEPS, steps_head, steps_row), (MEMORY, memory_head, memory_row)):
        if path.exists():
            found = json.loads(path.read_text())
            rows = [row(name, one) for name, one in found["cases"].items()]
            lines += [f"## {path.stem.capitalize()}", "", *head(found), *rows, "", machines([found["machine"]]), ""]
    return "\n".join(lines)


def steps_head(found: Found) -> list[str]:
    return [
        f"{_compared(found)}; {found['rounds']} rounds of {found['steps']} steps",
        "",
        "| case | older, ms a step | newer over older: median (lowest-highest) | older over older |",
        "| --- " * 4 + "|",
    ]


def steps_row(name: str, rounds: Sequence[Mapping[str, float]]) -> str:
    """Ratios are of one round."""
    older = statistics.median(turn["older"] for turn in rounds)
    newer, again = ([turn[who] / turn["older"] for turn in rounds] for who in ("newer", "older again"))
    return f"| {name} | {1e3 * older:.1f} | {_spread(newer)} | {_spread(again)} |"


def memory_head(found: Found) -> list[str]:
    return [
        f"{_compared(found)}; MiB at the peak of {found['steps']} steps",
        "",
        "| case | older, all ranks | newer over older | older over older | fullest rank, older | newer over older |",
        "| --- " * 6 + "|",
    ]


def memory_row(name: str, turns: Sequence[Peaks]) -> str:
    """turns: of the older revision, the newer one, and the older one again."""
    older, newer, again = turns
    return (
        f"| {name} | {sum(older) / MIB:.1f} | {sum(newer) / sum(older):.3f} | {sum(again) / sum(older):.3f} "
        f"| {max(older) / MIB:.1f} | {max(newer) / max(older):.3f} |"
    )


def _compared(found: Found) -> str:
    return f"{found['newer'] or 'the working tree'} over {found['older']}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    text = _page()
    print(text)
    (HERE / "figures.md").write_text(text)
