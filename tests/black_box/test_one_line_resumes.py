"""One line that goes on from a checkpoint goes on under its plan at once, if that is what the line asks for."""

import contextlib
import io

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss

import armillary
import face
from armillary import Choice

LOSSY = {"*": Choice.parse("top_k(keep=0.2)")}


def started(asked):
    model = made(Reader)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return model, optimizer, armillary.parallelize(model, optimizer, **asked)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        optimizer.step()


def exchanges(run):
    return {group.exchange.name for group in run.plan.groups}


def resumed(rank, workers, folder, first, then):
    """What differs in any bit from a run that never stopped; by what it goes on right after loading, and
    what that said."""
    model, optimizer, run = started(first)
    train(model, optimizer, rank, range(4))
    path = run.save(folder)
    train(model, optimizer, rank, range(4, 6))
    run.close(gather=True)
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer, run = started(then)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run.load(path)
    goes_by = exchanges(run)
    train(model, optimizer, rank, range(4, 6))
    run.close(gather=True)
    return [name for name, p in model.named_parameters() if not torch.equal(p, want[name])], goes_by, said.getvalue()


def test_a_lossy_exchange_that_is_named_again_loses_nothing(crew, tmp_path):
    for differs, goes_by, _ in crew(2).run(resumed, tmp_path, {"constraints": LOSSY}, {"constraints": LOSSY}):
        assert differs == [] and goes_by == {"top_k"}


TAKEN = "the run goes on under the plan of the checkpoint, at once\n"
BY_ROW = {"words.weight": Choice.parse("owned_rows")}


def test_a_table_with_its_owners_goes_on_there_at_once_and_rank_0_says_so(crew, tmp_path):
    """Hooks of our own, on what is whole until then, are not in the way."""
    asked = {"constraints": BY_ROW}
    (first, goes_by, told), (second, _, nothing) = crew(2).run(resumed, tmp_path, asked, asked)
    assert first == second == [] and "owned_rows" in goes_by
    assert told == f"load: {tmp_path / 'step-00000004'} (step 4): {TAKEN}" and nothing == ""


WAYS = {
    "rows in code": {"constraints": {"words.weight": Choice.parse("owned_rows(rows_as=quantize(bits=8))")}},
    "every table that can be": {"constraints": {"*": "row_sharded"}},
    "every table that can be, and prefetch": {"constraints": {"*": "owned_rows"}, "prefetch": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_asked_again_is_gone_on_with_at_once(crew, tmp_path, way):
    (first, goes_by, told), (second, _, _) = crew(2).run(resumed, tmp_path, WAYS[way], WAYS[way])
    assert first == second == [] and goes_by == {"owned_rows", "all_reduce"} and told.endswith(TAKEN)


@pytest.mark.parametrize(
    ("first", "then", "why"),
    [
        (True, False, "it prefetches, and prefetch=False is asked for here"),
        (False, True, "it does not prefetch, and prefetch=True is asked for here"),
    ],
)
def test_other_wishes_for_prefetch_are_planned_anew(crew, tmp_path, first, then, why):
    asked = [{"constraints": BY_ROW, "prefetch": wish} for wish in (first, then)]
    (one, _, told), (other, _, _) = crew(2).run(resumed, tmp_path, *asked)
    assert one == other == [] and why in told


def drawn_ahead(rank, workers, folder, then):
    """What a checkpoint's plan that prefetches draws of a loader of the user's own, before the loop needs it."""
    model, optimizer, run = started({"constraints": BY_ROW, "prefetch": True})
    train(model, optimizer, rank, range(4))
    path = run.save(folder)
    run.close(gather=True)
    model, optimizer, run = started({"constraints": BY_ROW, **then})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run.load(path)
    drawn, most = [], 0
    for step, batch in enumerate(run.batches(drawn.append(step) or word_batch(rank, step) for step in range(8))):
        most = max(most, len(drawn) - step - 1)
        optimizer.zero_grad()
        word_loss(model, batch).backward()
        optimizer.step()
    run.close(gather=True)
    return most, run.plan.looks_ahead, said.getvalue()


@pytest.mark.parametrize(("then", "most"), [({}, 0), ({"prefetch": True}, 3)])
def test_a_plan_that_prefetches_is_gone_on_with_and_reads_ahead_where_that_was_asked_for(crew, tmp_path, then, most):
    for ahead, looks_ahead, told in crew(2).run(drawn_ahead, tmp_path, then):
        assert ahead == most and looks_ahead and (told.endswith(TAKEN) or not told)


def test_a_table_that_can_be_spread_and_was_not_is_where_that_is_asked_for_now(crew, tmp_path):
    whole, spread = {"constraints": {"*": "replicated"}}, {"constraints": {"*": "row_sharded"}}
    (_, _, told), _ = crew(2).run(resumed, tmp_path, whole, spread)
    assert "words.weight goes by all_reduce there, and 'row_sharded' is asked for here" in told


def test_why_a_checkpoints_plan_is_not_gone_on_with_is_said_once(crew, tmp_path):
    other = {"constraints": {"*": "replicated"}}
    (_, goes_by, told), (_, _, nothing) = crew(2).run(resumed, tmp_path, {"constraints": BY_ROW}, other)
    assert "owned_rows" not in goes_by and nothing == ""
    assert told.startswith(
        f"load: {tmp_path / 'step-00000004'} (step 4): the plan of the checkpoint is not gone on with: "
        "words.weight goes by owned_rows there"
    )


@pytest.mark.filterwarnings("ignore:load")
def test_one_that_is_named_no_more_is_not_gone_on_with(crew, tmp_path):
    for _, goes_by, _ in crew(2).run(resumed, tmp_path, {"constraints": LOSSY}, {}):
        assert "top_k" not in goes_by


def profile_in(path):
    return torch.load(path / "rest.pt", weights_only=True)["profile"]


def gone_on_with(rank, workers, folder, way):
    """A run of one line, and one that goes on from it: what each says of itself."""
    model, optimizer, run = started({})
    train(model, optimizer, rank, range(4))
    first = run.save(folder)
    plan = run.plan
    run.close()
    if way == "one line":
        model, optimizer, run = started({})
    else:
        model = made(Reader)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        run = armillary.attach(plan, model, optimizer, topology=face.machines(2))
    run.load(first)
    train(model, optimizer, rank, range(4, 6))
    report = run.report()
    second = run.save(folder)
    run.close()
    lines = {line.group: (line.forecast.sent_bytes, line.measured.sent_bytes) for line in report.lines}
    return first, second, plan, run.plan, report.steps, lines


@pytest.mark.parametrize("way", ["one line", "attach"])
def test_a_run_that_goes_on_has_the_plan_and_the_profile_of_the_checkpoint(crew, tmp_path, way):
    """So its forecast stands beside what is measured at once."""
    for first, second, plan, goes_by, steps, lines in crew(2).run(gone_on_with, tmp_path, way):
        assert goes_by == plan and steps == 2
        groups = [lines[group.name] for group in plan.groups]
        assert all(forecast > 0 and measured > 0 for forecast, measured in groups), lines
        assert profile_in(first)
        again = armillary.Profile.from_json(profile_in(second))
        assert again.stages == armillary.Profile.from_json(profile_in(first)).stages  # nobody timed a step again
