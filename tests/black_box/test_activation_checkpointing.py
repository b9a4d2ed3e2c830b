"""A look-up inside torch.utils.checkpoint would be made again inside backward: a table of it is not spread."""

import pytest
import torch
from small_models import OPTIMIZERS, Reader, made, word_batch, word_loss
from torch.utils.checkpoint import checkpoint

import face

TABLE = "words.weight"


class Inside(Reader):
    is_reentrant = False

    def forward(self, words):
        some = torch.ones(1, dtype=torch.float64, requires_grad=True)  # a reentrant part wants one that learns
        read = checkpoint(lambda some: self.words(words).sum(1) * some, some, use_reentrant=self.is_reentrant)
        return self.layers(read)


class InsideReentrant(Inside):
    is_reentrant = True


KINDS = {"non-reentrant": Inside, "reentrant": InsideReentrant}


def planned(kind, **asked):
    batches = [word_batch(worker, 0) for worker in range(2)]
    return face.plan_for(made(kind), word_loss, batches, 2, **asked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointed_look_up_is_seen_by_the_profile_and_its_table_stays_whole(kind):
    assert face.exchanges_of(planned(KINDS[kind]))[TABLE] == "all_reduce"
    assert "activation checkpointing" in " ".join(str(planned(KINDS[kind])).split())
    for wanted in ("row_sharded", "owned_rows"):
        with pytest.raises(ValueError, match=r"activation checkpointing.*keep the look-up outside") as caught:
            planned(KINDS[kind], exchange={TABLE: wanted})
        assert TABLE in str(caught.value) and "replicated" in str(caught.value)


def first_step(rank, world, kind, plan):
    model = made(KINDS[kind])
    run = face.start(plan, model, OPTIMIZERS["sgd"](model.parameters()), word_loss)
    try:
        face.step(run, [word_batch(rank, 0)])
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_edited_to_spread_it_all_the_same_fails_at_the_first_step_by_name(crew, kind):
    """It is of the model without checkpointing, which has the same parameters."""
    for said in crew(2).run(first_step, kind, planned(Reader, exchange={TABLE: "owned_rows"})):
        assert TABLE in said and "activation checkpointing" in said and "outside the checkpointed part" in said
