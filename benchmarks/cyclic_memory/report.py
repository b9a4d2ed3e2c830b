"""The page of both scripts' figures, made of the records under results/ alone."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measuring.bars import Bar
from benchmarks.measuring.bars import table as table_of_bars

__all__ = ["JUDGED", "MIB", "MODES", "bars", "page"]

JUDGED = "ViT-B/16"
WANTED = {4: 0.55, 8: 0.52}  # of concurrent, by micro-batches a step, for that model
MODES = ("ddp", "ring")
MIB = 2**20


def page(results: Path) -> list[str]:
    """A table for each model, the curves, the ring's table and every bar, in Markdown."""
    lines = ["`python -m benchmarks.cyclic_memory.run`", ""]
    found = {path: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for path, record in found.items():
        if "rows" in record:
            told = f"{record['machine']}, {record['samples']} samples a micro-batch"
            lines += [f"## {record['model']}", "", told, "", *_table(record), "", *_picture(path)]
    for path, record in found.items():
        if "pace_milliseconds" in record:
            told = (
                f"{record['machine']}, {record['samples']} samples a micro-batch, a link's forward takes "
                f"{record['pace_milliseconds']:g} ms"
            )
            title = ["## Several workers", "", "`python -m benchmarks.cyclic_memory.ring`", ""]
            lines += [*title, told, "", *_table_of_workers(record), "", *_picture(path)]
    return [*lines, "## Bars", "", *table_of_bars(bars(list(found.values())))]


def bars(records: list[dict[str, Any]]) -> list[Bar]:
    judged = next((record for record in records if record.get("model") == JUDGED), {"rows": []})
    measured = {row["workers"] for row in judged["rows"]}
    return [
        Bar(f"{JUDGED}, N = {workers}: activations of cyclic at peak, of concurrent", f"{most} or less",
            [_ratio(judged, "cyclic", workers)] if workers in measured else [], lambda it, most=most: it <= most, 3)
        for workers, most in WANTED.items()
    ]  # fmt: skip


def _growth(row: dict[str, Any]) -> float:
    """Bytes of peak PSS per sample of a micro-batch: all that does not grow with samples is subtracted."""
    few, many = row["runs"]
    growth_bytes: float = (many["peak_bytes"] - few["peak_bytes"]) / (many["samples"] - few["samples"])
    return growth_bytes


def _ratio(record: dict[str, Any], name: str, workers: int) -> float:
    """Of activation memory, as measured, to that of concurrent micro-batches."""
    rows = {row["name"]: row for row in record["rows"] if row["workers"] == workers}
    return _growth(rows[name]) / _growth(rows["concurrent"])


def _table(record: dict[str, Any]) -> list[str]:
    lines = [
        "| N | | activations at peak, MiB (PSS) | of concurrent | saved tensors, MiB | of concurrent | forecast, MiB "
        "| of concurrent | whole process at peak, MiB (PSS) |",
        "|" + " --- |" * 9,
    ]
    for row in record["rows"]:
        first = next(r for r in record["rows"] if r["workers"] == row["workers"] and r["name"] == "concurrent")
        samples, forecast = record["samples"], row.get("forecast_bytes")
        said = f"{forecast / MIB:.1f} | {forecast / first['forecast_bytes']:.3f}" if forecast else " | "
        lines.append(
            f"| {row['workers']} | {row['name']} | {_growth(row) * samples / MIB:.1f} "
            f"| {_ratio(record, row['name'], row['workers']):.3f} | {row['saved_bytes'] / MIB:.1f} "
            f"| {row['saved_bytes'] / first['saved_bytes']:.3f} | {said} | {row['runs'][1]['peak_bytes'] / MIB:.0f} |"
        )
    return lines


def _table_of_workers(found: dict[str, Any]) -> list[str]:
    """Peak and mean over the timed steps of the sum over processes; activations as in the other tables."""
    many = found["samples"]
    lines = [
        f"| {found['workers']} processes | sum of PSS at peak, MiB | mean | activations at peak, MiB | of {MODES[0]} "
        "| mean | peak over mean |",
        "|" + " --- |" * 7,
    ]
    peaks = []
    for mode in MODES:
        totals = {samples: [pss for _, pss in curve] for samples, curve in found[mode].items()}
        few, peak, mean = statistics.fmean(totals["1"]), max(totals[str(many)]), statistics.fmean(totals[str(many)])
        share = many / (many - 1)
        peaks.append((peak - few) * share)
        lines.append(
            f"| {mode} | {peak / MIB:.0f} | {mean / MIB:.0f} | {peaks[-1] / MIB:.0f} | {peaks[-1] / peaks[0]:.2f} "
            f"| {(mean - few) * share / MIB:.0f} | {(peak - few) / (mean - few):.2f} |"
        )
    return lines


def _picture(record: Path) -> list[str]:
    drawn = record.with_suffix(".png")
    return [f"![PSS over time](results/{drawn.name})", ""] if drawn.is_file() else []
