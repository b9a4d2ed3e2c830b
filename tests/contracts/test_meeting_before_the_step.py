"""Weights that meet before the optimizer's step: the gradient is that of each rank's own, the step moves the mixed."""

import copy

import torch

from armillary.exchanges import dense_exchange
from armillary.plans import Choice
from contracts.journey import adam, batch_of, begun, loss, net, one_step, registered, saved_and_resumed
from contracts.test_ring_gossip import ring_gossip

STEPS = 6


def mixed_before():
    return ring_gossip()._replace(meeting="before")


def mixed_after():
    return ring_gossip()


def shelf():
    entry = dense_exchange(departs=("local",), costs="replicas agree only in the long run", offers=lambda *_: [])
    return registered(entry, mixed_before, entry, mixed_after)


def plain(workers, steps):
    """Loops over replicas on a ring: gradients, then the mean of three, then Adam."""
    models = [copy.deepcopy(net()) for _ in range(workers)]
    optimizers = [adam(model) for model in models]
    for step in range(steps):
        for worker, model in enumerate(models):
            model.zero_grad()
            loss(model, batch_of(worker, step)).backward()
        rows = [list(row) for row in zip(*(model.parameters() for model in models), strict=True)]
        with torch.no_grad():
            for row in rows:
                old = [one.clone() for one in row]
                for worker, one in enumerate(row):
                    circle = sorted({(worker - 1) % workers, worker, (worker + 1) % workers})
                    one.copy_(sum(old[other] for other in circle) / len(circle))
        for optimizer in optimizers:
            optimizer.step()
    return [dict(model.named_parameters()) for model in models]


def furthest(run, truth):
    gaps = [float((p - truth[run.rank][name]).detach().abs().max()) for name, p in run._model.named_parameters()]
    return max(gaps)


def beside_plain_loops(rank, workers, name):
    with shelf():
        run, truth = begun(workers, Choice(name)), plain(workers, STEPS)
        for step in range(STEPS):
            one_step(run, step)
        gap = furthest(run, truth)
        run.close()
        return gap


def test_it_is_a_plain_loop_that_mixes_between_backward_and_step(crew):
    assert max(gap for ranks in (1, 2, 3) for gap in crew(ranks).run(beside_plain_loops, "mixed_before")) < 1e-14
    assert min(crew(3).run(beside_plain_loops, "mixed_after")) > 1e-6  # so the loop tells one from the other


def test_what_was_saved_between_two_of_them_is_resumed_to_the_bit(crew, tmp_path):
    assert crew(3).run(saved_and_resumed, shelf, Choice("mixed_before"), str(tmp_path)) == [[]] * 3


def with_a_closure(rank, workers):
    """A closure that is called twice in a step meets once."""
    with shelf():
        run = begun(workers, Choice("mixed_before"))
        run._transport.recording = True

        def closure():
            run._optimizer.zero_grad()
            value = loss(run._model, batch_of(rank, 0))
            value.backward()
            return value

        run._optimizer.step(lambda: (closure(), closure())[1])
        asked = len(run._transport.take_records())
        one_step(run, 1)
        again = len(run._transport.take_records())
        run.close()
        return asked, again


def test_a_step_with_a_closure_meets_once(crew):
    for asked, again in crew(2).run(with_a_closure):
        assert asked == again > 0
