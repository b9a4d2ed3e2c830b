"""A run whose tables an older version had moved to other owners goes on with their values, and says whose they are."""

import shutil
from pathlib import Path

import torch
from torch import nn

from armillary.planning.request import PlanRequest
from armillary.session.events import Resumed, Warned
from armillary.session.plan_job import JobRequest
from armillary.session.train import train
from armillary.session.train_settings import Settings
from planning_cases import machines

FOLDER = Path(__file__).parents[1] / "fixtures" / "format_2" / "moved_owners"
V, READ = 41, 40


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.marks = nn.Embedding(V, 3), nn.Parameter(torch.randn(V))
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        ids, marks, target = batch
        return (self.head(self.words(ids)).squeeze(1) + self.marks[marks] - target).square().mean()


class Drifting:
    """What the fixture was trained on."""

    name, unit, steps, batch_size = "drifting", "words", 12, READ

    def model(self):
        return Two().double()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def batches(self, split, worker, workers, seed):
        for step in range(12):
            draw = torch.Generator().manual_seed(97 * worker + step)
            ids = torch.randint(0, READ, (8,), generator=draw)
            yield ids, ids, torch.rand(8, generator=draw, dtype=torch.float64)

    def loss(self, model, batch):
        return model(batch)

    def samples(self, batch):
        return len(batch[0])

    def evaluate(self, model, batch):
        return {"squares": float(model(batch)), "batches": 1.0}

    def report(self, totals):
        return {"mean_square": totals["squares"] / totals["batches"]}


def gone_on(rank, world, folder):
    wanted = {"words.weight": "owned_rows", "marks": "owned_rows"}
    request = JobRequest(PlanRequest(wanted), topology=machines(world, megabits=1.0, latency=1e-6))
    settings = Settings(Path(folder), steps=10, every_seconds=0.0, resume=True, request=request)
    return list(train(Drifting(), settings))


def test_it_goes_on_with_their_values_and_says_who_owns_them(crew, tmp_path):
    shutil.copytree(FOLDER, tmp_path / "checkpoints")
    events = crew(2).run(gone_on, str(tmp_path))[0]
    assert [event.step for event in events if isinstance(event, Resumed)] == [9]
    (said,) = [event.text for event in events if isinstance(event, Warned) and "owners" in event.text]
    assert "--rebalance-every, which no longer exists" in said and "(--exchange)" in said
