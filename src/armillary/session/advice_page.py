"""All advice on one page of at most 60 lines, as JSON, and as a picture: seconds against memory, a point a method."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from armillary.planning.clock import Simulation
from armillary.plans.advice import Advice, Combination, MethodPoint, Situation
from armillary.plans.group import DEPARTURES, Forecast
from armillary.plans.topology import Topology
from armillary.plans.units import WIDTH, Page, Table, bytes_text, page_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["AdvicePage", "Row", "bottleneck", "plot_advice"]

NOT_KNOWN = "not known"
TOO_MUCH = "!"  # of memory
LONGEST = 48  # of an option in a column
FULL = 1 << 50  # bytes; no rank has more
MIB = 1 << 20
MOSTLY = 0.5  # of a step


@dataclass(frozen=True)
class Row:
    """One method. memory_bytes: that a rank may hold."""

    method: str
    says: str
    page: str
    is_inference: bool
    advice: Advice
    memory_bytes: int

    @property
    def held_bytes(self) -> float | None:
        cost = self.advice.forecast
        return None if cost is None or self.is_inference else cost.memory_bytes + cost.peak_bytes

    @property
    def fits(self) -> bool:
        return self.held_bytes is None or self.held_bytes <= self.memory_bytes

    def figure(self, target: str) -> float | None:
        cost = self.advice.forecast
        if target == "latency":
            return self.advice.latency_seconds
        if target == "memory":
            return self.held_bytes
        return None if cost is None else cost.seconds if target == "seconds" else cost.sent_bytes

    def place(self, target: str) -> tuple[bool, bool, bool, float]:
        """In the table: those that apply, that fit, that are known; then the least."""
        figure = self.figure(target)
        return not self.advice.applies, not self.fits, figure is None, figure or 0.0

    def in_words(self) -> str:
        cost = self.advice.forecast
        assert cost is not None
        how, script = self.advice.shell, self.advice.python.splitlines()
        if not how:
            how = script[-1] if len(script) <= 2 else f"armillary.advise(...).script({self.method!r})"
        exact = "exact" if not self.advice.departures else _not_exact(self.advice.departures)
        held = bytes_text(cost.memory_bytes + cost.peak_bytes)
        return f"{self.method} ({self.says}; {exact}): {held}, {seconds_text(cost.seconds)} a step: {how}"


class Unit(NamedTuple):
    name: str
    size: int


@dataclass(frozen=True)
class AdvicePage:
    """What `advise` found; it prints.

    Args of note:
        sentence: the bottleneck. typed: the workload on the command line; empty in a script.
        plan: what the plan by price is expected to take. forward_seconds: of one forward in one process.
        rows: every method, sorted by the target.
    """

    sentence: str
    typed: str
    plan: Forecast
    topology: Topology
    forward_seconds: float
    rows: tuple[Row, ...]
    combinations: tuple[Combination, ...]
    assumed: tuple[str, ...]
    target: str = "seconds"

    def script(self, method: str) -> str:
        """Of a method, or of a combination as it is named on the page.

        Raises:
            ValueError: no such method, or it does not apply.
        """
        combined = {one.name: one.python for one in self.combinations}
        found = {row.method: row.advice for row in self.rows}
        if method in combined:
            return combined[method]
        if method not in found:
            raise ValueError(f"advise: no method {method!r}; there are {', '.join((*found, *combined))}")
        if not found[method].applies:
            raise ValueError(f"advise: {method} does not apply: {found[method].reason}")
        return found[method].python

    def page(self) -> Page:
        """At most 60 lines."""
        known = [row for row in self.rows if row.advice.applies]
        serving = [row for row in known if row.is_inference]
        training = [] if self.target == "latency" else [row for row in known if not row.is_inference]
        exact = [row for row in training if not row.advice.departures]
        other = [row for row in training if row.advice.departures]
        parts: list[Any] = []
        verb, given = ("To type", "") if self.typed else ("To write", " with batches and loss as here")
        together = self.combinations if training else ()
        said: dict[str, Advice | Combination] = {row.method: row.advice for row in (*training, *serving)}
        said |= {one.name: one for one in together}
        has_option = any(self._option(row.advice) for row in training)
        says = [self.sentence, self._plan()]
        says += [f"{verb}: {self._begins}{given}, then the last column."] if has_option else []
        parts.append("\n".join(says))
        parts += [self._table("exact", exact)] if exact else []
        parts += [self._table("not exact", other)] if other else []
        parts += [legend] if (legend := _legend(training)) else []
        parts += [self._serving(serving)] if serving else []
        parts += [self._together()] if together else []
        parts += self._apart({name: one for name, one in said.items() if not self._option(one)})
        left = [row for row in self.rows if not row.advice.applies and (training or row.is_inference)]
        parts += ["Not for this:\n" + "\n".join(map(_left_out, left))] if left else []
        parts.append(f"Assumed: {'; '.join(self.assumed)}.")
        return tuple(parts)

    def _plan(self) -> str:
        cost = self.plan
        held = bytes_text(cost.memory_bytes + cost.peak_bytes)
        return (
            f"The plan by price takes {seconds_text(cost.seconds)} a step, sends {cost.sent_bytes / 1e3:,.1f} kB "
            f"a rank and holds {held} at most."
        )

    @property
    def _begins(self) -> str:
        """What most lines begin with."""
        if self.typed:
            return f"armillary train {self.typed} --workers {self.topology.workers}"
        return "armillary.parallelize(model, optimizer, batches, loss, ...)"

    def _option(self, one: Advice | Combination) -> str:
        """What comes behind that; empty where the line begins otherwise."""
        line = one.shell if self.typed else one.python.rpartition("\n")[2]
        begins = f"{self._begins} " if self.typed else f"run = {self._begins.removesuffix('...)')}"
        option = line.removeprefix(begins).removesuffix("" if self.typed else ")") if line.startswith(begins) else ""
        return option if len(option) <= LONGEST or isinstance(one, Advice) else ""

    def _table(self, head: str, rows: Sequence[Row]) -> Table:
        unit, is_exact = self._unit, head == "exact"
        header = (head, "ms", "x plan", "kB sent", f"{unit.name} peak", *([] if is_exact else ["how"]), "")
        return Table(header, [self._cells(row, is_exact) for row in rows], (0, 5, 6)[: 2 + (not is_exact)])

    def _cells(self, row: Row, is_exact: bool) -> tuple[str, ...]:
        cost, option = row.advice.forecast, self._option(row.advice) or "see below"
        how = () if is_exact else (", ".join(row.advice.departures),)
        if cost is None:
            return (row.method, NOT_KNOWN, "", "", "", *how, option)
        times = f"{cost.seconds / self.plan.seconds:,.2f}" if self.plan.seconds else ""
        held = f"{(row.held_bytes or 0) / self._unit.size:,.1f}{'' if row.fits else ' ' + TOO_MUCH}"
        return (row.method, f"{cost.seconds * 1e3:,.2f}", times, f"{cost.sent_bytes / 1e3:,.1f}", held, *how, option)

    def _together(self) -> Table:
        rows, unit = [], self._unit
        for one in self.combinations:
            cost, how = one.forecast, (", ".join(one.departures) or "exact", self._option(one) or "see below")
            if cost is None:
                rows.append((one.name, NOT_KNOWN, "", "", *how))
                continue
            held = f"{(cost.memory_bytes + cost.peak_bytes) / unit.size:,.1f}"
            rows.append((one.name, f"{cost.seconds * 1e3:,.2f}", f"{cost.sent_bytes / 1e3:,.1f}", held, *how))
        return Table(("together", "ms", "kB sent", f"{unit.name} peak", "how", ""), rows, (0, 4, 5))

    @property
    def _unit(self) -> Unit:
        """Of memory."""
        return Unit("MiB", MIB) if self.plan.memory_bytes + self.plan.peak_bytes >= 4 * MIB else Unit("KiB", 1024)

    def _serving(self, rows: Sequence[Row]) -> Table:
        cells = []
        for row in rows:
            seconds, cost = row.advice.latency_seconds, row.advice.forecast
            sent = f"{cost.sent_bytes / 1e3:,.1f}" if cost else ""
            shown = NOT_KNOWN if seconds is None else f"{seconds * 1e3:,.2f}"
            times = f"{seconds / self.forward_seconds:,.2f}" if seconds is not None and self.forward_seconds else ""
            exact = ", ".join(row.advice.departures) or "exact"
            cells.append((row.method, shown, times, sent, exact, _clipped(row.advice.reason)))
        head = ("a trained model's forward", "ms", "x one process", "kB sent", "how", "")
        return Table(head, cells, (0, 4, 5))

    def _apart(self, said: Mapping[str, Advice | Combination]) -> list[str]:
        """What is not asked for by a word to `train`: commands that begin otherwise, and the names of scripts."""
        commands = [f"{name}: {one.shell}" for name, one in said.items() if one.shell and len(one.shell) <= WIDTH]
        scripts = [f"{name}{self._tells(one)}" for name, one in said.items() if not one.shell or len(one.shell) > WIDTH]
        asked = f"armillary advise {self.typed} --script NAME" if self.typed else "print(page.script(NAME))"
        lines = [*commands, *([f"Scripts of at most ten lines, by {asked}: {'; '.join(scripts)}."] if scripts else [])]
        return ["\n".join(lines)] if lines else []

    def _tells(self, one: Advice | Combination) -> str:
        tells = one.tells if self.typed else one.tells.replace("--measure", "measure=True")
        return f" ({NOT_KNOWN}: try {tells})" if tells else ""

    def __str__(self) -> str:
        return page_text(self.page())

    def facts(self) -> dict[str, Any]:
        """All of it, for JSON."""
        rows = []
        for row in self.rows:
            advice = {
                "applies": row.advice.applies, "reason": row.advice.reason, "forecast": row.advice.forecast,
                "latency_seconds": row.advice.latency_seconds, "departures": row.advice.departures,
                "shell": row.advice.shell, "python": row.advice.python, "try": row.advice.tells,
            }  # fmt: skip
            rows.append({"method": row.method, "says": row.says, "page": row.page, "fits": row.fits, **advice})
        total = self.plan.memory_bytes + self.plan.peak_bytes
        plan = {**asdict(self.plan), "memory_bytes": total, "between_steps_bytes": self.plan.memory_bytes}
        combined = [asdict(one) for one in self.combinations]
        return {
            "bottleneck": self.sentence, "plan": plan, "target": self.target, "rows": rows, "combinations": combined,
            "assumed": self.assumed,
        }  # fmt: skip

    def points(self) -> list[MethodPoint]:
        """Of every row that is known."""
        return [
            MethodPoint(row.method, row.advice.forecast.seconds, row.held_bytes, not row.advice.departures)
            for row in self.rows
            if row.advice.applies and row.advice.forecast and row.held_bytes is not None
        ]

    def save(self, path: str | Path) -> Path:
        """The picture: seconds against memory, exact methods filled, others hollow, and the frontier."""
        plot_advice(self.points(), self.sentence).savefig(path)
        return Path(path)


def bottleneck(situation: Situation, step: Simulation) -> str:
    """In one sentence, with its figure."""
    cost, topology = situation.chosen.forecast, situation.topology
    waits = sum(step.exposed_seconds.values()) / step.step_seconds if step.step_seconds else 0.0
    held = cost.memory_bytes + cost.peak_bytes
    speed = topology.link.bytes_per_second * 8
    named = f"{speed / 1e9:g} Gbit/s" if speed >= 1e9 else f"{speed / 1e6:.3g} Mbit/s"
    where = f"{topology.workers} workers at {named}" if topology.workers > 1 else "1 worker"
    share = f"{waits:.0%} of a step waits for the network"
    what, full = "the network" if waits > MOSTLY else "compute", held / topology.memory_bytes
    memory = f"memory is {full:.0%} full"
    if topology.memory_bytes > FULL:
        memory = "no limit of memory was given"
    elif full > 1:
        what = "memory"
        memory = f"the plan by price needs {bytes_text(held)}, a rank has {bytes_text(topology.memory_bytes)}"
    return f"Bottleneck: {what}. On {where} {share}; {memory}."


def _not_exact(departures: Iterable[str]) -> str:
    return ", ".join(DEPARTURES[word].removeprefix("NOT exact: ") for word in departures)


def _legend(rows: Sequence[Row]) -> str:
    """What the words mean that are used."""
    words = [word for word in DEPARTURES if any(word in row.advice.departures for row in rows)]
    said = [f"{word}: {_not_exact([word])}" for word in words]
    return "; ".join([*said, *([f"{TOO_MUCH}: more than a rank has"] if not all(row.fits for row in rows) else [])])


def _left_out(row: Row) -> str:
    return _clipped(f"  {row.method}: {' '.join(row.advice.reason.split())}", WIDTH)


def _clipped(text: str, width: int = 42) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."


def plot_advice(points: Sequence[MethodPoint], sentence: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for one in points:
        x, y = one.seconds * 1e3, one.held_bytes / MIB
        axes.plot(x, y, "o", color="#4169b1", markerfacecolor="#4169b1" if one.is_exact else "white", markersize=8)
        axes.annotate(one.method, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    front = _frontier(points)
    axes.plot(
        [one.seconds * 1e3 for one in front], [one.held_bytes / MIB for one in front], "-", color="#999999", linewidth=1
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("milliseconds a step (forecast)")
    axes.set_ylabel("MiB a rank at the peak (forecast)")
    axes.set_title(sentence, fontsize=9)
    axes.plot([], [], "o", color="#4169b1", label="exact")
    axes.plot([], [], "o", color="#4169b1", markerfacecolor="white", label="not exact")
    axes.plot([], [], "-", color="#999999", label="nothing is quicker and smaller")
    axes.legend(fontsize=8)
    return figure


def _frontier(points: Sequence[MethodPoint]) -> list[MethodPoint]:
    """Those that no other is quicker than with as little memory."""
    found: list[MethodPoint] = []
    for one in sorted(points, key=lambda one: (one.seconds, one.held_bytes)):
        if not found or one.held_bytes < found[-1].held_bytes:
            found.append(one)
    return found
