"""One line: a loop of the user's own is watched for two steps, then planned; it equals one process throughout.

The table is large enough for its rows to travel alone while the loop is watched, and is spread by the plan after it.
"""

import contextlib
import copy
import gc
import pickle
import re

import pytest
import torch
from plain_loop import differ, gradients_of, state_of
from small_models import OPTIMIZERS
from torch import nn
from torch.nn import functional
from torch.utils import _python_dispatch as python_dispatch

import armillary
import face
from armillary import Link
from armillary.session import parallelize as parallelizing

ROWS, WIDTH, CLASSES, STEPS, WATCHED = 1200, 4, 3, 6, 2
SPREAD = {"*": "row_sharded"}
TABLES = {"words.weight", "out"}


class Words(nn.Module):
    """Words come in by row; `out`, a bare parameter, is read by row in the loss, outside of forward."""

    def __init__(self):
        super().__init__()
        self.words, self.body = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.again = nn.Embedding(ROWS, WIDTH)
        self.again.weight = self.words.weight

    def forward(self, words):
        return torch.tanh(self.body(self.words(words).sum(1) + self.again(words).mean(1)))


def made():
    torch.manual_seed(3)
    return Words().double()


def batch_of(worker, step):
    draw = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randint(ROWS, (5, 3), generator=draw), torch.randint(ROWS, (5, CLASSES), generator=draw)


def loss(model, batch):
    words, candidates = batch
    scores = (model.out[candidates] * model(words)[:, None]).sum(-1)
    return functional.cross_entropy(scores, torch.zeros(len(words), dtype=torch.long))


def every_other(model, batch):
    """`out` is read by the first worker only, and only in every other step."""
    words, candidates = batch
    read = int(words[0, 0]) % 2
    hidden = model(words)
    return (hidden * (model.out[candidates[:, 0]] if read else 1.0)).square().mean()


CLIP = 0.02


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=STEPS + 1)


def one_process(habit, optimizer_name, steps, workers=2, loss=loss):
    """The truth: one model, everyone's batches one after the other, the mean of their gradients."""
    model = made()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    schedule = schedule_of(optimizer) if habit == "one_cycle" else None
    parts, kept = 2 if habit == "accumulate" else 1, {}
    for step in range(steps):
        batches = [batch_of(worker, step * parts + part) for part in range(parts) for worker in range(workers)]
        found = [gradients_of(model, loss, batch)[1] for batch in batches]
        for name, parameter in model.named_parameters():
            mine = [one[name] for one in found if name in one]
            parameter.grad = sum(mine[1:], mine[0]) / workers if mine else None
            if habit == "forget zero_grad":
                kept[name] = parameter.grad = parameter.grad + kept.get(name, 0.0)
        if habit == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return model, optimizer


def one_line(rank, world, habit, optimizer_name, constraints, loss=loss):
    """The same by the loop of a script: all that it holds was made before the first step."""
    model = made()
    kept, optimizer = list(model.parameters()), OPTIMIZERS[optimizer_name](model.parameters())
    schedule = schedule_of(optimizer) if habit == "one_cycle" else None
    scaler = torch.amp.GradScaler("cpu", enabled=habit == "scaler", init_scale=4.0)
    run = armillary.parallelize(model, optimizer, constraints=constraints, scaler=scaler)
    called = torch.compile(model, backend="eager") if habit == "compile" else model
    parts, plans = 2 if habit == "accumulate" else 1, [run.plan]
    for step in range(STEPS):
        if habit != "forget zero_grad":
            optimizer.zero_grad()
        for part in range(parts):
            with run.no_sync() if part + 1 < parts else contextlib.nullcontext():
                scaler.scale(loss(called, batch_of(rank, step * parts + part))).backward()
        if habit == "clip":
            nn.utils.clip_grad_norm_(kept, CLIP)
        if habit == "evaluate":
            seen_alone(model, rank, step)
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            schedule.step()
        if habit == "evaluate":
            run.evaluate([batch_of(rank, 77)], lambda model, batch: {"loss": float(loss(model, batch))})
        plans.append(run.plan)
    exported = run.export()
    run.close()
    assert all(type(one) is nn.Parameter for one in kept)
    assert all(mine is theirs for mine, theirs in zip(kept, model.parameters(), strict=True))
    return state_of(model), plans, exported


def seen_alone(model, rank, step):
    """A rank that looks on its own, without gradients, at rows that no step reads."""
    if rank == step % 2:
        with torch.no_grad():
            model.words(torch.arange(ROWS - 1))


def spread_by(plan):
    return {name for group in plan.groups if group.layout == "row_sharded" for name in group.parameters}


def is_provisional(plan):
    return any(note.startswith("provisional") for note in plan.notes)


@pytest.mark.parametrize(
    ("habit", "optimizer", "constraints"),
    [
        ("plain", "momentum", {}),
        ("plain", "momentum", SPREAD),
        ("clip", "adagrad", SPREAD),
        ("scaler", "adam", SPREAD),
        ("one_cycle", "sgd", SPREAD),
        ("accumulate", "momentum", SPREAD),
        ("compile", "adam", SPREAD),
        ("evaluate", "adam", SPREAD),
        ("forget zero_grad", "adam", SPREAD),
    ],
    ids=str,
)
def test_one_line_trains_as_one_process(crew, habit, optimizer, constraints):
    model, mine = one_process(habit, optimizer, STEPS)
    answers = crew(2).run(one_line, habit, optimizer, constraints)
    for state, plans, _ in answers:
        assert differ(state, state_of(model), 0.0 if habit == "plain" else 1e-10) == {}
        assert [is_provisional(plan) for plan in plans] == [True] * WATCHED + [False] * (STEPS - 1)
        if constraints:
            assert spread_by(plans[-1]) == TABLES
    assert answers[0][1] == answers[1][1]
    exported = answers[0][2]["optimizer"]["state"]
    for number, entries in mine.state_dict()["state"].items():
        for entry, value in entries.items():
            torch.testing.assert_close(exported[number][entry], value, rtol=1e-10, atol=1e-14)


def test_ranks_that_read_different_tables_agree_without_a_hang(crew):
    reads = [[int(batch_of(worker, step)[0][0, 0]) % 2 for worker in range(2)] for step in range(STEPS)]
    assert [1, 0] in reads[:WATCHED] or [0, 1] in reads[:WATCHED], reads  # by one rank only, while they are watched
    model, _ = one_process("plain", "adam", STEPS, loss=every_other)
    for state, _, _ in crew(2).run(one_line, "plain", "adam", SPREAD, every_other):
        assert differ(state, state_of(model)) == {}


def uneven(rank, world):
    """Rank 1 has fewer batches, and has run out when the run moves; the second attempt at a step overflows there."""
    model = made()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = armillary.parallelize(model, optimizer, scaler=scaler, constraints=SPREAD)
    for step in run.batches(range(5 if rank == 0 else 2)):
        optimizer.zero_grad()
        value = loss(model, batch_of(rank, step))
        scaler.scale(
            value * float("inf") if (rank, step) == (1, 1) and run.metrics().get("steps") else value
        ).backward()
        scaler.step(optimizer)
        scaler.update()
    assert spread_by(run.plan) == TABLES
    run.close()
    return state_of(model)


def test_a_rank_whose_data_run_out_and_a_skipped_step_do_not_keep_the_run_from_moving(crew):
    model = made()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for step in (0, 2, 3, 4):  # of both ranks, then of rank 0 alone, divided by two all the same
        found = [gradients_of(model, loss, batch_of(worker, step))[1] for worker in range(2 if step == 0 else 1)]
        for name, parameter in model.named_parameters():
            parameter.grad = sum(one[name] for one in found) / 2
        optimizer.step()
    for state in crew(2).run(uneven):
        assert differ(state, state_of(model)) == {}


def two_optimizers(rank, world):
    """One for what is bare and one for the rest; the second steps in every step, the first twice in it."""
    model = made()
    bare, rest = parted(model)
    run = armillary.parallelize(model, [bare, rest], constraints=SPREAD)
    for step in range(STEPS):
        by_turns(bare, rest, lambda turn, step=step: loss(model, batch_of(rank, 2 * step + turn)).backward())
    assert spread_by(run.plan) == TABLES
    run.close()
    return state_of(model)


def parted(model):
    rest = [parameter for name, parameter in model.named_parameters() if name != "out"]
    return OPTIMIZERS["adagrad"]([model.out]), OPTIMIZERS["adam"](rest)


def by_turns(bare, rest, backward):
    for turn in range(2):
        bare.zero_grad()
        rest.zero_grad()
        backward(turn)
        bare.step()
    rest.step()


def test_several_optimizers_move_after_the_second_step_of_all(crew):
    model = made()
    bare, rest = parted(model)

    def backward(number):
        found = [gradients_of(model, loss, batch_of(worker, number))[1] for worker in range(2)]
        for name, parameter in model.named_parameters():
            parameter.grad = (found[0][name] + found[1][name]) / 2

    for step in range(STEPS):
        by_turns(bare, rest, lambda turn, step=step: backward(2 * step + turn))
    for state in crew(2).run(two_optimizers):
        assert differ(state, state_of(model)) == {}


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss(model, batch_of(rank, step)).backward()
    optimizer.step()


def saved_early(rank, world, folder):
    """Saves after one step, in the watched phase, and goes on; a second run loads that; a third what came later."""
    found = []
    for load, steps, save in ((None, range(STEPS), 1), ("early", range(1, STEPS), STEPS), ("late", range(STEPS, 8), 0)):
        model = made()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        run = armillary.parallelize(model, optimizer)
        if load:
            run.load(armillary.latest_checkpoint(f"{folder}/{load}"))
        first = run.plan
        for step in steps:
            step_of(model, optimizer, rank, step)
            if step + 1 == save:
                run.save(f"{folder}/{'early' if save == 1 else 'late'}")
        last = run.plan
        run.close()
        found.append((state_of(model), is_provisional(first), last if is_provisional(first) else first))
    return found


def test_a_save_before_the_move_loads_and_one_after_it_brings_its_plan(crew, tmp_path):
    model, _ = one_process("plain", "adam", STEPS)
    longer, _ = one_process("plain", "adam", 8)
    for (whole, _, _), (again, early, plan), (later, late, taken) in crew(2).run(saved_early, str(tmp_path)):
        assert differ(whole, state_of(model)) == {} and differ(again, state_of(model)) == {}
        assert differ(later, state_of(longer)) == {}
        assert early and not late  # the second watched its own first steps, the third had the second's plan at once
        assert taken == plan


def alone_bytes(rank, world):
    """What a rank sends in a watched step, and under a plan of all_reduce alone."""
    sent = []
    for whole in (False, True):
        model = made()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        if whole:
            few = [batch_of(worker, 0) for worker in range(world)]
            run = armillary.parallelize(model, optimizer, few, loss, constraints={"*": "all_reduce"})
        else:
            run = armillary.parallelize(model, optimizer)
        step_of(model, optimizer, rank, 0)
        sent.append(face.count_bytes(face.Started(run, model, optimizer, loss)))
        run.close()
    return sent


def test_while_a_loop_is_watched_only_touched_rows_of_large_tables_travel(crew):
    for watched, whole in crew(2).run(alone_bytes):
        assert 0 < watched < whole / 10


def leftovers(rank, world):
    """What a run leaves in the process: closed after the move, before it, left by an error, refused, dropped."""
    found = []
    for how in ENDS:
        model = made()
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with contextlib.suppress(ValueError):
            run = armillary.parallelize(model, optimizer, lazy=["nothing"] if how == "refused" else [])
            with contextlib.nullcontext() if how == "dropped" else run:
                for step in range(3 if how == "moved" else 1):
                    step_of(model, optimizer, rank, step)
                if how == "error":
                    raise ValueError("planted")
        hooks = [one for one in model.parameters() if one._post_accumulate_grad_hooks]
        steps = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
        if how == "dropped":
            hooks, steps, run, optimizer = [], [], None, None
            gc.collect()
        found.append((how, len(python_dispatch._get_current_dispatch_mode_stack()), hooks, steps, is_compiled(model)))
    return found


def is_compiled(model):
    graphs = []
    torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)(batch_of(0, 0)[0])
    return len(graphs) > 0


ENDS = ("moved", "watched", "error", "refused", "dropped")


def test_nothing_of_the_watch_is_left_however_a_run_ends(crew):
    for found in crew(2).run(leftovers):
        assert found == [(how, 0, [], [], True) for how in ENDS]


def said_by(attempt):
    try:
        attempt()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return "nothing"


def test_what_cannot_wait_for_the_first_steps_is_refused_by_name_with_the_remedy():
    model = made()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for asked, name in (
        ({"schedule": armillary.Choice("ring")}, "schedule ring"),
        ({"autotune": 4}, "autotune"),
        ({"steps_by_run": True}, "steps_by_run"),
        ({"micro_batches": 2}, "micro_batches"),
    ):
        said = said_by(lambda: armillary.parallelize(model, optimizer, **asked))  # noqa: B023
        assert name in said and "batches=" in said and "loss=" in said, said
    with torch.device("meta"):
        empty = Words()
    said = said_by(lambda: armillary.parallelize(empty, OPTIMIZERS["sgd"](empty.parameters())))
    assert "meta device" in said and "batches=" in said, said
    assert "without loss" in said_by(lambda: armillary.parallelize(model, optimizer, [batch_of(0, 0)]))
    assert "without batches" in said_by(lambda: armillary.parallelize(model, optimizer, loss=loss))
    with pytest.raises(TypeError, match=r"batches is a function, not batches.*call your generator function"):
        armillary.parallelize(model, optimizer, lambda: iter([batch_of(0, 0)]), loss)
    said = said_by(lambda: armillary.parallelize(model, optimizer, constraints={"wrods.weight": "all_reduce"}))
    assert "did you mean 'words.weight'" in said, said


@pytest.mark.parametrize("more", [(), ([batch_of(0, 0)], loss)], ids=["one line", "with batches"])
def test_a_misspelt_argument_is_refused_with_what_was_meant(more):
    model = made()
    with pytest.raises(TypeError, match=r"parallelize.*'constriants'.*did you mean 'constraints'"):
        armillary.parallelize(model, OPTIMIZERS["sgd"](model.parameters()), *more, constriants={})
    with pytest.raises(TypeError, match=r"parallelize.*'pancake'.*it takes .*timeout"):
        armillary.parallelize(model, OPTIMIZERS["sgd"](model.parameters()), *more, pancake=1)


def test_a_model_that_does_not_fit_whole_is_refused_before_the_first_step(monkeypatch):
    model, link = made(), Link(1e-4, 1e8)
    small = armillary.Topology(1, 1, link, link, 50_000)
    monkeypatch.setattr(parallelizing, "measure_links", lambda _: small)
    said = said_by(lambda: armillary.parallelize(model, OPTIMIZERS["adam"](model.parameters())))
    assert re.search(r"75.* of parameters.*225.* of gradients and optimizer state; a rank has 124", said), said
    assert "take more ranks" in said
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


REFUSED = {
    "its numbers": lambda model: model.words.weight.detach().numpy(),
    "a product": lambda model: model.words.weight.T @ model.words.weight,
    "a deep copy": lambda model: copy.deepcopy(model),
    "pickling": lambda model: pickle.dumps(model),
    "an average by hand": lambda model: torch.zeros(ROWS, WIDTH).lerp_(model.words.weight, 0.1),
    "initialisation": lambda model: nn.init.normal_(model.words.weight),
    "another dtype": lambda model: model.words.weight.half(),
    "a hook": lambda model: model.words.weight.register_hook(lambda gradient: gradient),
}


@pytest.mark.parametrize("form", ["one line", "with batches"])
def test_a_script_that_every_table_is_spread_under_says_in_one_process_what_would_not_survive(form):
    model = made()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    more = ([batch_of(0, 0)], loss) if form == "with batches" else ()
    run = armillary.parallelize(model, optimizer, *more, constraints=SPREAD)
    assert (spread_by(run.plan) == TABLES) == (form == "with batches")
    for step in range(WATCHED):
        step_of(model, optimizer, 0, step)
    assert spread_by(run.plan) == TABLES
    for what, deed in REFUSED.items():
        said = said_by(lambda: deed(model))  # noqa: B023
        assert "words.weight" in said or "out" in said, (what, said)
    for step in range(WATCHED, STEPS):
        step_of(model, optimizer, 0, step)
    run.close()
    alone, _ = one_process("plain", "adam", STEPS, workers=1)
    assert differ(state_of(model), state_of(alone)) == {}


def test_a_plan_is_made_of_what_the_loop_read(capsys):
    model = made()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with armillary.parallelize(model, optimizer) as run:
        for step in range(WATCHED):
            assert "plan for" not in capsys.readouterr().out
            step_of(model, optimizer, 0, step)
        assert str(run.plan) in capsys.readouterr().out
        assert not run.plan.is_timed and run.plan.activation_bytes > 0
        assert any("the fullest moment too small" in note for note in run.plan.notes)
    assert spread_by(run.plan) == set()  # nothing crosses


def unheld_table(rank, world, constraints):
    """An optimizer that was not given `words`; what is said, and by what the table goes."""
    model = made()
    held = [parameter for name, parameter in model.named_parameters() if name != "words.weight"]
    optimizer = OPTIMIZERS["momentum"](held)
    try:
        run = armillary.parallelize(model, optimizer, constraints=constraints)
    except ValueError as error:
        return str(error)
    for step in range(3):
        step_of(model, optimizer, rank, step)
    plan = run.plan
    run.close()
    return spread_by(plan), [note for note in plan.notes if "in vain" in note]


@pytest.mark.parametrize("pattern", ["words.weight", "words*"])
def test_rows_asked_for_of_a_table_that_no_optimizer_holds_are_refused_at_the_call(crew, pattern):
    for said in crew(2).run(unheld_table, {pattern: "row_sharded"}):
        assert said == (
            f"parallelize: words.weight cannot be row_sharded, as {pattern!r} asks: the optimizer does not hold it; "
            "freeze it, or add it"
        )


def test_a_table_that_no_optimizer_holds_stays_whole_and_the_plan_says_so(crew):
    for spread, notes in crew(2).run(unheld_table, SPREAD):
        assert spread == {"out"}
        assert notes == ["gradients of words.weight travel in vain: no optimizer holds them; freeze them, or add them"]
