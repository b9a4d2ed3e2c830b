"""`keep=FOLDER`: a restart of the same job has the same plan and measures nothing; another one says why it does not."""

import contextlib
import io
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

import armillary
from armillary.session import parallelize
from armillary.session import plan_job as decide

ROWS, WIDTH = 3000, 8
USED = "plan and links are those of an earlier start; nothing is measured"


class Words(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.words, self.out = nn.Embedding(ROWS, width), nn.Linear(width, 3)

    def forward(self, words):
        return self.out(torch.tanh(self.words(words).sum(1)))


def loss(model, batch):
    return functional.cross_entropy(model(batch), batch[:, 0] % 3)


def batches(rank, size, lengths=(4,)):
    draw = torch.Generator().manual_seed(rank)
    while True:
        for length in lengths:
            yield torch.randint(ROWS, (size, length), generator=draw)


@contextlib.contextmanager
def counted():
    """How often links are measured inside."""
    calls, before = [], (decide.measure, parallelize.measure_links)

    def counting(transport):
        calls.append(1)
        return before[1](transport)

    decide.measure = parallelize.measure_links = counting
    try:
        yield calls
    finally:
        decide.measure, parallelize.measure_links = before


def started(rank, world, folder, *, steps=4, width=WIDTH, size=8, lengths=(4,), form="watched", lr=0.1, **asked):
    """The plan after some steps, that after the first, how often links were measured, what was printed, the weights."""
    torch.manual_seed(1)
    model = Words(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    drawn, plans = batches(rank, size, lengths), []
    more = {} if form == "watched" else {"batches": batches(0, size, lengths), "loss": loss}
    with counted() as calls, contextlib.redirect_stdout(io.StringIO()) as said:
        run = armillary.parallelize(model, optimizer, keep=folder, **more, **asked)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(model, next(drawn)).backward()
            optimizer.step()
            plans.append(run.plan)
    state = run.export()
    run.close()
    return plans[-1], plans[0], len(calls), said.getvalue(), None if state is None else state["model"]


@pytest.mark.parametrize("form", ["watched", "given"])
def test_a_restart_has_the_same_plan_from_its_first_step_and_measures_nothing(crew, tmp_path, form):
    job, where = crew(2), tmp_path / "kept"
    (first, _, calls, said, state), _ = job.run(kept_as, where, {"form": form})
    assert calls == 1 and USED not in said and not list(where.glob("*.draft"))
    (again, early, calls, said, same), (theirs, *_) = job.run(kept_as, where, {"form": form, "lr": 0.1})
    assert calls == 0 and said.count(USED) == 1 and str(where) in said
    assert again == early == theirs == first, "under the plan as it was kept, after one step"
    assert all(torch.equal(state[name], same[name]) for name in state)


def kept_as(rank, world, folder, how):
    return started(rank, world, folder, **how)


OTHERS = {
    "another model": {"width": 12},
    "another batch shape (16x4, 16x4, kept": {"size": 16},
    "other arguments": {"constraints": {"words.weight": "row_sharded"}},
}


@pytest.mark.parametrize("why", OTHERS)
def test_what_a_plan_hangs_on_is_measured_anew_where_it_is_another_and_said(crew, tmp_path, why):
    job = crew(2)
    job.run(kept_as, tmp_path, {})
    (plan, _, calls, said, _), (other, *_) = job.run(kept_as, tmp_path, OTHERS[why])
    assert calls == 1 and USED not in said and plan == other
    assert f"all is measured anew: {why.split(' (')[0]}" in said
    (plan, _, calls, said, _), _ = job.run(kept_as, tmp_path, OTHERS[why])
    assert calls == 0 and USED in said, "and it is what is kept then"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [("torch", "1.0", "another torch"), ("hosts", ["a", "b"], "other ranks or hosts"), ("hosts", ["a"], "number of")],
)
def test_another_torch_host_or_number_of_ranks_is_told_by_name(crew, tmp_path, field, value, why):
    job = crew(2)
    job.run(kept_as, tmp_path, {"steps": 2})
    kept = json.loads((tmp_path / "made_for.json").read_text())
    (tmp_path / "made_for.json").write_text(json.dumps({**kept, field: value}))
    (_, _, calls, said, _), _ = job.run(kept_as, tmp_path, {"steps": 2})
    assert calls == 1 and why in said


def test_batches_that_vary_in_length_are_one_shape(crew, tmp_path):
    job = crew(2)
    job.run(kept_as, tmp_path, {"lengths": (4, 6)})
    (_, _, calls, said, _), _ = job.run(kept_as, tmp_path, {"lengths": (9,)})
    assert calls == 0 and USED in said


def test_a_kept_file_that_is_cut_short_is_none(crew, tmp_path):
    job = crew(2)
    job.run(kept_as, tmp_path, {"steps": 2})
    (tmp_path / "plan.json").write_text("{")
    (_, _, calls, said, _), _ = job.run(kept_as, tmp_path, {"steps": 2})
    assert calls == 1 and "measured anew: it cannot be read" in said


def test_the_corrected_forecast_is_kept_too(crew, tmp_path):
    job = crew(2)
    (first, *_), _ = job.run(kept_as, tmp_path, {"steps": 41})
    assert first.is_timed
    (again, _, calls, said, _), _ = job.run(kept_as, tmp_path, {"steps": 2})
    assert calls == 0 and again == first and "not known yet" not in said


def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(crew, tmp_path):
    (tmp_path / "file").write_text("")
    for said in crew(2).run(refused, tmp_path / "file"):
        assert "cannot write to" in said


def refused(rank, world, folder):
    with pytest.raises(ValueError, match="run: ") as caught:
        started(rank, world, folder)
    return str(caught.value)
