"""A step of a plan played for a script: printed, and kept as a trace, as `armillary simulate` does."""

import json
from dataclasses import dataclass
from pathlib import Path

from armillary.facts.plan import Plan
from armillary.facts.profile import Profile
from armillary.facts.table import Page, Table, page_text
from armillary.facts.topology import Topology
from armillary.planning.pricing import Case, assumptions_behind
from armillary.planning.simulation import Simulation
from armillary.planning.simulator import simulate as play
from armillary.session.folder import open_folder
from armillary.session.foresight.timeline import chrome_trace

__all__ = ["Simulated", "simulate"]


@dataclass(frozen=True)
class Simulated:
    """A step as it was played, under a title, with what was taken for granted. It prints."""

    title: str
    played: Simulation
    assumptions: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        return self.played.step_seconds

    def save(self, folder: str | Path) -> Path:
        """Writes timeline.json, which Perfetto and chrome://tracing open; its path.

        Raises:
            ValueError: the folder cannot be written.
        """
        open_folder(Path(folder))
        trace = Path(folder) / "timeline.json"
        trace.write_text(json.dumps(chrome_trace(self.played)))
        return trace

    def page(self) -> Page:
        """What it prints, its table apart."""
        played = self.played
        exposed, rows = played.exposed_seconds, []
        for flight in played.flights:
            times = (f"{flight.launch_seconds * 1e3:,.2f}", f"{flight.seconds * 1e3:,.2f}")
            rows.append((flight.group, flight.action, *times, f"{flight.sent_bytes / 1e3:,.1f}"))
        table = Table(("exchange", "action", "starts ms", "in flight ms", "sent kB"), rows, (0, 1))
        waits = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in exposed.items()) or "nothing"
        total = f"step of {played.workers} workers: {played.step_seconds * 1e3:.2f} ms"
        busy = f"processor {played.processor_seconds * 1e3:.2f} ms"
        return f"{total}: {busy}, not hidden {sum(exposed.values()) * 1e3:.2f} ms ({waits})", table, *self.assumptions

    def __str__(self) -> str:
        return page_text(self.page())


def simulate(plan: Plan, profile: Profile, topology: Topology) -> Simulated:
    """Plays one step of the plan on these machines, in this process, which needs no other. `print` it, or `.save` it.

    Args:
        profile: of the model that the plan was made for.
        topology: need not be the one that the plan was made for; `topology.of(n)` is the same with n workers.

    Raises:
        ValueError: the plan is for another model, nobody priced it, or its schedule is not played yet.
    """
    played = play(plan, Case(profile, topology, assumptions_behind(plan)))
    return Simulated(f"plan for {plan.workers} workers", played)
