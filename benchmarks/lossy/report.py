"""The page's tables from the cells that were kept: seconds a step and to a metric, and the metric after equal steps."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lossy.bars import FP16, PLAIN, bars_of, by_contender, times_faster
from benchmarks.lossy.contenders import EXACT, OURS, PEERS, START, TO_THE_END, WHOLE_AT_FIRST, same_training
from benchmarks.lossy.tasks import Task
from benchmarks.measuring.bars import table
from benchmarks.measuring.ratios import quartiles

__all__ = ["page", "reached_at", "seconds_to"]

REACH = 0.98  # of the way from the first metric of the exact training to its best one: what all are timed to


def page(folder: Path, tasks: Mapping[str, Task]) -> str:
    """In Markdown."""
    return "\n".join(line for name, task in tasks.items() for line in _of_task(folder / name, name, task)) + "\n"


def reached_at(steps: Sequence[int], metric: Sequence[float], wanted: float, more_is_better: bool) -> float:
    """The first step at which a curve comes to that metric, between its looks; infinite if it never does."""
    sign = 1 if more_is_better else -1
    values, goal = sign * np.asarray(metric), sign * wanted
    if not (values >= goal).any():
        return float("inf")
    place = int(np.argmax(values >= goal))
    if place == 0:
        return float(steps[0])
    return float(np.interp(goal, values[place - 1 : place + 1], steps[place - 1 : place + 1]))


def seconds_to(steps: float, name: str, step_seconds: Mapping[str, float]) -> float:
    """How long a contender takes for its first `steps`; step_seconds: of everybody, after the start."""
    whole = min(steps, START if name in WHOLE_AT_FIRST else 0)
    return whole * step_seconds[WHOLE_AT_FIRST.get(name, name)] + (steps - whole) * step_seconds[name]


def _of_task(folder: Path, name: str, task: Task) -> list[str]:
    curves = {one: _curves(folder, same_training(one)) for one in (*OURS, *PEERS)}
    exact = curves[EXACT]
    steps, means = exact[0]["steps"], np.mean([one["metric"] for one in exact], 0)
    best = float(means.max() if task.more_is_better else means.min())
    goal = float(means[0]) + REACH * (best - float(means[0]))
    said = f"{task.metric} after {steps[-1]} steps, mean and spread of {len(exact)} seeds; wanted {goal:.4g}"
    lines = [f"## {name}", "", said, ""]
    head = ("contender", "what crosses", "at the end", "spread", "less the exact one", "steps to it")
    lines += [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    takes, ends = dict[str, float](), dict[str, float]()
    for one, those in curves.items():
        last = [curve["metric"][-1] for curve in those]
        takes[one] = reached_at(steps, list(np.mean([c["metric"] for c in those], 0)), goal, task.more_is_better)
        spread = f"{statistics.stdev(last):.4f}" if len(last) > 1 else "-"
        ends[one] = statistics.fmean(last)
        gap = ends[one] - float(means[-1])
        reach = f"{takes[one]:.0f}" if np.isfinite(takes[one]) else "never"
        cells = (one, OURS.get(one, ""), f"{ends[one]:.4f}", spread, f"{gap:+.4f}", reach)
        lines.append(f"| {' | '.join(cells)} |")
    ended = {one: _last(folder, one) for one in TO_THE_END}
    lines += _to_the_end(folder, task, ended)
    paths = sorted(folder.glob("seconds_*.json"), key=lambda path: float(path.stem.split("_")[1]))
    timed = {float(found["mbit"]): found for found in (json.loads(path.read_text()) for path in paths)}
    for found in timed.values():
        lines += ["", *_seconds(found, takes)]
    if task.metric == "accuracy":  # what the bars are said of
        means_ended = {one: statistics.fmean(last) for one, last in ended.items() if last}
        lines += ["", *table(bars_of(timed, ends, means_ended))]
    for path in sorted(folder.glob("live_*.json")):
        lines += ["", _live(path, folder, curves, task, goal)]
    return [*lines, ""]


def _curves(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"trajectory_{name}_seed*.json"))]


def _last(folder: Path, name: str) -> list[float]:
    """By seed, the metric of a training that was ended."""
    return [json.loads(path.read_text())["metric"][-1] for path in sorted(folder.glob(f"end_{name}_seed*.json"))]


def _to_the_end(folder: Path, task: Task, ended: Mapping[str, Sequence[float]]) -> list[str]:
    if not ended[EXACT]:
        return []
    steps = json.loads((folder / f"end_{EXACT}_seed0.json").read_text())["steps"][-1]
    said = f"{task.metric} after {steps} steps, in which the learning rate falls in a line to 0, on all held-out data"
    lines = ["", said, "", "| contender | at the end | spread | less the exact one, seed by seed |", "|" + " --- |" * 4]
    for one, last in ended.items():
        apart = ", ".join(f"{own - exact:+.4f}" for own, exact in zip(last, ended[EXACT], strict=False))
        spread = f"{statistics.stdev(last):.4f}" if len(last) > 1 else "-"
        mean = f"{statistics.fmean(last):.4f}" if last else "-"
        lines.append(f"| {one} | {mean} | {spread} | {apart or '-'} |")
    return lines


def _seconds(found: Mapping[str, Any], takes: Mapping[str, float]) -> list[str]:
    seconds, sent = by_contender(found, "step_seconds"), by_contender(found, "sent_bytes")
    speed = f"{found['mbit']:g} Mbit/s" if found["mbit"] else "links without a limit"
    lines = [f"{speed}, {found['workers']} hosts, {found['rounds']} paired rounds; {found['machine']}", ""]
    head = (
        "contender",
        "ms a step (quartiles)",
        "MB sent",
        "times DDP",
        "times fp16 hook",
        "s to it",
        "to it, times DDP",
    )
    lines += [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    medians = {one: statistics.median(those) for one, those in seconds.items()}
    best_ddp = min(seconds_to(takes[one], one, medians) for one in PLAIN)
    for one, those in seconds.items():
        middle = quartiles([1e3 * each for each in those])
        over = [times_faster(found, one, rivals) for rivals in (PLAIN, FP16)]
        until = seconds_to(takes[one], one, medians)
        times = f"{best_ddp / until:.2f}" if until and np.isfinite(until) else "-"
        lines.append(
            f"| {one} | {middle.median:.1f} ({middle.first:.1f}-{middle.third:.1f}) "
            f"| {statistics.median(sent[one]) / 1e6:.3f} | {over[0]:.2f} | {over[1]:.2f} | {until:.1f} | {times} |"
        )
    return lines


def _live(path: Path, folder: Path, curves: Mapping[str, Any], task: Task, goal: float) -> str:
    """One cell end to end, beside the product of its two factors."""
    live = json.loads(path.read_text())
    name, speed, first = live["contender"], f"{live['mbit']:g}", curves[live["contender"]][0]
    step = json.loads((folder / f"seconds_{speed}.json").read_text())
    medians = {one: statistics.median(those) for one, those in by_contender(step, "step_seconds").items()}
    at = reached_at(live["steps"], live["metric"], goal, task.more_is_better)
    said = f"after {float(np.interp(at, live['steps'], live['seconds'])):.1f} s" if np.isfinite(at) else "never"
    product = seconds_to(reached_at(first["steps"], first["metric"], goal, task.more_is_better), name, medians)
    apart = max(abs(a - b) for a, b in zip(live["metric"], first["metric"], strict=True))
    whole = live["seconds"][-1] / seconds_to(live["steps"][-1], name, medians)
    return (
        f"Live, end to end: {name} at {speed} Mbit/s came to it {said}; steps to it times seconds a step say "
        f"{product:.1f} s. All its steps took {whole:.2f} of the product. Its metric is at most {apart:.4f} from the "
        "lockstep's."
    )
