"""A row-sharded table reads, and learns, like the parameter it replaced; what it cannot do it refuses by name."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from armillary.reference.serial import train_step
from armillary.tables import handle
from armillary.tables.table import GradientHandle
from beside import close, own_part, pair, sgd

V, D = 11, 3
IDS = torch.tensor([3, 0, 3, 10, 7, 1])
OFFSETS = torch.tensor([0, 2, 2, 5])  # the second bag is empty
WEIGHTS = torch.linspace(0.5, 2.0, len(IDS), dtype=torch.float64)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lin = nn.Parameter(torch.randn(V, D)), nn.Linear(D, 4)


def bag(ids=IDS, offsets=OFFSETS, **options):
    return lambda table, shift: functional.embedding_bag((ids + shift) % V, table, offsets, **options)


NONE = torch.empty(0, dtype=torch.int64)
BAG = torch.ops.aten.embedding_bag.padding_idx
READS = {
    "embedding": lambda table, shift: functional.embedding(IDS, table),
    "embedding, sparse": lambda table, shift: functional.embedding(IDS, table, sparse=True),
    "embedding, int32 ids": lambda table, shift: functional.embedding(IDS.int(), table),
    "embedding, 2-D ids": lambda table, shift: functional.embedding(IDS.view(2, 3), table),
    "embedding, padding": lambda table, shift: functional.embedding(IDS, table, padding_idx=3),
    "embedding, negative padding": lambda table, shift: functional.embedding(IDS, table, padding_idx=-1),
    "embedding, padding not read": lambda table, shift: functional.embedding(IDS, table, padding_idx=5),
    "embedding, no ids": lambda table, shift: functional.embedding(NONE, table),
    "bag, sum": bag(mode="sum"),
    "bag, mean": bag(mode="mean"),
    "bag, max": bag(mode="max"),
    "bag, int32 ids and offsets": bag(IDS.int(), OFFSETS.int(), mode="sum"),
    "bag, int32 ids, int64 offsets": bag(IDS.int(), OFFSETS, mode="sum"),
    "bag, last offset": bag(offsets=torch.tensor([0, 2, 2, 6]), mode="mean", include_last_offset=True),
    "bag, padding": bag(mode="mean", padding_idx=3),
    "bag, 2-D ids": bag(IDS.view(2, 3), None, mode="max"),
    "bag, sample weights": bag(mode="sum", per_sample_weights=WEIGHTS),
    "bag, all empty": lambda t, s: functional.embedding_bag(NONE, t, torch.zeros(3, dtype=torch.int64), mode="mean"),
    "bag, no bag": lambda t, s: functional.embedding_bag(NONE, t, NONE, mode="sum"),
    "index": lambda table, shift: table[(IDS + shift) % V],
    "index, negative": lambda table, shift: table[IDS - V],
    "index, 2-D": lambda table, shift: table[IDS.view(3, 2)],
    "index, list": lambda table, shift: table[[2, 2, 5]],
    "index, int": lambda table, shift: table[4 + shift],
    "index, negative int": lambda table, shift: table[-2],
    "index_select": lambda table, shift: table.index_select(0, IDS),
    "torch.index_select, dim -2": lambda table, shift: torch.index_select(table, -2, IDS),
    "torch.index_select by name": lambda table, shift: torch.index_select(input=table, dim=0, index=IDS),
    "traced embedding": lambda table, shift: torch.ops.aten.embedding.default(table, IDS, 3),
    "traced embedding, no padding": lambda table, shift: torch.ops.aten.embedding.default(table, IDS),
    "traced bag": lambda t, s: BAG(t, IDS, OFFSETS, False, 1, False, None, False, 3)[0],
    "traced index_select": lambda table, shift: torch.ops.aten.index_select.default(table, 0, IDS),
    "numpy": lambda table, shift: table[IDS.numpy()],
    "a numpy number": lambda table, shift: table[IDS.numpy()[1]],
    "all columns": lambda table, shift: table[IDS, :] + table[IDS.view(-1, 1), ...][:, 0],
    "one row, all columns": lambda table, shift: table[2, :],
    "as it is": lambda table, shift: table.double().to("cpu").contiguous()[IDS],
    "twice": lambda table, shift: table[IDS] * table[IDS.flip(0)],
    "detached": lambda table, shift: table.detach()[IDS] + table[0],
}  # fmt: skip


def read_all(rank, workers, exchange):
    wrong = {}
    for name, read in READS.items():

        def loss(model, shift, read=read):
            return (read(model.table, shift) + model.lin.weight.sum()).sin().sum()

        run, model, optimizer, reference, truth = pair(Table, workers, {"table": exchange})
        here, there = read(model.table, rank), read(reference.table, rank)
        if not torch.equal(here, there) or here.requires_grad != there.requires_grad:
            wrong[name] = "forward"
        loss(model, rank).backward()
        optimizer.step()
        train_step(reference, truth, range(workers), loss)
        wrong.update({f"{name}: {tensor}": far for tensor, far in close(run, model, reference).items()})
    return wrong


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_every_way_to_read_rows_reads_and_learns_like_a_parameter(crew, exchange):
    assert crew(2).run(read_all, exchange) == [{}, {}]


REFUSED = {
    "arithmetic": lambda table: table + torch.ones(V, D, dtype=torch.float64),
    "sum of each column": lambda table: table.sum(0),
    "matmul": lambda table: torch.ones(2, V, dtype=torch.float64) @ table,
    "slice": lambda table: table[:3],
    "mask": lambda table: table[torch.ones(V, dtype=torch.bool)],
    "new axis": lambda table: table[None],
    "bool": lambda table: table[True],
    "columns": lambda table: table.index_select(1, torch.tensor([0])),
    "some columns": lambda table: table[IDS, 1:],
    "a view": lambda table: table.view(V, D),
    "a hook": lambda table: table.register_hook(print),
    "pairs": lambda table: table[IDS, torch.zeros_like(IDS)],
    "linear with gradients": lambda table: functional.linear(torch.ones(2, D, dtype=torch.float64), table),
    "clone": lambda table: table.clone(),
    "transpose": lambda table: table.T,
    "cast": lambda table: table.to(torch.float32),
    "stack": lambda table: torch.stack([table, table]),
    "in place": lambda table: table.mul_(2),
    "max_norm": lambda table: functional.embedding(IDS, table, max_norm=1.0),
    "scale_grad_by_freq": lambda table: functional.embedding(IDS, table, scale_grad_by_freq=True),
    "copy.deepcopy": lambda table: copy.deepcopy(table),
    "pickle": lambda table: pickle.dumps(table),
}


def refuse_all(rank, workers):
    run, model, _, _, _ = pair(Table, workers, {"table": "owned_rows"})
    silent = []
    for name, operation in {
        **{name: lambda _, o=operation: o(model.table) for name, operation in REFUSED.items()},
        "module cast": lambda _: model.half(),
        "module copy": lambda _: copy.deepcopy(model),
    }.items():
        try:
            operation(None)
        except NotImplementedError as error:
            if not str(error).startswith("table: ") or "Remedy: " not in str(error):
                silent.append((name, str(error)))
        else:
            silent.append((name, "no error"))
    said = repr(model.table), tuple(model.table.shape), isinstance(model.table, nn.Parameter)
    run._engine.finish()
    return silent, said


def test_what_needs_the_whole_table_is_refused_by_name_with_a_remedy(crew):
    for silent, said in crew(2).run(refuse_all):
        assert silent == []
        assert said == (
            "TableHandle('table', shape=(11, 3), dtype=torch.float64, rows owned by workers)", (V, D), True,
        )  # fmt: skip


def read_by_full_softmax(rank, workers, exchange):
    """As an evaluation of a model with sampled outputs does."""
    _, model, _, _, _ = pair(Table, workers, {"table": exchange})
    hidden, said = torch.ones(2, D, dtype=torch.float64), ""
    with torch.no_grad():
        try:
            scores = hidden @ model.table.T
        except NotImplementedError as error:
            said, scores = str(error), functional.linear(hidden, model.table)
        return said, torch.equal(scores, functional.linear(hidden, model.table[torch.arange(V)]))


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
def test_what_stands_in_the_refusal_of_a_full_softmax_does_instead(crew, exchange):
    for said, is_equal in crew(2).run(read_by_full_softmax, exchange):
        assert said.startswith("table: .T needs the whole table")
        assert "F.linear(x, table)" in said and said.endswith(
            "Remedy: constraints={'table': 'all_reduce'} keeps it whole and plain, as DDP does"
        )
        assert is_equal


def read_nonsense(rank, workers):
    """Caught, the refusal leaves the ranks in step: nothing was asked of anyone."""
    run, model, _, _, _ = pair(Table, workers, {"table": "owned_rows"})
    said = []
    for bad in (torch.tensor([0, V]), torch.tensor([-1, 2])):
        if rank == 1:
            with pytest.raises(IndexError) as caught:
                functional.embedding(bad, model.table)
            said.append(str(caught.value))
        functional.embedding(IDS, model.table).sum().backward()
    run._engine.finish()
    return said


def test_an_id_out_of_range_names_rank_table_and_id(crew):
    assert crew(2).run(read_nonsense)[1] == [
        "rank 1: table has 11 rows, but the batch reads row 11; check the vocabulary or the hashing of ids",
        "rank 1: table has 11 rows, but the batch reads row -1; check the vocabulary or the hashing of ids",
    ]


def evaluate_on_one_rank(rank, workers, monkeypatched_rows):
    run, model, _, reference, _ = pair(Table, workers, {"table": "owned_rows"})
    block, handle.LINEAR_BLOCK_ROWS = handle.LINEAR_BLOCK_ROWS, monkeypatched_rows
    same = None
    if rank == 1:
        hidden, bias = torch.randn(2, 5, D, dtype=torch.float64), torch.randn(V, dtype=torch.float64)
        with torch.no_grad():
            here, there = (functional.linear(hidden, m.table, bias) for m in (model, reference))
        same = torch.equal(here, there) or float((here - there).abs().max())
    handle.LINEAR_BLOCK_ROWS = block
    run._engine.finish()
    return same


@pytest.mark.parametrize("block_rows", [1, 4, V, 100])
def test_full_softmax_on_one_rank_reads_the_table_in_blocks(crew, block_rows):
    same = crew(2).run(evaluate_on_one_rank, block_rows)[1]
    assert same is True or same < 1e-14


def look_at_gradient(rank, workers):
    run, model, optimizer, reference, _ = pair(Table, workers, {"table": "owned_rows"})
    functional.embedding(IDS, model.table).square().sum().backward()
    train_step(reference, sgd(reference.parameters()), range(workers), lambda m, w: m.table[IDS].square().sum())
    held = next(table for table in run._engine.tables.values()).parameter
    # train_step has stepped: gradients of the reference are still there
    gradients = [model.table.grad, held.grad, model.table.grad.data, held.grad.detach()]
    want = reference.table.grad
    norms = {
        "2": all(abs(float(g.norm() - want.norm())) < 1e-12 for g in gradients),
        "1": all(abs(float(g.norm(1) - want.norm(1))) < 1e-12 for g in gradients),
        "inf": all(float(torch.linalg.vector_norm(g, float("inf"))) == float(want.abs().max()) for g in gradients),
    }
    refused = []
    for operation in (
        lambda g: g + 1,
        lambda g: g.abs().max(),
        lambda g: torch.linalg.vector_norm(g, 2, dim=0),
        lambda g: g.norm(0),
        lambda g: g.numpy(),
    ):
        with pytest.raises(NotImplementedError, match=r"table\.grad: "):
            refused.append(operation(model.table.grad))
    with pytest.raises(ValueError, match="can be set to None only"):
        model.table.grad = torch.zeros(V, D)
    shape = tuple(model.table.grad.shape), isinstance(held.grad, GradientHandle)
    model.table.grad.mul_(0.5)
    local = run._engine.tables["table"].gradient
    halved = float((local - 0.5 * touched(own_part(run, "table", want))).norm())
    model.zero_grad(set_to_none=False)
    zeroed = float(run._engine.tables["table"].gradient.norm())
    optimizer.zero_grad(set_to_none=False)
    model.zero_grad()
    run._engine.finish()
    return norms, refused, shape, halved, zeroed, model.table.grad, held.grad


def touched(rows):
    """Plain SGD sees a window of the rows that got a gradient."""
    return rows[rows.abs().sum(1) > 0]


def test_the_gradient_answers_global_norms_and_scales_in_place(crew):
    for norms, refused, shape, halved, zeroed, *cleared in crew(2).run(look_at_gradient):
        assert norms == {"2": True, "1": True, "inf": True}
        assert refused == [] and shape == ((V, D), True)
        assert halved < 1e-12 and zeroed == 0 and cleared == [None, None]


CLIPS = {
    "model, foreach": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=True),
    "optimizer's groups": lambda model, optimizer: nn.utils.clip_grad_norm_(held_by(optimizer), 0.05),
    "optimizer's groups, foreach": lambda m, optimizer: nn.utils.clip_grad_norm_(
        held_by(optimizer), 0.05, foreach=True
    ),
    "values, foreach": lambda model, optimizer: nn.utils.clip_grad_value_(held_by(optimizer), 0.01, foreach=True),
    "norm of order 3": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=3),
}


def held_by(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train_clipped(rank, workers, how, exchange):
    run, model, optimizer, reference, truth = pair(Table, workers, {"table": exchange})

    def loss(model, worker):
        return model.lin(model.table[(IDS + worker) % V]).square().sum()

    norms = []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss(model, rank).backward()
        norms.append(CLIPS[how](model, optimizer))
        optimizer.step()
        train_step(reference, truth, range(workers), loss, before_step=lambda m: norms.append(CLIPS[how](m, truth)))
    apart = [float(mine - true) for mine, true in zip(norms[::2], norms[1::2], strict=True) if mine is not None]
    return close(run, model, reference), all(abs(value) < 1e-12 for value in apart)


@pytest.mark.parametrize("exchange", ["owned_rows", "gather_rows"])
@pytest.mark.parametrize("how", CLIPS)
def test_clipping_is_by_the_one_process_norm_however_it_is_called(crew, how, exchange):
    assert crew(2).run(train_clipped, how, exchange) == [({}, True)] * 2


def load_and_freeze(rank, workers):
    run, model, optimizer, reference, _ = pair(Table, workers, {"table": "owned_rows"})
    plain = {name: torch.randn_like(value) for name, value in reference.state_dict().items()}
    plain = [plain]
    torch.distributed.broadcast_object_list(plain)
    model.load_state_dict(plain[0])
    reference.load_state_dict(plain[0])
    kinds = {name: type(value).__name__ for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"table: shape \(2, 2\) does not fit|size mismatch for table"):
        model.load_state_dict({**plain[0], "table": torch.zeros(2, 2)})
    model.table.requires_grad_(False)  # frozen later: it is still read, and gets no gradient
    (model.table[IDS].sum() * model.lin.weight.sum()).backward()
    frozen = model.table.grad is None
    optimizer.step()
    train = sgd(reference.lin.parameters())
    reference.table.requires_grad_(False)
    train_step(reference, train, range(workers), lambda m, w: m.table[IDS].sum() * m.lin.weight.sum())
    return close(run, model, reference), kinds, frozen


def test_a_plain_state_dict_loads_and_a_frozen_table_stays(crew):
    for far, kinds, frozen in crew(2).run(load_and_freeze):
        assert far == {} and frozen
        assert kinds == {"table": "TableHandle", "lin.weight": "Tensor", "lin.bias": "Tensor"}


def recompute(rank, workers, is_reentrant):
    run, model, _, _, _ = pair(Table, workers, {"table": "owned_rows"})
    start = torch.ones((), dtype=torch.float64, requires_grad=True)

    def part(scale):
        return model.lin(model.table[IDS] * scale)

    with pytest.raises(RuntimeError) as caught:
        checkpoint(part, start, use_reentrant=is_reentrant).sum().backward()
    run._transport.close()
    return str(caught.value)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_look_up_inside_a_checkpointed_part_is_refused(crew, is_reentrant):
    for error in crew(2).run(recompute, is_reentrant):
        assert error.startswith("table: read inside a backward") and "outside the checkpointed part" in error


def train_compiled(rank, workers, backend):
    class Compiled(Table):
        def forward(self, ids):
            return self.lin(torch.tanh(functional.embedding(ids, self.table))).square().sum()

    run, model, optimizer, reference, truth = pair(Compiled, workers, {"table": "owned_rows"})
    compiled = torch.compile(model, backend=backend)
    for step in range(2):
        optimizer.zero_grad()
        compiled((IDS + rank + step) % V).backward()
        optimizer.step()
        train_step(reference, truth, range(workers), lambda m, w, step=step: m((IDS + w + step) % V))
    return close(run, model, reference)


def test_compiling_after_attach_trains_the_same(crew):
    assert crew(2).run(train_compiled, "aot_eager") == [{}, {}]


def use_as_a_module(rank, workers):
    """What changes nothing is allowed: state taken and put back, a move to where the model is."""
    run, model, optimizer, reference, truth = pair(Table, workers, {"table": "owned_rows"})
    model.load_state_dict(model.state_dict())
    model.to("cpu").double().train()
    model.load_state_dict(reference.state_dict())

    def loss(model, shift):
        return (model.table[(IDS + shift) % V].sum() + model.lin.weight.sum()).sin()

    loss(model, rank).backward()
    optimizer.step()
    train_step(reference, truth, range(workers), loss)
    return close(run, model, reference)


def test_what_changes_nothing_may_be_done_to_an_attached_model(crew):
    assert crew(2).run(use_as_a_module) == [{}, {}]


def remedies(rank, workers):
    run, model, _, _, _ = pair(Table, workers, {"table": "owned_rows"})
    said = {}
    for name, operation in {
        "module cast": lambda: model.half(),
        "initialise": lambda: nn.init.zeros_(model.table),
        "assign": lambda: setattr(model.table, "data", torch.zeros(V, D)),
        "hook": lambda: model.table.register_hook(print),
        "mask": lambda: model.table[torch.ones(V, dtype=torch.bool)],
    }.items():
        with pytest.raises(NotImplementedError) as caught:
            operation()
        said[name] = str(caught.value)
    run._engine.finish()
    return said


def test_the_remedy_fits_what_was_tried(crew):
    said = crew(2).run(remedies)[0]
    assert "convert and move the model before attach" in said["module cast"]
    assert all("before attach, or load_state_dict" in said[name] for name in ("initialise", "assign"))
    assert "what the look-up returns" in said["hook"]
    assert "indexing with a tensor of torch.bool" in said["mask"]
