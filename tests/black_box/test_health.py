"""What `run.report()` and `train` say of groups that are not exact, and of replicas that are no longer alike."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss

import face
from armillary import Choice
from armillary.cli.terminal import ended_page
from armillary.planning.request import PlanRequest
from armillary.plans import page_text
from armillary.session.plan_job import JobRequest
from armillary.session.train import train
from armillary.session.train_settings import Settings
from contracts.journey import of_few_tensors


def begun(plan):
    model = made(Reader)
    return face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)


def plan_by(text, workers=2):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    return face.plan_for(made(Reader), word_loss, batches, workers, exchange={"*": Choice.parse(text)})


def reported(rank, workers, plan):
    """Five steps by hand, of which the third overflows on rank 1; the report, and what this rank can tell by itself."""
    run = begun(plan)
    for step in range(5):
        run.optimizer.zero_grad()
        loss = word_loss(run.model, word_batch(rank, step))
        (loss * float("inf") if (rank, step) == (1, 2) else loss).backward()
        if all(bool(p.grad.isfinite().all()) for p in run.model.parameters() if p.grad is not None):
            run.optimizer.step()
    report, parts = run.run.report(), []
    for unit in run.run._engine.executor.units:
        weights = torch.cat([p.detach().view(-1) for p in unit.parameters]).norm()
        waiting, real = unit.state["residual"], sum(p.numel() for p in unit.parameters)
        parts.append((float(waiting.norm() / weights), int(waiting.count_nonzero()) / real))
    face.close(run)
    return report, parts


DENSITY = {"top_k(keep=0.25)": lambda waiting: 0.25, "threshold(sparsity=0.9, small=0)": lambda waiting: 1 - waiting}


@pytest.mark.parametrize("text", DENSITY)
def test_a_report_says_how_much_is_sent_how_much_waits_and_what_was_skipped(crew, text):
    (report, first), (other, second) = crew(2).run(reported, plan_by(text))
    assert report.health == other.health and len(report.health) == len(first) > 0
    for one, *ranks in zip(report.health, first, second, strict=True):
        assert one.residual == pytest.approx(sum(share for share, _ in ranks) / 2) and one.residual > 0
        assert one.density == pytest.approx(sum(DENSITY[text](waiting) for _, waiting in ranks) / 2)
        assert one.skipped == pytest.approx(1 / 5) and one.exchange == str(Choice.parse(text))
    assert "residual : weights" in str(report) and "values sent" in str(report)


def ended_by(rank, workers, folder, text):
    request = JobRequest(PlanRequest(constraints={"*": Choice.parse(text)} if text else {}))
    settings = Settings(Path(folder), steps=3, every_seconds=0, request=request)
    *_, ended = train(of_few_tensors(), settings)
    return page_text(ended_page(ended, "images", Path(folder)))


def test_train_says_it_at_its_end_and_an_exact_run_says_nothing_of_it(crew, tmp_path):
    lossy = crew(2).run(ended_by, tmp_path / "lossy", "quantize(bits=4)")[0]
    assert "residual : weights" in lossy and "quantize(bits=4)" in lossy
    dropped = crew(2).run(ended_by, tmp_path / "dropped", "quantize(bits=4, feedback=False)")[0]
    assert re.search(r"bucket 0 +quantize\(.*\) +1 +- +0\b", dropped), "what keeps no residual does not have one of 0"
    assert "residual" not in crew(2).run(ended_by, tmp_path / "exact", "")[0]


def drifted(rank, workers, plan, share):
    """Rank 1 changes one number of a parameter after the third step; what was raised and warned of by the tenth."""
    run, raised = begun(plan), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(10):
                face.step(run, [word_batch(rank, step)])
                if (rank, step) == (1, 2):
                    with torch.no_grad():
                        weight = dict(run.model.named_parameters())["words.weight"]
                        weight[0, 0] += share * weight.norm()
        except RuntimeError as error:
            raised = str(error)
    run.run._give_up(RuntimeError("done")) if raised else face.close(run)
    return raised, [str(one.message) for one in caught if "alike" in str(one.message)]


def test_a_parameter_that_one_rank_changed_is_named_on_all_ranks(crew):
    for rank, (raised, _) in enumerate(crew(2).run(drifted, plan_by("all_reduce"), 1e-3)):
        assert raised.startswith(f"rank {rank}: after step 10 the ranks no longer hold words.weight")
        assert "rank 1 is 1.0e-03 of its norm away from rank 0" in raised


def test_what_is_little_more_than_rounding_is_warned_of_once_and_replicas_that_are_alike_say_nothing(crew):
    (raised, warned), (other, quiet) = crew(2).run(drifted, plan_by("quantize(bits=8)"), 1e-9)
    assert not raised and not other and not quiet and len(warned) == 1 and "rank 1 is 1.0e-09" in warned[0]
    assert crew(2).run(drifted, plan_by("all_reduce"), 0.0) == [("", [])] * 2
