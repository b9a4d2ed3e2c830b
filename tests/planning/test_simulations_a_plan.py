"""How often a plan is played against a clock while it is made, and what spares that: a bound that no step is below."""

import json
from pathlib import Path

import pytest

from armillary.planning import simulator
from armillary.planning.activities import least_seconds
from armillary.planning.planner import plan
from armillary.plans import Profile, Topology

RESULTS = Path(__file__).parents[2] / "benchmarks" / "planner" / "results"
EVERY = sorted(path.stem for path in RESULTS.glob("*.json") if "_8_" not in path.stem)
LINKS = 8  # cells of a workload; of one workload every other, of the next those between
CELLS = [cell for number, cell in enumerate(EVERY) if (number + number // LINKS) % 2 == 0]
MOST = 6


@pytest.fixture
def played(monkeypatch):
    """(plan, case, seconds) of every step that is played."""
    simulator._simulated.cache_clear()
    found, play = [], simulator._Play.simulation

    def watched(self):
        answer = play(self)
        found.append((self.plan, self.case, answer.step_seconds))
        return answer

    monkeypatch.setattr(simulator._Play, "simulation", watched)
    return found


@pytest.mark.parametrize("cell", CELLS)
def test_a_plan_is_played_a_few_times_and_no_step_is_below_its_bound(cell, played):
    kept = json.loads((RESULTS / f"{cell}.json").read_text())
    profile, topology = (
        kind.from_json(json.dumps(kept[name])) for kind, name in ((Profile, "profile"), (Topology, "topology"))
    )
    made = plan(profile, topology)
    assert 0 < len(played) <= MOST
    assert plan(profile, topology) == made and len(played) <= MOST
    plan(profile, topology, prefetch=None, allow=("lossy",), steps_by_run=True)
    for one, case, seconds in played:
        assert one.stages or least_seconds(one, case) <= seconds * (1 + 1e-9), one
