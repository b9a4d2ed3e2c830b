"""The bytes that ranks send are the bytes that the plan says."""

import pytest
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss

import face

TABLE = "words.weight"
STEPS = 8


def words_plan(workers, exchange, per_node=0):
    """Profiled on the very batches that are trained on."""
    batches = [word_batch(worker, step) for step in range(STEPS) for worker in range(workers)]
    pattern = "*" if exchange in ("all_reduce", "owned_dense") else TABLE
    return face.plan_for(made(Reader), word_loss, batches, workers, exchange={pattern: exchange}, per_node=per_node)


def sent_by_words(rank, world, plan):
    """A step each."""
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    face.count_bytes(run)
    sent = []
    for step in range(STEPS):
        face.step(run, [word_batch(rank, step)])
        sent.append(face.count_bytes(run))
    face.close(run)
    return sent


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("exchange", ["all_reduce", "owned_dense"])
def test_a_dense_exchange_sends_what_the_plan_says_in_every_step(crew, exchange, workers):
    plan = words_plan(workers, exchange)
    answers = crew(workers).run(sent_by_words, plan)
    for sent in zip(*answers, strict=True):
        assert sum(sent) / workers == pytest.approx(face.sent_bytes_planned(plan), rel=1e-9)
    assert workers == 1 or face.sent_bytes_planned(plan) > 0


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("exchange", ["gather_rows", "owned_rows", "owned_rows_by_node"])
def test_what_rows_cost_is_foretold_from_the_batches_that_were_looked_at(crew, exchange, workers):
    plan = words_plan(workers, exchange, per_node=1 if exchange == "owned_rows_by_node" else 0)
    answers = crew(workers).run(sent_by_words, plan)
    mean = sum(map(sum, answers)) / workers / len(answers[0])
    band = 1e-9 if exchange == "gather_rows" else 0.05  # whose rows are read, the plan knows on average only
    assert mean == pytest.approx(face.sent_bytes_planned(plan), rel=band)


SCHEDULES = {
    "pipeline": 2,
    "pipeline(micro_batches=4, slack=1)": 2,
    "ring": 2,
    "ring(stages=4, slack=1)": 2,
    "zero_ring(stages=4, slack=1)": 2,
    "shared_stages": 3,
    "shared_stages(slack=2)": 3,
    "delayed_all_reduce": 2,
    "gpipe(micro_batches=4)": 2,
    "one_f_one_b(micro_batches=4)": 2,
    "ring(stages=4, slack=2, clip_norm=1.0)": 2,
}


def sent_on_the_way(rank, world, plan, count):
    """Bytes of four steps with others before and after them."""
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, pair_batch(0, 0))
    sent = []
    for steps in (range(3), range(3, 7)):
        for step in steps:
            face.step(run, face.own(run, [pair_batch(step, number) for number in range(count)]))
        sent.append(face.count_bytes(run))
    face.close(run)
    return sent[1]


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_sends_what_the_plan_says(crew, text):
    processes = SCHEDULES[text]
    batches = [pair_batch(0, number) for number in range(processes)]
    plan = face.plan_for(chain(), pair_loss, batches, processes, schedule=text)
    count = 4 if "micro_batches=4" in text else 2
    sent = crew(processes).run(sent_on_the_way, plan, count)
    assert sum(sent) == pytest.approx(4 * processes * face.sent_bytes_planned(plan), rel=1e-9)
    assert sum(sent) > 0


def held_in_a_ring(rank, world, plan):
    """Bytes of weights and optimizer state on this rank between two steps."""
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["momentum"](model.parameters()), pair_loss, pair_batch(0, 0))
    for step in range(3):
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(world)]))
    held = sum(line.measured.memory_bytes for line in run.run.report().lines)
    face.close(run)
    return held


def test_a_ring_holds_what_the_plan_says(crew):
    """The plan counts a gradient, too, which is gone between two steps."""
    optimizer = OPTIMIZERS["momentum"](chain().parameters())
    batches = [pair_batch(0, number) for number in range(2)]
    plan = face.plan_for(chain(), pair_loss, batches, 2, schedule="ring", optimizer=optimizer)
    gradient = sum(parameter.nbytes for parameter in chain().parameters())
    held = crew(2).run(held_in_a_ring, plan)
    assert sum(held) / 2 + gradient == pytest.approx(plan.forecast.memory_bytes, rel=1e-9)
