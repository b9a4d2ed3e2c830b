"""Planted faults: each must be seen by the very comparison the exactness and contract tests make.

"Residual dropped": no exchange keeps one yet; error feedback on late gradients does, and has its planted fault in
`tests/runtime/test_corrected_step.py`.
"""

import pytest
import torch

from armillary.contracts.exchange import sends_what_it_says
from armillary.exchanges import Ownership, exchange, gather_rows, owned_rows, owned_rows_by_node
from armillary.reference import lockstep
from armillary.runtime import executor
from armillary.runtime.bucket import Bucket
from armillary.runtime.executor import Executor
from armillary.session import hooks_engine as user_loop
from armillary.session.hooks_engine import UserLoop
from armillary.tables import build as tables
from armillary.tables import handle
from armillary.tables.lookups import TableNorms
from armillary.tables.table import RowTable
from exchanges.test_row_exchanges import test_predicted_bytes_are_the_bytes_sent as compare_row_bytes
from session.test_exact import train_both


def sum_for_mean(patch, rank):
    patch.setattr(Executor, "scale", 1.0)


def sum_for_mean_in_tables(patch, rank):
    """Parallax's own default."""
    take = RowTable.take_gradients
    patch.setattr(RowTable, "take_gradients", lambda table, scale: take(table, 1.0))


def weights_ignored(patch, rank):
    patch.setattr(Executor, "scale", property(lambda self: 1.0 / self.transport.place.workers))


def duplicate_rows_lost(patch, rank):
    def keep_last(rows, gradients):
        distinct, inverse = torch.unique(rows, return_inverse=True)
        return distinct, gradients.new_zeros(len(distinct), *gradients.shape[1:]).index_copy_(0, inverse, gradients)

    for module in (owned_rows, gather_rows, owned_rows_by_node):
        patch.setattr(module, "merge_rows", keep_last)


def wrong_owner(patch, rank):
    """Reads the row of the same place in the neighbour's shard."""
    keys = Ownership.keys
    patch.setattr(Ownership, "keys", lambda self, ids: keys(self, (ids ^ 1).clamp(max=self.rows - 1)))


def wrong_row(patch, rank):
    deposit = RowTable.deposit
    patch.setattr(
        RowTable, "deposit", lambda table, rows, sums: deposit(table, rows, sums.roll(1, 0) if rank == 1 else sums)
    )


def one_of_two_look_ups_lost(patch, rank):
    take = RowTable.take_gradients

    def lose(table, scale):
        gradients, routes = take(table, scale)
        return [gradient * (number == 0) for number, gradient in enumerate(gradients)], routes

    patch.setattr(RowTable, "take_gradients", lose)


def zero_for_absent_gradient(patch, rank):
    withdraw = Bucket.withdraw

    def fill(bucket, total):
        withdraw(bucket, total)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view

    patch.setattr(Bucket, "withdraw", fill)


def clip_before_exchange(patch, rank):
    """Gradients land in the optimizer's pre-hook, after the user has clipped his own."""

    class Deaf:
        class _execution_engine:
            @staticmethod
            def queue_callback(callback):
                pass

    ready = UserLoop._ready_for_step
    patch.setattr(executor, "Variable", Deaf)
    patch.setattr(UserLoop, "_ready_for_step", lambda loop, one: (loop.executor.settle(), ready(loop, one)))


def norm_of_this_rank_only(patch, rank):
    def local(self, table, order):
        return torch.linalg.vector_norm(table.gradient, order)

    patch.setattr(TableNorms, "of", local)


def a_rank_without_data_counts(patch, rank):
    patch.setattr(Executor, "set_exhausted", lambda self, is_exhausted: None)


def untouched_rows_left_alone(patch, rank):
    """Lazy where exact was promised."""
    patch.setattr(tables, "leaves_untouched_rows", lambda *of: True)


def state_of_other_rows(patch, rank):
    """The window's rows come with the optimizer state of the shard's first rows."""

    def opened(table, optimizer, held):
        for name, whole in held.items():
            optimizer.state[table.parameter][name] = whole[: len(table.window_rows)].clone()

    patch.setattr(user_loop, "open_window", opened)


def padding_learns(patch, rank):
    patch.setattr(handle, "_padding", lambda *_: None)


def two_requests_swapped_on_one_rank(patch, rank):
    if rank == 1:
        leave = Executor._leave
        patch.setattr(Executor, "_leave", lambda self, unit: leave(self, swapped(self.units, unit)))


def swapped(units, unit):
    return {units[0]: units[-1], units[-1]: units[0]}.get(unit, unit)


# fault: (exchange, optimizer, what the loop does, workers) of the test that must see it
MUTATIONS = {
    sum_for_mean: ("all_reduce", "sgd", "plain", 2),
    sum_for_mean_in_tables: ("gather_rows", "sgd", "plain", 2),
    weights_ignored: ("owned_rows", "sgd", "weights", 3),
    duplicate_rows_lost: ("owned_rows", "sgd", "plain", 2),
    wrong_owner: ("owned_rows", "sgd", "plain", 2),
    wrong_row: ("owned_rows", "adam", "plain", 2),
    one_of_two_look_ups_lost: ("owned_rows_one_owner", "sgd", "plain", 2),
    zero_for_absent_gradient: ("all_reduce", "sgd", "plain", 2),
    clip_before_exchange: ("owned_rows", "sgd", "clip_norm", 2),
    norm_of_this_rank_only: ("owned_rows", "sgd", "clip_norm", 2),
    a_rank_without_data_counts: ("owned_rows", "sgd", "uneven_counts", 2),
    untouched_rows_left_alone: ("owned_rows", "adam", "plain", 2),
    state_of_other_rows: ("owned_rows", "adagrad", "plain", 2),
    padding_learns: ("owned_rows", "sgd", "padding_only", 2),
    two_requests_swapped_on_one_rank: ("owned_rows", "sgd", "bag_unread_by_some", 2),  # compares orders
}


# faults that part the ranks: what the check says that sees it first, on every rank
SAID = {
    clip_before_exchange: " changed lin.bias.grad inside the backward, when it was being exchanged",
    norm_of_this_rank_only: "after step 3 the ranks no longer hold lin.bias (and 2 more) alike: rank 1 is ",
    two_requests_swapped_on_one_rank: "ranks out of order: rank 0 asks #",
}


def nothing(patch, rank):
    """No fault: the harness itself finds none."""


def train_planted(rank, workers, plant, *case):
    """What the exactness test looks at: differences, whether an unused parameter kept its None, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, rank)
        try:
            far, never_is_none = train_both(rank, workers, *case)
        except RuntimeError as error:
            return str(error)
    return max(far.values()) > 1e-10, never_is_none


@pytest.mark.parametrize("case", sorted(set(MUTATIONS.values())), ids=lambda case: "-".join(map(str, case)))
def test_without_a_fault_there_is_no_difference(crew, case):
    *deeds, workers = case
    assert crew(workers).run(train_planted, nothing, *deeds) == [(False, True)] * workers


@pytest.mark.parametrize("plant", MUTATIONS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_seen(crew, plant):
    *deeds, workers = MUTATIONS[plant]
    seen = crew(workers).run(train_planted, plant, *deeds)
    if plant in SAID:
        assert all(isinstance(said, str) and SAID[plant] in said for said in seen), seen
    elif plant is zero_for_absent_gradient:
        assert [never_is_none for _, never_is_none in seen] == [False] * workers
    else:
        assert any(is_far for is_far, _ in seen), seen


def formula_without_ids(patch):
    build = exchange.build_row

    def shortened(name, **options):
        made = build(name, **options)
        return made._replace(
            legs=lambda traffic, skew, topology: made.legs(
                traffic._replace(row_bytes=traffic.row_bytes - 2), skew, topology
            )
        )

    patch.setattr("exchanges.test_row_exchanges.build_row", shortened)


def formula_without_the_way_back(patch):
    build = exchange.build_dense

    def halved(name, **options):
        made = build(name, **options)
        return made._replace(
            sent_bytes=lambda layout, topology: [sent / 2 for sent in made.sent_bytes(layout, topology)]
        )

    patch.setattr(exchange, "build_dense", halved)


def own_piece_counted(patch):
    count = lockstep.sent_bytes
    patch.setattr(
        lockstep, "sent_bytes", lambda request, ranks, rank: count(request, ranks, rank) + request.tensor.nbytes
    )


def rows_are_compared():
    compare_row_bytes("owned_rows", {}, 4, 2)
    compare_row_bytes("gather_rows", {}, 3, 1)


def dense_are_compared():
    assert sends_what_it_says(exchange.build_dense("all_reduce")) == ""


@pytest.mark.parametrize(
    ("plant", "compare"),
    [
        (formula_without_ids, rows_are_compared),
        (own_piece_counted, rows_are_compared),
        (formula_without_the_way_back, dense_are_compared),
        (own_piece_counted, dense_are_compared),
    ],
)
def test_a_byte_formula_that_is_off_is_seen(monkeypatch, plant, compare):
    compare()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare()
