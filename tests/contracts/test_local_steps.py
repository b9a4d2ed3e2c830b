"""Local SGD and DiLoCo, held to plain loops over replicas with torch's own SGD as the outer optimizer."""

from contextlib import nullcontext

import pytest
import torch

from armillary.exchanges import build_dense
from armillary.plans import Choice, Layout
from contracts.journey import (
    adam,
    batch_of,
    begun,
    compared,
    kept,
    loss,
    net,
    one_step,
    planned,
    saved_and_resumed,
    trained_beside,
    unlike,
    verified,
    with_push,
)

MEAN = Choice("local_steps", {"steps": 2})
DILOCO = Choice("local_steps", {"steps": 2, "outer_rate": 0.7, "outer_momentum": 0.9})


def in_plain_loops(workers, steps, every, outer=(1.0, 0.0), start=0, island=1):
    """Weights of every replica after so many steps, by name. outer: rate and momentum. island: replicas of a node."""
    replicas = [net() for _ in range(workers)]
    optimizers, anchor = [adam(one) for one in replicas], net()
    outer = torch.optim.SGD(anchor.parameters(), *outer, nesterov=outer[1] > 0)
    for step in range(steps):
        for worker, model in enumerate(replicas):
            model.zero_grad()
            loss(model, batch_of(worker, step)).backward()
        size = workers if step < start else island
        for first in range(0, workers, size):
            average_gradients(replicas[first : first + size])
        for optimizer in optimizers:
            optimizer.step()
        if step + 1 == start:
            anchor.load_state_dict(replicas[0].state_dict())
        if step + 1 > start and (step + 1 - start) % every == 0:
            for at, *theirs in zip(anchor.parameters(), *[one.parameters() for one in replicas], strict=True):
                at.grad = at.detach() - torch.stack([one.detach() for one in theirs]).mean(0)
            outer.step()
            for model in replicas:
                model.load_state_dict(anchor.state_dict())
    return [{name: p.detach() for name, p in model.named_parameters()} for model in replicas]


def average_gradients(replicas):
    for theirs in zip(*[one.parameters() for one in replicas], strict=True):
        found = [one.grad for one in theirs if one.grad is not None]
        for one in theirs:
            one.grad = torch.stack(found).sum(0) / len(replicas) if found else None


def trained(rank, workers, choice, steps, per_node=1):
    run = begun(workers, choice, per_node=per_node)
    for step in range(steps):
        one_step(run, step)
    found = {name: p.detach().clone() for name, p in run._model.named_parameters()}
    run.close()
    return found


WAYS = {
    "mean": (MEAN, {}),
    "diloco": (DILOCO, {"outer": (0.7, 0.9)}),
    "post-local": (Choice("local_steps", {"steps": 2, "start": 3}), {"start": 3}),
    "diloco after a start": (Choice("local_steps", {**DILOCO.options, "start": 3}), {"outer": (0.7, 0.9), "start": 3}),
    "islands": (Choice("local_steps", {"steps": 2, "inside": "node"}), {"island": 2}),
    "islands after a start": (
        Choice("local_steps", {"steps": 2, "start": 3, "inside": "node"}),
        {"start": 3, "island": 2},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_train_as_plain_loops_do(crew, way):
    choice, told = WAYS[way]
    workers, per_node = (4, 2) if "island" in told else (3, 1)
    want = in_plain_loops(workers, 8, 2, **told)
    for mine, theirs in zip(crew(workers).run(trained, choice, 8, per_node), want, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)


def test_a_start_that_is_never_over_is_all_reduce_bit_for_bit(crew):
    ways = Choice("local_steps", {"steps": 2, "start": 100}), Choice("all_reduce")
    begun, summed = (crew(3).run(trained, choice, 5) for choice in ways)
    assert [unlike(one, other) for one, other in zip(begun, summed, strict=True)] == [[]] * 3


def asked_of_islands(rank, workers):
    """By step, for which groups requests were made; all groups; and whether gradients outlast the meeting."""
    run = begun(workers, Choice("local_steps", {"steps": 2, "inside": "node"}), per_node=2)
    run._transport.recording, asked, outlast = True, [], []
    for step in range(4):
        run._optimizer.zero_grad()
        loss(run._model, batch_of(run.rank, step)).backward()
        before = [None if p.grad is None else p.grad.clone() for p in run._model.parameters()]
        run._optimizer.step()
        pairs = zip(before, [p.grad for p in run._model.parameters()], strict=True)
        outlast.append(all(one is other or torch.equal(one, other) for one, other in pairs))
        asked.append([record.group for record in run._transport.take_records()])
    groups = [group.name for group in run.plan.groups]
    run.close()
    return asked, groups, outlast


def test_islands_ask_nobody_else_between_meetings_and_leave_gradients_as_they_are(crew):
    for asked, groups, outlast in crew(4).run(asked_of_islands):
        assert all(outlast) and asked == [groups, groups * 2] * 2


def one_sgd(rank, workers, choice):
    """Plain SGD, so that the mean of steps is the step of the mean."""
    run = begun(workers, choice, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        one_step(run, step)
    found = {name: p.detach().clone() for name, p in run._model.named_parameters()}
    run.close()
    return found


def test_meetings_after_every_step_of_sgd_are_data_parallel(crew):
    ways = Choice("local_steps", {"steps": 1}), Choice("all_reduce")
    met, summed = (crew(3).run(one_sgd, choice) for choice in ways)
    for mine, theirs in zip(met, summed, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-12, atol=1e-12)


def test_it_is_taken_where_it_is_named_and_offered_nowhere():
    asked, by_price = planned(2, DILOCO), planned(2)
    assert {group.cadence for group in asked.groups} == {"meeting"} and asked.departures == ("local",)
    assert asked.consensus == "mean" and "local_steps" not in str(by_price)


@pytest.mark.parametrize(
    "options",
    [{"steps": 4}, {"steps": 4, "outer_rate": 0.7, "outer_momentum": 0.9}, {"steps": 4, "start": 3}],
    ids=str,
)
def test_verify_holds_it_to_its_oracle_and_saw_each_mechanism_twice(crew, options):
    for is_equal, said in crew(3).run(verified, nullcontext, Choice("local_steps", options)):
        assert is_equal and "meetings" in said and "NOT exercised" not in said, said


@pytest.mark.parametrize("choice", [MEAN, DILOCO], ids=["mean", "diloco"])
def test_a_run_saved_in_the_midst_of_a_round_goes_on_bit_for_bit(crew, tmp_path, choice):
    assert crew(2).run(saved_and_resumed, nullcontext, choice, str(tmp_path)) == [[]] * 2


def gone_on(rank, workers, choice, path, folder, forgets=""):
    """Loads, trains three steps, saves; all that it held before and after. forgets: an entry of the states."""
    run = begun(workers, choice)
    run.load(path)
    for unit in run._engine.executor.units if forgets else ():
        unit.state[forgets].zero_()
    before = kept(run)
    for step in range(3, 6):
        one_step(run, step)
    run.save(folder)
    after = kept(run)
    run.close()
    return before, after


def test_what_four_ranks_saved_two_go_on_with_and_then_three(crew, tmp_path):
    four, two, three = (str(tmp_path / name) for name in ("four", "two", "three"))
    assert crew(4).run(saved_and_resumed, nullcontext, DILOCO, four) == [[]] * 4
    crew(2).run(gone_on, DILOCO, f"{four}/step-00000003", two)
    (first, _), *others = crew(3).run(gone_on, DILOCO, f"{two}/step-00000006", three)
    assert any(bool(value.any()) for name, value in first.items() if "momentum" in name)
    assert all(unlike(before, first) == [] for before, _ in others)


def test_a_momentum_that_is_not_saved_shows(crew, tmp_path):
    assert crew(2).run(saved_and_resumed, nullcontext, DILOCO, str(tmp_path)) == [[]] * 2
    path = f"{tmp_path}/step-00000003"
    whole, lost = (crew(2).run(gone_on, DILOCO, path, str(tmp_path / one), one) for one in ("", "momentum"))
    assert all(unlike(one, other) for (_, one), (_, other) in zip(whole, lost, strict=True))


def outer_sign(run):
    def change(result, after, place, before):
        other = 2 * before["anchor"] - result.values
        return result.answered(other, result.tail), {**after, "anchor": other}

    with_push(change)(run)


def momentum_dropped(run):
    def change(result, after, place, before):
        return result, {**after, "momentum": torch.zeros_like(after["momentum"])}

    with_push(change)(run)


def divided_twice(run):
    def change(result, after, place, before):
        return result.answered(result.values / place.workers, result.tail), after

    with_push(change)(run)


@pytest.mark.parametrize("fault", [None, outer_sign, momentum_dropped, divided_twice])
def test_a_planted_fault_shows(crew, fault):
    gaps = [gap for gap, _ in crew(3).run(trained_beside, nullcontext, DILOCO, batch_of, fault)]
    assert (max(gaps) <= 1e-12) == (fault is None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps as a whole number of 1 or more, got 0"),
        ({"steps": 2.5}, "steps as a whole number of 1 or more, got 2.5"),
        ({"steps": True}, "steps as a whole number"),
        ({"outer_momentum": 1.0}, "outer_momentum of 0 to below 1, got 1.0"),
        ({"outer_momentum": -0.1}, "outer_momentum of 0 to below 1"),
        ({"outer_rate": 0.0}, "outer_rate above 0"),
        ({"outer_rate": float("nan")}, "outer_rate above 0"),
        ({"start": -1}, "start as a whole number of 0 or more, got -1"),
        ({"inside": "rack"}, "inside='node' or nothing, got 'rack'"),
        ({"inside": "node"}, "averages gradients inside a node, but each node has one rank"),
        ({"every": 4}, "it has no every; it may have steps"),
    ],
)
def test_options_out_of_range_are_refused_by_name(options, said):
    with pytest.raises(ValueError, match=said):
        planned(2, Choice("local_steps", options))


def test_compare_finds_the_bytes_that_were_forecast(crew, tmp_path):
    for is_within, sent in crew(2).run(compared, nullcontext, MEAN, str(tmp_path / "run")):
        assert is_within and sent > 0


def test_what_does_not_float_is_refused():
    layout = Layout(("angles",), ((3,),), "complex64")
    assert "have no mean" in build_dense("local_steps").refuses(layout)
