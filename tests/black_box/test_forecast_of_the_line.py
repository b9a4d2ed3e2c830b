"""What the one line says of a step: nothing while nobody knows, then one figure that comes true."""

import contextlib
import io
import re
import statistics
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import armillary
from armillary.planning.pricing import Case, assumptions_behind
from armillary.session.forecast_correction import TimedStep, corrected_facts
from planning_cases import dense, machines, model, table

ROWS, WIDTH, STEPS = 400, 8, 60
SLOW_SECONDS = 0.003  # of every forward
LINE = re.compile(r"armillary: a step is forecast to take ([\d.]+) ms, of it ([\d.]+) ms without waits")


class Slow(nn.Module):
    """A forward takes as long as it is told; where parameters are first met it takes longer."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 3)
        self.met = 0

    def forward(self, words):
        self.met += 1
        hidden = torch.tanh(self.words(words).sum(1))
        time.sleep(SLOW_SECONDS * (10 if self.met < 3 else 1))
        return self.out(hidden)


def trained(rank, world, late_seconds):
    """What was printed; the forecast before, and the report; the step's forecast and what later steps took."""
    torch.manual_seed(1)
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw, taken = torch.Generator().manual_seed(rank), []
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = armillary.parallelize(model, optimizer)
        for step in range(STEPS):
            began = time.perf_counter()
            optimizer.zero_grad()
            words = torch.randint(ROWS, (8, 4), generator=draw)
            functional.cross_entropy(model(words), words[:, 0] % 3).backward()
            time.sleep(late_seconds if rank else 0.0)
            optimizer.step()
            taken.append(time.perf_counter() - began)
            if step == 5:
                before, early = run.plan, str(run.report())
    after, late = run.plan, str(run.report())
    run.close()
    return said.getvalue(), (str(before), early), (after.step_seconds, late), statistics.median(taken[-15:])


def test_a_step_is_not_known_until_it_was_timed_and_comes_true_then(crew):
    found = crew(2).run(trained, 0.0)
    (said, (before, early), (step_seconds, late), taken), other = found
    assert "what a step takes is not known yet" in before and "not known yet" in said
    assert re.search(r"compute .*not known yet", before), before
    assert "(forecast not known yet)" in early
    assert [bool(LINE.search(line)) for line in said.splitlines()].count(True) == 1
    assert LINE.search(said) and not LINE.search(other[0]), "rank 0 alone says it"
    assert "the first forecast, of watched steps, was" in said
    first = float(re.search(r"watched steps, was ([\d.]+) ms", said).group(1))
    assert first > 8e3 * SLOW_SECONDS, "watched steps are slow, and the plan was made of them"
    assert step_seconds >= SLOW_SECONDS
    assert abs(step_seconds / taken - 1) < 0.5, (step_seconds, taken)
    assert other[2][0] == step_seconds, "ranks have one plan"
    assert f"(forecast {step_seconds * 1e3:.2f} ms)" in late


def test_of_ranks_at_different_pace_the_slowest_counts_and_its_wait_does_not(crew):
    (said, _, (step_seconds, _), taken), _ = crew(2).run(trained, 0.01)
    own = float(LINE.search(said).group(2)) / 1e3
    assert SLOW_SECONDS + 0.01 <= own < 0.03 and abs(step_seconds / taken - 1) < 0.5, (own, step_seconds, taken)


@pytest.mark.parametrize("times", [0.5, 1.0, 2.5], ids="links measured {} times too slow".format)
def test_waits_of_timed_steps_correct_links_that_were_measured_wrong(times):
    profile = model(dense("head.weight", 20_000), table(rows=20_000), workers=2, seconds=0.004)
    right = machines(nodes=2, latency=8e-4)
    measured = machines(nodes=2, latency=times * 8e-4, megabits=1000.0 / times)
    plan = armillary.plan(profile, right)
    true = armillary.simulate(plan, profile, right).played
    timed = TimedStep(true.processor_seconds, sum(true.exposed_seconds.values()))
    found = corrected_facts(plan, Case(profile, measured, assumptions_behind(plan)), timed)
    corrected = armillary.simulate(plan, found.profile, found.topology).step_seconds
    assert corrected == pytest.approx(true.step_seconds, rel=0.05)
    blind = corrected_facts(
        plan, Case(profile, measured, assumptions_behind(plan)), timed._replace(waited_seconds=None)
    )
    left = armillary.simulate(plan, blind.profile, blind.topology).step_seconds
    assert (abs(left / true.step_seconds - 1) > 0.15) == (times != 1.0), "without the waits the links stay wrong"


def test_hidden_requests_say_nothing_of_links():
    profile = model(*(dense(f"{at}.weight", 1000, arrival=at) for at in range(3)), workers=2, seconds=0.1)
    plan = armillary.plan(profile, machines(nodes=2))
    case = Case(profile, machines(nodes=2), assumptions_behind(plan))
    assert corrected_facts(plan, case, TimedStep(0.1, 0.0)).topology.between == case.topology.between
