"""Several optimizers on one model: as one process trains with them, whether they step by turns or together."""

import copy

import pytest
import torch
from plain_loop import apart, differ, same
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from test_errors import said_by
from torch import nn
from torch.nn import functional

import armillary
import face

WORKERS, STEPS, ROWS, CRITIC_STEPS = 2, 4, 17, 2
TABLES = {"critic.words.weight": "owned_rows", "generator.words.weight": "owned_rows"}


class Player(nn.Module):
    """Half of a GAN: a table of classes, and layers over them and what comes in."""

    def __init__(self, width, out, norm):
        super().__init__()
        self.words, self.first = nn.Embedding(ROWS, 3), nn.Linear(width, 5)
        self.norm, self.last = nn.BatchNorm1d(5) if norm else nn.Identity(), nn.Linear(8, out)

    def forward(self, values, words):
        hidden = torch.tanh(self.norm(self.first(values)))
        return self.last(torch.cat([hidden, self.words(words)], -1))


class Plain(Player):
    """Without a table."""

    def __init__(self, width, out, norm):
        super().__init__(width, out, norm)
        del self.words

    def forward(self, values, words):
        hidden = torch.tanh(self.norm(self.first(values)))
        return self.last(torch.cat([hidden, hidden[:, :3]], -1))


def pair(generator=Player):
    torch.manual_seed(5)
    return nn.ModuleDict({"generator": generator(2, 4, norm=True), "critic": Player(4, 1, norm=False)}).double()


def optimizers_of(model):
    """One whose rows stay put without a gradient, one that moves all."""
    return [OPTIMIZERS["adagrad"](model["critic"].parameters()), OPTIMIZERS["adam"](model["generator"].parameters())]


def batch_of(rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    noise, real = (torch.randn(6, width, generator=draw, dtype=torch.float64) for width in (2, 4))
    return noise, real, torch.randint(ROWS, (6,), generator=draw)


def critic_loss(model, batch, fake):
    _, real, words = batch
    scored = model["critic"](real, words), model["critic"](fake.detach(), words)
    return functional.softplus(-scored[0]).mean() + functional.softplus(scored[1]).mean()


def generator_loss(model, batch, fake):
    return functional.softplus(-model["critic"](fake, batch[2])).mean()


def whole_loss(model, batch):
    fake = model["generator"](batch[0], batch[2])
    return critic_loss(model, batch, fake) + generator_loss(model, batch, fake)


def play(model, optimizers, batch, rests=False):
    """A step of each, by turns, unless the generator rests. Without a table of its own its graph waits while the critic
    steps."""
    critic, generator = optimizers
    fake = model["generator"](batch[0], batch[2])
    for _ in range(CRITIC_STEPS):
        critic.zero_grad()
        critic_loss(model, batch, fake).backward()
        critic.step()
    if rests:
        return
    generator.zero_grad()
    if hasattr(model["generator"], "words"):
        fake = model["generator"](batch[0], batch[2])
    generator_loss(model, batch, fake).backward()
    generator.step()


def played_alone(steps, kind=Player, rests=0):
    """The truth: in one process, everyone's batches one after the other. rests: steps in which the generator does."""
    model = pair(kind)
    parameters = list(model.parameters())
    critic, generator = optimizers_of(model)
    for step in steps:
        turns = [(critic, critic_loss)] * CRITIC_STEPS + [(generator, generator_loss)] * (step >= rests)
        for optimizer, loss in turns:
            total = [torch.zeros_like(one) for one in parameters]
            used = [False] * len(parameters)
            for rank in range(WORKERS):
                batch = batch_of(rank, step)
                fake = model["generator"](batch[0], batch[2])
                found = torch.autograd.grad(loss(model, batch, fake), parameters, allow_unused=True)
                total = [one if new is None else one + new / WORKERS for one, new in zip(total, found)]
                used = [was or new is not None for was, new in zip(used, found)]
            for parameter, gradient, is_used in zip(parameters, total, used):
                parameter.grad = gradient if is_used else None
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def plan_of(exchange=TABLES, generator=Player, **asked):
    given = {name: way for name, way in exchange.items() if name.split(".")[0] == "critic" or generator is Player}
    batches = [batch_of(rank, 0) for rank in range(WORKERS)]
    return face.plan_for(pair(generator), whole_loss, batches, WORKERS, exchange=given, **asked)


def started(plan, generator=Player):
    model = pair(generator)
    return face.start(plan, model, optimizers_of(model), whole_loss)


def played(rank, world, plan, generator, folder):
    """Weights after some steps; saved halfway, and resumed from there by a second run, by files of either kind."""
    run = started(plan, generator)
    for step in range(STEPS):
        if step == STEPS // 2:
            path = face.save(run, folder, {"step": step})
            plain = face.export(run)
            if rank == 0:
                torch.save(plain, f"{folder}/plain.pt")
        play(run.model, run.optimizer, batch_of(rank, step))
    steps = run.run.report().steps
    whole, end = face.weights(run), face.export(run)
    face.close(run)
    kept = copy.deepcopy([one.state_dict() for one in run.optimizer])
    resumed = []
    for again in (path, f"{folder}/plain.pt"):
        run = started(plan, generator)
        face.load(run, again)
        for step in range(STEPS // 2, STEPS):
            play(run.model, run.optimizer, batch_of(rank, step))
        resumed.append(face.export(run))
        face.close(run)
    return whole, steps, end, resumed, kept


WAYS = {
    "owned rows": (TABLES, Player),
    "gathered rows": (dict.fromkeys(TABLES, "gather_rows"), Player),
    "the generator dense, its graph waiting": (TABLES, Plain),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_gan_of_two_models_and_two_optimizers_trains_as_one_process_and_resumes_bit_for_bit(crew, tmp_path, way):
    exchange, generator = WAYS[way]
    answers = crew(WORKERS).run(played, plan_of(exchange, generator), generator, str(tmp_path))
    want = played_alone(range(STEPS), generator)
    for whole, steps, _, _, kept in answers:
        assert differ({name: whole[name] for name in want}, want) == {}
        assert steps == STEPS * CRITIC_STEPS, "a step is over when both have stepped, or one steps again"
        assert same(kept, answers[0][4])
    buffers = [{name: whole[name] for name in whole if name not in want} for whole, *_ in answers]
    assert buffers[0] and same(*buffers), "statistics are rank 0's"
    _, _, end, resumed, kept = answers[0]
    assert [same(again, end) for again in resumed] == [True, True]
    assert same([one["state"] for one in end["optimizer"]], [one["state"] for one in kept]), "one state_dict for each"


def in_one_line(rank, world):
    """Planned from the first steps, in which both have stepped; the generator's table is spread from then on."""
    model = pair()
    optimizers = optimizers_of(model)
    run = armillary.parallelize(model, optimizers, constraints={"*.words.weight": "row_sharded"})
    layouts = []
    for step in range(STEPS):
        layouts.append(run.plan.group_of("generator.words.weight").layout)
        play(model, optimizers, batch_of(rank, step))
    run.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, layouts


def test_a_gan_in_one_line_trains_as_one_process(crew):
    for whole, layouts in crew(WORKERS).run(in_one_line):
        assert differ(whole, played_alone(range(STEPS))) == {}
        assert layouts[0] == "replicated" and layouts[-1] == "row_sharded"


RESTS = 5


def pretrained_in_one_line(rank, world):
    """The critic steps alone at first: what is remembered of it after each step, and then how the tables lie."""
    model = pair()
    optimizers = optimizers_of(model)
    run = armillary.parallelize(model, optimizers, constraints={"*.words.weight": "row_sharded"})
    watch, remembered = run._engine.watcher.watch, []
    for step in range(RESTS):
        play(model, optimizers, batch_of(rank, step), rests=True)
        looked = sum(len(one.pending) for one in watch.reads.readings.values())
        remembered.append((len(watch.steps), looked, len(watch.made)))
    play(model, optimizers, batch_of(rank, RESTS))
    layout = run.plan.group_of("generator.words.weight").layout
    play(model, optimizers, batch_of(rank, RESTS + 1))
    run.close()
    return {name: value.detach().clone() for name, value in model.named_parameters()}, remembered, layout


def test_steps_in_which_an_optimizer_rests_are_watched_too_and_the_plan_comes_when_all_have_stepped(crew):
    for whole, remembered, layout in crew(WORKERS).run(pretrained_in_one_line):
        assert differ(whole, played_alone(range(RESTS + 2), rests=RESTS)) == {}
        assert remembered[1] == remembered[-1] and remembered[-1][0] == 2 and layout == "row_sharded"


# Together: one backward, a step of each


def halves(model, kinds=("adagrad", "adam")):
    """One optimizer for the table, one for the layers."""
    return [OPTIMIZERS[kinds[0]](model.words.parameters()), OPTIMIZERS[kinds[1]](model.layers.parameters())]


def words_plan(exchange="owned_rows", **asked):
    batches = [word_batch(rank, 0) for rank in range(WORKERS)]
    return face.plan_for(made(Reader), word_loss, batches, WORKERS, exchange={"words.weight": exchange}, **asked)


def step_of(optimizers, step, every):
    """The last one steps in every so many iterations only, and then on the sum of its gradients."""
    often, seldom = optimizers
    often.step()
    often.zero_grad()
    if step % every == every - 1:
        seldom.step()
        seldom.zero_grad()


def together(rank, world, plan, every, through_batches, seldom="layers"):
    model = made(Reader)
    run = face.start(plan, model, halves(model), word_loss)
    optimizers = run.optimizer if seldom == "layers" else run.optimizer[::-1]
    before = run.run._transport.counts.total()
    batches = [word_batch(rank, step) for step in range(6)]
    for step, batch in enumerate(face.batches_of(run, batches) if through_batches else batches):
        word_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.words.parameters(), 0.05)
        step_of(optimizers, step, every)
    requests = run.run._transport.counts.total() - before
    whole = face.weights(run)
    face.close(run)
    return whole, requests


def together_alone(every, seldom="layers"):
    model = made(Reader)
    optimizers = halves(model) if seldom == "layers" else halves(model)[::-1]
    for step in range(6):
        for rank in range(WORKERS):
            (word_loss(model, word_batch(rank, step)) / WORKERS).backward()
        torch.nn.utils.clip_grad_norm_(model.words.parameters(), 0.05)
        step_of(optimizers, step, every)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("every", "seldom"), [(1, "layers"), (2, "layers"), (1, "words"), (3, "words")])
@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows", "replicated"])
def test_two_optimizers_after_one_backward_train_as_one_process(crew, exchange, every, seldom):
    for whole, _ in crew(WORKERS).run(together, words_plan(exchange), every, False, seldom):
        assert differ(whole, together_alone(every, seldom)) == {}


def test_two_optimizers_with_prefetch_train_as_one_process(crew):
    plan = words_plan(prefetch=True)
    assert plan.looks_ahead
    for whole, _ in crew(WORKERS).run(together, plan, 1, True):
        assert differ(whole, together_alone(1)) == {}


def with_one(rank, world, plan):
    model = made(Reader)
    run = face.start(plan, model, OPTIMIZERS["adagrad"](model.parameters()), word_loss)
    before = run.run._transport.counts.total()
    for step in range(6):
        word_loss(model, word_batch(rank, step)).backward()
        torch.nn.utils.clip_grad_norm_(model.words.parameters(), 0.05)
        run.optimizer.step()
        run.optimizer.zero_grad()
    requests = run.run._transport.counts.total() - before
    face.close(run)
    return requests


def test_two_optimizers_exchange_no_more_than_one(crew):
    plan = words_plan()
    for (_, requests), alone in zip(crew(2).run(together, plan, 1, False), crew(2).run(with_one, plan)):
        assert requests == alone > 0


def in_one_call(rank, world):
    model = made(Reader)
    batches = [word_batch(number, 0) for number in range(2 * world)]
    run = face.parallelize(
        model, halves(model), batches, word_loss, autotune=2, constraints={"words.weight": "row_sharded"}
    )
    for step in range(6):
        face.step(run, [word_batch(rank, step)])
    whole = face.weights(run)
    face.close(run)
    return whole


def test_parallelize_takes_several_optimizers_and_times_plans_with_them(crew):
    model = made(Reader)
    optimizers = halves(model)
    for step in range(6):
        for rank in range(WORKERS):
            (word_loss(model, word_batch(rank, step)) / WORKERS).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    for whole in crew(2).run(in_one_call):
        assert differ(whole, {name: value.detach() for name, value in model.state_dict().items()}) == {}


def scaled(rank, world, plan):
    """The second step overflows on rank 1 alone; both optimizers pass it over on both ranks."""
    model, scaler = made(Reader), torch.amp.GradScaler("cpu", init_scale=8.0)
    run = face.start(plan, model, halves(model), word_loss, scaler=scaler)
    seen = []
    for step in range(3):
        before = face.weights(run)
        loss = word_loss(model, word_batch(rank, step)) * (float("inf") if (rank, step) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        for one in run.optimizer:
            scaler.step(one)
            one.zero_grad()
        scaler.update()
        seen.append(sorted(apart(face.weights(run), before)))
    face.close(run)
    return seen


def test_a_scaler_passes_over_a_step_of_both_on_every_rank(crew):
    for first, second, third in crew(2).run(scaled, words_plan()):
        assert len(first) == len(third) == 5 and second == []


# Refused


def refused(rank, world, plan, schedule_plan):
    model, other = made(Reader), chain()
    both = [OPTIMIZERS["sgd"](model.parameters()), OPTIMIZERS["adam"](model.layers.parameters())]
    two = [OPTIMIZERS["sgd"](part.parameters()) for part in (other[:2], other[2:])]
    return [
        said_by(lambda: face.start(plan, model, both, word_loss)),
        said_by(lambda: face.start(plan, model, [], word_loss)),
        said_by(lambda: face.start(plan, model, ["adam"], word_loss)),
        said_by(lambda: face.start(schedule_plan, other, two, pair_loss, pair_batch(0, 0))),
        said_by(lambda: face.parallelize(model, both, [word_batch(0, 0)] * 2, word_loss)),
        said_by(lambda: armillary.verify(model, halves(model), [word_batch(0, 0)] * 2, word_loss)),
    ]


@pytest.mark.parametrize("schedule", ["pipeline", "delayed_all_reduce"])
def test_a_parameter_in_two_optimizers_none_at_all_and_schedules_that_own_the_loop_are_refused(crew, schedule):
    staged = face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(2)], 2, schedule=schedule)
    for twice, none, text, owned, twice_too, verified in crew(2).run(refused, words_plan(), staged):
        assert "SGD + Adam holds 'layers.0.weight' twice" in twice and "each parameter once" in twice_too
        assert "want an optimizer of torch" in none and "want an optimizer of torch" in text
        assert "verify: takes one optimizer, got a list" in verified
        assert schedule in owned and "one optimizer, got SGD + SGD" in owned


def of_other_optimizers(rank, world, plan, folder):
    model = made(Reader)
    run = face.start(plan, model, halves(model), word_loss)
    path = face.save(run, folder)
    face.close(run)
    found = []
    for kinds in (("adam", "adagrad"), None):
        model = made(Reader)
        run = face.start(
            plan, model, halves(model, kinds) if kinds else OPTIMIZERS["adam"](model.parameters()), word_loss
        )
        found.append(said_by(lambda: face.load(run, path)))  # noqa: B023
        face.close(run)
    return found


def test_a_checkpoint_of_other_optimizers_is_refused(crew, tmp_path):
    for swapped, one in crew(2).run(of_other_optimizers, words_plan(), str(tmp_path)):
        assert "saved from Adagrad + Adam, this run has Adam + Adagrad" in swapped
        assert "saved from Adagrad + Adam, this run has Adam" in one
