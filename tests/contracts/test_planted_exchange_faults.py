"""What each method would do wrong if somebody forgot: the comparison with its oracle must tell."""

import pytest
import torch

from armillary.exchanges import build_dense, dense_exchange
from armillary.plans import Choice
from armillary.runtime.dense_unit import DenseUnit
from contracts import test_identity_codec, test_meet_every, test_ring_gossip, test_top_k
from contracts.journey import batch_of, compared, registered, sick_at_2, trained_beside, with_push


# Bit for bit where the order of sums is the method's own.
def every_second_sum():
    """Gradients are summed in every second step; between, each rank steps with its own."""
    return build_dense("all_reduce")._replace(due=lambda taken: taken % 2 == 0)


def summing():
    return registered(dense_exchange(departs=("local",), costs="replicas drift apart"), every_second_sum)


METHODS = {
    "every_second_sum": (summing, Choice("every_second_sum"), 1e-12),
    "largest_k": (test_top_k.shelf, Choice("largest_k"), 0.0),
    "ring_gossip": (test_ring_gossip.shelf, Choice("ring_gossip"), 0.0),
    "meet_every": (test_meet_every.shelf, Choice("meet_every", {"steps": 2}), 1e-12),
    "coded_identity": (test_identity_codec.shelf, Choice("coded_identity"), 0.0),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_what_runs_is_what_the_oracle_says(crew, name, workers):
    shelf, choice, tolerance = METHODS[name]
    gaps = [gap for gap, _ in crew(workers).run(trained_beside, shelf, choice)]
    assert max(gaps) <= tolerance


@pytest.mark.parametrize("name", ["largest_k", "coded_identity"])
def test_a_step_that_overflows_on_one_rank_harms_no_state(crew, name):
    shelf, choice, tolerance = METHODS[name]
    gaps = [gap for gap, _ in crew(2).run(trained_beside, shelf, choice, sick_at_2)]
    assert max(gaps) <= tolerance


@pytest.mark.parametrize("name", ["meet_every", "every_second_sum"])
def test_a_group_that_is_not_due_asks_for_nothing(crew, name):
    shelf, choice, _ = METHODS[name]
    for _, asked in crew(2).run(trained_beside, shelf, choice):
        assert [len(step) > 0 for step in asked] == [False, True] * 3


def residual_dropped(run):
    def change(result, after, place, before):
        return result, {entry: torch.zeros_like(value) for entry, value in after.items()}

    return with_push(change)(run)


def tail_coded_too(run):
    """Its small numbers are left out, as those of the values."""

    def change(result, after, place, before):
        return result.answered(result.values, result.tail * (result.tail >= place.workers)), after

    return with_push(change)(run)


def mean_instead_of_sum(run):
    def change(result, after, place, before):
        return result.answered(result.values / place.workers, result.tail), after

    return with_push(change)(run)


def other_order_on_one_rank(run):
    """Rank 1 adds up what it hears from the last rank to the first."""
    if run.rank == 1:
        for unit in run._engine.executor.units:
            push = unit.exchange.push

            def faulty(parcel, state, place, push=push):
                program, answer = push(parcel, state, place), None
                while True:
                    try:
                        request = program.send(answer)
                    except StopIteration as stop:
                        return stop.value
                    answer = (yield request).flip(0)

            unit.exchange = unit.exchange._replace(push=faulty)


def one_step_late(run):
    for unit in run._engine.executor.units:
        due = unit.exchange.due
        unit.exchange = unit.exchange._replace(due=lambda taken, due=due: due(taken - 1))


def sick_flag_ignored(run):
    """The state is taken whatever the ranks' numbers are."""
    return _patched("_commit", lambda self, moved: setattr(self, "state", moved[1]))


def unused_parameters_move(run):
    return _patched("_without", lambda self, unused, state: state)


def own_weights_kept(run):
    return _patched("take_weights", lambda self, moved: None) if run.rank == 1 else None


def _patched(name, otherwise):
    was = getattr(DenseUnit, name)
    setattr(DenseUnit, name, otherwise)
    return lambda: setattr(DenseUnit, name, was)


FAULTS = {
    residual_dropped: ("largest_k", batch_of),
    tail_coded_too: ("largest_k", batch_of),
    mean_instead_of_sum: ("largest_k", batch_of),
    other_order_on_one_rank: ("coded_identity", batch_of),
    one_step_late: ("meet_every", batch_of),
    sick_flag_ignored: ("largest_k", sick_at_2),
    unused_parameters_move: ("largest_k", batch_of),
    own_weights_kept: ("ring_gossip", batch_of),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(crew, fault):
    name, feed = FAULTS[fault]
    shelf, choice, tolerance = METHODS[name]
    gaps = [gap for gap, _ in crew(3).run(trained_beside, shelf, choice, feed, fault)]
    assert max(gaps) > tolerance


def a_tenth_forecast_too_much():
    honest = test_top_k.largest_k(keep=0.25)
    return honest._replace(sent_bytes=lambda layout, places: [1.1 * sent for sent in honest.sent_bytes(layout, places)])


def telling_too_much():
    return registered(dense_exchange(departs=("lossy",), costs="its forecast is wrong"), a_tenth_forecast_too_much)


def test_a_forecast_of_bytes_that_is_a_tenth_too_high_is_outside_its_band(crew, tmp_path):
    choice = Choice("a_tenth_forecast_too_much")
    assert [is_within for is_within, _ in crew(2).run(compared, telling_too_much, choice, str(tmp_path))] == [False] * 2
