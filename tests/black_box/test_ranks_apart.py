"""Ranks that come apart are told at the next exchange, save, export, evaluate or close, by parameter and rank."""

import time
import warnings
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from small_models import OPTIMIZERS, Reader, chain, made, pair_batch, pair_loss, word_batch, word_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import armillary
import face

STEPS, DRIFTS = 40, 15


def mean_plan(schedule="simultaneous", workers=2, **asked):
    batches = [pair_batch(0, number) for number in range(max(workers, 4))]
    return face.plan_for(chain(), pair_loss, batches, workers, schedule=schedule, **asked)


def begun(plan, optimizer="sgd", **asked):
    model = chain()
    own = OPTIMIZERS[optimizer](model.parameters())
    return armillary.attach(plan, model, own, report_after=None, timeout=20, **asked)


def said_by(attempt):
    """The error or nothing, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attempt()
        except (ValueError, RuntimeError) as error:
            return str(error), [str(one.message) for one in caught]
    return "nothing", [str(one.message) for one in caught]


def trained(run, rank, steps, change=None, batch=pair_batch):
    """A loop of the user's; change(model, optimizer, step) before the step."""
    for step in range(steps):
        run._optimizer.zero_grad()
        pair_loss(run._model, batch(step, rank)).backward()
        if change is not None:
            change(run._model, run._optimizer, step)
        run._optimizer.step()


# Parameters that drift


def looked_at(run, way, folder):
    """The call by which weights leave the run."""
    if way == "save":
        run.save(folder)
    elif way == "export":
        run.export()
    elif way == "evaluate":
        run.evaluate([pair_batch(0, run.rank)], lambda model, batch: {"loss": float(pair_loss(model, batch))})
    else:
        run.close()


@torch.no_grad()
def drift(model, share):
    """Of one dense parameter that this rank holds; its name."""
    name, weight = next((name, p) for name, p in model.named_parameters() if p.numel() and "weight" in name)
    weight.view(-1)[0] += share * weight.norm()
    return name


def drifted(rank, world, plan, way, share, folder, drifting):
    """40 steps, in the 15th of which one rank changes a parameter."""
    model = chain()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loop = plan.schedule.name in ("simultaneous", "delayed_all_reduce")
    given = {} if loop else {"loss": pair_loss, "example": pair_batch(0, 0)}
    run, name = armillary.attach(plan, model, optimizer, check_data=False, report_after=None, timeout=20, **given), ""
    for step in range(STEPS):
        if loop:
            optimizer.zero_grad()
            pair_loss(model, pair_batch(step, rank)).backward()
            optimizer.step()
        else:
            run.step([pair_batch(step, number) for number in run._engine.micro_batches])
        if step == DRIFTS and rank == drifting:
            name = drift(model, share)
    said, warned = said_by(lambda: looked_at(run, way, folder))
    if way != "close":
        run._give_up(RuntimeError("done"))
    return said, [one for one in warned if "alike" in one], name, all(p.isfinite().all() for p in model.parameters())


PLANS = {
    "user's loop": ("simultaneous", 3),
    "late loop": ("delayed_all_reduce", 2),
    "data x stage": ("gpipe(micro_batches=2, stages=2)", 4),
    "one device, cyclic": ("one_device(micro_batches=2, stages=2)", 2),
    "cyclic data x stage": ("pipeline(stages=2)", 4),
}
WAYS = ["save", "export", "evaluate", "close"]
CASES = [("user's loop", way) for way in WAYS] + [("data x stage", "save"), ("late loop", "evaluate")]
CASES += [("data x stage", "close"), ("one device, cyclic", "export"), ("cyclic data x stage", "evaluate")]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_drift_of_a_thousandth_is_told_on_every_rank_with_parameter_and_rank(crew, tmp_path, kind, way):
    text, workers = PLANS[kind]
    answers = crew(workers).run(drifted, mean_plan(text, workers), way, 1e-3, tmp_path, 1)
    name = answers[1][2]
    for rank, (said, warned, _, _) in enumerate(answers):
        assert said.startswith(f"rank {rank}: run.{way}: after step {STEPS} ") and name in said and not warned
        assert "rank 1 is" in said or "away from rank 1" in said
    if way == "save":
        assert [path.name for path in tmp_path.iterdir()] == [f"step-{STEPS:08d}-apart"]
        assert armillary.latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(("share", "count"), [(1e-7, 1), (0.0, 0)])
@pytest.mark.parametrize("kind", ["user's loop", "data x stage"])
def test_rounding_is_a_warning_on_rank_0_and_ranks_without_a_fault_say_nothing(crew, tmp_path, kind, share, count):
    text, workers = PLANS[kind]
    answers = crew(workers).run(drifted, mean_plan(text, workers), "evaluate", share, tmp_path, 1)
    assert [(said, len(warned)) for said, warned, _, _ in answers] == [
        ("nothing", count),
        *[("nothing", 0)] * (workers - 1),
    ]


def saved_before(rank, world, plan, folder):
    run = begun(plan)
    trained(run, rank, 2)
    older = run.save(folder, keep=1)
    if rank == 1:
        drift(run._model, 1e-2)
    said, _ = said_by(lambda: run.save(folder, keep=1))
    loaded = armillary.latest_checkpoint(folder) == older
    run.load(older)
    fine, _ = said_by(run.close)
    return said, loaded, fine


def test_a_save_of_ranks_apart_leaves_older_checkpoints_and_loading_one_mends_it(crew, tmp_path):
    for said, loaded, fine in crew(2).run(saved_before, mean_plan(), tmp_path):
        assert "step-00000002-apart" in said and loaded and fine == "nothing"


def other_states(rank, world, plan, way):
    """What one rank does to its model or optimizer between steps."""
    run = begun(plan, "momentum")
    other = chain()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    trained(run, rank, 3)
    if rank == 1:
        if way == "load_state_dict":
            run._model.load_state_dict(other.state_dict())
        elif way == "data":
            run._model[1][0].bias.data = run._model[1][0].bias.data + 1
        elif way == "momentum":
            for entries in run._optimizer.state.values():
                entries["momentum_buffer"].mul_(3)
        elif way == "swap of values":
            run._model[1][0].weight.data = run._model[1][0].weight.data.flip(0)
    said, _ = said_by(lambda: (trained(run, rank, 1), run.close()))
    return said, [list(map(len, (p._backward_hooks or (), p._post_accumulate_grad_hooks or ()))) for p in run_of(run)]


def run_of(run):
    return run._running.model.parameters()


@pytest.mark.parametrize("way", ["load_state_dict", "data", "momentum", "swap of values"])
def test_whatever_one_rank_changed_close_puts_everything_back_and_then_says_so(crew, way):
    for rank, (said, hooks) in enumerate(crew(2).run(other_states, mean_plan(), way)):
        assert said.startswith(f"rank {rank}: run.close: after step 4 ") and "The run is closed" in said
        assert hooks == [[0, 0]] * 8


def in_a_block(rank, world, plan):
    """An error of the script's own, of ranks that have drifted."""
    run, said = begun(plan), []
    try:
        with run:
            trained(run, rank, 2)
            if rank == 1:
                drift(run._model, 1e-2)
            raise KeyError("mine")
    except KeyError as error:
        said.append(str(error))
    again = begun(plan)
    try:
        if rank == 1:
            drift(again._model, 1e-2)
        raise KeyError("mine")
    except KeyError:
        said.append(said_by(again.close)[0])
    return said


def test_nothing_is_compared_where_a_run_ends_an_error(crew):
    assert crew(2).run(in_a_block, mean_plan()) == [["'mine'", "nothing"]] * 2


def replicated(rank, world, plan):
    """A table that every rank holds whole, exchanged by row."""
    model = made(Reader)
    run = armillary.attach(plan, model, OPTIMIZERS["adagrad"](model.parameters()), report_after=None)
    for step in range(3):
        run._optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        run._optimizer.step()
    fine, _ = said_by(lambda: run.evaluate([0], lambda *_: {"n": 1.0}))
    if rank == 1:
        run._engine.tables["words.weight"].shard[3] += 0.01
    said, _ = said_by(run.close)
    return fine, said


@pytest.mark.parametrize(("exchange", "names"), [("gather_rows", True), ("owned_rows", False)])
def test_copies_of_tables_are_compared_and_rows_of_owners_are_not(crew, exchange, names):
    batches = [word_batch(worker, 0) for worker in range(2)]
    plan = face.plan_for(made(Reader), word_loss, batches, 2, exchange={"words.weight": exchange})
    for fine, said in crew(2).run(replicated, plan):
        assert fine == "nothing" and ("words.weight" in said) == names


# Options of the optimizer


def rated(rank, world, plan, change):
    """From step 3 on one rank's options are others; in which step it is told, and how."""
    run = begun(plan, "momentum")

    def other(model, optimizer, step):
        if step >= 3 and rank == 1:
            optimizer.param_groups[0].update(change)

    told = []
    for step in range(6):
        told.append(said_by(lambda step=step: trained_at(run, rank, step, other))[0])
        if told[-1] != "nothing":
            run._give_up(RuntimeError("done"))
            break
    else:
        told.append(said_by(run.close)[0])
    return told


def trained_at(run, rank, step, change=None):
    run._optimizer.zero_grad()
    pair_loss(run._model, pair_batch(step, rank)).backward()
    if change is not None:
        change(run._model, run._optimizer, step)
    run._optimizer.step()


CHANGES = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0, "maximize": True}


@pytest.mark.parametrize("name", CHANGES)
def test_an_option_that_one_rank_changed_is_told_at_the_next_exchange(crew, name):
    for rank, told in enumerate(crew(2).run(rated, mean_plan(), {name: CHANGES[name]})):
        assert told[:4] == ["nothing"] * 4 and len(told) == 5
        assert told[4].startswith(f"rank {rank}: in step 4 ") and f"{name} in group 0 of SGD" in told[4]
        assert "rank 0: " in told[4] and "rank 1: " in told[4]


def frozen(rank, world, plan, ranks):
    """From step 3 on these ranks train their last layer no more."""
    run, told = begun(plan, "momentum"), []

    def freezes(model, _, step):
        list(model.parameters())[-1].requires_grad_(step < 3 or rank not in ranks)

    for step in range(6):
        told.append(said_by(lambda step=step: trained_at(run, rank, step, freezes))[0])
        if told[-1] != "nothing":
            run._give_up(RuntimeError("done"))
            return told
    return [*told, said_by(run.close)[0]]


def test_a_parameter_that_one_rank_froze_is_told_at_the_next_exchange(crew):
    for rank, told in enumerate(crew(2).run(frozen, mean_plan(), (1,))):
        assert told[:4] == ["nothing"] * 4 and len(told) == 5, told
        assert told[4].startswith(f"rank {rank}: in step 4 "), told
        assert "bias in group 0 of SGD (rank 0: True, rank 1: False)" in told[4] and "requires_grad of" in told[4]
    assert crew(2).run(frozen, mean_plan(), (0, 1)) == [["nothing"] * 7] * 2


def test_an_option_that_differs_by_rounding_is_no_fault(crew):
    assert crew(2).run(rated, mean_plan(), {"lr": 0.1 * (1 + 1e-9)}) == [["nothing"] * 7] * 2


def last_rated(rank, world, plan, way):
    """Another rate in the last step, or one in a tensor: found when weights leave the run."""
    model = chain()
    rate = torch.tensor(0.1) if way == "tensor" else 0.1
    run = armillary.attach(plan, model, torch.optim.SGD(model.parameters(), lr=rate), report_after=None)
    trained(run, rank, 2)
    if rank == 1:
        run._optimizer.param_groups[0]["lr"] = torch.tensor(0.2) if way == "tensor" else 0.2
    return said_by(lambda: run.export())[0]


@pytest.mark.parametrize("way", ["tensor", "number"])
def test_rates_are_compared_when_weights_leave_the_run(crew, way):
    for said in crew(2).run(last_rated, mean_plan(), way):
        assert "run.export: " in said and "lr in group 0 of SGD (rank 0: 0.1, rank 1: 0.2)" in said


def scheduled(rank, world, plan):
    """Rates that move alike on every rank, by a scheduler for each of two optimizers."""
    model = chain()
    halves = list(model[:2].parameters()), list(model[2:].parameters())
    optimizers = [torch.optim.Adam(halves[0], lr=0.1, foreach=True), torch.optim.SGD(halves[1], lr=0.1, momentum=0.9)]
    run = armillary.attach(plan, model, optimizers, report_after=None)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(one, 0.2, total_steps=20) for one in optimizers]
    for step in range(8):
        for one in optimizers:
            one.zero_grad()
        pair_loss(model, pair_batch(step, rank)).backward()
        for one in optimizers:
            one.step()
        for one in schedulers:
            one.step()
    run.evaluate([0], lambda *_: {"n": 1.0})
    return said_by(run.close)


def test_schedulers_that_step_alike_say_nothing(crew):
    assert crew(3).run(scheduled, mean_plan(workers=3)) == [("nothing", [])] * 3


# Ranks whose loops go different ways


def late(rank, world, plan, change, names):
    """Rank 1's backward reaches no parameter in step 3; what every rank does to gradients, if anything."""
    run, told = begun(plan, **names), []
    for step in range(6):
        run._optimizer.zero_grad()
        one, other = pair_batch(step, rank)
        is_empty = (rank, step) == (1, 3)
        loss = one.requires_grad_().sum() if is_empty else pair_loss(run._model, (one, other))
        loss.backward()
        change(run._model)
        told.append(said_by(run._optimizer.step)[0])
        if told[-1] != "nothing":
            run._give_up(RuntimeError("done"))
            return told
    told.append(said_by(run.close)[0])
    return told


def clipped(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def halved(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / 2


def dropped(model):
    model[0][0].bias.grad = None


@pytest.mark.parametrize("change", [clipped, halved, dropped])
def test_gradients_changed_where_a_rank_came_late_are_told_on_every_rank(crew, change):
    for told in crew(2).run(late, mean_plan(), change, {}):
        assert told[:3] == ["nothing"] * 3 and len(told) == 4
        assert "backward of rank 1 reached no parameter" in told[3] and "rank 0 changed gradients" in told[3]


def test_a_rank_that_came_late_trains_on_where_gradients_are_left_alone(crew):
    assert crew(3).run(late, mean_plan(workers=3), id, {}) == [["nothing"] * 7] * 3


def read_by_row(rank, world, plan, fault):
    """A table sharded by row, whose look-ups tell what else travels alone: the same faults, and where they are told."""
    model = made(Reader)
    optimizer, told = OPTIMIZERS["momentum"](model.parameters()), []
    run = armillary.attach(plan, model, optimizer, report_after=None, timeout=20)
    start, asked = run._transport.start, set()
    run._transport.start = lambda request, label, *more: (asked.add(label), start(request, label, *more))[1]

    def step_at(step):
        optimizer.zero_grad()
        is_late = fault == "late" and (rank, step) == (1, 3)
        loss = torch.zeros(1, requires_grad=True).sum() if is_late else word_loss(model, word_batch(rank, step))
        loss.backward()
        if fault == "late":
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if fault == "rate" and rank == 1 and step >= 3:
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()

    for step in range(6):
        told.append(said_by(lambda step=step: step_at(step))[0])
        if told[-1] != "nothing":
            run._give_up(RuntimeError("done"))
            return told
    run.close()
    return [*told, sorted(asked)]


def spread_plan():
    batches = [word_batch(worker, 0) for worker in range(2)]
    return face.plan_for(made(Reader), word_loss, batches, 2, exchange={"words.weight": "owned_rows"})


@pytest.mark.parametrize(
    ("fault", "place", "words"),
    [("rate", 4, "lr in group 0 of SGD"), ("late", 3, "let every rank's loss reach a parameter")],
)
def test_with_a_table_by_row_the_same_faults_are_told_at_the_same_steps(crew, fault, place, words):
    for told in crew(2).run(read_by_row, spread_plan(), fault):
        assert told[:place] == ["nothing"] * place and len(told) == place + 1
        assert words in told[place]


def test_with_a_table_by_row_nothing_travels_alone_that_look_ups_can_tell(crew):
    for *told, asked in crew(2).run(read_by_row, spread_plan(), "none"):
        assert told == ["nothing"] * 6 and asked == ["bucket 0", "look-ups", "words.weight"]


def uneven(rank, world, plan, way):
    """One rank makes a step, or a backward, more than the others."""
    run, told = begun(plan), []
    for step in range(6):
        told.append(said_by(lambda step=step: trained_at(run, rank, step))[0])
        if told[-1] != "nothing":
            break
        if (rank, step) == (1, 2):
            if way == "step":
                run._optimizer.zero_grad()
            told[-1] = said_by(lambda: trained_unevenly(run, rank, way))[0]
            if told[-1] != "nothing":
                break
    run._give_up(RuntimeError("done"))
    return told


def trained_unevenly(run, rank, way):
    run._optimizer.zero_grad()
    pair_loss(run._model, pair_batch(9, rank)).backward()
    if way == "backward":
        pair_loss(run._model, pair_batch(8, rank)).backward()
    run._optimizer.step()


@pytest.mark.parametrize("way", ["backward"])
def test_a_rank_that_makes_another_backward_is_told_and_not_paired_with_another_step(crew, way):
    for told in crew(2).run(uneven, mean_plan(), way):
        assert "different numbers of optimizer steps" in told[-1] and len(told) < 6


# Words of what is refused


def other_model(rank, world, kind):
    torch.manual_seed(0)
    sizes = [6, 5, 3]
    if kind == "shape" and rank == 1:
        sizes[1] = 7
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[2]))
    if rank == 1:
        if kind == "dtype":
            model[1].bass = None
            model[1].to(torch.float64)
        elif kind == "number":
            model.append(nn.Linear(3, 3))
        elif kind == "names":
            model.register_module("last", model._modules.pop("1"))
        elif kind == "frozen":
            model[1].bias.requires_grad_(False)
        elif kind == "order":
            model._modules["0"]._parameters = dict(reversed(model._modules["0"]._parameters.items()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 6) for _ in range(4)]
    plain = said_by(lambda: armillary.parallelize(model, optimizer))[0]
    planned = said_by(lambda: armillary.parallelize(model, optimizer, batches, lambda m, b: m(b).sum()))[0]
    return plain, planned


@pytest.mark.parametrize("kind", ["shape", "dtype", "number", "names", "frozen", "order"])
def test_models_that_differ_between_ranks_are_told_by_parameter_and_rank(crew, kind):
    for answers in crew(2).run(other_model, kind):
        for said in answers:
            assert "ranks built different models" in said and "on rank 1" in said and "on rank 0" in said
            assert any(name in said for name in ("weight", "bias"))


def outside(rank, world):
    group = dist.new_group([0])
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"process_group": group, "report_after": None}
    said = []
    for more in ((), ([torch.randn(2, 3)] * 2, lambda m, b: m(b).sum())):
        said.append(said_by(lambda more=more: armillary.parallelize(model, optimizer, *more, **given).close())[0])
    return said


def test_a_rank_outside_the_group_is_told_so(crew):
    first, second = crew(2).run(outside)
    assert first == ["nothing"] * 2
    assert all("rank 1 of the job is not one of its ranks" in said for said in second)


def nothing_to_train(rank, world):
    model = nn.Linear(3, 3).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(2, 3)] * 2
    return [
        said_by(lambda more=more: armillary.parallelize(model, optimizer, *more))[0] for more in ((), (batches, id))
    ]


def test_a_model_without_anything_to_train_is_refused(crew):
    for said in crew(2).run(nothing_to_train):
        assert all("no parameter of the model requires a gradient" in one for one in said)


def without_batch(rank, world, plan, empty):
    run = begun(plan)
    said = said_by(lambda: list(run.batches([] if rank in empty else [pair_batch(0, 0)])))[0]
    run._give_up(RuntimeError("done"))
    return said


@pytest.mark.parametrize("empty", [[0], [1], [0, 1]])
def test_every_rank_is_told_which_has_no_batch(crew, empty):
    for rank, said in enumerate(crew(2).run(without_batch, mean_plan(), empty)):
        assert (
            said
            == f"run.batches: rank {rank if rank in empty else empty[0]} has no batch; give every rank at least one"
        )


# The process as it was


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 2), nn.Dropout(0.5)

    def forward(self, value):
        return self.drop(self.layer(value))


def random_numbers(rank, world, kind):
    """What is drawn next, with and without a plan before."""
    found = []
    for is_planned in (False, True):
        torch.manual_seed(rank)
        own = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.arange(96.0).view(16, 6))
        generator = own if kind == "own generator" else None
        loader = DataLoader(data, batch_size=2, shuffle=True, generator=generator)
        model = Drops()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_planned:
            given = () if kind == "watched" else (loader, lambda m, b: m(b[0]).square().mean())
            armillary.parallelize(model, optimizer, *given, check_data=False).close()
        found.append(torch.cat([torch.rand(3), *(batch[0].view(-1) for batch in loader)]))
    return torch.equal(*found)


@pytest.mark.parametrize("kind", ["loader", "own generator", "watched"])
def test_parallelize_leaves_random_numbers_as_they_were(crew, kind):
    assert crew(2).run(random_numbers, kind) == [True, True]


class Centred(nn.Module):
    """Takes the mean over all ranks off what it computes, by a collective of its own."""

    def __init__(self, rank):
        super().__init__()
        self.layer, self.rank, self.calls = nn.Linear(6, 2), rank, []

    def forward(self, value):
        if self.rank == 1:
            time.sleep(0.002)  # this rank is slower
        hidden = self.layer(value)
        sums = torch.stack([hidden.detach().mean(), torch.tensor(float(len(self.calls)))])
        dist.all_reduce(sums)
        self.calls.append(float(sums[1]) / 2)
        return hidden - sums[0] / 2


def forwards(rank, world):
    """What each forward found of the others' number, beside its own."""
    torch.manual_seed(0)
    model = Centred(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 6) for _ in range(4)]
    run = armillary.parallelize(model, optimizer, batches, lambda m, b: m(b).square().mean(), timeout=30)
    run.close()
    return model.calls == list(map(float, range(len(model.calls)))), len(model.calls)


def test_a_model_with_collectives_makes_as_many_forwards_on_every_rank_and_pairs_its_sums(crew):
    (fine, count), other = crew(2).run(forwards)
    assert fine and count > 6 and other == (fine, count)


# Parameters that begin anywhere in their storage


class Slices(nn.Module):
    """Parameters that are views of one tensor, as flat buffers of others make them."""

    def __init__(self):
        super().__init__()
        flat = torch.linspace(-1, 1, 17)
        self.weight, self.bias = nn.Parameter(flat[1:13].view(4, 3)), nn.Parameter(flat[13:])

    def forward(self, x):
        return x @ self.weight.T + self.bias


def odd_chain():
    """No stage of it is as long as whole eights of bytes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise((6, 3, 5, 11, 9, 3, 5))))


def looked_at_anywhere(rank, world, schedule):
    """What is said of a model whose parameters begin anywhere, when it is looked at."""
    model, given = odd_chain() if schedule else Slices(), {}
    if schedule:
        given = {"schedule": schedule, "batches": [torch.randn(7, 6) for _ in range(4)], "loss": square}
    run = armillary.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=20, **given)

    def looped():
        for step in range(4):
            if schedule:
                run.step([torch.randn(7, 6, generator=torch.Generator().manual_seed(10 * step + rank))])
            else:
                square(model, torch.ones(2, 3)).backward()
                run._optimizer.step()
        run.export()
        run.close()

    return said_by(looped)


def square(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("schedule", ["", "ring(stages=2, costs=[[1, 1], [2, 2]], slack=1)"])
def test_parameters_that_begin_anywhere_in_their_storage_are_compared_as_others_are(crew, schedule):
    for said, _ in crew(2).run(looked_at_anywhere, schedule):
        assert said == "nothing"
