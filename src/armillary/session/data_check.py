"""Whether ranks that are to train on data of their own do so: what they see first is compared.

Ranks that see the same data learn as much as one of them. Ranks whose loaders shuffle apart see some samples twice and
others never. The loss falls all the same, so nothing else would tell.

The first batches, and the beginning of each pass of a shard over its loader, are compared at the end of the backwards
1, 2, 4, 8, ... Sums stand for values, and the verdict is the same on all ranks. Loaders of different lengths are evened
out, or refused where weights meet (`even_batches`).
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from armillary.prefetch.batches import LeftOver, Source, is_plain_loader, leaves
from armillary.runtime.dense_unit import DenseUnit
from armillary.runtime.executor import Executor
from armillary.transport.agreement import checksum
from armillary.transport.transport import Transport

__all__ = ["STEPS", "FirstBatches", "alike_ranks", "complaint", "entrances", "even_batches"]

STEPS = 3  # of which everything that was given is compared
ROUNDS = 2  # of every pass of a shard
MOST_ROWS, MOST_NUMBERS = 256, 1024  # of a tensor that are looked at, and of each of its rows
BY_CHANCE = 3  # how many samples more than by chance ranks must have in common
REMEDY = (
    "give every rank its own share, by run.shard(loader) or a DistributedSampler; if this is meant, say "
    "check_data=False to parallelize or attach"
)


class SeenBatch(NamedTuple):
    """What a rank tells the others after a step.

    given: a sum of every tensor it was given since the step before. samples: a sum of each row of these.
    rounds: (number of the shard, pass, round) -> a sum of every tensor in the batches of all workers.
    """

    given: tuple[int, ...]
    samples: tuple[int, ...]
    rounds: dict[tuple[int, int, int], tuple[int, ...]]


class FirstBatches:
    """`open`, `take` and `watch` ask nobody; `compare` asks all ranks.

    Args:
        one_each: a rank for each of those that are to have data of their own; all, if not said.
    """

    def __init__(self, transport: Transport, is_wanted: bool = True, one_each: Sequence[int] = ()) -> None:
        self.transport, self.is_on = transport, is_wanted and transport.place.workers > 1
        self._one_each = one_each or range(transport.place.workers)
        self.steps = self.shards = 0
        self.is_plain = False  # whether the loader that was handed in last is torch's own
        self.only_plain = False  # whether no other is drawn before its turn
        self._given: list[int] = []
        self._samples: list[int] = []
        self._rounds: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._told: list[list[SeenBatch]] = []  # step by step, of every rank
        self._entrance, self._hooks = _Entrance(self), list[RemovableHandle]()

    def look_at(self, model: nn.Module) -> None:
        """A step is given what goes into its training forwards, as long as first steps last."""
        if self.is_looking:
            hooks = [one.register_forward_pre_hook(self._entrance, with_kwargs=True) for one in entrances(model)]
            self._hooks = hooks

    def look_away(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def is_looking(self) -> bool:
        return self.is_on and self.steps < STEPS

    def open(self, loader: object) -> None:
        """The loop is about to go over this one."""
        self.is_plain = is_plain_loader(loader)

    def take(self, batch: Any) -> None:
        """A step is given this."""
        if not self.is_looking:
            return
        rows = [_row_sums(leaf) for leaf in leaves(batch) if _is_readable(leaf)]
        self._given += [_total(one) for one in rows]
        if rows:
            together = [one for one in rows if len(one) == len(rows[0])]
            self._samples += (torch.stack(together, 1) * _odd(len(together))).sum(1).tolist()

    def watch(self) -> Callable[[], Callable[[Sequence[Any]], None]]:
        """For one more shard: what it calls at the begin of a pass, and then with each round of batches."""
        shard, passes = self.shards, 0
        self.shards += 1

        def begin() -> Callable[[Sequence[Any]], None]:
            nonlocal passes
            this, rounds = passes, 0
            passes += 1

            def show(together: Sequence[Any]) -> None:
                nonlocal rounds
                if rounds < ROUNDS:
                    sums = tuple(_total(_row_sums(leaf)) for leaf in leaves(together) if _is_readable(leaf))
                    self._rounds[shard, this, rounds] = sums
                rounds += 1

            return show

        return begin

    def compare(self) -> None:
        """Collective, once a step.

        Raises:
            ValueError: ranks train on the same data, or their shards are of other data. On every rank.
        """
        self.steps += 1
        if not self.is_on or (self.steps > STEPS and self.steps & (self.steps - 1)):
            return
        mine = SeenBatch(tuple(self._given), tuple(self._samples), dict(self._rounds))
        self._given, self._samples, self._rounds = [], [], {}
        everyones = self.transport.share(mine)
        if error := shuffled_apart([seen.rounds for seen in everyones]):
            raise ValueError(error)
        if self.steps <= STEPS:
            self._told.append(everyones)
        if self.steps == STEPS:
            error, warning = complaint(self._told, self._one_each)
            self._told = []
            if not self._entrance.is_compiled:  # torch would compile all anew
                self.look_away()
            if error:
                raise ValueError(error)
            if warning and self.transport.place.rank == 0:
                warnings.warn(warning, stacklevel=2)


class _Entrance:
    """The hook on a model. A copy of the model has the same one, a pickled model none that sees anything."""

    def __init__(self, first: FirstBatches | None = None) -> None:
        self.first, self.is_compiled = first, False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # what torch has compiled is seen in run.batches and run.shard alone
            self.is_compiled = True
            return
        if self.first is None or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            self.first.take((args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Entrance":
        return self

    def __reduce__(self) -> Any:
        return _Entrance, ()


def shuffled_apart(everyones: Sequence[Mapping[tuple[int, int, int], tuple[int, ...]]]) -> str:
    """What shards of other data on some rank are told; empty if all draw alike. A part of a batch may differ, as random
    augmentation makes it; where nothing is alike the batches are others."""
    for rank, theirs in enumerate(everyones):
        for key in sorted(theirs.keys() & everyones[0].keys()):
            pairs = list(zip(theirs[key], everyones[0][key], strict=False))
            if pairs and all(one != other for one, other in pairs):
                return (
                    f"run.shard: in its pass {key[1] + 1} over the loader rank {rank} drew other batches than rank 0, "
                    "so some are trained on twice and others never; let every rank shuffle alike: "
                    "draw = torch.Generator(), DataLoader(..., shuffle=True, generator=draw), and before each epoch "
                    "draw.manual_seed(epoch). If only random augmentation differs, say check_data=False to parallelize "
                    "or attach"
                )
    return ""


def complaint(steps: Sequence[Sequence[SeenBatch]], compared: Sequence[int]) -> tuple[str, str]:
    """An error, or else a warning, of what these ranks were given in some steps; empty where all is well.

    The same data in every step, and others in each: somebody forgot to cut them. The same data all the time may be a
    trial on one batch, and samples in common may be drawn with replacement: a warning does.
    """
    alike = defaultdict(list)
    for rank in compared:
        if all(step[rank].given for step in steps):
            alike[tuple(step[rank].given for step in steps)].append(rank)
    for given, ranks in alike.items():
        if len(ranks) > 1:
            said = (
                f"ranks {', '.join(map(str, ranks))} were given the same data in each of their first {len(steps)} steps"
            )
            if len(set(given)) > 1:
                return f"{said}, so they learn as much as one; {REMEDY}", ""
            return "", f"{said}, the same batch every time, so they learn as much as one; {REMEDY}"
    return "", next(_in_common(steps, compared), "")


def _in_common(steps: Sequence[Sequence[SeenBatch]], compared: Sequence[int]) -> Iterator[str]:
    samples = {rank: [one for step in steps for one in step[rank].samples] for rank in compared}
    repeats = sum(len(mine) - len(set(mine)) for mine in samples.values())
    for one, other in combinations(compared, 2):
        shared = len(set(samples[one]) & set(samples[other]))
        if shared > BY_CHANCE * (repeats + 1):
            yield (
                f"ranks {one} and {other} were both given {shared} of the same samples in their first {len(steps)} "
                f"steps, in which each saw {len(samples[one])}; {REMEDY}"
            )


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules by which a loop calls a model: itself, or what it holds if it is a mere container."""
    if type(model).forward is not nn.Module.forward:
        return [model]
    return [one for child in model.children() for one in entrances(child)]


def _is_readable(leaf: Tensor) -> bool:
    return (
        leaf.layout == torch.strided
        and not leaf.is_meta
        and leaf.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        and not (leaf.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _row_sums(leaf: Tensor) -> Tensor:
    """A sum of each of the first rows, (rows,), which others would hardly have; of a single number, its own."""
    first = leaf.detach()[:MOST_ROWS] if leaf.dim() else leaf.detach().view(1)
    rows = first.reshape(len(first), -1)
    rows = rows[:, :: -(-rows.shape[1] // MOST_NUMBERS)].contiguous().cpu()
    words = rows.view(torch.uint8).long()
    return (words * _odd(words.shape[1])).sum(1)


def _total(sums: Tensor) -> int:
    return int((sums * _odd(len(sums))).sum())


def _odd(count: int) -> Tensor:
    """Weights of 64 bits, the same on every rank."""
    draw = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=draw) * 2 + 1


def alike_ranks(batch: Any, transport: Transport) -> list[tuple[int, ...]]:
    """The sets of ranks whose batches are equal, which they should never be; empty when all is well."""
    sums = transport.share(tuple(checksum(leaf) for leaf in leaves(batch)))
    ranks: dict[Any, list[int]] = defaultdict(list)
    for rank, found in enumerate(sums):
        ranks[found].append(rank)
    return [tuple(same) for found, same in ranks.items() if len(same) > 1 and found]


Batch = TypeVar("Batch")


def even_batches(
    at_work: Callable[[], Executor], loader: Iterable[Batch], first: FirstBatches, left: LeftOver
) -> Iterator[Batch]:
    """The loader's batches, as many as the longest rank has; see `Run.batches`.

    Args:
        at_work: who carries the plan out now; a run may move to another plan in the middle of a loop.
        first: is shown each batch of this rank's own.
        left: of loops before this one.

    Raises:
        ValueError: this rank has no batch at all; there is nothing it could repeat. Or weights meet, and ranks have
            different numbers of batches, or do not know how many.
    """
    executor = at_work()
    if meeting := [one for one in executor.units if isinstance(one, DenseUnit) and one.exchange.carries == "weights"]:
        _refuse_uneven(executor, loader, meeting[0].name)
        if not executor.tables:
            first.open(loader)
            for given in loader:
                first.take(given)
                yield given
            return
    prefetch = executor.prefetch
    first.open(loader)
    source = Source(loader, prefetch.depth if first.is_plain or not first.only_plain else 0, left)
    batch: Batch | None = source.take()
    _refuse_none(executor, batch is not None)
    assert batch is not None
    last = batch
    prefetch.begin_loop()
    try:
        while True:
            last = batch if batch is not None else last
            with_data = _first_of(at_work(), batch is not None)
            if with_data is None:
                return
            at_work().with_data = with_data
            at_work().set_exhausted(batch is None)
            if executor is at_work():  # a plan that came since prefetches from the next loop on
                prefetch.begin_batch(partial(leaves, last), lambda: leaves(source.glance()))
            if batch is not None:
                first.take(batch)
            yield last
            batch = source.take() if batch is not None else None
    finally:
        source.leave()
        prefetch.end_loop()
        at_work().set_exhausted(False)
        at_work().with_data = 0


def _refuse_uneven(executor: Executor, loader: Iterable[Any], group: str) -> None:
    """Collective, when a loop begins.

    Raises:
        ValueError: ranks have different numbers of batches, or one does not know. On every rank.
    """
    with executor.transport.within("batches"), executor.transport.unrecorded():
        everyones = executor.transport.share(len(loader) if isinstance(loader, Sized) else None)
    if len(set(everyones)) > 1 or None in everyones:
        told = ", ".join(f"rank {rank}: {'unknown' if n is None else n}" for rank, n in enumerate(everyones))
        raise ValueError(
            f"run.batches: ranks have different numbers of batches, or do not know them ({told}), and the weights of "
            f"{group} meet, where each rank counts alike; give every rank as many, by a loader with a length"
        )


def _refuse_none(executor: Executor, mine: bool) -> None:
    """Collective, when a loop begins; ranks that are still evaluating are served meanwhile.

    Raises:
        ValueError: a rank has no batch. On every rank.
    """
    rank, transport = executor.transport.place.rank, executor.transport
    with transport.within("batches"), transport.unrecorded():
        executor.look_ups.serve_until("idle")
        most = int(transport.agree_largest([0.0 if mine else rank + 1.0])[0])
    if most:
        raise ValueError(f"run.batches: rank {most - 1 if mine else rank} has no batch; give every rank at least one")


def _first_of(executor: Executor, mine: bool) -> int | None:
    """The first rank of which it is true; ranks that are still evaluating are served meanwhile."""
    look_ups, place = executor.look_ups, executor.transport.place
    with executor.transport.within("batches"):
        if not look_ups.pulled:
            behind = int(executor.transport.agree_largest([float(mine * (place.workers - place.rank))])[0])
            return place.workers - behind if behind else None
        look_ups.serve_until("idle", float(mine))
        executor.prefetch.seal()
        return next((rank for rank, weight in enumerate(look_ups.weights) if weight), None)
