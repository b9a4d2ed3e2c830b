"""One run for every plan: what it is given, told and asked is the same whoever owns the loop."""

import pytest
import torch
from plain_loop import apart, differ, state_of, train
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss

import armillary
import face

SEED, HALF, STEPS = 5, 3, 6
SCHEDULES = {
    "one_device(micro_batches=2, stages=2)": 1,
    "pipeline": 2,
    "ring(stages=2)": 2,
    "zero_ring(stages=2)": 2,
    "shared_stages": 3,
    "delayed_all_reduce": 2,
    "gpipe(micro_batches=2)": 2,
    "one_f_one_b(micro_batches=2)": 2,
    "accumulation(micro_batches=2)": 1,
}


def plan_of(text, dropout=0.3):
    ranks = SCHEDULES.get(text, 2)
    batches = [pair_batch(0, number) for number in range(ranks)]
    return face.plan_for(chain(dropout), pair_loss, batches, ranks, schedule=text)


def started(plan, dropout=0.3, optimizer="adam"):
    model = chain(dropout)
    return face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), pair_loss, pair_batch(0, 0), SEED)


def take(run, steps):
    for step in steps:
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(2)]))


def said_by(attempt):
    try:
        attempt()
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def without_an_example(rank, world, plans):
    """What is said where the schedule owns the loop and nobody gave it an example; and with a scaler."""
    found = []
    for plan in plans:
        for more in (
            {"loss": pair_loss},
            {"scaler": torch.amp.GradScaler("cpu"), "loss": pair_loss, "example": pair_batch(0, 0)},
        ):
            model = chain()
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            found.append(said_by(lambda: armillary.attach(plan, model, optimizer, **more)))  # noqa: B023
            hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
            assert hooks == 0 and type(next(model.parameters())) is torch.nn.Parameter
    return found


def test_a_plan_that_owns_the_loop_is_refused_without_an_example_and_with_a_scaler(crew):
    for ranks in (1, 2, 3):
        names = [text for text, count in SCHEDULES.items() if count == ranks]
        for found in crew(ranks).run(without_an_example, [plan_of(text) for text in names]):
            for text, missing, scaled in zip(names, found[::2], found[1::2], strict=True):
                assert "needs example" in missing and text.partition("(")[0] in missing, missing
                assert "GradScaler" in scaled, scaled


def with_different_data(rank, world, plan):
    run = started(plan, 0.0)
    for step in range(3):
        said = said_by(lambda: face.step(run, [pair_batch(step, 10 * rank + n) for n in range(2)]))  # noqa: B023
        if said != "nothing":
            return said
    return "nothing"


@pytest.mark.parametrize("text", ["pipeline", "gpipe(micro_batches=2)", "shared_stages"])
def test_ranks_of_one_replica_that_pass_different_micro_batches_are_told(crew, text):
    for said in crew(SCHEDULES[text]).run(with_different_data, plan_of(text, 0.0)):
        assert "rank" in said and "micro-batch" in said, said


def loaded_back(rank, world, plan, folder):
    """Saves, goes on, loads into the same run, and goes on again."""
    run = started(plan)
    take(run, range(HALF))
    path = face.save(run, folder, {"step": HALF})
    then = face.weights(run)
    take(run, range(HALF, STEPS))
    first = face.weights(run)
    loop = face.load(run, path)
    back = face.weights(run)
    take(run, range(HALF, STEPS))
    second = face.weights(run)
    face.close(run)
    return loop, apart(back, then), apart(second, first), apart(first, then)


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_checkpoint_is_loaded_into_the_run_that_wrote_it_and_training_repeats_bit_for_bit(crew, tmp_path, text):
    for loop, back, again, moved in crew(SCHEDULES[text]).run(loaded_back, plan_of(text), tmp_path):
        assert loop == {"step": HALF} and back == {} and again == {} and moved != {}


def evaluated(rank, world, plan):
    """What a rank is told of an evaluation over all ranks, and the weights that were seen."""
    run = started(plan)
    take(run, range(HALF))
    batches = [pair_batch(50 + rank, number) for number in range(rank + 1)]  # not equally many
    totals = run.run.evaluate(batches, lambda model, batch: {"loss": float(pair_loss(model, batch)), "count": 1.0})
    got = face.weights(run)
    face.close(run)
    return totals, got


@pytest.mark.parametrize("text", SCHEDULES)
def test_an_evaluation_adds_up_over_ranks_at_the_newest_weights_and_tells_everyone_the_same(crew, text):
    ranks = SCHEDULES[text]
    answers = crew(ranks).run(evaluated, plan_of(text))
    model = chain()
    model.load_state_dict(answers[0][1])
    with torch.no_grad():
        seen = [float(pair_loss(model.eval(), pair_batch(50 + r, n))) for r in range(ranks) for n in range(r + 1)]
    for totals, _ in answers:
        assert totals == answers[0][0] and totals["count"] == len(seen)
        assert totals["loss"] == pytest.approx(sum(seen), rel=1e-12)


def counted(rank, world, plan):
    run = started(plan)
    held_out = face.shard(run, [pair_batch(50, number) for number in range(4)], drop_last=False)
    totals = run.run.evaluate(held_out, lambda model, batch: {"samples": float(len(batch[0]))})
    face.close(run)
    return totals


@pytest.mark.parametrize("text", SCHEDULES)
def test_what_is_divided_by_the_run_counts_once_whatever_the_schedule(crew, text):
    wanted = {"samples": float(sum(len(pair_batch(50, number)[0]) for number in range(4)))}
    assert crew(SCHEDULES[text]).run(counted, plan_of(text)) == [wanted] * SCHEDULES[text]


def several_at_once(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["momentum"](model.parameters()), word_loss, word_batch(0, 0))
    for step in range(4):
        face.step(run, [word_batch(rank, 2 * step + piece) for piece in range(2)])
    told, got = face.losses(run), face.weights(run)
    face.close(run)
    return told, got


@pytest.mark.parametrize("exchange", ["all_reduce", "owned_rows"])
def test_a_step_over_several_micro_batches_takes_the_mean_of_their_gradients(crew, exchange):
    batches = [word_batch(worker, 0) for worker in range(2)]
    plan = face.plan_for(made(Reader), word_loss, batches, 2, exchange={"words.weight": exchange})
    model = made(Reader)
    steps = [[word_batch(worker, 2 * step + piece) for worker in range(2) for piece in range(2)] for step in range(4)]
    losses = train(model, OPTIMIZERS["momentum"](model.parameters()), word_loss, steps)
    for rank, (told, got) in enumerate(crew(2).run(several_at_once, plan)):
        assert differ(got, state_of(model)) == {}
        for mine, whole in zip(told, losses, strict=True):
            assert mine == pytest.approx(whole[2 * rank : 2 * rank + 2], rel=1e-10)


def test_a_plan_of_another_format_is_refused_in_one_sentence():
    old = '{"workers": 2, "groups": [], "model_fingerprint": "0", "schedule": {"name": "simultaneous", "options": {}}}'
    with pytest.raises(ValueError, match="plan again") as caught:
        armillary.Plan.from_json(old)
    assert "\n" not in str(caught.value)


def marker_cut_short(rank, world, plan, folder):
    run = started(plan)
    path = face.save(run, folder)
    if rank == 0:
        marker = path / "complete.json"
        marker.write_text(marker.read_text()[:-20])
    torch.distributed.barrier()
    said = said_by(lambda: face.load(run, path))
    face.close(run)
    return said


def test_a_checkpoint_whose_marker_is_cut_short_is_refused_by_its_name(crew, tmp_path):
    plan = face.plan_for(chain(0.3), pair_loss, [pair_batch(0, n) for n in range(2)], 2)
    for said in crew(2).run(marker_cut_short, plan, tmp_path):
        assert "step-00000000" in said and "rank 0" in said, said


@pytest.mark.parametrize("text", ["gpipe(micro_batches=4)", "one_f_one_b(micro_batches=2)"])
def test_exact_schedules_are_trained_and_verified_by_name_on_the_command_line(tmp_path, text):
    vit = ("--set", "architecture=vit", "--set", "width=16", "--set", "depth=2")
    small = ("vision", "--small", "--set", "batch_size=8", *vit)
    ended = face.command_in_job(2, "train", *small, "--schedule", text, "--steps", "4", "--json", folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
    assert face.departures_of(armillary.Plan.load(tmp_path / "runs/vision/plan.json")) == set()
    ended = face.command_in_job(2, "verify", "vision", *vit, "--schedule", text, "--steps", "3", folder=tmp_path)
    assert [one.code for one in ended] == [0, 0], ended
