"""What the groups of a plan really sent, held and took: the forecast's own type, so that the two can be subtracted."""

import resource
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from armillary.facts.plan import Forecast, Plan
from armillary.facts.trace import Record
from armillary.runtime.hybrid.executor import DenseUnit
from armillary.session.run import Run

__all__ = ["OTHER", "Comparison", "Tally", "compare", "held_bytes", "reset_peak_memory", "resident_bytes"]

OTHER = "other requests"  # rounds of look-ups, gradient norms: what belongs to no group


@dataclass(frozen=True)
class Comparison:
    """One line of forecast beside measured, per worker and step (mean over workers)."""

    group: str
    exchange: str
    forecast: Forecast
    measured: Forecast


class Tally:
    """Adds up the records of this rank by group. records: those of the last `window` steps, for the trace."""

    def __init__(self, plan: Plan, window: int = 50):
        self.groups = {group.name for group in plan.groups}
        self.group_of = {name: group.name for group in plan.groups for name in group.parameters}
        self.window = window
        self.sent: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self.records: list[Record] = []
        self.steps = 0

    def add(self, records: tuple[Record, ...], steps: int) -> float:
        """Takes the records of `steps` more steps; returns the bytes this rank sent in them."""
        self.steps += steps
        sent = 0.0
        for record in records:
            group = self._group(record.group)
            self.sent[group] += record.sent_bytes
            self.seconds[group] += record.seconds
            sent += record.sent_bytes
        last = records[-1].step if records else 0
        kept = [record for record in (*self.records, *records) if record.step > last - self.window]
        self.records = kept
        return sent

    def _group(self, label: str) -> str:
        """Pulls are recorded under the table's name, pushes under the group's."""
        return label if label in self.groups else self.group_of.get(label, OTHER)

    def per_step(self) -> dict[str, tuple[float, float]]:
        """group -> (bytes sent, seconds in flight), means over the steps."""
        steps = max(self.steps, 1)
        return {group: (self.sent[group] / steps, self.seconds[group] / steps) for group in self.sent}


def compare(run: Run, tally: Tally) -> tuple[Comparison, ...]:
    """Forecast beside measured for every group, measured as the mean over workers. Every rank must call it."""
    mine = {group: (*spent, held) for group, spent, held in _spent(run, tally)}
    everyones = run.transport.share(mine)
    lines = []
    for group in run.plan.groups:
        measured = _mean([theirs.get(group.name, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(group.name, str(group.exchange), group.forecast, measured))
    if any(OTHER in theirs for theirs in everyones):
        measured = _mean([theirs.get(OTHER, (0.0, 0.0, 0.0)) for theirs in everyones])
        lines.append(Comparison(OTHER, "", Forecast(), measured))
    return tuple(lines)


def _spent(run: Run, tally: Tally) -> list[tuple[str, tuple[float, float], float]]:
    held, spent = held_bytes(run), tally.per_step()
    return [(name, spent.get(name, (0.0, 0.0)), held.get(name, 0.0)) for name in {**held, **spent}]


def _mean(spent: list[tuple[float, float, float]]) -> Forecast:
    sent, seconds, held = (sum(column) / len(spent) for column in zip(*spent, strict=True))
    return Forecast(sent, held, seconds)


def held_bytes(run: Run) -> dict[str, float]:
    """Bytes of the tensors each group keeps on this rank: weights, gradients, optimizer state."""
    held: dict[str, float] = {}
    for unit in run.executor.units:
        if isinstance(unit, DenseUnit):
            tensors: list[Any] = [unit.bucket.flat, *unit.bucket.parameters]
            owners: list[Tensor] = list(unit.bucket.parameters)
        else:
            table = unit.table
            tensors = [table.shard, table.parameter, table.gradient, *run.held[table.name].values()]
            owners = [table.parameter]
        for owner in owners:
            tensors += run.optimizer.state.get(owner, {}).values()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if _is_plain(t)}
        held[unit.name] = float(sum(storages.values()))
    return held


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor)


def resident_bytes() -> tuple[int, int]:
    """(now, peak) bytes of this process in memory."""
    status = Path("/proc/self/status")
    if not status.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, peak
    found = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    now, peak = (int(found[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak_memory() -> None:
    """Makes the peak of `resident_bytes` begin from now, where the system allows it (Linux, proc(5))."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
