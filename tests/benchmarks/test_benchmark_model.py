"""The language model of the benchmarks: the same on every rank, its words by Zipf's law, its tables read by row."""

import pytest
import torch
from benchmarks.measuring.model import Sizes, batches, seeded_model

SIZES = Sizes(vocabulary=300, features=16, hidden=8, projection=4, sentences=4, words=5, negatives=32)


def test_batches_differ_between_ranks_and_not_between_modes():
    first, again, other = (next(batches(SIZES, rank)) for rank in (0, 0, 1))
    assert all(map(torch.equal, first, again)) and not any(map(torch.equal, first, other))


def test_words_follow_zipfs_law():
    """P(id <= k) is log(k + 1) / log(vocabulary)."""
    sizes = Sizes(vocabulary=1000, negatives=100_000)
    _, ids = next(batches(sizes, rank=3))
    for k in (1, 10, 99, 500):
        wanted = (torch.tensor(k + 1.0).log() / torch.tensor(1000.0).log()).item()
        assert (ids <= k).float().mean().item() == pytest.approx(wanted, abs=0.01)
    assert ids.min() >= 1 and ids.max() < 1000


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_only_rows_that_were_read_have_a_gradient():
    model, (sentences, negatives) = seeded_model(SIZES, sparse=True), next(batches(SIZES, 0))
    model(sentences, negatives).backward()
    read = {"inputs": sentences[:, :-1], "outputs": torch.cat([sentences[:, 1:].reshape(-1), negatives])}
    for table, ids in read.items():
        gradient = getattr(model, table).weight.grad.coalesce()
        assert gradient.indices()[0].tolist() == ids.unique().tolist()


def test_the_model_is_the_same_whatever_the_random_stream():
    def built_at(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(seeded_model(SIZES, sparse=True).parameters())

    assert all(map(torch.equal, built_at(1), built_at(2)))


def test_building_the_model_leaves_the_random_stream_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    seeded_model(SIZES, sparse=False)
    assert torch.equal(torch.rand(3), want)


def test_the_size_of_the_tables_is_that_of_their_parameters():
    model = seeded_model(SIZES, sparse=False)
    assert SIZES.table_bytes == model.inputs.weight.nbytes + model.outputs.weight.nbytes


@pytest.mark.parametrize("wrong", [{"words": 0}, {"vocabulary": 1}, {"projection": 64}])
def test_a_model_of_impossible_size_is_refused(wrong):
    with pytest.raises(ValueError, match="model: sizes must be"):
        Sizes(**wrong)
