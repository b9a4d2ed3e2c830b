"""Proof of the contracts: local SGD. Replicas train alone and average their weights every so many steps."""

import torch

from armillary.exchanges import DenseExchange, Leg, dense_exchange
from armillary.plans import AllReduce, Choice
from contracts.journey import (
    begun,
    compared,
    moved,
    one_step,
    planned,
    registered,
    saved_and_resumed,
    truth_after,
    unlike,
    verified,
)


def meet_every(steps=4):
    """One all-reduce of weights where the number of steps divides by `steps`, none in between."""

    def push(parcel, state, place):
        total = yield AllReduce(parcel.values / place.workers)
        return parcel.answered(total, parcel.tail), state

    def sent_bytes(layout, topology):
        return [2 * (topology.workers - 1) / topology.workers * layout.nbytes] * topology.workers

    def legs(layout, topology):
        return [Leg("neighbour", sent_bytes(layout, topology)[0], 2 * (topology.workers - 1), "AllReduce")]

    def oracle(parcels, states):
        mean = sum(parcel.values / len(parcels) for parcel in parcels)
        return [parcel.answered(mean, parcel.tail) for parcel in parcels], list(states)

    return DenseExchange(
        push, 1, sent_bytes, legs, oracle, carries="weights", due=lambda taken: taken % steps == 0
    )  # fmt: skip


def shelf():
    entry = dense_exchange(
        {"steps": 4}, departs=("local",), costs="replicas drift apart between their meetings", offers=lambda *_: []
    )
    return registered(entry, meet_every)


CHOICE = Choice("meet_every", {"steps": 2})


def test_it_is_planned_where_it_is_demanded_with_its_cadence():
    with shelf():
        asked, by_price = planned(2, CHOICE), planned(2)
    assert {group.cadence for group in asked.groups} == {"meeting"} and asked.consensus == "mean"
    assert "NOT exact: meet_every(steps=2): replicas drift apart between their meetings" in str(asked)
    assert by_price.departures == () and not any("meet_every" in note for note in by_price.notes)


def test_workers_train_as_its_oracle_says(crew):
    for is_equal, said in crew(2).run(verified, shelf, CHOICE):
        assert is_equal and "NOT exact, held to its own oracle" in said, said


def test_every_replica_is_resumed_and_elsewhere_begins_with_their_mean(crew, tmp_path):
    assert crew(2).run(saved_and_resumed, shelf, CHOICE, str(tmp_path)) == [[]] * 2
    want = truth_after(3, 2, shelf, CHOICE).consensus()
    for weights, _ in crew(3).run(moved, shelf, CHOICE, str(tmp_path)):
        assert all(torch.allclose(weights[name], mean, rtol=1e-12, atol=1e-12) for name, mean in want.items())


def optimizer_state(run):
    named = run._model.named_parameters()
    kept = {name: run._optimizer.state.get(parameter, {}) for name, parameter in named}
    return {f"{name} {entry}": value.clone() for name, entries in kept.items() for entry, value in entries.items()}


def loaded_from_replicas_alike(rank, workers, folder):
    """What differs of the optimizer's state from what was saved."""
    with shelf():
        run = begun(workers, Choice("all_reduce"))
        for step in range(3):
            one_step(run, step)
        path, saved = run.save(folder), optimizer_state(run)
        run.close()
        again = begun(workers, CHOICE)
        again.load(path)
        loaded = optimizer_state(again)
        again.close()
        return unlike(saved, loaded)


def test_what_an_optimizer_had_kept_for_replicas_alike_is_kept_for_each(crew, tmp_path):
    assert crew(2).run(loaded_from_replicas_alike, tmp_path) == [[]] * 2


def test_compare_finds_the_bytes_that_were_forecast(crew, tmp_path):
    for is_within, sent in crew(2).run(compared, shelf, CHOICE, str(tmp_path / "run")):
        assert is_within and sent > 0
