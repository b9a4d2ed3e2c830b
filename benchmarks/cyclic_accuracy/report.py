"""The page of figures and the pictures, from the files under results/: python -m benchmarks.cyclic_accuracy.report

Nothing is trained and nothing is measured here.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cyclic_accuracy.rules import PLAIN, rules_of
from benchmarks.cyclic_accuracy.run import RESULTS, best_rate, final_runs, swept
from benchmarks.cyclic_accuracy.summary import Spread, gaps, mean_curve, reached, seconds_by_mode, spread, trailing
from benchmarks.cyclic_accuracy.tasks import TASKS
from benchmarks.measuring.bars import Bar
from benchmarks.measuring.bars import table as table_of_bars
from benchmarks.measuring.page import written
from benchmarks.measuring.record import machines

HERE = Path(__file__).parent
WANTED_POINTS = 0.3  # of accuracy below data parallelism, at most
JUDGED = ("v2", "slack1")
# What is judged on held-out data: its name in the records, the factor it is shown with, its unit.
SCORES = {"vision": ("accuracy", 100.0, "points"), "language_model": ("nats_per_word", 1.0, "nats")}
LATE_ANYHOW = (
    "v1",
    "v1_nesterov",
    "v1_nadam",
)  # whose look-ahead is the user's optimizer, so delayed all-reduce has it
LAST_WINDOWS = 5  # of a curve of 50: where it stands is the mean of a tenth of the run
LONGER = {"language_model": 1000}  # steps of runs beside those of the sweep's length
COLORS = {"dp": "#222222", "v1": "#c2570c", "v2": "#2563a8", "slack1": "#2f8f5b", "delayed": "#b04fa8"}
OTHER_COLORS = ("#888888", "#d9a400", "#7a5cc9", "#5bb5c9", "#a0522d")

Record = Mapping[str, Any]


def main() -> None:
    for task in TASKS:
        _draw(task, final_runs(task, TASKS[task].steps)).savefig(RESULTS / f"{task}.png")
    print(written(HERE, page()))


def page() -> list[str]:
    """All tables, the pictures and every bar, in Markdown."""
    lines = ["`python -m benchmarks.cyclic_accuracy.report`, of runs by `run`, `clock`, `boundary` and `same`", ""]
    for task in TASKS:
        records = final_runs(task, TASKS[task].steps)
        runs = [record for by_seed in records.values() for record in by_seed.values()]
        lines += [
            f"## {task}", "", f"Runs of {TASKS[task].steps} steps; {machines(run.get('machine') for run in runs)}.", "",
            "Sweep: training loss over the last tenth of a run, by highest rate; the chosen one in bold.", "",
            *sweep_table(task), "", f"All seeds at the chosen rate, {TASKS[task].steps} steps:", "",
            *score_table(task, records), "",
        ]  # fmt: skip
        if LONGER.get(task):
            longer = score_table(task, final_runs(task, LONGER[task]))
            lines += [f"At these rates, {LONGER[task]} steps:", "", *longer, ""]
        lines += [*time_table(task, records), "", f"![loss against samples and against time](results/{task}.png)", ""]
    boundary, same = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("boundary", "same"))
    told = f"{boundary['machine']}, {boundary['points']} points, {boundary['steps']} steps."
    lines += ["## The stability boundary", "", told, "", *boundary_table(boundary), ""]
    lines += ["## One run for two rules, and the reference for the runtime", "", f"{same['machine']}.", ""]
    return [*lines, *same_table(same), "", "## Bars", "", *table_of_bars(bars(same))]


def bars(same: Record) -> list[Bar]:
    vision = {rule: _scores("vision", runs) for rule, runs in final_runs("vision", TASKS["vision"].steps).items()}
    points = {rule: gaps(vision.get(rule, {}), vision.get("dp", {})) for rule in JUDGED}
    unlike = sum(not row["is_same"] for row in same["rows"])
    return [
        *(
            Bar(f"vision: points of accuracy that {rule} loses beside dp, mean of seeds", f"{WANTED_POINTS} or less",
                [-statistics.fmean(each)] if each else [], lambda it: it <= WANTED_POINTS)
            for rule, each in points.items()
        ),
        Bar("pairs of trainings whose weights are not all equal", "0", [unlike], lambda it: it == 0, 0),
    ]  # fmt: skip


def sweep_table(task: str) -> list[str]:
    losses = {rule: swept(task, rule) for rule in rules_of(task)}
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    lines = [f"| rule | {' | '.join(f'{rate:g}' for rate in rates)} |", "| --- " * (len(rates) + 1) + "|"]
    for rule, by_rate in losses.items():
        best = best_rate(by_rate)
        cells = [_swept_cell(by_rate.get(rate), rate == best) for rate in rates]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return lines


def _swept_cell(loss: float | None, is_best: bool) -> str:
    if loss is None:
        return ""
    said = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
    return f"**{said}**" if is_best else said


def score_table(task: str, records: Mapping[str, Mapping[int, Record]]) -> list[str]:
    name, _, unit = SCORES[task]
    scores = {rule: _scores(task, by_seed) for rule, by_seed in records.items()}
    lines = [
        f"| rule | late share | rate | held-out {name}: mean ± deviation ({unit}) | by seed | less dp, same seed: mean "
        "(each) | training loss at the end: mean ± deviation |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for rule, by_seed in records.items():
        first = next(iter(by_seed.values()))
        ends = [record["last_tenth"] for record in by_seed.values() if record["last_tenth"] is not None]
        if not ends:
            lines.append(f"| {rule} | {first['stale_share']:.3f} | {first['rate']:g} | diverged | | | |")
            continue
        found = gaps(scores[rule], scores["dp"])
        each = ", ".join(f"{gap:+.3f}" for gap in found)
        lines.append(
            f"| {rule} | {first['stale_share']:.3f} | {first['rate']:g} | {_said(spread(list(scores[rule].values())))} "
            f"| {', '.join(f'{value:.3f}' for value in scores[rule].values())} "
            f"| {sum(found) / len(found):+.3f} ({each}) | {_said(spread(ends))} |"
        )
    return lines


def _scores(task: str, by_seed: Mapping[int, Record]) -> dict[int, float]:
    """By seed, in the unit of the page; without runs that diverged."""
    name, factor, _ = SCORES[task]
    return {seed: run["held_out"][name] * factor for seed, run in by_seed.items() if run["held_out"]}


def _said(found: Spread) -> str:
    """With the number of seeds; one alone has no deviation."""
    return f"{found.mean:.3f} ± {found.deviation:.3f} ({found.count})" if found.count > 1 else f"{found.mean:.3f} (1)"


def time_table(task: str, records: Mapping[str, Mapping[int, Record]]) -> list[str]:
    """Seconds on the link; the losses of v1, with look-ahead and without, serve delayed all-reduce, too."""
    clock = json.loads((RESULTS / f"clock_{task}.json").read_text())
    seconds = seconds_by_mode(clock["turns"])
    curves = {rule: trailing(curve, LAST_WINDOWS) for rule, curve in _curves(records).items()}
    target = max(curves[rule][-1] for rule in PLAIN if rule in curves)
    steps = TASKS[task].steps
    lines = [
        ", ".join(f"{name} {said}" for name, said in clock["conditions"].items() if name != "stages") + ".", "",
        f"| rule | by | ms a step | s for the whole run | {TASKS[task].unit} until the loss is {target:.3f} "
        "| s until then |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for rule, mode in _clocks(task, curves):
        at = reached(curves[rule], target)
        each = seconds[mode]
        until = "never | never" if at is None else (
            f"{at * steps * TASKS[task].samples_a_step:,.0f} | {at * steps * each:.1f}"
        )  # fmt: skip
        lines.append(f"| {rule} | {mode} | {each * 1e3:.0f} | {steps * each:.1f} | {until} |")
    return lines


def _clocks(task: str, curves: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """(rule, mode of the clock); what delayed all-reduce can do, too, comes twice."""
    pairs = [(rule, rules_of(task)[rule].clock) for rule in curves]
    return pairs + [(rule, "delayed") for rule in curves if rule in LATE_ANYHOW]


def _curves(records: Mapping[str, Mapping[int, Record]]) -> dict[str, list[float]]:
    """By rule the mean training loss over the seeds that did not diverge."""
    kept = {rule: [r["losses"] for r in by_seed.values() if r["losses"]] for rule, by_seed in records.items()}
    return {rule: mean_curve(losses) for rule, losses in kept.items() if losses}


def _draw(task: str, records: Mapping[str, Mapping[int, Record]]) -> Figure:
    seconds = seconds_by_mode(json.loads((RESULTS / f"clock_{task}.json").read_text())["turns"])
    curves = {rule: trailing(curve, LAST_WINDOWS) for rule, curve in _curves(records).items()}
    steps = TASKS[task].steps
    figure = Figure(figsize=(12, 4.6), dpi=80, layout="constrained")
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    others = iter(OTHER_COLORS)
    colors = {rule: COLORS.get(rule) or next(others) for rule in curves}
    for rule, mode in _clocks(task, curves):
        curve = curves[rule]
        shares = [(place + 0.5) / len(curve) for place in range(len(curve))]
        label = rule if mode != "delayed" else f"{rule} by delayed all-reduce"
        color = COLORS[mode] if (rule, mode) == ("v1", "delayed") else colors[rule]
        style = {
            "color": color,
            "linewidth": 1.4 if rule in COLORS else 0.9,
            "linestyle": "-" if rule in COLORS else "--",
        }
        if mode != "delayed":
            by_samples.plot([s * steps * TASKS[task].samples_a_step for s in shares], curve, label=label, **style)
        by_time.plot([s * steps * seconds[mode] for s in shares], curve, label=label, **style)
    low, high = min(map(min, curves.values())), max(curve[len(curve) // 10] for curve in curves.values())
    by_samples.set_ylim(low - 0.05 * (high - low), high)
    by_samples.set_xlabel(f"{TASKS[task].unit} of all workers")
    by_time.set_xlabel("seconds on the shaped link (steps x measured seconds a step)")
    by_samples.set_ylabel("training loss, nats (mean of seeds, of the last tenth)")
    by_time.legend(fontsize=7)
    for panel in (by_samples, by_time):
        panel.grid(alpha=0.3)
    figure.suptitle(f"{task}: loss against samples and against time", fontsize=11)
    return figure


def boundary_table(found: Record) -> list[str]:
    lines = [
        "| rule | momentum | correction | late share | foretold | measured | measured / foretold |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        foretold = row["predicted"]
        said = f"{foretold:.4f} | {row['measured']:.4f} | {row['measured'] / foretold:.3f}" if foretold else (
            f"- | {row['measured']:.4f} | -"
        )  # fmt: skip
        lines.append(
            f"| {row['rule']} | {row['momentum']:g} | {row['correction'] or '-'} | {row['share']:g} | {said} |"
        )
    return lines


def same_table(found: Record) -> list[str]:
    lines = [f"| task | rule | against | all weights equal after {found['steps']} steps |", "| --- | --- | --- | --- |"]
    for row in found["rows"]:
        lines.append(f"| {row['task']} | {row['rule']} | {row['against']} | {'yes' if row['is_same'] else '**no**'} |")
    return lines


if __name__ == "__main__":
    main()
