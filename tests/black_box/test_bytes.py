"""The bytes that ranks send are the bytes that the plan says."""

import pytest
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch import nn
from torch.optim import SGD

import armillary
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


def all_with_momentum(model):
    return OPTIMIZERS["momentum"](model.parameters())


def last_without_momentum(model):
    *first, last = ({"params": block.parameters()} for block in model)
    return SGD([*({**group, "momentum": 0.9} for group in first), last], lr=0.1)


def held_in_a_ring(rank, world, plan, optimizer_of):
    """Bytes of weights and optimizer state on this rank between two steps."""
    model = chain()
    run = face.start(plan, model, optimizer_of(model), pair_loss, pair_batch(0, 0))
    for step in range(3):
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(world)]))
    held = sum(line.measured.memory_bytes for line in run.run.report().lines)
    face.close(run)
    return held


@pytest.mark.parametrize("optimizer_of", [all_with_momentum, last_without_momentum])
def test_a_ring_holds_what_the_plan_says(crew, optimizer_of):
    """The plan counts a gradient, too, which is gone between two steps."""
    batches = [pair_batch(0, number) for number in range(2)]
    model = chain()
    plan = face.plan_for(model, pair_loss, batches, 2, schedule="ring", optimizer=optimizer_of(model))
    gradient = sum(parameter.nbytes for parameter in model.parameters())
    held = crew(2).run(held_in_a_ring, plan, optimizer_of)
    assert sum(held) / 2 + gradient == pytest.approx(plan.forecast.memory_bytes, rel=1e-9)


class LongReader(Reader):
    """Most of its words are in no batch."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4000, self.words.embedding_dim)


def each_its_own(model, table):
    return [OPTIMIZERS[table](model.words.parameters()), OPTIMIZERS["adam"](model.layers.parameters())]


def held_by_each(rank, world, plan, table, way):
    """Bytes of every group, forecast and held between two steps. No plan: the first steps of the loop are watched."""
    model = made(LongReader)
    both = each_its_own(model, table)
    run = armillary.attach(plan, model, both) if plan else armillary.parallelize(model, both, constraints={TABLE: way})
    for step in range(4):
        model.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        for one in both:
            one.step()
    lines = [(line.forecast.memory_bytes, line.measured.memory_bytes) for line in run.report().lines]
    run.close()
    return lines


@pytest.mark.parametrize(
    ("table", "way", "is_watched"),
    [
        ("sgd", "all_reduce", False), ("sgd", "owned_rows", False), ("adagrad", "owned_rows", False),
        ("momentum", "gather_rows", False), ("sgd", "owned_rows", True),
    ],
)  # fmt: skip
def test_of_several_optimizers_every_group_holds_what_its_own_keep(crew, table, way, is_watched):
    model, batches = made(LongReader), [word_batch(worker, step) for step in range(4) for worker in range(2)]
    both = each_its_own(model, table)
    plan = face.plan_for(model, word_loss, batches, 2, exchange={TABLE: way}, optimizer=both)
    for lines in crew(2).run(held_by_each, None if is_watched else plan, table, way):
        for forecast, held in lines:
            assert held == pytest.approx(forecast, rel=0.1)
        assert max(held for _, held in lines) >= 8 * 4000 * 4 / 2  # at least the rows that a rank owns
