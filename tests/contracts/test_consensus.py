"""What others see while replicas differ: the mean of their weights and of what their optimizers keep."""

import torch

from armillary.plans import Choice
from armillary.runtime.weight_averaging import shown
from contracts.journey import begun, kept, one_step, truth_after, unlike
from contracts.test_meet_every import shelf

CHOICE = Choice("meet_every", {"steps": 4})


def total(model, batch):
    """A metric: the sum of the weights that are evaluated."""
    return {"sum": float(sum(p.sum() for p in model.parameters()))}


def looked_at(rank, workers):
    with shelf():
        run = begun(workers, CHOICE)
        for step in range(3):
            one_step(run, step)
        before = kept(run)
        plain, score = run.export(), run.evaluate([rank], total)
        with shown(run._engine.executor.units, run._model, run._transport):
            seen = {name: p.detach().clone() for name, p in run._model.named_parameters()}
        changed = unlike(kept(run), before)
        run.close()
        return plain, score["sum"], seen, changed


def test_export_and_evaluate_see_the_mean_and_change_nothing(crew):
    answers, truth = crew(3).run(looked_at), truth_after(3, 3, shelf, CHOICE)
    want = truth.consensus()
    total = sum(float(value.sum()) for value in want.values())
    for _, score, seen, changed in answers:
        assert changed == [] and abs(score / 3 - total) < 1e-12
        assert all(torch.equal(seen[name], mean) for name, mean in want.items())
    plain = answers[0][0]
    assert all(torch.equal(plain["model"][name], mean) for name, mean in want.items())
    assert [plain for plain, *_ in answers[1:]] == [None, None]


def test_an_optimizer_that_never_stepped_a_parameter_does_not_count_in_its_mean(crew):
    """Only worker 1 uses `rare`, so only its Adam keeps something for it."""
    plain = crew(3).run(looked_at)[0][0]
    truth = truth_after(3, 3, shelf, CHOICE)
    numbers = {name: number for number, name in enumerate(truth.named[0])}
    mine = truth.optimizers[1].state[truth.named[1]["rare"]]
    theirs = plain["optimizer"]["state"][numbers["rare"]]
    assert all(torch.equal(theirs[entry], mine[entry]) for entry in ("step", "exp_avg", "exp_avg_sq"))
    firsts = [one.state[named["first.weight"]]["exp_avg"] for one, named in zip(truth.optimizers, truth.named)]
    torch.testing.assert_close(plain["optimizer"]["state"][numbers["first.weight"]]["exp_avg"], sum(firsts) / 3)
