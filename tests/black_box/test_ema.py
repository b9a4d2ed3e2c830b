"""run.ema(decay): the numbers of torch's AveragedModel in one process, wherever the rows of tables are."""

import warnings
from dataclasses import replace

import pytest
import torch
from plain_loop import differ, same, state_of, train
from small_models import OPTIMIZERS, Reader, Tied, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import armillary
import face
from armillary.session import watched_steps

TABLE, DECAY = "words.weight", 0.8
STEPS = 8  # gradients that wait begin to wait in the sixth
CLOSE = 1e-12


class Normed(Reader):
    """With running statistics, which nobody averages."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.BatchNorm1d(4), self.layers)
        self.frozen = torch.nn.Parameter(torch.full((3,), 1.5), requires_grad=False)


# name -> (exchange of the table, prefetch, optimizer, kind of model)
WAYS = {
    "whole": ("all_reduce", "none", "sgd", Reader),
    "rows of every rank": ("owned_rows", "none", "sgd", Reader),
    "rows of one owner": (face.armillary.Choice("owned_rows", {"owners": 1}), "none", "momentum", Reader),
    "gathered rows": ("gather_rows", "none", "adagrad", Reader),
    "all rows are stepped": ("owned_rows", "none", "adam", Reader),
    "rows that go early": ("owned_rows", "rows", "sgd", Reader),
    "gradients that wait": ("owned_rows", "gradients", "sgd", Reader),
    "tied": ("all_reduce", "none", "sgd", Tied),
    "running statistics": ("owned_rows", "none", "sgd", Normed),
}


def plan_of(exchange, prefetch="none", kind=Reader, workers=2):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    plan = face.plan_for(made(kind), word_loss, batches, workers, exchange={TABLE: exchange})
    groups = [replace(g, prefetch=prefetch) if TABLE in g.parameters else g for g in plan.groups]
    return replace(plan, groups=tuple(groups))


def started(plan, optimizer="sgd", kind=Reader):
    model = made(kind)
    return face.start(plan, model, OPTIMIZERS[optimizer](model.parameters()), word_loss)


def train_on(run, ema, steps, rank=None):
    """As a loop does, through the run's batches; `ema` after each step."""
    rank = run.rank if rank is None else rank
    for batch in face.batches_of(run, [word_batch(rank, step) for step in steps]):
        run.optimizer.zero_grad()
        word_loss(run.model, batch).backward()
        run.optimizer.step()
        ema.update()


def losses_at(model, numbers):
    model.eval()
    with torch.no_grad():
        found = [float(word_loss(model, word_batch(9, number))) for number in numbers]
    model.train()
    return found


def averaged(rank, world, plan, optimizer, kind):
    """What is shown and exported half-way and at the end, and the training that went on."""
    run = started(plan, optimizer, kind)
    ema, seen = face.ema(run, DECAY), []
    for half in (range(STEPS - 1), range(STEPS - 1, STEPS)):
        train_on(run, ema, half)
        before = [one.detach().clone() for one in run.model.buffers()]
        with ema.shown():  # ranks read as much as each likes
            losses = losses_at(run.model, range(2 + 3 * rank))
        seen.append((losses, ema.export(), ema.updates))
        assert all(map(torch.equal, before, run.model.buffers()))
    weights = face.weights(run)
    face.close(run)
    return seen, weights


def truth(optimizer, kind, workers=2, steps=range(STEPS)):
    model = made(kind)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    ema, seen = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), []
    for step in steps:
        train(model, stepping, word_loss, [[word_batch(worker, step) for worker in range(workers)]])
        ema.update_parameters(model)
        seen.append((losses_at(ema.module, range(5)), state_of(ema.module)))
    return seen, state_of(model)


@pytest.mark.parametrize("way", WAYS)
def test_the_average_is_that_of_torchs_averaged_model_in_one_process(crew, way):
    exchange, prefetch, optimizer, kind = WAYS[way]
    want, weights = truth(optimizer, kind)
    names = dict(made(kind).named_parameters(remove_duplicate=False)).keys()

    def of_parameters(state):
        return {name: state[name] for name in names}

    lagging = differ(of_parameters(want[-1][1]), of_parameters(weights), 1e-3)
    assert lagging.keys() == names - {"frozen"}  # it is not the newest weights
    for rank, (seen, after) in enumerate(crew(2).run(averaged, plan_of(exchange, prefetch, kind), optimizer, kind)):
        for (losses, exported, _), (wanted, state) in zip(seen, want[-2:], strict=True):
            assert (exported is None) is (rank == 1)
            if exported is not None:
                made(kind).load_state_dict(exported)
                assert differ(of_parameters(exported), of_parameters(state), CLOSE) == {}
            if kind is not Normed:  # whose statistics each worker has of its own data
                assert losses == pytest.approx(wanted[: len(losses)], rel=CLOSE)
        assert [updates for _, _, updates in seen] == [STEPS - 1, STEPS]
        assert differ(of_parameters(after), of_parameters(weights)) == {}


def test_in_one_process_the_average_of_a_spread_table_is_the_same():
    run = started(plan_of("owned_rows", workers=1))
    ema = face.ema(run, DECAY)
    train_on(run, ema, range(3))
    assert differ(ema.export(), truth("sgd", Reader, 1, range(3))[0][-1][1], CLOSE) == {}
    face.close(run)


def counted(rank, world, plan, has_ema):
    """Bytes of a step, and the weights, with and without averages; rows go early all the same after they were shown."""
    run = started(plan)
    ema = face.ema(run, DECAY) if has_ema else None
    for number, batch in enumerate(face.batches_of(run, [word_batch(rank, step) for step in range(STEPS)])):
        run.optimizer.zero_grad()
        word_loss(run.model, batch).backward()
        run.optimizer.step()
        if ema is not None:
            ema.update()
        if ema is not None and number % 3 == 2:
            with ema.shown():
                losses_at(run.model, range(2))
    sent, weights = face.count_bytes(run), face.weights(run)
    face.close(run)
    return sent, weights


def test_an_average_sends_nothing_in_a_step_and_changes_no_bit_of_training(crew):
    plan = plan_of("owned_rows", "rows")
    (sent, weights), _ = crew(2).run(counted, plan, True)
    (plain, without), _ = crew(2).run(counted, plan, False)
    assert sent == plain > 0
    assert same(weights, without)


def saved(rank, world, plan, folder):
    run = started(plan, "adam")
    ema, other = face.ema(run, DECAY), face.ema(run, 0.5)
    for one in (ema, other, face.ema(run, DECAY)):  # the last is the first
        assert one.updates == 0
    train_on(run, ema, range(3))
    other.update()
    path = face.save(run, folder)
    again, kept = ema.export(), other.export()
    face.close(run)
    return path, again, kept


def resumed(rank, world, plan, path, steps, others):
    """Goes on, training on all workers' batches of a step."""
    run = started(plan, "adam")
    ema = face.ema(run, DECAY)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        face.load(run, path)
    loaded = ema.export()
    for step in steps:
        mine = [word_batch(worker, step) for worker in others[rank::world]]
        face.step(run, mine)
        ema.update()
    found = loaded, ema.export(), ema.updates, [str(one.message) for one in told if "average" in str(one.message)]
    face.close(run)
    return found


ONTO = {
    "one process, whole": ("all_reduce", 1),
    "one process, spread": ("owned_rows", 1),
    "two, whole": ("all_reduce", 2),
    "two, gathered": ("gather_rows", 2),
    "two, one owner": (face.armillary.Choice("owned_rows", {"owners": 1}), 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def checkpoints(crew, folder):
    """By exchange of the table: the path, and what the averages were."""
    return {
        exchange: crew(2).run(saved, plan_of(exchange), f"{folder}/{exchange}")[0]
        for exchange in ("owned_rows", "all_reduce")
    }


@pytest.mark.parametrize("onto", ONTO)
@pytest.mark.parametrize("exchange", ["owned_rows", "all_reduce"])
def test_an_average_is_saved_with_the_run_and_goes_on_on_other_workers_and_plans(crew, checkpoints, exchange, onto):
    path, was, other = checkpoints[exchange]
    assert differ(was, other, 1e-3).keys() == was.keys()
    to, workers = ONTO[onto]
    plan = plan_of(to, workers=workers)
    loaded, after, updates, told = crew(workers).run(resumed, plan, path, [3, 4], range(2))[0]
    want, _ = truth("adam", Reader, steps=range(5))
    assert differ(loaded, was, 0.0) == {} and differ(was, want[2][1], CLOSE) == {}
    assert updates == 5 and differ(after, want[4][1], CLOSE) == {}
    assert len(told) == 1 and "0.5" in told[0] and "before run.load" in told[0]


def loaded_without(rank, world, plan, folder):
    """A checkpoint that has no average: it begins anew."""
    run = started(plan)
    train_on(run, face.ema(run, 0.5), range(2))
    path = face.save(run, folder)
    face.close(run)
    run = started(plan)
    ema = face.ema(run, DECAY)
    train_on(run, ema, range(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        face.load(run, path)
    updates, begun, weights = ema.updates, ema.export(), face.export(run)
    face.close(run)
    return updates, begun, weights and weights["model"]


def test_an_average_that_was_not_saved_begins_anew_from_what_was_loaded(crew, tmp_path):
    updates, begun, weights = crew(2).run(loaded_without, plan_of("owned_rows"), str(tmp_path))[0]
    assert updates == 0 and differ(begun, weights, 0.0) == {}


def one_line(rank, world):
    """The average is begun while the loop is watched; then rows are spread, and gradients wait in the next loop."""
    original = watched_steps.make_plan

    def waiting(*asked, **more):
        plan = original(*asked, **more)
        groups = [replace(g, prefetch="gradients") if TABLE in g.parameters else g for g in plan.groups]
        return replace(plan, groups=tuple(groups))

    watched_steps.make_plan = waiting
    try:
        model = made(Reader)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        begun = armillary.parallelize(model, optimizer, constraints={TABLE: "row_sharded"})
        run = face.Started(begun, model, optimizer, word_loss)
        ema, layouts = face.ema(run, DECAY), []
        for steps in (range(2), range(2, 2 + STEPS)):
            layouts.append(run.plan.group_of(TABLE).layout)
            train_on(run, ema, steps)
    finally:
        watched_steps.make_plan = original
    exported = ema.export()
    face.close(run)
    return layouts, exported


def test_an_average_begun_before_the_plan_is_made_goes_on_when_rows_are_spread(crew):
    want, _ = truth("sgd", Reader, steps=range(2 + STEPS))
    layouts, exported = crew(2).run(one_line)[0]
    assert layouts == ["replicated", "row_sharded"]
    assert differ(exported, want[-1][1], CLOSE) == {}


def said_by(attempt):
    try:
        attempt()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def misused(rank, world, plan, folder):
    run = started(plan)
    found = {
        "decay": said_by(lambda: face.ema(run, 1.5)),
        "decays": said_by(lambda: face.ema(run, 0.5 + 0.1 * rank)),
    }
    ema, other = face.ema(run, DECAY), face.ema(run, 0.5)
    face.step(run, [word_batch(rank, 0)])
    ema.update()
    inside = {
        "update": ema.update, "another's update": other.update, "shown": ema.shown().__enter__, "export": ema.export,
        "save": lambda: face.save(run, folder), "run's export": lambda: face.export(run),
        "load": lambda: face.load(run, folder), "step": lambda: face.step(run, [word_batch(rank, 1)]),
        "close": lambda: face.close(run),
        "backward": lambda: word_loss(run.model, word_batch(rank, 1)).backward(),
    }  # fmt: skip
    with ema.shown():
        found |= {f"inside: {name}": said_by(attempt) for name, attempt in inside.items()}
    newest = face.weights(run)
    try:
        with ema.shown():
            raise ValueError("of the user")
    except ValueError:
        found["an error inside"] = str(same(face.weights(run), newest))
    if rank == 0:
        other.update()
    found |= {"uneven, shown": said_by(other.export), "uneven, save": said_by(lambda: face.save(run, folder))}
    face.close(run)
    found |= {"closed": said_by(ema.update), "closed, ema": said_by(lambda: face.ema(run, DECAY))}
    return found


def test_what_is_no_use_of_an_average_is_refused_and_nothing_is_lost(crew, tmp_path):
    for rank, found in enumerate(crew(2).run(misused, plan_of("owned_rows"), str(tmp_path))):
        assert "from 0 to 1" in found["decay"] and "[0.5, 0.6]" in found["decays"]
        for name, said in found.items():
            if name.startswith("inside: ") and "backward" not in name:
                assert "inside ema.shown()" in said and f"rank {rank}" in said, (name, said)
        assert "does not require grad" in found["inside: backward"]
        assert found["an error inside"] == "True"
        assert "[1, 0]" in found["uneven, shown"] and "every rank" in found["uneven, shown"]
        assert "moving averages" in found["uneven, save"] and "'0.5': 1" in found["uneven, save"]
        assert "was closed" in found["closed"] and "was closed" in found["closed, ema"]
    assert not list(tmp_path.iterdir())


# name -> ranks; the schedules whose loop is the run's
OWN_LOOP = {"pipeline": 2, "ring(stages=2)": 2, "delayed_all_reduce": 2, "gpipe(micro_batches=2)": 2}


def asked_under(rank, world, plan):
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), pair_loss, pair_batch(0, 0))
    said = said_by(lambda: face.ema(run, DECAY))
    face.close(run)
    return said


@pytest.mark.parametrize("text", OWN_LOOP)
def test_a_schedule_that_leaves_no_whole_newest_weights_refuses_an_average_by_name(crew, text):
    ranks = OWN_LOOP[text]
    plan = face.plan_for(chain(), pair_loss, [pair_batch(0, n) for n in range(ranks)], ranks, schedule=text)
    for said in crew(ranks).run(asked_under, plan):
        assert "run.ema" in said and text.split("(")[0] in said and "run.export()" in said


def accumulated(rank, world, plan):
    model = chain()
    run = face.start(plan, model, OPTIMIZERS["adam"](model.parameters()), pair_loss, pair_batch(0, 0))
    ema = face.ema(run, DECAY)
    for step in range(3):
        face.step(run, face.own(run, [pair_batch(step, number) for number in range(4)]))
        ema.update()
    exported, weights = ema.export(), face.weights(run)
    face.close(run)
    return exported, weights


def test_under_accumulation_the_average_is_that_of_one_process(crew):
    batches = [pair_batch(0, n) for n in range(2)]
    plan = face.plan_for(chain(), pair_loss, batches, 2, schedule="accumulation(micro_batches=2)")
    model = chain()
    optimizer, ema = (
        OPTIMIZERS["adam"](model.parameters()),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    )
    for step in range(3):
        train(model, optimizer, pair_loss, [[pair_batch(step, number) for number in range(4)]])
        ema.update_parameters(model)
    exported, weights = crew(2).run(accumulated, plan)[0]
    assert differ(exported, state_of(ema.module), CLOSE) == {} and differ(weights, state_of(model)) == {}
