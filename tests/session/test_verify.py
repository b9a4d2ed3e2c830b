"""Laws of `verify`: N workers are one process, under every exchange; and what is not equal is not called equal."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from armillary.cli.names import find, small
from armillary.exchanges import dense_exchanges, row_exchanges
from armillary.plans import Choice
from armillary.session.double_precision import InDouble, uniform_plan
from armillary.session.plan_job import JobRequest, model_to_plan, plan_job
from armillary.session.verification import TOLERANCE
from armillary.session.verify import verify_workload


def workload_of(name, **options):
    return find(name, {**small(name), **options})


def verify_one(rank, workers, name, options):
    torch.set_num_threads(1)
    return verify_workload(workload_of(name, **options), steps=3)


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("language_model", 1),
        ("language_model", 2),
        ("recommender", 4),
        ("translation", 3),
        ("vision", 2),
        ("vision", 3),
    ],
)
def test_workers_train_as_one_process_does_under_every_exchange(crew, name, workers):
    found, *others = crew(workers).run(verify_one, name, {})
    assert found.is_equal, str(found)
    assert all(other == found for other in others)
    assert found.workers == workers
    judged = [one for one in found.differences if one.verdict == "equal"]
    trained = {one.parameter for one in found.differences}
    assert {one.parameter for one in judged} >= trained - {one.parameter for one in found.differences if is_bias(one)}
    exchanges = {one.exchange.partition("(")[0] for one in judged}
    assert {"all_reduce", "owned_dense"} <= exchanges
    if name != "vision":  # the others read tables by row
        exact = {name for name, entry in dense_exchanges().items() if not entry.departs}
        assert {*exact, *row_exchanges()} <= exchanges


def is_bias(difference):
    """A tensor whose gradient is truly zero: a bias that a normalisation or a softmax takes out again."""
    return difference.verdict == "no gradient" and "bias" in difference.parameter


def verify_norm(rank, workers, norm, joined):
    task = workload_of("vision", norm=norm)
    whole = workload_of("vision", norm=norm, batch_size=task.batch_size * workers) if joined else None
    return verify_workload(task, steps=2, exchanges=(), global_batch=whole)


def test_batch_statistics_of_each_worker_are_those_of_one_process_over_the_same_batches(crew):
    assert crew(2).run(verify_norm, "batch", False)[0].is_equal


def test_group_norm_trains_as_one_process_with_one_big_batch(crew):
    assert crew(2).run(verify_norm, "group", True)[0].is_equal


def test_batch_norm_is_not_called_equal_to_one_big_batch(crew):
    found = crew(2).run(verify_norm, "batch", True)[0]
    assert not found.is_equal
    assert max(one.difference for one in found.differences) > 1e-6
    assert "NOT equal" in str(found)


@dataclasses.dataclass(frozen=True)
class WithMomentum:
    """The language model under an optimizer that moves rows without gradient."""

    inner: object

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def verify_sabotaged(rank, workers, sabotage):
    task = WithMomentum(workload_of("language_model"))
    decided = plan_job(model_to_plan(InDouble(task), 0), JobRequest())
    plan = uniform_plan(decided.profile, Choice("owned_rows"))
    group = plan.group_of("embedding.weight")
    return verify_workload(task, request=JobRequest(plan=plan.with_group(sabotage(group))), exchanges=())


def as_it_was(group):
    return group


def lazy(group):
    return dataclasses.replace(group, departures=("lazy",))


def test_a_plan_that_moves_touched_rows_only_is_not_called_exact(crew):
    assert crew(2).run(verify_sabotaged, as_it_was)[0].is_equal
    found = crew(2).run(verify_sabotaged, lazy)[0]
    assert "embedding.weight" in [one.parameter for one in found.differences if one.difference > 1e-6]
    assert not found.is_equal


class OwnScale(nn.Module):
    """A model of one's own whose loss depends on how many processes there are: what verify is there to find."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 3)
        self.unread = nn.Parameter(torch.ones(2))


@dataclasses.dataclass(frozen=True)
class Cheater:
    name: str = "cheater"
    unit: str = "rows"
    steps: int = 3
    batch_size: int = 4
    rank_matters: bool = False
    makes_noise: bool = False

    def model(self):
        return OwnScale()

    def optimizer(self, parameters):
        return torch.optim.Adam(parameters, lr=0.1)

    def batches(self, split, worker, workers, seed):
        draw = torch.Generator().manual_seed(seed + worker)
        for _ in range(8):
            yield {"ids": torch.randint(0, 20, (4,), generator=draw), "worker": worker}

    def loss(self, model, batch) -> Tensor:
        rows = model.table(batch["ids"])
        if self.makes_noise:
            rows = nn.functional.dropout(rows, 0.5)
        factor = 1 + torch.distributed.get_rank() if self.rank_matters else 1
        return factor * (rows**2).sum()

    def samples(self, batch):
        return 4

    def evaluate(self, model, batch):
        return {"n": 4.0}

    def report(self, totals):
        return totals


def verify_cheater(rank, workers, fields):
    return verify_workload(Cheater(**fields), exchanges=("owned_rows",))


def test_a_loss_that_depends_on_the_rank_is_not_called_equal(crew):
    assert not crew(2).run(verify_cheater, {"rank_matters": True})[0].is_equal


def test_random_layers_draw_each_workers_own_stream_in_both(crew):
    assert crew(3).run(verify_cheater, {"makes_noise": True})[0].is_equal


def test_what_no_batch_reads_is_listed_apart_and_not_judged(crew):
    found = crew(2).run(verify_cheater, {})[0]
    assert {one.verdict for one in found.differences if one.parameter == "unread"} == {"no gradient"}
    assert "not judged, since the true gradient is zero: unread" in str(found)
    assert found.tolerance == TOLERANCE


def test_a_workload_in_float64_casts_what_is_real_and_keeps_what_counts():
    double = InDouble(workload_of("vision"))
    images, labels = next(double.batches("train", 0, 1, 0))
    assert (images.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert {parameter.dtype for parameter in double.model().parameters()} == {torch.float64}
