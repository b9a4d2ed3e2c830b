"""Parameters keep their identity: whatever a script took hold of before a run follows into it and out again."""

import weakref

import pytest
import torch
from plain_loop import differ, same, state_of, train
from small_models import OPTIMIZERS, Reader, Tied, made, word_batch, word_loss
from torch import nn

import armillary
import face

STEPS, NORM = 4, 0.05
TABLE = "words.weight"
EXCHANGES = ["all_reduce", "gather_rows", "owned_rows"]


class TwoReaders(nn.Module):
    """Two modules share one table, which is read by row."""

    def __init__(self):
        super().__init__()
        self.words, self.again = nn.Embedding(29, 4), nn.Embedding(29, 4)
        self.again.weight = self.words.weight
        self.out = nn.Linear(8, 3)

    def forward(self, words):
        return self.out(torch.cat([self.words(words).sum(1), self.again(words).mean(1)], 1))


def plan_of(kind, exchange, workers=2):
    batches = [word_batch(worker, 0) for worker in range(workers)]
    return face.plan_for(made(kind), word_loss, batches, workers, exchange={TABLE: exchange})


def batches_of(step, workers=2):
    return [word_batch(worker, step) for worker in range(workers)]


def clipped(rank, world, kind, optimizer_name, plan):
    """Everything is taken hold of before the run: a list to clip, the optimizer, attributes."""
    model = made(kind)
    kept = list(model.parameters())
    optimizer = OPTIMIZERS[optimizer_name](kept)
    in_groups = optimizer.param_groups[0]["params"]
    kept[0].title = "given by the script"
    run = armillary.attach(plan, model, optimizer)
    same_objects = [mine is theirs for mine, theirs in zip(kept, model.parameters(), strict=True)]
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(kept, NORM)))
        optimizer.step()
    assert kept[0].title == "given by the script"
    run.close()
    same_objects += [mine is theirs for mine, theirs in zip(kept, model.parameters(), strict=True)]
    same_objects += [mine is theirs for mine, theirs in zip(kept, optimizer.param_groups[0]["params"], strict=True)]
    same_objects.append(in_groups is optimizer.param_groups[0]["params"])
    assert all(type(one) is nn.Parameter for one in kept) and kept[0].title == "given by the script"
    whole = dict(zip([name for name, _ in model.named_parameters()], [p.detach().clone() for p in kept], strict=True))
    state = {number: dict(optimizer.state[p]) for number, p in enumerate(kept) if p in optimizer.state}
    return all(same_objects), norms, whole, state


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("kind", "optimizer"), [(Reader, "adagrad"), (Reader, "adam"), (TwoReaders, "momentum")])
def test_a_list_kept_from_before_clips_as_one_process_and_holds_the_newest_weights_after(
    crew, kind, optimizer, exchange
):
    model, norms = made(kind), []
    mine = OPTIMIZERS[optimizer](model.parameters())
    clip = lambda model: norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), NORM)))  # noqa: E731
    train(model, mine, word_loss, [batches_of(step) for step in range(STEPS)], clip=clip)
    assert min(norms) > NORM  # it does clip
    for is_same, told, whole, state in crew(2).run(clipped, kind, optimizer, plan_of(kind, exchange)):
        assert is_same
        assert told == pytest.approx(norms, rel=1e-10)
        assert differ(whole, {name: state_of(model)[name] for name in whole}) == {}
        wanted = {number: mine.state[p] for number, p in enumerate(model.parameters())}
        for number, entries in wanted.items():
            for entry, value in entries.items():
                torch.testing.assert_close(state[number][entry], value, rtol=1e-10, atol=1e-12)


def held_weakly(model):
    return weakref.ref(model.words.weight)


def viewed(model):
    return model.words.weight[:3]


def viewed_without_gradients(model):
    with torch.no_grad():
        return model.words.weight[:3]


def hooked(model):
    return model.words.weight.register_hook(lambda gradient: gradient * 2)


def hooked_when_final(model):
    return model.words.weight.register_post_accumulate_grad_hook(lambda parameter: None)


FIXED = {
    held_weakly: "weak reference",
    viewed: "view",
    viewed_without_gradients: "view",
    hooked: "hook",
    hooked_when_final: "hook",
}


def said_of_fixed(rank, world, deeds, plan):
    """What attach says to each, and whether it works once the thing is gone."""
    said = []
    for deed in deeds:
        model = made(Reader)
        before, optimizer = state_of(model), OPTIMIZERS["adam"](model.parameters())
        thing = deed(model) if rank == world - 1 else None  # one rank is enough
        try:
            armillary.attach(plan, model, optimizer)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        assert same(state_of(model), before) and type(model.words.weight) is nn.Parameter
        if hasattr(thing, "remove"):
            thing.remove()
        thing = None
        armillary.attach(plan, model, optimizer).close()
        assert same(state_of(model), before)
    return said


def test_what_keeps_a_table_from_becoming_a_handle_is_refused_by_name_and_works_when_it_is_gone(crew):
    for said in crew(2).run(said_of_fixed, list(FIXED), plan_of(Reader, "owned_rows")):
        for one, word in zip(said, FIXED.values(), strict=True):
            assert "rank 1" in one and TABLE in one and word in one and "all_reduce" in one, one


@pytest.mark.parametrize("deed", FIXED)
def test_a_table_that_cannot_become_a_handle_is_planned_whole_and_the_plan_says_why(deed):
    model = made(Reader)
    thing = deed(model)
    seen = armillary.profile(model, batches_of(0), word_loss, workers=2)
    plan = armillary.plan(seen, face.machines(2))
    assert face.exchanges_of(plan)[TABLE] == "all_reduce" and thing is not None
    assert FIXED[deed] in " ".join(str(plan).split())
    with pytest.raises(ValueError, match=FIXED[deed]):
        armillary.plan(seen, face.machines(2), constraints={TABLE: "row_sharded"})


def closed_late(rank, world, plan):
    """A weak reference that was made during the run keeps it open; then it closes."""
    model = made(Reader)
    run = armillary.attach(plan, model, OPTIMIZERS["adam"](model.parameters()))
    before = face.export(face.Started(run, model, run._optimizer, word_loss))
    known = weakref.ref(model.words.weight) if rank == 0 else None
    try:
        run.close()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    del known
    run.close()
    assert before is None or same(dict(before["model"]), state_of(model))
    return said


def test_a_handle_that_is_held_weakly_at_the_end_is_told_by_name_and_the_run_can_be_closed_after(crew):
    for said in crew(2).run(closed_late, plan_of(Reader, "owned_rows")):
        assert "rank 0" in said and TABLE in said and "weak reference" in said, said


def with_a_live_loss(rank, world, plan):
    """The script still holds the losses of before, as loops do; training goes on, the old graph says why it cannot."""
    model = made(Reader)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    ended, alive = word_loss(model, word_batch(rank, 0)), word_loss(model, word_batch(rank, 0))
    ended.backward()
    optimizer.zero_grad()
    run = armillary.attach(plan, model, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        word_loss(model, word_batch(rank, step)).backward()
        optimizer.step()
    run.close()
    then = state_of(model)
    optimizer.zero_grad()
    word_loss(model, word_batch(0, 9)).backward()  # the same object has a new end for new graphs
    with pytest.raises(RuntimeError, match=r"swap|inplace"):
        alive.backward()
    return then


def test_losses_that_a_script_still_holds_do_not_stand_in_the_way(crew):
    model = made(Reader)
    train(model, OPTIMIZERS["sgd"](model.parameters()), word_loss, [batches_of(step) for step in range(2)])
    for then in crew(2).run(with_a_live_loss, plan_of(Reader, "owned_rows")):
        assert differ(then, state_of(model)) == {}


def test_a_table_that_is_also_read_whole_keeps_its_parameter():
    assert face.exchanges_of(plan_of(Tied, "replicated"))[TABLE] == "all_reduce"
