"""What a profile says of real batches agrees with a brute-force count, and bad input is told clearly."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from armillary.exchanges import Ownership
from armillary.plans import Profile, RowFacts
from armillary.profiler.profiler import profile

ROWS = 21


def summed(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).sum()


def rows_of(batches: list[list[int]], workers: int, workers_per_node: int) -> RowFacts:
    found = profile(
        nn.Embedding(ROWS, 2),
        [torch.tensor(batch, dtype=torch.int64) for batch in batches],
        summed,
        workers=workers,
        workers_per_node=workers_per_node,
    )
    rows = found.parameter("weight").rows
    assert rows is not None
    return rows


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@settings(max_examples=25)
@given(
    batches=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=30), min_size=4, max_size=9),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)]),
)
def test_row_facts_equal_a_brute_force_count(batches: list[list[int]], shape: tuple[int, int]) -> None:
    workers, per_node = shape
    rows = rows_of(batches, workers, per_node)
    steps = [batches[i * workers : (i + 1) * workers] for i in range(len(batches) // workers)]
    nodes = [step[i : i + per_node] for step in steps for i in range(0, workers, per_node)]
    used = [batch for step in steps for batch in step]

    assert rows.ids == pytest.approx(mean([len(batch) for batch in used]))
    assert rows.lookups == 1
    assert rows.alpha_worker == pytest.approx(mean([len(set(batch)) / ROWS for batch in used]))
    assert rows.alpha_node == pytest.approx(mean([len(set().union(*node)) / ROWS for node in nodes]))
    assert rows.alpha_union == pytest.approx(mean([len(set().union(*step)) / ROWS for step in steps]))

    later = [(set(batch), set().union(*before)) for before, step in itertools.pairwise(steps) for batch in step]
    read = sum(len(mine) for mine, _ in later)
    assert rows.repeated == (sum(len(mine & before) for mine, before in later) / read if read else None)

    sent = [row for batch in used for row in set(batch)]
    block = -(-ROWS // workers)
    hashed = Ownership(ROWS, tuple(range(workers)), workers, "hashed")
    held = {int(row): rank for rank in range(workers) for row in hashed.ids(rank)}
    for load, owner in (
        (rows.load_modulo, lambda row: row % workers),
        (rows.load_hashed, held.__getitem__),
        (rows.load_blocks, lambda row: row // block),
    ):
        owned = Counter(owner(row) for row in sent)
        want = [owned[o] / len(sent) for o in range(workers)] if sent else [1 / workers] * workers
        assert load == pytest.approx(want)

    every = [row for batch in batches for row in batch]
    hottest = sorted(Counter(every).items(), key=lambda pair: (-pair[1], pair[0]))[:10]
    assert rows.hottest == tuple((row, count / len(every)) for row, count in hottest)


def test_rows_asked_for_are_those_of_every_look_up_by_itself() -> None:
    """Repeats inside a look-up are merged, those of another are not; negative ids are rows too."""

    def looked(model: nn.Embedding, batch: tuple[list[int], list[int]]) -> Tensor:
        weight, (first, other) = model.weight, batch
        return model(torch.tensor(first)).sum() + weight[torch.tensor(other)].sum()

    batches = [([1, 1, 2], [2, 3]), ([5], [-1, ROWS - 1, 5])]
    rows = profile(nn.Embedding(ROWS, 1), batches, looked).parameter("weight").rows
    assert rows is not None and rows.lookups == 2
    assert rows.asked_rows == (2 + 2 + 1 + 2) / 2
    assert rows.alpha_worker == pytest.approx((3 + 2) / 2 / ROWS)


def test_blocks_are_of_the_same_length_but_the_last() -> None:
    assert rows_of([[5, 6, 11, 12, 17, 18]] * 4, 4, 1).load_blocks == (1 / 6, 2 / 6, 2 / 6, 1 / 6)


def test_a_skewed_vocabulary_loads_blocks_unevenly_and_modulo_evenly() -> None:
    generator = torch.Generator().manual_seed(0)
    zipf = 1.0 / torch.arange(1, 2001)
    batches = [torch.multinomial(zipf, 600, True, generator=generator) for _ in range(8)]
    rows = profile(nn.Embedding(2000, 2), batches, summed, workers=4).parameter("weight").rows
    assert rows is not None
    assert max(rows.imbalance_modulo, rows.imbalance_hashed) < 1.1 < 1.5 < rows.imbalance_blocks


class ConstructedLM(nn.Module):
    """The parameters of Parallax's constructed-sparsity model: two tables, a bias table, one LSTM."""

    def __init__(self, vocabulary: int = 15_360, width: int = 512, state: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(vocabulary, width))
        self.softmax = nn.Parameter(torch.zeros(vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.kernel = nn.Parameter(torch.zeros(2 * width, 4 * state))
        self.gates = nn.Parameter(torch.zeros(4 * state))
        self.projection = nn.Parameter(torch.zeros(state, width))


def touch(model: ConstructedLM, ids: Tensor) -> Tensor:
    read = [F.embedding(ids, model.embedding), F.embedding(ids, model.softmax), model.bias[ids]]
    return sum(part.sum() for part in [*read, model.kernel, model.gates, model.projection])


def test_model_alpha_is_the_one_parallax_gives_for_its_constructed_model() -> None:
    torch.manual_seed(0)
    model, order = ConstructedLM(), torch.randperm(15_360)
    published = {120: 1.0, 30: 0.28, 8: 0.10, 1: 0.04}
    for length, alpha in published.items():
        found = profile(model, [order[: 128 * length]], touch)
        assert found.row_bytes == 4 * 15_744_000 and found.dense_bytes == 4 * 590_336
        assert found.alpha == pytest.approx((0.590336 + 15.744 * length / 120) / 16.334336, rel=1e-12)
        assert round(found.alpha, 2) == alpha


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(self.second(x)))


def test_gradients_are_numbered_in_the_order_in_which_they_arrive() -> None:
    found = profile(Chain(), [torch.ones(2, 3)], summed)
    stages = [fact.stage for fact in found.arrivals]
    assert stages == ["third", "third", "first", "first", "second", "second"]
    assert [fact.arrival for fact in found.arrivals] == list(range(6))
    assert found.parameter("unused.weight").arrival is None


def test_a_parameter_used_twice_arrives_after_its_last_use() -> None:
    def twice(model: Chain, x: Tensor) -> Tensor:
        return model.third(model.second(model.third(x))).sum()

    assert profile(Chain(), [torch.ones(2, 3)], twice).arrivals[-1].stage == "third"


def test_batches_may_come_from_an_iterator() -> None:
    batches = [torch.tensor([n, n + 1]) for n in range(6)]
    model = nn.Embedding(ROWS, 2)
    assert unclocked(profile(model, iter(batches), summed, workers=2)) == unclocked(
        profile(model, batches, summed, workers=2)
    )


def unclocked(found: Profile) -> object:
    return found.parameters, [stage.forward_flops for stage in found.stages], found.batches


def test_a_lazy_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'0.weight' is lazy .* run one batch"):
        profile(nn.Sequential(nn.LazyLinear(3)), [torch.ones(2, 3)], summed)


def test_a_meta_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'weight' is on the meta device .* materialised"):
        profile(nn.Linear(3, 3, device="meta"), [torch.ones(2, 3)], summed)


def test_a_compiled_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].compile(backend="eager")
    with pytest.raises(TypeError, match=r"module '0' is compiled"):
        profile(model, [torch.ones(2, 3)], summed)


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (lambda model, x: model(x), r"loss returned shape \(2, 3\)"),
        (lambda model, x: model(x).sum().item(), "loss returned float"),
        (lambda model, x: model(x).sum().detach(), "depends on no parameter"),
    ],
)
def test_a_loss_that_cannot_be_trained_by_is_refused(loss: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        profile(nn.Linear(3, 3), [torch.ones(2, 3)], loss)


@pytest.mark.parametrize("batches", [[], [torch.ones(2, 3)]])
def test_fewer_batches_than_workers_are_refused(batches: list[Tensor]) -> None:
    with pytest.raises(ValueError, match=f"2 workers need a batch each, got {len(batches)}"):
        profile(nn.Linear(3, 3), batches, summed, workers=2)


def test_workers_that_do_not_fill_their_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 workers do not fill nodes of 2"):
        profile(nn.Linear(3, 3), [torch.ones(2, 3)] * 3, summed, workers=3, workers_per_node=2)


def test_modules_that_keep_running_statistics_are_named() -> None:
    model = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3, track_running_stats=False)
    )
    batches = [torch.randn(4, 3)]
    assert profile(model, batches, lambda model, batch: model(batch).sum()).running == ("1.0",)
