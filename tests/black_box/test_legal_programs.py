"""Programs that train in one process train here, whatever the plan by price; or a sentence says why they cannot."""

import warnings

import pytest
import torch
from plain_loop import differ, state_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import armillary
import face

ROWS, MANY, WIDTH, STEPS = 40, 150_000, 4, 4
VAST = 1_000_000  # by row it is cheaper by more than a busy machine's links scatter
UNLEARNED = "None of the inputs have requires_grad"  # of a part inside another
ROW, GATHER, WHOLE = {"*": "row_sharded"}, {"*": "gather_rows"}, {"*": "all_reduce"}


class Reader(nn.Module):
    """A table, and layers over it."""

    def __init__(self, rows=ROWS, **options):
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, **options)
        self.one, self.two, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def hidden(self, ids):
        return torch.tanh(self.two(torch.tanh(self.one(self.table(ids)))))

    def forward(self, ids):
        return self.head(self.hidden(ids))


class Kept(Reader):
    """In reentrant parts. without_head: nothing learns outside of them but the table."""

    without_head = shares = False

    def forward(self, ids):
        second = self.one if self.shares else self.two
        read = torch.tanh(checkpoint(self.one, self.table(ids), use_reentrant=True))
        read = torch.tanh(checkpoint(second, read, use_reentrant=True))
        return read if self.without_head else self.head(read)


class Headless(Kept):
    without_head = True


class SharedHeadless(Kept):
    without_head = shares = True


class Shared(Kept):
    shares = True


class Twice(Kept):
    """One part inside another."""

    def forward(self, ids):
        def outer(read):
            return checkpoint(self.two, torch.tanh(self.one(read)), use_reentrant=True)

        return self.head(checkpoint(outer, self.table(ids), use_reentrant=True))


class Phases(Reader):
    """A complex table, read by index."""

    def __init__(self, rows=ROWS):
        super().__init__(rows)
        self.double()
        self.table = nn.Parameter(torch.randn(rows, WIDTH, dtype=torch.complex128))

    def hidden(self, ids):
        return torch.tanh(self.one(self.table[ids].abs()))


def made(kind, rows=ROWS, **options):
    torch.manual_seed(5)
    model = kind(rows, **options)
    return model.double() if kind is not Phases else model


def ids_of(rank, step, rows):
    return torch.randint(rows, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


def once(model, rank, step, rows):
    model(ids_of(rank, step, rows)).square().mean().backward()


def pairs(model, rank, step, rows):
    """Two forwards, each with its backward."""
    for part in range(2):
        once(model, rank, 10 * step + part, rows)


def two_losses(model, rank, step, rows):
    """The second reads rows again."""
    ids = ids_of(rank, step, rows)
    model(ids).square().mean().backward()
    (1e-2 * model.table(ids).square().sum()).backward()


def kept_graph(model, rank, step, rows):
    """Two backwards of one forward."""
    read = model.hidden(ids_of(rank, step, rows))
    model.head(read).square().mean().backward(retain_graph=True)
    read.mean().backward()


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def adam(model):
    return [torch.optim.Adam(model.parameters(), lr=0.01)]


def sparse_adam(model):
    rest = [p for name, p in model.named_parameters() if not name.startswith("table")]
    return [torch.optim.SparseAdam([model.table.weight], lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def trained_by_itself(kind, habit, optimizers, rows, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UNLEARNED)
        return one_process(kind, habit, optimizers, rows, **options)


def one_process(kind, habit, optimizers, rows, **options):
    model = made(kind, rows, **options)
    those = optimizers(model)
    for step in range(STEPS):
        for one in those:
            one.zero_grad()
        for rank in range(2):
            habit(model, rank, step, rows)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / 2
        for one in those:
            one.step()
    return state_of(model)


def one_line(rank, world, kind, habit, optimizers, rows, constraints, options):
    model = made(kind, rows, **options)
    those = optimizers(model)
    run = armillary.parallelize(model, those, constraints=constraints)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=UNLEARNED)
        for step in range(STEPS):
            for one in those:
                one.zero_grad()
            habit(model, rank, step, rows)
            for one in those:
                one.step()
    plan = run.plan
    run.close()
    return plan, state_of(model)


def refused(rank, world, *job):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        one_line(rank, world, *job)
    return str(caught.value)


def trains(crew, kind, habit, optimizers=sgd, rows=ROWS, constraints=None, tolerance=1e-12, **options):
    """As one process does; the plan."""
    truth = trained_by_itself(kind, habit, optimizers, rows, **options)
    told = crew(2).run(one_line, kind, habit, optimizers, rows, constraints or {}, options)
    for _, state in told:
        assert differ(state, truth, tolerance) == {}
    return told[0][0]


KINDS = {kind.__name__: kind for kind in (Kept, Headless, SharedHeadless, Twice)}


@pytest.mark.parametrize(
    ("rows", "constraints"), [(VAST, {}), (ROWS, ROW), (ROWS, GATHER)], ids=["price", "row", "gather"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_reentrant_parts_behind_a_table(crew, kind, rows, constraints):
    plan = trains(crew, KINDS[kind], once, rows=rows, constraints=constraints)
    assert face.exchanges_of(plan)["table.weight"] in ("owned_rows", "gather_rows")


def test_a_layer_in_two_reentrant_parts_under_a_head_is_refused_by_name(crew):
    for said in crew(2).run(refused, Shared, once, sgd, ROWS, {}, {}):
        assert "one.weight" in said or "one.bias" in said
        assert "twice in one backward" in said and "use_reentrant=False" in said


@pytest.mark.parametrize("constraints", [{}, ROW, GATHER], ids=["price", "row", "gather"])
@pytest.mark.parametrize("habit", [pairs, two_losses])
@pytest.mark.parametrize("optimizers", [sgd, adam])
def test_two_backwards_a_step(crew, habit, optimizers, constraints):
    plan = trains(crew, Reader, habit, optimizers, constraints=constraints)
    if constraints:
        assert face.exchanges_of(plan)["table.weight"] == ("owned_rows" if constraints == ROW else "gather_rows")
    assert "dispatcher" not in str(plan)


def test_two_backwards_of_one_look_up(crew):
    plan = trains(crew, Reader, kept_graph, rows=MANY)
    assert face.exchanges_of(plan)["table.weight"] == "all_reduce"
    assert "two backwards of one look-up" in " ".join(str(plan).split())
    for said in crew(2).run(refused, Reader, kept_graph, sgd, ROWS, {"table.weight": "row_sharded"}, {}):
        assert "table.weight" in said and "two backwards of one look-up" in said


@pytest.mark.parametrize("rows", [ROWS, MANY])
@pytest.mark.parametrize("optimizers", [sgd, adam])
def test_complex_tables(crew, optimizers, rows):
    trains(crew, Phases, once, optimizers, rows)


@pytest.mark.parametrize("norm", [0.5, 1.5])
@pytest.mark.parametrize("optimizers", [sgd, adam])
def test_max_norm_trains_and_the_plan_says_that_copies_drift(crew, optimizers, norm):
    told = crew(2).run(one_line, Reader, once, optimizers, ROWS, {}, {"max_norm": norm})
    for plan, state in told:
        said = " ".join(str(plan).split())
        assert "NOT exact: forward writes into table.weight" in said and "exact (as in one process)" not in said, said
        assert (state["table.weight"].norm(dim=1) < 100).all()
    for said in crew(2).run(
        refused, Reader, once, optimizers, ROWS, {"table.weight": "row_sharded"}, {"max_norm": norm}
    ):
        assert "table.weight" in said and "max_norm" in said


@pytest.mark.parametrize(
    ("rows", "constraints"),
    [(ROWS, {}), (MANY, {}), (ROWS, ROW), (ROWS, GATHER), (ROWS, {"table.weight": "replicated"})],
    ids=["price", "price, large", "row", "gather", "replicated"],
)  # fmt: skip
def test_sparse_adam_steps_the_rows_of_a_sparse_table(crew, rows, constraints):
    plan = trains(crew, Reader, once, sparse_adam, rows, constraints, sparse=True)
    assert "lazy rows of table.weight" in " ".join(plan.notes)


def test_sparse_adam_with_two_backwards_and_rows_that_every_rank_reads(crew):
    trains(crew, Reader, pairs, sparse_adam, 3, sparse=True)
    trains(crew, Reader, pairs, sparse_adam, 3, ROW, sparse=True)


def test_sparse_adam_is_refused_where_no_gradient_lists_rows(crew):
    for said in crew(2).run(refused, Reader, once, sparse_adam, ROWS, {}, {}):
        assert "SparseAdam" in said and "table.weight" in said and "sparse=True" in said
    for said in crew(2).run(refused, Reader, once, sparse_adam, ROWS, WHOLE, {"sparse": True}):
        assert "table.weight" in said and "list rows" in said


def momentum_encoder(rank, world, way):
    query, key = made(Reader, sparse=False), made(Reader)
    key.requires_grad_(False)
    model = nn.ModuleDict({"query": query, "key": key})
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1)
    run = armillary.parallelize(model, optimizer, constraints={"query.table.weight": "row_sharded"})
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            once(query, rank, step, ROWS)
            optimizer.step()
            for mine, theirs in zip(query.parameters(), key.parameters(), strict=True):
                way(mine, theirs)
    except (NotImplementedError, ValueError) as error:
        return str(error)
    finally:
        run.close(gather=False)
    return "trained"


def by_data(mine, theirs):
    theirs.data = 0.9 * theirs.data + 0.1 * mine.data


def in_place(mine, theirs):
    theirs.data.mul_(0.9).add_(mine.data, alpha=0.1)


def by_lerp(mine, theirs):
    with torch.no_grad():
        theirs.lerp_(mine, 0.1)


def by_copy(mine, theirs):
    with torch.no_grad():
        theirs.copy_(mine)


@pytest.mark.parametrize("way", [by_data, in_place, by_lerp, by_copy])
def test_a_momentum_encoder_is_told_what_keeps_its_table_whole(crew, way):
    for said in crew(2).run(momentum_encoder, way):
        assert "query.table.weight" in said and "all_reduce" in said
        if way in (by_lerp, by_copy):  # without gradients, so no step of training as it was watched
            assert "constraints={'query.table.weight': 'all_reduce'}" in said and "momentum encoder" in said


def functional_loss(model, batch):
    return functional.mse_loss(model(batch), torch.zeros(len(batch), WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("codec", ["quantize(bits=8)", "low_rank(rank=1)", "top_k(keep=0.1)"])
def test_a_pattern_codes_what_is_not_read_by_row(codec):
    batches = [ids_of(rank, 0, MANY) for rank in range(2)]
    plan = face.plan_for(made(Reader, MANY), functional_loss, batches, 2, exchange={"*": armillary.Choice.parse(codec)})
    free = face.plan_for(made(Reader, MANY), functional_loss, batches, 2)
    ways = face.exchanges_of(plan)
    assert ways["table.weight"] == face.exchanges_of(free)["table.weight"] != codec.partition("(")[0]
    assert {ways[name] for name in ("one.weight", "two.weight", "head.weight")} == {codec.partition("(")[0]}
    named = {"table.weight": armillary.Choice.parse(codec)}
    whole = face.plan_for(made(Reader, MANY), functional_loss, batches, 2, exchange=named)
    assert face.exchanges_of(whole)["table.weight"] == codec.partition("(")[0]
    assert 20 * plan.forecast.sent_bytes < whole.forecast.sent_bytes
