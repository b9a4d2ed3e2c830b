"""Owners moved while a run trains: only where it is clearly better, and nothing else of the run changes by a bit."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.exchanges.exchange import RankInfo
from armillary.facts.plan import Choice, Plan
from armillary.planning.planner import plan
from armillary.planning.request import PlanRequest
from armillary.planning.traffic import merged_rows
from armillary.runtime.hybrid import row_samples
from armillary.runtime.hybrid.look_ups import LookUps
from armillary.runtime.hybrid.table import RowTable
from armillary.runtime.profiling.profiler import profile
from armillary.runtime.profiling.row_counts import Lookups
from armillary.session import move as moving
from armillary.session.attach import attach
from armillary.session.decide import JobRequest, assumptions_of
from armillary.session.events import Rebalanced, Resumed
from armillary.session.foresight.compare import Band, compare_run
from armillary.session.move import move
from armillary.session.remeasure import remeasured
from armillary.session.settings import Settings
from armillary.session.train import train
from planning_cases import dense, machines, model, table
from scenes import OPTIMIZERS, TABLES
from scenes import batch_of as mixed_batch
from session.test_prefetch import count_rounds, plain_step, started
from session.test_save_and_load import flat, unlike

V, READ = 41, 40  # rows of a table; those that balanced batches read, all of them
OWNED, HASHED, ONE = (Choice("owned_rows", options) for options in ({}, {"order": "hashed"}, {"owners": 1}))
WANTED = {"words.weight": "owned_rows", "marks": "owned_rows"}


def slow(world):
    return machines(world, megabits=1.0, latency=1e-6)


class Two(nn.Module):
    """words: a table whose ids drift; marks: a number a row, of a table whose ids never do."""

    def __init__(self):
        super().__init__()
        self.words, self.marks = nn.Embedding(V, 3), nn.Parameter(torch.randn(V))
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        ids, marks, target = batch
        return (self.head(self.words(ids)).squeeze(1) + self.marks[marks] - target).square().mean()


def loss(model, batch):
    return model(batch)


def batch_of(worker, step, drift=0):
    """Every row once; or of words only rows that one of `drift` owners has, and of marks the first half."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    rows = torch.arange(0, READ, drift).repeat(drift)[: READ // 2] if drift else torch.arange(READ)
    ids, marks = (made[torch.randperm(len(rows), generator=generator)] for made in (rows, torch.arange(len(rows))))
    return ids, marks, torch.randn(len(rows), generator=generator)


def ragged(worker, step, drift):
    """As many as ever, but other rows, and other numbers of them, in every batch."""
    generator = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(READ // drift, (READ // 2,), generator=generator) * drift
    marks = torch.randint(READ, (READ // 2,), generator=generator)
    return ids, marks, torch.randn(READ // 2, generator=generator)


def begin(world, optimizer_name, lazy=(), constraints=WANTED):
    torch.manual_seed(1)
    model = Two()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    seen = profile(model, [batch_of(worker, 0) for worker in range(world)], loss, workers=world)
    still = tuple(replace(stage, forward_seconds=0.0, backward_seconds=0.0) for stage in seen.stages)
    seen, taken = replace(seen, stages=still), assumptions_of(optimizer)
    made = plan(seen, slow(world), constraints=constraints, lazy=lazy, assumptions=taken)
    return attach(made, model, optimizer), seen


def steps(run, numbers, drift=0, zero_every=1, make=batch_of):
    for step in numbers:
        if step % zero_every == 0:
            run._optimizer.zero_grad()
        loss(run._model, make(run.rank, step, drift)).backward()
        run._optimizer.step()


def ended(run):
    run.close()


def sampling_all(patch):
    patch.setattr(row_samples, "EVERY_STEPS", 1)


# Moved and not moved, side by side -----------------------------------------------------------------------------------


def drifting(rank, world, optimizer, fields, zero_every, plant=None):
    """The same training twice, once with owners asked for: what was told, where the two differ right after a move and
    at the end, and by how much at the end."""
    exports, told = [], []
    with pytest.MonkeyPatch.context() as patch:
        sampling_all(patch)
        for asks in (False, True):
            run, seen = begin(world, optimizer, **fields)
            if asks and plant is not None:
                plant(patch)
            steps(run, range(2), 0, zero_every)
            before = run.rebalance(seen, slow(world)) if asks else None
            steps(run, range(2, 6), world, zero_every)
            after = run.rebalance(seen, slow(world)) if asks else None
            at_once = run.export()
            steps(run, range(6, 9), world, zero_every)
            exports.append((at_once, run.export()))
            if asks:
                told = [str(before), str(after), run.plan.to_json(), owners(run)]
                told += [{one.table: one.has_moved for one in event.tables} for event in (before, after)]
            ended(run)
    if rank > 0:
        return told, [], [], 0.0
    (plain_at_once, plain), (moved_at_once, moved) = exports
    pairs = [(value, flat(moved)[path]) for path, value in flat(plain).items() if torch.is_tensor(value)]
    largest = max(float((one - other).abs().max()) for one, other in pairs)
    return told, unlike(plain_at_once, moved_at_once), unlike(plain, moved), largest


def owners(run):
    return {name: (table.ownership.order, len(table.ownership.owners)) for name, table in run._engine.tables.items()}


CASES = {
    "momentum": ("momentum_decay", {}, 1),
    "momentum, gradients kept over steps": ("momentum_decay", {}, 4),
    "adagrad": ("adagrad", {}, 1),
    "adam": ("adam", {}, 1),
    "adam, lazy": ("adam", {"lazy": ["words.weight", "marks"]}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_that_drifted_to_one_owner_is_moved_and_training_is_the_same_bit_for_bit(crew, case):
    answers = crew(2).run(drifting, *CASES[case])
    for told, at_once, at_end, _ in answers:
        assert told == answers[0][0], "ranks were told different things"
        before, after = told[4:]
        assert not any(before.values())
        assert after == {"words.weight": True, "marks": False}
        assert Plan.from_json(told[2]).group_of("words.weight").exchange == HASHED
        assert (at_once, at_end) == ([], [])


def test_a_fused_optimizer_trains_on_to_rounding(crew):
    """Torch's fused kernels on the CPU round the last numbers of a tensor otherwise than the others (no FMA), so values
    depend on where a row lies."""
    for _, at_once, _, largest in crew(2).run(drifting, "adam_fused", {}, 1):
        assert at_once == []
        assert largest < 1e-6


def test_fused_kernels_round_by_place_and_others_do_not():
    """Why the law above is weaker than the others."""
    order = torch.randperm(63, generator=torch.Generator().manual_seed(0))
    for name, differs in (("adam_fused", True), ("adam", False), ("adam_foreach", False), ("momentum_decay", False)):
        whole, dealt = nn.Parameter(torch.ones(63)), nn.Parameter(torch.ones(63))
        gradients = torch.randn(6, 63, generator=torch.Generator().manual_seed(1))
        for parameter, placed in ((whole, gradients), (dealt, gradients[:, order])):
            optimizer = OPTIMIZERS[name]([parameter])
            for gradient in placed:
                parameter.grad = gradient.clone()
                optimizer.step()
            parameter.state = {entry: value for entry, value in optimizer.state[parameter].items() if value.dim()}
        far = [entry for entry in whole.state if not torch.equal(whole.state[entry][order], dealt.state[entry])]
        assert bool(far) == differs, name
        torch.testing.assert_close(whole[order], dealt)


def test_four_ranks_agree_that_an_only_owner_gives_way_to_all_and_these_to_hashed_ones(crew):
    fields = {"constraints": {"words.weight": ONE, "marks": "owned_rows"}}
    answers = crew(4).run(drifting, "momentum_decay", fields, 1)
    told = answers[0][0]
    assert all(answer[0] == told for answer in answers)
    assert "moves from owned_rows(owners=1), " in told[0]
    assert told[3] == {"words.weight": ("hashed", 4), "marks": ("modulo", 4)}
    assert told[4:] == [{"words.weight": True, "marks": False}] * 2
    assert [answer[1:3] for answer in answers] == [([], [])] * 4


def left_behind(patch):
    """Only the table itself moves."""
    found = moving.row_tensors
    patch.setattr(moving, "row_tensors", lambda *args: [one for one in found(*args) if not one.entry])


def gradient_left_behind(patch):
    deal = RowTable.deal_anew
    patch.setattr(RowTable, "deal_anew", lambda table, exchange, shard, _: deal(table, exchange, shard, table.gradient))


def old_owners_serve(patch):
    patch.setattr(LookUps, "deal_anew", lambda look_ups: None)


def rows_in_another_order(patch):
    carry = moving._carry

    def shuffled(rows, table, into, *rest):
        carry(rows, table, into, *rest)
        into.copy_(into.flip(0))

    patch.setattr(moving, "_carry", shuffled)


@pytest.mark.parametrize(
    ("plant", "case", "at_once"),
    [
        (left_behind, "momentum", True),
        (left_behind, "adagrad", True),
        (left_behind, "adam, lazy", True),
        (gradient_left_behind, "momentum, gradients kept over steps", False),
        (old_owners_serve, "momentum", False),
        (rows_in_another_order, "adam", True),
    ],
)
def test_a_planted_fault_of_the_move_is_seen(crew, plant, case, at_once):
    _, seen_at_once, seen_at_end, _ = crew(2).run(drifting, *CASES[case], plant)[0]
    assert bool(seen_at_once) == at_once
    assert seen_at_end


# What is measured ----------------------------------------------------------------------------------------------------


def measured(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        sampling_all(patch)
        run, seen = begin(world, "sgd")
        steps(run, range(6), world, make=ragged)
        event = run.rebalance(seen, slow(world), constraints={"words.weight": OWNED, "marks": OWNED})
        again = run.rebalance(seen, slow(world), constraints={"words.weight": OWNED, "marks": OWNED})
        assert str(again) == str(event)
        alone = profile(Two(), [batch_of(0, 0)], loss)
        of_one = run.rebalance(alone, slow(world), constraints={"words.weight": OWNED, "marks": OWNED})
        assert (of_one.tables, of_one.profile.workers) == (event.tables, world), "what was measured is of this job"
        ended(run)
    return event


def test_alpha_and_load_are_those_of_the_last_sampled_steps_counted_by_hand(crew):
    world = 2
    event = crew(world).run(
        measured,
    )[0]
    read = {"words.weight": 0, "marks": 1}
    for one in event.tables:
        made = [(worker, step) for step in range(2, 6) for worker in range(world)]
        asked = [set(ragged(*which, world)[read[one.table]].tolist()) for which in made]
        served = [sum(row % world == owner for rows in asked for row in rows) for owner in range(world)]
        assert one.alpha == pytest.approx(sum(map(len, asked)) / len(asked) / V)
        assert one.imbalance == pytest.approx(max(served) * world / sum(served))
        steps_read = [asked[first : first + world] for first in range(0, len(asked), world)]
        rows = event.profile.parameter(one.table).rows
        assert rows.alpha_union == pytest.approx(sum(len(set.union(*step)) for step in steps_read) / 4 / V)
        assert rows.ids == READ // 2
        assert rows.repeated is None, "as the profile has it: sampled steps need not follow one another"
    by_name = {one.table: one for one in event.tables}
    assert by_name["words.weight"].imbalance == world
    assert not any(one.has_moved for one in event.tables), "both are pinned"


@pytest.mark.parametrize("place", [RankInfo(0, 4), RankInfo(0, 4, 2), RankInfo(0, 8, 4)], ids=str)
def test_tables_nobody_looked_at_say_of_this_job_what_they_said_before(place):
    before = model(table("one", union=0.02, workers=2), table("two", workers=2), dense(), workers=2)
    looked = {"one": [Lookups(1, torch.arange(5), torch.ones(5, dtype=torch.int64), 5)] * place.workers}
    after = remeasured(before, looked, place)
    assert after.parameter("one").rows.alpha_union == 5 / before.parameter("one").rows.rows
    old, new = before.parameter("two").rows, after.parameter("two").rows
    for workers in (1, place.workers_per_node, place.workers):
        assert merged_rows(new, after, workers) == pytest.approx(merged_rows(old, before, workers))
    assert after.parameter("head.weight") == before.parameter("head.weight")


def sampled_steps(rank, world):
    run, _ = begin(world, "sgd")
    steps(run, range(20))
    with torch.no_grad():  # before the step that is sampled
        run._model.words(torch.arange(V))
    steps(run, range(20, 25))
    samples = run._engine.executor.look_ups.samples.steps.items()
    kept = {step: {name: len(asked) for name, asked in tables.items()} for step, tables in samples}
    ended(run)
    return kept


def test_one_step_in_ten_is_sampled_and_no_evaluation(crew):
    each = {"words.weight": 1, "marks": 1}
    assert crew(2).run(sampled_steps) == [{0: each, 10: each, 20: each}] * 2


def asked_too_early(rank, world):
    """Between backward and step, and after a forward whose backward is still to come, on one rank."""
    with pytest.MonkeyPatch.context() as patch:
        sampling_all(patch)
        run, seen = begin(world, "momentum_decay")
        steps(run, range(5), world)
        loss(run._model, batch_of(rank, 5, world)).backward()
        said = [run.rebalance(seen, slow(world)).remark, owners(run)]
        run._optimizer.step()
        if rank == 1:
            value = loss(run._model, batch_of(rank, 6, world))
        said.append(run.rebalance(seen, slow(world)).remark)
        run._optimizer.zero_grad()
        (value if rank == 1 else loss(run._model, batch_of(rank, 6, world))).backward()
        run._optimizer.step()
        said += [str(run.rebalance(seen, slow(world))), owners(run), run.rebalance(seen, slow(world)).remark]
        ended(run)
    return said


def test_nothing_moves_while_gradients_wait_nor_by_what_the_owners_before_were_asked(crew):
    for backward, stay, forward, text, moved, again in crew(2).run(asked_too_early):
        assert again == "no table with owners was read in a sampled step"
        assert backward == "on rank 0 gradients wait for their step"
        assert stay == {"words.weight": ("modulo", 2), "marks": ("modulo", 2)}
        assert forward.startswith("on rank 0 what was read of ") and forward.endswith(" waits for its backward")
        assert ", the busiest rank serves 2.00 x the mean; moves from owned_rows, " in text
        assert moved == {"words.weight": ("hashed", 2), "marks": ("modulo", 2)}


def refused(rank, world):
    run, seen = begin(world, "sgd")
    steps(run, range(1))
    said = []
    for topology, constraints in ((slow(2 * world), {}), (slow(world), {"nobody": "owned_rows"})):
        with pytest.raises(ValueError, match=r"rebalance: the topology|names no parameter") as caught:
            run.rebalance(seen, topology, constraints=constraints)
        said.append(str(caught.value))
    ended(run)
    return said


def test_facts_of_another_job_are_refused_on_every_rank(crew):
    for rank, (other, unknown) in enumerate(crew(2).run(refused)):
        prefix = "rank 0 failed: " if rank else ""
        assert other.startswith(f"{prefix}rebalance: the topology is of 4 workers in nodes of 1, the plan of 2")
        assert unknown.startswith(f"{prefix}plan: 'nobody' names no parameter")


# After a move --------------------------------------------------------------------------------------------------------


def used_after(rank, world, folder):
    """Evaluation, export, save and load into the run that moved; and load under the plan it began with."""
    run, _ = begin(world, "adam", lazy=["words.weight"])
    steps(run, range(4))
    move(run._engine, {"words.weight": HASHED, "marks": ONE})
    steps(run, range(4, 6))
    whole = run.export()
    with torch.no_grad():
        read = run._model.words(torch.arange(V)), run._model.marks[torch.arange(V)]
    path = run.save(folder)
    steps(run, range(6, 9))
    unbroken = run.export()
    run.load(path)
    loaded = run.export()
    steps(run, range(6, 9))
    resumed = run.export()
    ended(run)
    other, _ = begin(world, "adam", lazy=["words.weight"])
    other.load(path)
    steps(other, range(6, 9))
    elsewhere = other.export()
    ended(other)
    if rank > 0:
        return []
    assert torch.equal(read[0], whole["model"]["words.weight"]) and torch.equal(read[1], whole["model"]["marks"])
    return [unlike(whole, loaded), unlike(unbroken, resumed), unlike(unbroken, elsewhere)]


def test_a_run_that_moved_evaluates_exports_saves_and_loads_as_any_other(crew, tmp_path):
    assert crew(2).run(used_after, str(tmp_path))[0] == [[], [], []]


def moved_in_a_loop(rank, world, rows, optimizer, kind):
    """Under prefetch, ids of two batches are with the old owners when rows move."""
    exports, rounds = [], []
    for moves in (False, True):
        run, model, made = started(rows, optimizer, kind, world)
        own, by_step = count_rounds(run), []
        for step, batch in enumerate(run.batches([mixed_batch(rank, step) for step in range(11)])):
            own.clear()
            plain_step(run, model, made, batch, step)
            by_step.append(len(own))
            if moves and step == 5:
                move(
                    run._engine, dict.fromkeys(TABLES, Choice(run.plan.group_of("soft").exchange.name, HASHED.options))
                )
        exports.append(run.export())
        rounds.append(by_step)
        ended(run)
    return (unlike(*exports) if rank == 0 else []), rounds


@pytest.mark.parametrize(
    ("workers", "rows", "optimizer", "kind"),
    [
        (2, "owned_rows", "adagrad", "rows"), (2, "owned_rows", "adagrad", "gradients"),
        (2, "owned_rows", "adam", "ids"), (4, "by_node", "adam", "ids"),
    ],
)  # fmt: skip
def test_prefetch_goes_on_after_a_move_and_changes_no_bit(crew, workers, rows, optimizer, kind):
    for far, (stayed, moved) in crew(workers).run(moved_in_a_loop, rows, optimizer, kind):
        assert far == []
        assert moved[:6] == stayed[:6] and moved[8:] == stayed[8:] == [0, 0, 0]
        assert all(count > 0 for count in moved[6:8]), "what was predicted was meant for the old owners"


# A whole run ---------------------------------------------------------------------------------------------------------


class Drifting:
    """A workload whose words drift after its fourth step."""

    name, unit, steps, batch_size = "drifting", "words", 12, READ

    def model(self):
        return Two().double()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def batches(self, split, worker, workers, seed):
        for step in range(12):
            ids, marks, target = batch_of(worker, step, workers if step > 3 else 0)
            yield ids, marks, target.double()

    def loss(self, model, batch):
        return loss(model, batch)

    def samples(self, batch):
        return len(batch[0])

    def evaluate(self, model, batch):
        return {"squares": float(loss(model, batch)), "batches": 1.0}

    def report(self, totals):
        return {"mean_square": totals["squares"] / totals["batches"]}


def train_job(rank, world, folder, fields, taken=None):
    request = JobRequest(PlanRequest(WANTED), topology=slow(world), plan=taken)
    with pytest.MonkeyPatch.context() as patch:
        sampling_all(patch)
        settings = Settings(Path(folder), every_steps=4, every_seconds=0.0, request=request, **fields)
        return list(train(Drifting(), settings))


def of(kind, events):
    return [event for event in events if isinstance(event, kind)]


def test_a_run_moves_owners_at_a_checkpoint_says_so_and_goes_on_with_them(crew, tmp_path):
    names = ("whole", "moved", "broken", "alone", "given")
    whole, moved, broken, alone, given = (str(tmp_path / name) for name in names)
    plain = crew(2).run(train_job, whole, {"steps": 12})[0]
    events = crew(2).run(train_job, moved, {"steps": 12, "rebalance_every": 1})[0]
    assert [event.step for event in of(Rebalanced, events)] == [4, 8]
    stayed, went = of(Rebalanced, events)
    assert not any(one.has_moved for one in stayed.tables)
    assert {one.table: one.after for one in went.tables} == {"words.weight": HASHED, "marks": OWNED}
    assert events[-1].metrics == plain[-1].metrics
    _holds_the_plan_in_force(moved, events)
    assert any("owners after step 8: words.weight: alpha " in note for note in went.plan.notes)

    crew(2).run(train_job, broken, {"steps": 9, "rebalance_every": 1})
    for copy in (alone, given):
        shutil.copytree(broken, copy)
    again = crew(2).run(train_job, broken, {"steps": 12, "resume": True})[0]
    assert [event.step for event in of(Resumed, again)] == [9]
    (restored,) = of(Rebalanced, again)
    assert restored.remark == "words.weight by owned_rows(order=hashed), as the checkpoint left them"
    assert again[-1].metrics == plain[-1].metrics
    _holds_the_plan_in_force(broken, again)

    as_given = crew(2).run(train_job, given, {"steps": 10, "resume": True}, again[0].plan)[0]
    assert of(Resumed, as_given) and not of(Rebalanced, as_given), "a plan that the user gives is taken as it is"

    other = crew(1).run(train_job, alone, {"steps": 10, "resume": True})[0]
    assert of(Resumed, other) and not of(Rebalanced, other), "what was good for two workers says nothing of one"


def _holds_the_plan_in_force(folder, events):
    kept = Plan.load(Path(folder) / "plan.json")
    assert kept == of(Rebalanced, events)[-1].plan
    assert kept.group_of("words.weight").exchange == HASHED
    assert [line.group for line in events[-1].comparison if line.exchange] == [group.name for group in kept.groups]
    found = compare_run(Path(folder), Band(0.0, 1.0, 1.0))
    assert found.is_within, [line for line in found.lines if line.outside]


def test_under_a_schedule_that_owns_the_loop_it_is_refused():
    with pytest.raises(ValueError, match="rebalance_every has no effect; drop it"):
        Settings(Path("x"), 1, rebalance_every=1, request=JobRequest(PlanRequest(schedule=Choice("ring"))))
