"""What goes wrong is said at once, with the rank, the parameter or the call, and what to do instead."""

import pytest
import torch
from small_models import OPTIMIZERS, Idle, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss

import face

TABLE = "words.weight"


def words_plan(workers=2, kind=Reader, exchange="owned_rows", **asked):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    return face.plan_for(made(kind), word_loss, batches, workers, exchange={TABLE: exchange}, **asked)


def said_by(attempt):
    try:
        attempt()
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        return str(error)
    return "nothing"


class RowMixing(torch.optim.Optimizer):
    """Moves every row by the mean gradient of all rows."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad.mean(0, keepdim=True))


def mixing(rank, world, plan):
    model = made(Reader)
    return said_by(lambda: face.start(plan, model, RowMixing(model.parameters()), word_loss))


def test_an_optimizer_that_mixes_rows_is_refused_on_a_table_that_is_spread(crew):
    for said in crew(2).run(mixing, words_plan()):
        assert TABLE in said and "RowMixing" in said


def thawed(rank, world, plan):
    model = made(Idle)
    run = face.start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), word_loss)
    model.frozen.requires_grad_(True)
    return said_by(lambda: face.step(run, [word_batch(rank, 0)]))


def test_a_parameter_that_begins_to_learn_is_named_with_its_rank(crew):
    for rank, said in enumerate(crew(2).run(thawed, words_plan(kind=Idle))):
        assert f"rank {rank}" in said and "frozen" in said and "not in the plan" in said and "plan again" in said


def weighed(rank, world, plan, other):
    found = []
    for one, weight in ((plan, 2.0), (other, -1.0)):
        model = made(Reader)
        run = face.start(one, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
        found.append(said_by(lambda: face.weigh(run, weight)))  # noqa: B023
        face.close(run)
    return found


def test_weights_that_mean_nothing_are_refused(crew):
    for rank, (unasked, negative) in enumerate(crew(2).run(weighed, words_plan(), words_plan(mean="weights"))):
        assert "run.weigh" in unasked and "mean='weights'" in unasked
        assert f"rank {rank}" in negative and "weight >= 0, got -1.0" in negative


def without_data(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    return said_by(lambda: list(face.batches_of(run, [])))


def test_a_rank_without_any_batch_is_told(crew):
    for rank, said in enumerate(crew(2).run(without_data, words_plan())):
        assert f"rank {rank} has no batch" in said and "at least one" in said


def saved_apart(rank, world, plan, folder):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    found = [
        said_by(lambda: face.save(run, f"{folder}/{rank}")),
        said_by(lambda: face.save(run, folder, {"mine": face.Started})),
        said_by(lambda: face.save(run, folder, keep=0)),
        said_by(lambda: face.load(run, f"{folder}/nowhere")),
    ]
    face.step(run, [word_batch(rank, 0)])  # all goes on
    face.close(run)
    return found


def test_a_checkpoint_that_cannot_be_written_or_read_is_refused_alike_on_every_rank(crew, tmp_path):
    answers = crew(2).run(saved_apart, words_plan(), str(tmp_path))
    for folders, loop, keep, nowhere in answers:
        assert "ranks disagree on the folder" in folders and "rank 0" in folders and "rank 1" in folders
        assert "plain values, tensors and state_dicts" in loop and "rank 0" in loop
        assert "keep at least 1" in keep
        assert "nowhere" in nowhere
    assert not list(tmp_path.glob("**/step-*"))


def of_others(rank, world, plans, folder):
    """Saved from one model and optimizer, loaded into others."""
    found = []
    model = made(Reader)
    run = face.start(plans[0], model, OPTIMIZERS["adam"](model.parameters()), word_loss)
    face.step(run, [word_batch(rank, 0)])
    path = face.save(run, folder)
    face.close(run)
    for plan, kind, optimizer in ((plans[1], Idle, "adam"), (plans[0], Reader, "adagrad")):
        model = made(kind)
        run = face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), word_loss)
        found.append(said_by(lambda: face.load(run, path)))  # noqa: B023
        face.close(run)
    return found


def test_a_checkpoint_of_another_model_or_optimizer_says_what_is_missing(crew, tmp_path):
    for model, optimizer in crew(2).run(of_others, [words_plan(), words_plan(kind=Idle)], str(tmp_path)):
        assert "another model" in model and "rare" in model and "never" in model and "rank 0" in model
        assert "it was saved from Adam, this run has Adagrad" in optimizer
        for said in (model, optimizer):
            assert f"load: rank 0: {tmp_path / 'step-00000001'} (step 1): it was saved from" in said


def out_of_range(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    words, classes, seed = word_batch(rank, 0)
    return said_by(lambda: word_loss(run.model, (words + 25, classes, seed)))


def test_an_id_out_of_range_names_the_table_the_row_and_how_many_there_are(crew):
    for said in crew(2).run(out_of_range, words_plan()):
        assert TABLE in said and "29" in said


def wrong_numbers(rank, world, plan, text):
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, pair_batch(0, 0))
    return said_by(lambda: face.step(run, [pair_batch(0, n) for n in range(3)]))


@pytest.mark.parametrize("text", ["pipeline", "ring", "delayed_all_reduce"])
def test_another_number_of_micro_batches_than_the_schedules_is_refused(crew, text):
    plan = face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule=text)
    for rank, said in enumerate(crew(2).run(wrong_numbers, plan, text)):
        assert "run.step" in said and f"rank {rank}" in said and "3" in said


def unfit_losses(rank, world, plan):
    def of_twice(model, batch):
        return pair_loss(lambda value: model(model(value)), batch)

    def with_penalty(model, batch):
        return pair_loss(model, batch) + sum(p.square().sum() for p in model.parameters())

    def scaled(model, batch):
        return torch.amp.GradScaler("cpu").scale(pair_loss(model, batch))

    found = []
    for loss in (of_twice, with_penalty, scaled):
        model = chain()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        found.append(said_by(lambda: face.start(plan, model, optimizer, loss, pair_batch(0, 0))))  # noqa: B023
    return found


def test_a_loss_that_cannot_be_cut_is_refused_before_the_first_step(crew):
    plan = face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule="pipeline")
    for twice, penalty, scaled in crew(2).run(unfit_losses, plan):
        assert "more than once" in twice and "penalty" in penalty and "GradScaler" in scaled


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("pipeline(slack=-1)", "slack >= 0"),
        ("ring(micro_batches=5)", "micro_batches=2.*got 5"),
        ("pipeline(clip_norm=1.0)", "slack"),
        ("ring(colour='red')", "colour"),
        ("delayed_all_reduce(slack=1)", "slack"),
    ],
)
def test_options_that_a_schedule_does_not_have_are_refused_by_the_plan(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule=text)
