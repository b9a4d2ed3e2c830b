"""A worker: what a step pulls from the owners, and the gradients that it pushes to them.

Before a forward all that it reads is asked for at once, so that a step has one pull of every owner. What is read whole
comes whole. Which rows a batch reads is learned from its integer tensors (`LookupPredictor`); where that is not
known, a forward on zeros, which changes nothing, tells. A forward that reads other rows than these is made again.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn

from armillary.owners.owner import DEAL, BodyForm, GroupOptions, Ownings, Parts, packed, size_of, taken
from armillary.plans.update_log import Event, Kind
from armillary.prefetch.batches import leaves
from armillary.prefetch.predictor import LookupPredictor
from armillary.tables.table import RowTable
from armillary.transport.mailbox import OwnerMailbox

__all__ = ["OVERHEAD", "NotPulled", "PulledTable", "Worker"]

MOST_LOOKUPS = 8  # of a table and batch that are predicted
TRUSTED = 2  # batches in a row that were predicted right, before a forward relies on it
OVERHEAD = "heads of letters"


class NotPulled(Exception):
    """A forward reads rows that were not asked for."""


class PulledTable:
    """What a table's handle reads: the rows that were pulled for this step (`tables/handle.Reader`)."""

    epoch, accumulates = 0, False
    gradient: Tensor | None = None

    def __init__(self, name: str, like: Tensor, ownings: Ownings) -> None:
        self.name, self.shape, self.ownership = name, like.shape, ownings.tables[name]
        self.shard = like.detach()[:0].clone()  # its dtype, and where it lies
        self.ids = torch.empty(0, dtype=torch.int64)
        self.values, self.used = self.shard, torch.empty(0, dtype=torch.bool)
        self.noticed: list[Tensor] | None = None  # keys of look-ups, where a forward on zeros is under way

    def pulled(self, ids: Tensor, by_owner: Sequence[Tensor]) -> None:
        """ids: ascending, distinct. by_owner: the rows of those that each owner has.

        Rows stand in the order of their ids: kernels sort what is looked up, and break ties by the order that they
        find, so that gradients are added up as they are in the whole table.
        """
        values = self.shard.new_empty(len(ids), *self.shape[1:])
        for (places, _), rows in zip(self.parts(ids), by_owner, strict=True):
            values[places] = rows
        self.ids, self.values = ids, values.requires_grad_()
        self.used = torch.zeros(len(ids), dtype=torch.bool)

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.long()
        if self.noticed is not None:
            distinct, inverse = torch.unique(ids, return_inverse=True)
            self.noticed.append(self.ownership.keys(distinct).sort().values)
            return self.shard.new_zeros(len(distinct), *self.shape[1:]), inverse
        inverse = torch.searchsorted(self.ids, ids).clamp_(max=max(len(self.ids) - 1, 0))
        if ids.numel() and not (len(self.ids) and torch.equal(self.ids[inverse], ids)):
            raise NotPulled
        self.used[inverse.view(-1)] = True
        return self.values, inverse

    def gradients(self) -> list[list[Tensor]]:
        """By owner, the local rows that were read, and their gradients. None where nothing came back."""
        if self.values.grad is None:
            return []
        rows = self.used.nonzero().view(-1)
        gradient = self.values.grad.index_select(0, rows)
        return [[local, gradient[places]] for places, local in self.parts(self.ids[rows])]

    def parts(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By owner, places among these ids, and the owner's rows there."""
        keys = self.ownership.keys(ids)
        owners = torch.div(keys, self.ownership.capacity, rounding_mode="floor")
        local, found = keys - owners * self.ownership.capacity, list[tuple[Tensor, Tensor]]()
        for owner in self.ownership.owners:
            places = (owners == owner).nonzero().view(-1)
            found.append((places, local[places]))
        return found

    @property
    def rows(self) -> NoReturn:
        self._refuse()

    def everyones(self, part: Tensor) -> NoReturn:
        self._refuse()

    def load(self, whole: Tensor) -> NoReturn:
        self._refuse()

    def gradient_norms(self, order: float) -> NoReturn:
        self._refuse()

    def drop_gradient(self) -> None:
        """There is none between two steps."""

    drop_accumulated = drop_gradient

    def join(self) -> None:
        """Nothing waits."""

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name}: its rows are with their owners between two steps; look at it inside run.evaluate, or at "
            "what run.export gives"
        )


class Worker:
    """
    Args:
        dense: parameters of the model that are read whole, by name. tables: the others. forms: of all, whole.
        forward: (batch) -> loss, on the model.

    Args of note:
        sent: bytes that went over a link, by parameter; what is of none as `OVERHEAD`.
    """

    def __init__(
        self, mailbox: OwnerMailbox, ownings: Ownings, model: nn.Module, tables: Mapping[str, PulledTable],
        forms: Mapping[str, BodyForm], forward: Callable[[Any], Tensor],
    ) -> None:  # fmt: skip
        self.mailbox, self.ownings, self.model, self.forward = mailbox, ownings, model, forward
        self.tables, self.forms = tables, forms
        trained = {name: one for name, one in model.named_parameters() if name in forms}
        self.dense = {name: one for name, one in trained.items() if name not in tables}
        self.sent = Counter(dict.fromkeys([OVERHEAD, *forms], 0))
        self._predictor, self._right = LookupPredictor(), 0
        self._options: GroupOptions | None = None  # of the push before
        self._wanted: dict[str, Tensor] = {}

    def look(self, batch: Any, is_sure: bool = False) -> None:
        """Finds out which rows a batch reads. is_sure: it was predicted in vain."""
        if not self.tables:
            return
        self._predictor.open_batch(leaves(batch))
        predicted = {name: self._predicted(one, batch) for name, one in self.tables.items()}
        if self._right >= TRUSTED and not is_sure:
            self._wanted = {name: self._ids(name, keys) for name, keys in predicted.items()}
            return
        for table in self.tables.values():
            table.noticed = []
        try:
            with _unseen(self.model), torch.no_grad():
                self.forward(batch)
            for table in self.tables.values():
                for keys in table.noticed or []:
                    self._predictor.notice(cast(RowTable, table), keys, was_predicted=False)
            found = {name: _union(table.noticed or []) for name, table in self.tables.items()}
            self._wanted = {name: self._ids(name, keys) for name, keys in found.items()}
        finally:
            for table in self.tables.values():
                table.noticed = None
        is_right = all(torch.equal(predicted[name], keys) for name, keys in found.items())
        self._right = self._right + 1 if is_right and not is_sure else 0

    def _ids(self, name: str, keys: Tensor) -> Tensor:
        """Ascending."""
        ids: Tensor = self.ownings.tables[name].ids_of(keys).sort().values
        return ids

    def _predicted(self, table: PulledTable, batch: Any) -> Tensor:
        return _union(self._predictor.predict(cast(RowTable, table), leaves(batch), MOST_LOOKUPS))

    def pull(self, event: Event) -> None:
        """The model holds the owners' values of what the batch that was looked at reads."""
        rows = {name: [local for _, local in one.parts(self._wanted[name])] for name, one in self.tables.items()}
        forms = {owner: self._answer_forms(owner, rows) for owner in self._in_turn()}
        expected = {owner: self.mailbox.expect(owner, size_of([*there.values()])) for owner, there in forms.items()}
        for owner in forms:
            self._send(owner, event, None, {name: [parts[owner]] for name, parts in rows.items()})
        came: dict[str, list[Tensor]] = {name: [] for name in self.tables}
        for owner in sorted(forms):
            with self.mailbox.transport.waiting(f"values of rank {owner}"):
                answer = taken(expected[owner].wait(), [*forms[owner].values()])
            for name, values in zip(forms[owner], answer, strict=True):
                if name in self.tables:
                    came[name].append(values)
                else:
                    self.dense[name].data.copy_(values)
        for name, table in self.tables.items():
            table.pulled(self._wanted[name], came[name])

    def push(self, event: Event, options: GroupOptions) -> None:
        """Sends the gradients to their owners, and drops them."""
        said = None if self._options == options else options
        self._options = options
        rows = {name: found for name, table in self.tables.items() if (found := table.gradients())}
        for owner in self._in_turn():
            dense = {name: self.dense[name].grad for name in self.ownings.dense[owner]}
            there = {name: [one.to_dense()] for name, one in dense.items() if one is not None}
            theirs = {name: found[owner] for name, found in rows.items() if len(found[owner][0])}
            self._send(owner, event, said, there | theirs)
        for parameter in self.dense.values():
            parameter.grad = None
        for table in self.tables.values():
            table.values.grad = None

    def _send(self, owner: int, event: Event, said: GroupOptions | None, parts: Parts) -> None:
        if sent := self.mailbox.send(owner, _numbers(event), packed(said, parts)):
            named = Counter({name: sum(one.nbytes for one in each) for name, each in parts.items()})
            self.sent.update(named)
            self.sent[OVERHEAD] += sent - named.total()

    def step_aside(self, step: int) -> None:
        for owner in self._in_turn():
            self.mailbox.send(owner, _numbers(Event(Kind.ASIDE, self.mailbox.rank, step)))

    def dealt(self, epoch: int) -> int:
        """The number of the next batch of an epoch that nobody has; rank 0 deals."""
        expected = self.mailbox.expect(0, 8)
        self.mailbox.send(0, [DEAL, 0, epoch, 0, 0])
        with self.mailbox.transport.waiting("a batch of rank 0"):
            return int(expected.wait().view(torch.int64))

    def _in_turn(self) -> list[int]:
        """The owners, this rank's own first."""
        count = self.mailbox.workers
        return [(self.mailbox.rank + place) % count for place in range(count)]

    def _answer_forms(self, owner: int, rows: Mapping[str, Sequence[Tensor]]) -> dict[str, BodyForm]:
        found = {name: self.forms[name] for name in self.ownings.dense[owner]}
        for name in self.tables:
            shape, dtype = self.forms[name]
            found[name] = BodyForm((len(rows[name][owner]), *shape[1:]), dtype)
        return found


def _numbers(event: Event) -> list[int]:
    """As a letter has them; who sends it stands on the letter."""
    return [event.kind, event.step, event.epoch, event.batch, 0]


@contextmanager
def _unseen(model: nn.Module) -> Iterator[None]:
    """Inside, a forward leaves random streams and buffers as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    plain, arrays = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(arrays)
        for buffer, value in buffers:
            buffer.data.copy_(value)


def _union(keys: Sequence[Tensor]) -> Tensor:
    found: Tensor = torch.cat(list(keys)).unique() if keys else torch.empty(0, dtype=torch.int64)
    return found
