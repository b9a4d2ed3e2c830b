"""How a parameter is read is told by the operations that touch it, not by its module, its flags or its values."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.plans import ParameterFact, Profile
from armillary.profiler.profiler import profile

ROWS, WIDTH = 12, 4
IDS = torch.tensor([1, 7, 7, 3])
OFFSETS = torch.tensor([0, 3])

Use = Callable[["Bare", Tensor], Tensor]


class Bare(nn.Module):
    """A table, a 1-D bias table and a dense matrix, used as the test says."""

    def __init__(self, use: Use, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, **options)
        self.bias = nn.Parameter(torch.randn(ROWS))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.use = use

    @property
    def weight(self) -> nn.Parameter:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.use(self, ids).pow(2).sum() + self.matrix.sum()


def read(use: Use, *batches: Tensor, **options: object) -> Profile:
    return profile(Bare(use, **options), batches or [IDS], lambda model, ids: model(ids))


def table(use: Use, *batches: Tensor, **options: object) -> ParameterFact:
    return read(use, *batches, **options).parameter("table.weight")


BY_ROW: dict[str, Use] = {
    "nn.Embedding": lambda m, ids: m.table(ids),
    "F.embedding": lambda m, ids: F.embedding(ids, m.weight),
    "F.embedding of int32 ids": lambda m, ids: F.embedding(ids.int(), m.weight),
    "bag sum": lambda m, ids: F.embedding_bag(ids, m.weight, OFFSETS, mode="sum"),
    "bag mean": lambda m, ids: F.embedding_bag(ids, m.weight, OFFSETS, mode="mean"),
    "bag max": lambda m, ids: F.embedding_bag(ids, m.weight, OFFSETS, mode="max"),
    "bag of 2-D ids": lambda m, ids: F.embedding_bag(ids.view(2, 2), m.weight, mode="sum"),
    "weighted bag": lambda m, ids: F.embedding_bag(
        ids, m.weight, OFFSETS, mode="sum", per_sample_weights=torch.ones(4)
    ),
    "bag with trained weights": lambda m, ids: F.embedding_bag(
        ids, m.weight, OFFSETS, mode="sum", per_sample_weights=m.matrix[0]
    ),
    "param[ids]": lambda m, ids: m.weight[ids],
    "param[ids2d]": lambda m, ids: m.weight[ids.view(2, 2)],
    "index_select": lambda m, ids: m.weight.index_select(0, ids),
    "index_select from the end": lambda m, ids: m.weight.index_select(-2, ids),
    "param[array]": lambda m, ids: m.weight[ids.numpy()],
    "all columns": lambda m, ids: m.weight[ids, :],
    "in a detached alias": lambda m, ids: m.weight[ids] + m.weight.detach()[ids],
    "in .data": lambda m, ids: m.weight[ids] + F.embedding(ids, m.weight.data),
    "under autocast": lambda m, ids: autocast_rows(m, ids),
}

WHOLE: dict[str, Use] = {
    "linear": lambda m, ids: F.linear(torch.ones(3, WIDTH), m.weight),
    "matmul": lambda m, ids: m.weight.t() @ torch.ones(ROWS, 3),
    "one_hot": lambda m, ids: F.one_hot(ids, ROWS).float() @ m.weight,
    "slice": lambda m, ids: m.weight[2:5],
    "row by number": lambda m, ids: m.weight[3],
    "mask": lambda m, ids: m.weight[torch.arange(ROWS) < 5],
    "columns": lambda m, ids: m.weight[:, ids.clamp(max=WIDTH - 1)],
    "elements": lambda m, ids: m.weight[ids, ids.clamp(max=WIDTH - 1)],
    "index_select of columns": lambda m, ids: m.weight.index_select(1, ids.clamp(max=WIDTH - 1)),
    "gather": lambda m, ids: m.weight.gather(0, ids[:, None]),
    "rows of a slice": lambda m, ids: F.embedding(ids, m.weight[:8]),
    "rows of another shape": lambda m, ids: F.embedding(ids, m.weight.view(2 * ROWS, 2)),
    "rows of its transpose": lambda m, ids: F.embedding(ids.clamp(max=WIDTH - 1), m.weight.t()),
    "rows of a cast": lambda m, ids: F.embedding(ids, m.weight.double()).float(),
    "rows of a scaled table": lambda m, ids: F.embedding(ids, m.weight * 2),
    "stack": lambda m, ids: torch.stack([m.weight, m.weight]),
    "foreach": lambda m, ids: torch._foreach_mul([m.weight], 2.0)[0],
    "as the weights of a bag": lambda m, ids: (
        F.embedding_bag(ids, m.matrix, OFFSETS, mode="sum", per_sample_weights=m.weight[0])
        if ids.max() < WIDTH
        else m.weight
    ),
}


def autocast_rows(model: Bare, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (model.table(ids) @ model.matrix).float()


@pytest.mark.parametrize("name", BY_ROW)
def test_reads_by_row_are_named_rows(name: str) -> None:
    fact = table(BY_ROW[name])
    assert (fact.reads, fact.dense_readers, fact.refusals) == ("rows", (), ())
    assert fact.rows is not None and fact.rows.alpha_worker == 3 / ROWS


@pytest.mark.parametrize("name", WHOLE)
def test_everything_else_is_named_dense(name: str) -> None:
    ids = IDS.clamp(max=WIDTH - 1) if name.startswith("as the") else IDS
    fact = table(lambda m, x: WHOLE[name](m, ids).reshape(-1)[:4] * 1.0)
    assert (fact.reads, fact.rows, fact.shardable) == ("dense", None, False)
    assert fact.dense_readers


@pytest.mark.parametrize("name", WHOLE)
def test_a_table_also_read_whole_is_named_both(name: str) -> None:
    ids = IDS.clamp(max=WIDTH - 1)
    fact = table(lambda m, x: WHOLE[name](m, ids).sum() + m.table(x).sum())
    assert fact.reads == "both" and fact.dense_readers and fact.rows is None


@pytest.mark.parametrize("sparse", [False, True])
def test_the_sparse_flag_is_not_trusted(sparse: bool) -> None:
    assert table(lambda m, ids: m.table(ids), sparse=sparse).reads == "rows"
    assert table(lambda m, ids: m.table.weight, sparse=sparse).reads == "dense"


def test_values_never_make_a_table_sparse() -> None:
    fact = table(lambda m, ids: m.weight * torch.eye(ROWS)[0][:, None])  # the gradient has one row
    assert fact.reads == "dense"


def test_sampled_softmax_reads_its_bias_table_by_row() -> None:
    def sampled(m: Bare, ids: Tensor) -> Tensor:
        samples = torch.randint(ROWS, (3 * ROWS,), generator=torch.Generator().manual_seed(0))
        return torch.ones(4, WIDTH) @ F.embedding(samples, m.weight).t() + m.bias[samples]

    found = read(sampled)
    bias = found.parameter("bias")
    assert (found.parameter("table.weight").reads, bias.reads) == ("rows", "rows")
    assert bias.rows is not None and bias.rows.ids == 3 * ROWS and bias.rows.row_bytes == 4


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("bias", lambda m, ids: F.embedding(ids, m.bias[:, None])),
        ("table.weight", lambda m, ids: F.embedding(ids, m.weight.view(ROWS, 2, 2).flatten(1))),
        ("table.weight", lambda m, ids: m.weight.view(ROWS, WIDTH)[ids]),
        ("table.weight", lambda m, ids: m.weight[:][ids]),
        ("table.weight", lambda m, ids: m.weight.view(ROWS, WIDTH).detach()[ids] + m.weight[ids]),
    ],
)
def test_a_table_read_through_a_view_is_read_by_row_and_refused_with_a_reason(name: str, use: Use) -> None:
    fact = read(use).parameter(name)
    assert fact.reads == "rows" and "through a view" in fact.refusals[0]


def test_a_table_read_in_a_checkpointed_part_is_refused_with_a_reason() -> None:
    """Backward would read it once more, when the other ranks have no look-up to answer."""
    fact = table(lambda m, ids: checkpoint(lambda x: m.table(x).exp(), ids, use_reentrant=False))
    assert fact.reads == "rows" and "activation checkpointing" in fact.refusals[0]
    assert fact.rows is not None and (fact.rows.lookups, fact.rows.ids) == (1, len(IDS)), "it counts once"


@pytest.mark.parametrize("make", [lambda w: w.new_zeros(4, WIDTH), lambda w: torch.zeros_like(w)[:4]])
def test_a_shape_or_dtype_taken_from_a_table_is_no_read_and_refused_with_a_reason(
    make: Callable[[Tensor], Tensor],
) -> None:
    fact = table(lambda m, ids: m.weight[ids] + make(m.weight))
    assert fact.reads == "rows" and "takes shape and dtype" in fact.refusals[0]


def test_one_table_for_two_features_counts_two_lookups() -> None:
    rows = table(lambda m, ids: m.table(ids) * m.table(ids.flip(0) + 1)).rows
    assert rows is not None and (rows.lookups, rows.ids) == (2, 2 * len(IDS))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(ROWS, WIDTH)
        self.output = nn.Linear(WIDTH, ROWS, bias=False)
        self.output.weight = self.source.weight


def test_tied_weights_under_a_full_softmax_are_both() -> None:
    found = profile(Tied(), [IDS], lambda m, ids: m.output(m.source(ids)).logsumexp(1).sum())
    (fact,) = found.parameters
    assert (fact.name, fact.aliases, fact.reads) == ("source.weight", ("output.weight",), "both")
    assert found.parameter("output.weight") is fact


def test_tied_weights_under_a_sampled_softmax_are_rows() -> None:
    def sampled(m: Tied, ids: Tensor) -> Tensor:
        return (m.source(ids) @ F.embedding(ids + 2, m.output.weight).t()).sum()

    (fact,) = profile(Tied(), [IDS], sampled).parameters
    assert fact.reads == "rows" and fact.rows is not None
    assert (fact.rows.lookups, fact.rows.alpha_worker) == (2, 5 / ROWS)  # rows 1 3 7 and 3 5 9


def test_padding_is_noted_where_all_lookups_agree() -> None:
    rows = table(lambda m, ids: m.table(ids), padding_idx=7).rows
    assert rows is not None and rows.padding_idx == 7
    rows = table(lambda m, ids: m.table(ids) + m.weight[ids], padding_idx=7).rows
    assert rows is not None and rows.padding_idx is None


def test_a_frozen_table_is_read_by_row_and_has_no_gradient() -> None:
    model = Bare(lambda m, ids: m.table(ids) @ m.matrix)
    model.weight.requires_grad_(False)
    fact = profile(model, [IDS], lambda m, ids: m(ids)).parameter("table.weight")
    assert (fact.reads, fact.requires_grad, fact.arrival) == ("rows", False, None)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_that_need_the_whole_batch_are_refused_with_a_reason(option: dict[str, object]) -> None:
    fact = table(lambda m, ids: m.table(ids), **option)
    assert (fact.reads, fact.shardable) == ("rows", False)
    assert next(iter(option)) in fact.refusals[0]
    assert fact.is_rewritten == ("max_norm" in option)


def test_max_norm_of_a_bag_is_refused_and_the_table_left_as_it_was() -> None:
    model = Bare(lambda m, ids: F.embedding_bag(ids, m.weight, OFFSETS, max_norm=0.1, mode="sum"))
    before = model.weight.detach().clone()
    fact = profile(model, [IDS, IDS + 1], lambda m, ids: m(ids)).parameter("table.weight")
    assert "max_norm" in fact.refusals[0]
    assert torch.equal(model.weight, before)


def test_a_parameter_that_no_step_reads_is_named_never() -> None:
    fact = table(lambda m, ids: m.bias[ids])
    assert (fact.reads, fact.arrival, fact.alpha) == ("never", None, 0.0)


def test_reads_are_united_over_batches() -> None:
    def branch(m: Bare, ids: Tensor) -> Tensor:
        return m.table(ids) if ids[0] == 1 else m.weight

    assert table(branch, IDS, IDS).reads == "rows"
    assert table(branch, IDS, IDS + 1).reads == "both"
    assert table(branch, IDS + 1, IDS + 2).reads == "dense"


def test_a_write_in_place_is_a_dense_use() -> None:
    def zeroes_padding(m: Bare, ids: Tensor) -> Tensor:
        m.weight.data[0].zero_()
        return m.table(ids)

    assert table(zeroes_padding).dense_readers == ("zero_",)


class BehindTheDispatcher(torch.autograd.Function):
    """Reads a table through numpy, which no dispatch mode sees."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return torch.tensor(weight.detach().numpy().sum())

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * torch.ones(ROWS, WIDTH)


def test_a_reader_behind_the_dispatcher_is_betrayed_by_the_gradient() -> None:
    fact = table(lambda m, ids: m.table(ids).sum() + BehindTheDispatcher.apply(m.weight))
    assert fact.reads == "both" and "dispatcher" in fact.dense_readers[0]
    assert table(lambda m, ids: BehindTheDispatcher.apply(m.weight)).reads == "dense"


def test_parameters_in_one_storage_are_told_apart_by_the_part_they_cover() -> None:
    flat = torch.randn(2, ROWS, WIDTH)
    model = Bare(lambda m, ids: m.table(ids).sum() + m.other.sum())
    model.table.weight = nn.Parameter(flat[0])
    model.other = nn.Parameter(flat[1])
    found = profile(model, [IDS], lambda m, ids: m(ids))
    assert [found.parameter(name).reads for name in ("table.weight", "other")] == ["rows", "dense"]
    assert found.parameter("table.weight").refusals == ()


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    model = Bare(lambda m, ids: m.table(ids).sum() + m.twin[ids].sum())
    model.twin = nn.Parameter(model.weight.detach())
    found = profile(model, [IDS], lambda m, ids: m(ids))
    assert found.parameter("table.weight").refusals == ("its memory is shared with twin",)


def test_an_id_out_of_range_names_the_table() -> None:
    with pytest.raises(IndexError, match=r"rows 1 to 12 in 'table.weight', which has rows 0 to 11"):
        table(lambda m, ids: m.table(ids), torch.tensor([1, ROWS]))


def test_negative_indices_are_the_rows_they_mean() -> None:
    rows = table(lambda m, ids: m.weight[ids], torch.tensor([-1, ROWS - 1, 0])).rows
    assert rows is not None and rows.hottest == ((ROWS - 1, 2 / 3), (0, 1 / 3))
