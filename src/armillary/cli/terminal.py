"""What a training run looks like on a terminal: tables before and after, a moving line between.

Puts a page of paragraphs and tables before the user: drawn on a terminal, as plain text in a file or a pipe.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.table import Table as DrawnTable

from armillary.plans.group import Forecast
from armillary.plans.plan import Plan
from armillary.plans.profile import Profile
from armillary.plans.topology import Topology
from armillary.plans.units import (
    WIDTH,
    Page,
    Part,
    Picture,
    Table,
    bytes_text,
    count_text,
    page_text,
    seconds_text,
    wrapped,
)
from armillary.schedules.registry import options_of
from armillary.session.events import Ended, Evaluated, Event, NothingLeft, PlannedJob, Progress, Resumed, Saved, Warned
from armillary.session.health import health_table
from armillary.session.report import Comparison, comparison_table
from armillary.session.train_settings import validation_interval

__all__ = [
    "ProgressLine",
    "as_json",
    "comparison_page",
    "console_here",
    "decided_page",
    "drain",
    "ended_page",
    "put",
    "show",
    "tell",
]


def console_here(is_aside: bool = False) -> Console:
    """That of stdout, or aside of it on stderr; no wider than a page."""
    console = Console(stderr=is_aside, soft_wrap=True, highlight=False, markup=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def put(console: Console, page: Iterable[Part]) -> None:
    """Prints it, an empty line behind. Where lines can be drawn it is as narrow as the terminal, its first paragraph in
    bold."""
    page = tuple(page)
    if not console.is_terminal:
        console.print(page_text(page) + "\n")
        return
    for place, part in enumerate(page):
        if isinstance(part, Table):
            console.print(_drawn(part, console.width))
        elif isinstance(part, Picture):
            console.print(f"{part}\n")
        else:
            console.print(wrapped(part, console.width) + "\n", style="bold" if place == 0 else None)


def tell(text: str) -> None:
    """A line to who sits there and waits: what takes its time now. A pipe or a file gets none."""
    if (console := console_here(is_aside=True)).is_terminal:
        console.print(text)


def _drawn(table: Table, width: int) -> DrawnTable:
    narrow = table.folded(width)
    drawn = DrawnTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, head in enumerate(narrow.header):
        drawn.add_column(head, justify="left" if place in table.left else "right", no_wrap=True)
    for row in narrow.rows:
        drawn.add_row(*row)
    return drawn


BAR = 20  # characters
LINE_SECONDS = 10.0


def decided_page(decided: PlannedJob, is_verbose: bool) -> Page:
    """The plan and the machines; if asked for, what was seen of the model below them."""
    topology = decided.topology
    link = topology.link
    speed = f"{link.bytes_per_second * 8 / 1e9:.2f} Gbit/s, {seconds_text(link.latency_seconds)} latency"
    machines = f"{topology.nodes} node(s) of {topology.workers_per_node}, link {speed}"
    memory = f"{bytes_text(topology.memory_bytes)} per worker, {topology.backend}"
    parts = [*decided.plan.page(), f"machines: {machines}, {memory}"]
    if drawn := options_of(decided.plan).picture():
        parts.append(Picture(drawn))
    return (*parts, *(decided.profile.page() if is_verbose else ()))


def show(events: Iterable[Event], steps: int, unit: str, folder: Path, is_verbose: bool) -> None:
    """Draws the events as they come: a moving line on a terminal, now and then a line elsewhere."""
    console = console_here()
    line = ProgressLine(steps, unit)

    def say(text: str, style: str | None = None) -> None:
        """In a file it is one line, as long as it is."""
        console.print(wrapped(text, console.width) if console.is_terminal else text, style=style)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        for event in events:
            if not isinstance(event, Progress | Evaluated):
                line.passed()  # planning and saving are no part of a step
            match event:
                case PlannedJob():
                    put(console, decided_page(event, is_verbose))
                case Warned(text):
                    console.print(wrapped(f"warning: {text}", console.width), style="yellow")
                case Resumed(step, path, remark):
                    line.begin(step)
                    say("; ".join(filter(None, (f"going on after step {step} from {path}", remark))))
                case NothingLeft(done):
                    say(f"step {done} was reached before: nothing is left to do, and {folder} stays as it was")
                case Saved(step, path):
                    say(f"saved step {step}: {path}", "dim")
                case Ended():
                    say(f"{line.text()}\n")
                    put(console, ended_page(event, unit, folder))
                case Progress() | Evaluated():
                    line.take(event)
                    live.update(line.drawn(), refresh=True)
                    if not console.is_terminal and line.is_due():
                        say(line.text())


class ProgressLine:
    """The line that moves: the latest of everything."""

    def __init__(self, steps: int, unit: str, clock: Callable[[], float] = time.monotonic):
        self.steps, self.unit, self.clock = steps, unit, clock
        self.step = self.first = self.looks = 0
        self.seen_seconds = self.said_seconds = clock()
        self.training_seconds = self.looking_seconds = 0.0
        self.parts: dict[str, str] = {}

    def begin(self, step: int) -> None:
        self.step = self.first = step

    def passed(self) -> float:
        """Seconds since it was last asked; between two events the run did what the second tells of."""
        before, self.seen_seconds = self.seen_seconds, self.clock()
        return self.seen_seconds - before

    def take(self, event: Progress | Evaluated) -> None:
        self.step = event.step
        if isinstance(event, Evaluated):
            self.looking_seconds += self.passed()
            self.looks += 1
            name, value = list(event.metrics.items())[-1]
            self.parts["held out"] = (
                f"held-out {name.replace('_', ' ')} {value:.4g}{'' if event.is_whole else ' (sample)'}"
            )
        else:
            self.training_seconds += self.passed()
            self.parts["rate"] = f"{count_text(event.samples_per_second)} {self.unit}/s"
            self.parts["loss"] = f"loss {event.loss:.3f}"
            self.parts["sent"] = f"{event.sent_bytes / 1e6:.2f} MB sent/step"

    def is_due(self) -> bool:
        """Whether it is time for another line where lines do not move. The last one is left to the end of the run."""
        now = self.clock()
        if self.step == self.steps or now - self.said_seconds < LINE_SECONDS:
            return False
        self.said_seconds = now
        return True

    def text(self) -> str:
        """What stands most to the left matters most: a narrow terminal cuts the right."""
        parts = [self.parts[key] for key in ("loss", "rate", "held out", "sent") if key in self.parts]
        return " | ".join((f"step {self.step}/{self.steps}", f"{self._left()} left", *parts))

    def drawn(self) -> RenderableType:
        """On a terminal: a bar before it, one line however narrow that is."""
        row = DrawnTable.grid(Column(width=BAR), Column(no_wrap=True, overflow="ellipsis"), padding=(0, 1))
        row.add_row(ProgressBar(total=self.steps, completed=self.step, width=BAR), self.text())
        return row

    def _left(self) -> str:
        """Of the steps and the short evaluations that are still to come, each as long as those before."""
        done, more = self.step - self.first, self.steps - self.step
        to_train = self.training_seconds * more / done if done else 0.0
        each = validation_interval(self.steps)
        looks_to_come = -(-self.steps // each) - self.first // each - self.looks
        to_look = self.looking_seconds * looks_to_come / self.looks if self.looks else 0.0
        seconds = round(to_train + to_look) if more else 0
        return f"{seconds // 60}:{seconds % 60:02}"


def ended_page(ended: Ended, unit: str, folder: Path) -> Page:
    """Held-out metrics and the pace, then forecast beside measured."""
    lines = []
    for name, value in ended.metrics.items():
        simple = f" (a simpler method: {ended.baseline[name]:.4g})" if name in ended.baseline else ""
        lines.append(f"held-out {name.replace('_', ' ')}: {value:.4g}{simple}")
    rate = f"{count_text(ended.samples_per_second)} {unit}/s"
    lines.append(f"{rate}, {seconds_text(ended.step_seconds)} a step; everything is under {folder}")
    return ("\n".join(lines), *comparison_page(ended))


def comparison_page(ended: Ended) -> Page:
    """Forecast beside measured: bytes sent, memory and seconds of every group and of the whole step."""
    sent = sum(line.measured.sent_bytes for line in ended.comparison)
    measured = Forecast(sent, ended.peak_bytes, ended.step_seconds)
    table = comparison_table((*ended.comparison, Comparison("step", "", ended.forecast, measured)))
    legend = (
        "per worker; memory of a group: its tensors between steps, of the step: all tensors in its fullest moment (the "
        f"process grew by {bytes_text(ended.resident_bytes)});\ntime of a group: in flight, overlapping; of the step: "
        "the median, from batch to update"
    )
    return (table, legend, *([health_table(ended.health)] if ended.health else []), *ended.beside)


def drain(events: Iterable[Event]) -> Ended | NothingLeft:
    """Runs the events through without showing them."""
    for event in events:
        last = event
    assert isinstance(last, Ended | NothingLeft), last
    return last


def as_json(thing: Any) -> str:
    """One JSON object; what JSON has no number for is null."""
    return json.dumps(_plain(thing))


def _plain(thing: Any) -> Any:
    if isinstance(thing, Plan | Profile | Topology):
        return _plain(json.loads(thing.to_json()))  # as their files are, so that they open as such
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: _plain(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if isinstance(thing, Mapping):
        return {str(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [_plain(item) for item in thing]
    if isinstance(thing, Path):
        return str(thing)
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing
