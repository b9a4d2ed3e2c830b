"""The row-sharded tables that one stage reads: pulled by micro-batch at the version of its place, pushed once a step.

All ranks hold rows, so all take part in every visit and in every push, whether they run the stage or only serve; when
that is due every rank knows from the schedule. The owner adds gradients up rank by rank, and by micro-batch within a
rank, divides once, and lets the user's optimizer step on its rows, with the options of the gradient's step.

Source: Kim et al., EuroSys 2019 (rows owned by workers); Fournier & Oyallon, 2024 (which version is read).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.exchanges.exchange import Pulled, RankInfo
from armillary.exchanges.look_up import FLAGS, LookupRequest, LookupRound, look_up
from armillary.facts.collectives import Program
from armillary.runtime.channel import Requests
from armillary.runtime.cyclic.delayed_step import Options, step_with
from armillary.runtime.cyclic.row_versions import RowVersions
from armillary.runtime.cyclic.row_visit import Desk, Visit
from armillary.runtime.hybrid.optimizer_trial import leaves_untouched_rows
from armillary.runtime.hybrid.row_update import Held, close_window, open_window
from armillary.runtime.hybrid.table import RowTable
from armillary.schedules.schedule import Cell

__all__ = ["OwnedTable", "StageTables", "Tables"]


@dataclass(eq=False)
class OwnedTable:
    """held: what the optimizer keeps for the rows that it does not see. is_lazy: of rows without gradient."""

    table: RowTable
    held: Held
    is_lazy: bool = False
    known: Mapping[str, Any] = field(default_factory=dict)  # options for which the window is exact

    def __post_init__(self) -> None:
        self.versions = RowVersions(self.table.name, self.table.shard)

    def learn(self, rows: Tensor, mean: Tensor, optimizer: Optimizer, options: Options) -> None:
        """One step of the optimizer on the rows owned here. rows: (k,) sorted; mean: (k, *row shape)."""
        table, versions = self.table, self.versions
        versions.stand_at(versions.newest)
        with torch.no_grad():
            if not table.has_window:
                before = table.shard.clone()
                whole = torch.zeros_like(table.shard).index_add_(0, rows, mean)
                step_with(optimizer, {table.parameter: whole}, options)
                versions.advance(None, before)
                return
            self._refuse_new_options(optimizer, options)
            table.window_rows, table.parameter.data = rows, table.shard.index_select(0, rows)
            before = table.parameter.data.clone()
            open_window(table, optimizer, self.held)
            step_with(optimizer, {table.parameter: mean}, options)
            close_window(table, optimizer, self.held)
            versions.advance(rows, before)

    def stay(self) -> None:
        """No rank learnt from the table in this step."""
        self.versions.stand_at(self.versions.newest)
        none = torch.empty(0, dtype=torch.int64, device=self.table.shard.device)
        self.versions.advance(none, self.table.shard[:0].clone())

    def _refuse_new_options(self, optimizer: Optimizer, options: Options) -> None:
        """A window is exact as long as the optimizer leaves rows without gradient alone; options may change that."""
        groups = zip(optimizer.param_groups, options, strict=True)
        then = next(then for group, then in groups if any(p is self.table.parameter for p in group["params"]))
        kept = {name: value for name, value in then.items() if name != "lr"}
        if self.is_lazy or kept == self.known:
            return
        group = {**then, "params": [self.table.parameter]}
        if not leaves_untouched_rows(optimizer, group, self.table.parameter):
            raise ValueError(
                f"rank {self.table.place.rank}: {self.table.name}: the optimizer's options are now {kept}, with which "
                "rows move that get no gradient; set them before attach, or plan the table lazy"
            )
        self.known = kept


class StageTables:
    """
    Args:
        stage: its index.
        order: numbers of the tables in the order in which the stage's forward looks them up.
        divisor: of the summed gradients: micro-batches of a step, those of all ranks.

    Reads while no micro-batch is going through are answered as they were before (`RowTable.reads`).

    Raises:
        ValueError: more tables than one header can speak of.
    """

    def __init__(
        self,
        stage: int,
        owned: Sequence[OwnedTable],
        order: Sequence[int],
        divisor: int,
        optimizer: Optimizer,
        requests: Requests,
    ) -> None:
        if len(owned) > FLAGS:
            raise ValueError(f"stage {stage} reads {len(owned)} row-sharded tables, want at most {FLAGS}: cut it")
        self.stage, self.owned, self.order = stage, list(owned), tuple(order)
        self._divisor, self._optimizer, self._requests = divisor, optimizer, requests
        self._served = [one.table.as_served() for one in owned]
        self._desk = Desk()
        self._visits: dict[int, dict[int, Visit]] = {}  # by step and micro-batch
        self._options: dict[int, Options] = {}
        self._outside = {one.table.name: one.table.reads for one in owned}
        for one in owned:
            one.table.reads = torch.compiler.disable(self._read)  # a look-up is a graph break

    def begin(self, step: int, options: Options) -> None:
        """A step is handed in, with the optimizer's options of this moment."""
        self._options[step] = options

    def visit(self, place: Cell, version: int) -> Visit:
        """For one forward of the stage, at that version of the rows; every rank must make the same visits.

        Raises:
            RuntimeError: the version is not there.
        """
        step, micro_batch, _ = place
        for one in self.owned:
            one.versions.stand_at(version)
        nothing = torch.empty(0, dtype=torch.int64, device=self._served[0].shard.device)

        def pull(table: int, keys: Tensor) -> Pulled:
            pulled = self._round(LookupRequest(table, keys, True, step)).pulled
            assert pulled is not None
            return pulled

        visit = Visit(f"rank {self._rank.rank}, stage {self.stage}", self.order, pull, self._desk, nothing)
        self._visits.setdefault(step, {})[micro_batch] = visit
        return visit

    def learn(self, step: int) -> None:
        """Pushes the gradients of a step to the owners, which step: version step + 1 is there then."""
        by_micro_batch = self._visits.pop(step)
        visits = [by_micro_batch[micro_batch] for micro_batch in sorted(by_micro_batch)]
        options = self._options.pop(step)
        learned = self._learned_anywhere(step, visits)
        for number, one in enumerate(self.owned):
            if not learned >> number & 1:
                one.stay()
                continue
            rows, sums = self._carried(self._push(number, visits), one.table.name)
            one.learn(rows, sums.div_(self._divisor), self._optimizer, options)

    def forget(self, before: int) -> None:
        """Nobody will read versions older than `before`."""
        for one in self.owned:
            one.versions.forget(min(before, one.versions.newest))

    def settle(self) -> None:
        """Everything is finished; the shards hold the newest rows."""
        for one in self.owned:
            one.versions.stand_at(one.versions.newest)

    @property
    def _rank(self) -> RankInfo:
        return self.owned[0].table.place

    def _read(self, table: RowTable, ids: Tensor) -> tuple[Tensor, Tensor]:
        visit = self._desk.visit
        if visit is None:
            with torch.no_grad():
                return self._outside[table.name](table, ids)
        _refuse_out_of_range(table, ids)
        keys, inverse = torch.unique(table.ownership.keys(ids.long()), return_inverse=True)
        number = next(number for number, one in enumerate(self.owned) if one.table is table)
        return visit.read(number, table.name, keys), inverse

    def _learned_anywhere(self, step: int, visits: Sequence[Visit]) -> int:
        """Bit i: some rank has a gradient of the i-th table. A table without keeps its rows, whatever was read of it,
        as a parameter without gradient does in one process."""
        mine = 0
        for number in range(len(self.owned)):
            found = any(one.gradient is not None for visit in visits for one in visit.of_table(number))
            mine |= found << number
        nothing = torch.empty(0, dtype=torch.int64)
        return self._round(LookupRequest("idle", nothing, False, step, flags=mine)).flags

    def _push(self, number: int, visits: Sequence[Visit]) -> Program[tuple[Tensor, Tensor]]:
        table = self.owned[number].table
        gradients, routes = [], []
        for visit in visits:
            for one in visit.of_table(number):
                none = table.shard.new_zeros((len(one.keys), *table.shape[1:]))
                gradients.append(none if one.gradient is None else one.gradient)
                routes.append(one.route)
        return table.exchange.push(gradients, routes, table.ownership, table.place)

    def _round(self, request: LookupRequest) -> LookupRound:
        label = self._served[request.table].name if isinstance(request.table, int) else "tables"
        found: LookupRound = self._carried(look_up(request, self._served, self._rank), label)
        return found

    def _carried(self, program: Program[Any], label: str) -> Any:
        """Carries a program to its end, one request at a time."""
        answer = None
        while True:
            try:
                request = program.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = self._requests.start(request, label)()


Tables = Mapping[int, StageTables]  # by stage; none of a stage that reads no table


def _refuse_out_of_range(table: RowTable, ids: Tensor) -> None:
    if not ids.numel():
        return
    low, high = (int(edge) for edge in torch.aminmax(ids))
    if low < 0 or high >= table.shape[0]:
        raise IndexError(
            f"rank {table.place.rank}: {table.name} has {table.shape[0]} rows, but the batch reads row "
            f"{low if low < 0 else high}; check the vocabulary or the hashing of ids"
        )
