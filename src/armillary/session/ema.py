"""Evaluation on held-out batches, and `run.ema(decay)`, a moving average of all parameters.

Every rank evaluates its share, and the sums are added up over ranks. What ranks of one replica say of the same batches
counts once. Batches are compared by their bytes, since a user may divide them otherwise than `run.shard` does.

The model is evaluated whole. Where edges are coded, a stage's first module reads what decoding would give
(`Codec.meaning`). Of a traced model, what skips that module is not coded. Which values training codes is found before
training begins, since evaluation has no gradients.

`torch.optim.swa_utils.AveragedModel` copies the model, which a row-sharded table does not allow. The average here has
the same values, computed where the parameters are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from armillary.codecs.registry import Codec
from armillary.exchanges.look_up import State
from armillary.models.preserved_state import untouched
from armillary.plans.plan import Plan
from armillary.prefetch.batches import leaves as leaves_in
from armillary.schedules.edges import Edge, at_eval, is_codable
from armillary.session.job import Average, Job
from armillary.session.save import export_model
from armillary.transport.agreement import checksum
from armillary.transport.transport import Transport

__all__ = [
    "CodedLeaves",
    "Ema",
    "Measure",
    "Shown",
    "begin_ema",
    "coded_leaves",
    "edges_at_eval",
    "evaluated",
    "evaluating",
]

CodedLeaves = Sequence[tuple[bool, ...]]  # by edge: of all that the first module behind it is called with


def coded_leaves(model: nn.Module, plan: Plan, value: tuple[Any, ...]) -> CodedLeaves:
    """Which values training codes: those that were made since the last edge and ask for a gradient.

    Args:
        value: an example of what the first stage reads. The model is left as it was.
    """
    if all(stage.edge is None for stage in plan.stages):
        return ()
    value = tree_map_only(Tensor, Tensor.detach, value)
    came: dict[int, Any] = {id(leaf): leaf for leaf in tree_leaves(value)}  # held, so that each keeps its number
    found: list[tuple[bool, ...]] = []

    def look(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        leaves = tree_leaves((given, named))
        found.append(tuple(_asks(leaf) and id(leaf) not in came for leaf in leaves))
        came.update({id(leaf): leaf for leaf in leaves})

    with untouched(model), ExitStack() as stack, torch.enable_grad():
        for stage in plan.stages[1:]:
            first = model.get_submodule(stage.begins)
            stack.callback(first.register_forward_pre_hook(look, with_kwargs=True).remove)
        model(*value)
    return found


def _asks(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and is_codable(leaf)


@contextmanager
def edges_at_eval(model: nn.Module, plan: Plan, step: int, coded: CodedLeaves) -> Iterator[None]:
    """Inside, the model reads what has crossed coded edges, where the plan does not switch that off.

    Args:
        step: of the training; edges that are still warming up are not coded.
    """
    handles = []
    for below, above, leaves in zip(plan.stages, plan.stages[1:], coded, strict=False):
        codec = at_eval(Edge(below.edge), step)
        if codec is not None:
            hook = _crossing(codec, leaves)
            handles.append(model.get_submodule(above.begins).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _crossing(codec: Codec, coded: tuple[bool, ...]) -> Any:
    def arrived(tensor: Tensor) -> Tensor:
        draw = torch.Generator().manual_seed(0) if codec.draws else None  # the same for every batch
        with torch.autocast(tensor.device.type, enabled=False):
            return codec.meaning(tensor.reshape(-1), draw).view(tensor.shape)

    def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((given, named))
        if len(leaves) != len(coded):
            raise ValueError(
                f"evaluate: {type(module).__name__}, which begins a stage behind a coded edge, reads {len(leaves)} "
                f"values, and read {len(coded)} of the example; evaluate on batches of its form, or code the edge "
                f"with at_eval=off"
            )
        return tree_unflatten([arrived(leaf) if is_coded else leaf for leaf, is_coded in zip(leaves, coded)], spec)

    return hook


Measure = Callable[[nn.Module, Any], Mapping[str, float]]


class Shown(Protocol):
    """What evaluation needs of whatever carries a plan out."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def transport(self) -> Transport: ...

    @property
    def coded(self) -> CodedLeaves: ...

    def newest(self) -> AbstractContextManager[None]:
        """Inside, the model holds the newest weights."""

    def finish(self, state: State = "finished") -> None:
        """Waits for all ranks to be so far, and serves them meanwhile."""


def evaluated(run: Shown, batches: Iterable[Any], measure: Measure) -> dict[str, float]:
    """What `measure(model, batch)` says of every rank's batches, added up: the same totals on every rank. The same
    batches on several ranks of one replica count once.

    A rank that is done serves the look-ups of the others.

    Raises:
        ValueError: no rank has a batch.
    """
    mine: dict[str, float] = {}
    rank, mesh = run.transport.place.rank, run.plan.mesh
    is_alone = len(mesh.sharing_data(rank)) == 1
    drawn: list[int] = []  # checksums of all that was measured; not needed where nobody shares this rank's data
    with run.transport.unrecorded(), run.newest():
        edges = edges_at_eval(run.model, run.plan, run.transport.step, run.coded)
        with edges, evaluating(run.model), torch.no_grad():
            for batch in batches:
                drawn += [] if is_alone else map(checksum, leaves_in(batch))
                for name, value in measure(run.model, batch).items():
                    mine[name] = mine.get(name, 0.0) + value
        run.finish("evaluated")
        everyones = run.transport.share((mine, drawn))
    totals: dict[str, float] = {}
    counted: list[tuple[int, list[int]]] = []
    for other, (theirs, their_drawn) in enumerate(everyones):
        data = (mesh.data_coordinate(other), their_drawn)
        if their_drawn and data in counted:
            continue
        counted.append(data)
        for name, value in theirs.items():
            totals[name] = totals.get(name, 0.0) + value
    if not totals:
        raise ValueError(f"evaluate: no batch on any of {run.transport.place.workers} ranks")
    return totals


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model judges instead of training; every module is put back into the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


class Ema:
    """After each `optimizer.step()` every rank calls `update`. `run.save` saves it, `run.load` loads it, on any number
    of workers and under any plan; make it before loading.

    Raises (every method):
        RuntimeError: the run is closed, or the model shows averages (`update`, `export`).
    """

    def __init__(self, job: Callable[[], Job], average: Average) -> None:
        """job: the run, while it is open."""
        self._job, self._average = job, average

    @property
    def decay(self) -> float:
        return self._average.decay

    @property
    def updates(self) -> int:
        """How often it was updated."""
        return self._average.updates

    def update(self) -> None:
        """Takes the parameters of this moment in; the first time it becomes them. Asks nobody."""
        job = self._open("update")
        self._average.update(job.model, job.tables)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Collective. Inside, the model holds the averages (and its own buffers), on every rank, without gradients;
        each rank may read as much as it likes. Afterwards it holds what it had, bit for bit.

        Raises:
            ValueError: ranks have made different numbers of updates.
        """
        job = self._open("shown")
        with torch.no_grad(), job.transport.unrecorded():
            with job.transport.within("ema.shown"):
                job.serve()
                self._refuse_uneven(job)
                job.settle()
            self._average.swap(job.model, job.tables)
            try:
                yield
                with job.transport.within("the end of ema.shown"):
                    job.settle()  # others may read still
            finally:
                self._average.swap(job.model, job.tables)

    def export(self) -> dict[str, Any] | None:
        """Collective.

        Returns:
            On rank 0 a state_dict of the plain model with averages in place of parameters, copies on the CPU; None on
            the other ranks.

        Raises:
            ValueError: ranks have made different numbers of updates.
        """
        job = self._open("export")
        with self.shown(), job.transport.within("ema.export"):
            return export_model(job)

    def _open(self, call: str) -> Job:
        job = self._job()
        if any(average.is_shown for average in job.averages.values()):
            raise RuntimeError(f"rank {job.rank}: ema.{call}: inside ema.shown(); leave its block first")
        if job.not_whole:  # since the run has moved to another plan
            raise ValueError(_why_not(job))
        return job

    def _refuse_uneven(self, job: Job) -> None:
        everyones = job.transport.share(self.updates)
        if len(set(everyones)) > 1:
            raise ValueError(
                f"run.ema: ranks have made different numbers of updates {everyones} (rank order); call ema.update() on "
                "every rank after each optimizer step"
            )


def begin_ema(job: Callable[[], Job], decay: float) -> Ema:
    """Collective, between two steps: the average of that decay, from the parameters as they are if it is new.

    Raises:
        ValueError: decay is not between 0 and 1, ranks give different ones, or the model does not hold the newest
            weights between two steps.
    """
    run, decay = job(), float(decay)
    everyones = run.transport.share(decay)
    if not all(0.0 <= one <= 1.0 for one in everyones) or len(set(everyones)) > 1:
        raise ValueError(f"run.ema: want one decay from 0 to 1 on all ranks, got {everyones} (rank order)")
    if run.not_whole:
        raise ValueError(_why_not(run))
    average = run.averages.setdefault(repr(decay), Average(decay))
    if not average.updates and not average.whole:
        run.keep_up()
        average.begin(run.model, run.tables)
    return Ema(job, average)


def _why_not(run: Job) -> str:
    return (
        f"run.ema: {run.not_whole}, so there is nothing to average. Remedy: average what run.export() gives, every so "
        "many steps, or plan for a loop of your own"
    )
