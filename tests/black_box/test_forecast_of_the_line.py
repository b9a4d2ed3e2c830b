"""What the one line says of a step: nothing while nobody knows, then one figure that comes true."""

import contextlib
import io
import re
import statistics
import time

import torch
from torch import nn
from torch.nn import functional

import armillary

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
