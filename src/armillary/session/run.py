"""A plan at work: what `attach` returns, and all that a training loop may want of it.

    with armillary.attach(plan, model, optimizer) as run:
        for batch in run.shard(loader):
            ...                          # the loop as it was

When the block ends, the model is plain again on every rank, with the newest weights, and nothing of the run is left in
the process. An exception leaves at once, without a word to other ranks but the error itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.plans.plan import Plan
from armillary.prefetch.batches import Dealt, Shard
from armillary.session.compare import kept_report
from armillary.session.ema import Ema, Measure, begin_ema, evaluated
from armillary.session.health import refuse_apart, unless_it_ends_an_error
from armillary.session.job import Job
from armillary.session.load import load
from armillary.session.report import Report, last_steps, report_of
from armillary.session.save import export, save
from armillary.session.undo import give_up, undo
from armillary.stages.train_spec import StepLosses
from armillary.transport.transport import Transport

__all__ = ["Run"]

Item = TypeVar("Item")


class Run:
    """Every rank makes the same calls, but for `weigh`, `shard`, `batches` and `no_sync`, which ask nobody.

    Raises (every method):
        RuntimeError: the run is closed.
    """

    def __init__(self, engine: Job, undo: Sequence[Callable[[], None]], owns_transport: bool = True) -> None:
        """undo: what else must be taken back at the end; asks nobody."""
        self._running, self._undo, self._owns_transport = engine, undo, owns_transport
        self._closed = ""  # why
        self._rank, self._workers, self._plan = engine.rank, engine.workers, engine.plan

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._running.plan

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def workers(self) -> int:
        return self._workers

    @property
    def _engine(self) -> Job:
        if self._closed:
            raise RuntimeError(f"rank {self._rank}: the run {self._closed}; attach again to go on")
        return self._running

    @property
    def _transport(self) -> Transport:
        return self._engine.transport

    @property
    def _model(self) -> nn.Module:
        return self._engine.model

    @property
    def _optimizer(self) -> Optimizer:
        return self._engine.optimizer

    def step(self, micro_batches: Sequence[Any]) -> list[StepLosses]:
        """One training step: forward, backward and the optimizer's step over this rank's micro-batches, with the mean
        of their gradients.

        Returns:
            Of every step that is complete by now, its number and the losses of its micro-batches.

        Raises:
            ValueError: nobody gave the loss to `attach`, or another number of micro-batches is wanted.
        """
        if isinstance(micro_batches, Tensor | Mapping):
            raise ValueError(
                f"run.step: rank {self.rank} was given a {type(micro_batches).__name__}; want a list with a batch for "
                "each micro-batch, as in run.step([batch])"
            )
        self._refuse_shown("step")
        with self._transport.within("step"):
            return self._engine.step(micro_batches)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate on this rank; the first backward outside exchanges the sum (as DDP's no_sync)."""
        return self._engine.no_sync()

    def weigh(self, weight: float) -> None:
        """Declares the weight of this rank's next backward, for example its number of tokens.

        Raises:
            ValueError: the plan's mean is over workers, the weight is negative, or gradients of another weight have
                accumulated.
        """
        self._engine.weigh(weight)

    def batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        """The loader's batches, as many as the longest rank has.

        A rank whose data have run out repeats its last batch with weight zero, so that the loop, the optimizer and the
        schedulers go on alike everywhere. With the mean over workers the divisor stays the number of workers (as
        DDP's join).

        If the plan prefetches, the loader may be three batches ahead of the loop. A loop that saves its place in the
        data must then save that of the batch it holds: iterate over pairs of a batch and its place.

        Raises:
            ValueError: this rank has no batch at all; there is nothing it could repeat.
        """
        return self._engine.batches(loader)

    def shard(self, loader: Iterable[Item], *, drop_last: bool = True) -> Shard[Item] | Dealt[Item]:
        """This rank's share of a loader that gives the same batches on every rank; anew in every epoch, and as long as
        the share is. The loader may shuffle, from one seed on all ranks. Ranks that hold stages of one replica share
        one data coordinate: each gets everything. Under a schedule without a common clock batches are dealt as ranks
        ask for them, and every batch is some rank's.

        Args:
            drop_last: whether an incomplete last round is left out. False is for evaluation: every batch is some
                rank's, and some ranks have one more (`run.evaluate` takes such, `run.batches` evens them out).

        Raises:
            ValueError: the loader's sampler cuts the data already.
        """
        if (deal := self._engine.deal) is not None:
            return Dealt(loader, deal)
        mesh, first = self._engine.plan.mesh, self._engine.first
        return Shard(loader, mesh.data_coordinate(self._rank), mesh.data_coordinates, drop_last, first.watch())

    def evaluate(self, batches: Iterable[Any], measure: Measure) -> dict[str, float]:
        """Adds up what `measure(model, batch)` says of this rank's batches, over batches and ranks: the same totals on
        every rank. Ranks of one replica that measure the same batches count once. The model is in evaluation mode,
        without gradients, and holds the newest weights; afterwards its modules are in the mode they were in.

        Raises:
            ValueError: no rank has a batch. RuntimeError: ranks no longer hold alike what the plan keeps alike.
        """
        engine = self._engine
        with engine.transport.within("evaluate"):
            with engine.transport.unrecorded():
                engine.serve("evaluated")
            refuse_apart(engine, "run.evaluate")
            return evaluated(engine, batches, measure)

    def ema(self, decay: float) -> Ema:
        """An exponential moving average of every parameter, tables whose rows are spread among them: an owner averages
        its rows. The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.

            ema = run.ema(0.999)
            ...
                optimizer.step()
                ema.update()  # asks nobody
            with ema.shown():  # the model holds the averages
                totals = run.evaluate(batches, measure)
            state = ema.export()  # a state_dict on rank 0

        Called again with the same decay it is the same average.

        Raises:
            ValueError: decay is not between 0 and 1, ranks give different ones, or the plan does not leave the newest
                weights in the model after a step.
        """
        with self._aside("ema"):
            return begin_ema(lambda: self._engine, decay)

    def report(self, folder: str | Path | None = None) -> Report:
        """Forecast beside measured, per worker and step since the plan came into force; it prints.

        Args:
            folder: where rank 0 leaves what `armillary compare FOLDER` reads: the plan and what it was made from, a
                trace of the last steps, and these figures. Before the plan has taken two steps it is left as it is,
                and rank 0 warns.

        Raises:
            ValueError: for a folder: it cannot be written, or the run does not know what the plan was made from.
        """
        with self._aside("report") as engine:
            return report_of(engine, last_steps(engine)) if folder is None else kept_report(engine, Path(folder))

    def metrics(self) -> dict[str, float]:
        """What this rank sent and how long its steps took since the last call, as means per step: "step_seconds",
        "sent_bytes", "in_flight_seconds", the last two by group too ("sent_bytes/emb.weight"). Asks nobody, so one
        rank alone may call it. For TensorBoard:

            for name, value in run.metrics().items():
                writer.add_scalar(f"armillary/{name}", value, step)
        """
        engine = self._engine
        engine.count()
        return engine.traffic_meter.metrics()

    def save(self, folder: str | Path, *, loop: Mapping[str, Any] | None = None, keep: int = 3) -> Path:
        """Between two steps. Writes `folder/step-00001234/`; when it returns, the checkpoint is whole, on the disk, and
        the newest; an error at any moment leaves the older ones as they were.

        Args:
            folder: seen by every worker (a shared file system if they run on several machines).
            loop: what this rank's loop wants back on resume (scheduler and scaler state_dicts, random state, place in
                the data): plain values and tensors. Each rank gives its own.
            keep: how many of the newest checkpoints in `folder` stay.

        Raises:
            ValueError: ranks disagree on what to save. RuntimeError: a rank could not write, and the message names it;
                or ranks no longer hold alike what the plan keeps alike: then the folder is `step-00001234-apart`, which
                is never the newest, and older checkpoints stay.
        """
        with self._aside("save") as engine:
            return save(engine, folder, loop=loop, keep=keep)

    def load(self, path: str | Path | None) -> dict[str, Any]:
        """Between two steps. Loads a checkpoint folder of any plan and number of workers, or a file that `torch.save`
        made of a model's state_dict or of {"model": state_dict, "optimizer": state_dict}. None, which is what
        `latest_checkpoint` says of a first start, loads nothing.

        Returns:
            What this rank's loop gave to `save`. A rank that the saving job did not have gets rank 0's: fit for
            counters and schedulers, not for random streams. From a plain file what stands beside the model in it.

        Raises:
            ValueError: it is not whole, does not fit, or is None on some ranks only; the message names the rank that
                found out. Nothing was loaded.
            RuntimeError: a rank could not read it.
        """
        with self._aside("load") as engine:
            return load(engine, path)

    def export(self) -> dict[str, Any] | None:
        """Between two steps.

        Returns:
            On rank 0, copies on the CPU: {"model": state_dict, "optimizer": state_dict}, which the user's own classes
            load by `load_state_dict` and `torch.save` writes. None on the other ranks.

        Raises:
            ValueError: the optimizer holds a parameter that the model does not.
            RuntimeError: ranks no longer hold alike what the plan keeps alike.
        """
        with self._aside("export") as engine:
            return export(engine)

    def close(self, *, gather: bool = True) -> list[StepLosses]:
        """Ends the run, on every rank. What is under way is finished; then the model is plain, with the newest whole
        weights on every rank, the optimizer holds its parameters with their state, and nothing of the run is left: no
        hook, thread or group. Closing twice does nothing.

        Args:
            gather: False leaves out the tables whose rows are spread over the ranks. They stay in the model and say so
                when they are read; the optimizer no longer holds them.

        Returns:
            The losses of the steps of which no call of `step` told them.

        Raises:
            RuntimeError: ranks no longer hold alike what the plan keeps alike. The model is plain by then, and each
                rank has its own values. Nothing is compared where an exception is being handled.
        """
        if self._closed:
            return []
        engine = self._engine
        self._refuse_shown("close")
        with engine.transport.within("close"):
            told = engine.drained()
            engine.finish()
            apart = unless_it_ends_an_error(engine, "run.close")
            undo(engine, gather)
        self._let_go("was closed")
        if self._owns_transport:
            engine.transport.close()
        if apart:
            raise RuntimeError(f"rank {self._rank}: {apart}. The run is closed")
        return told

    def _give_up(self, error: BaseException) -> None:
        """Ends the run on this rank alone: no request is made, ranks that wait for this one hear why."""
        if self._closed:
            return
        engine, why = self._engine, f"ended on rank {self._rank} with {type(error).__name__}: {error}"
        engine.transport.tell(f"{type(error).__name__}: {error}")
        give_up(engine, why)
        self._let_go(why)
        if self._owns_transport:
            engine.transport.give_up()

    def _let_go(self, why: str) -> None:
        for take_back in self._undo:
            take_back()
        self._closed = why

    @contextmanager
    def _aside(self, call: str) -> Iterator[Job]:
        """Requests made inside belong to no step."""
        engine = self._engine
        self._refuse_shown(call)
        with engine.transport.within(call), engine.transport.unrecorded():
            engine.serve()
            yield engine

    def _refuse_shown(self, call: str) -> None:
        if any(average.is_shown for average in self._engine.averages.values()):
            raise RuntimeError(
                f"run.{call}: rank {self._rank}: inside ema.shown() the model holds averages, and may only be read; "
                "leave its block first (ema.export() exports averages)"
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._give_up(error)
