"""What `attach` returns: the few things a training loop may want to say to the runtime.

Nothing here is needed by a plain loop. `no_sync` accumulates gradients, `weigh` declares how much this rank's batch
counts, `batches` keeps ranks together when their data run out at different times, `finish` serves the others at the
end.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from armillary.facts.plan import Plan
from armillary.facts.trace import Trace
from armillary.runtime.hybrid.executor import Executor
from armillary.runtime.hybrid.late_step import LateSteps
from armillary.runtime.hybrid.look_ahead import DEPTH
from armillary.runtime.hybrid.row_update import Held, close_window, leaves_untouched_rows, open_window, options_of
from armillary.runtime.hybrid.table import RowTable
from armillary.session.source import Source, leaves

__all__ = ["Run"]

Batch = TypeVar("Batch")


class Run:
    """A plan at work. `held` keeps the optimizer state of tables whose optimizer sees a window only."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        executor: Executor,
        held: dict[str, Held],
        scaler: Any,
    ):
        self.plan, self.model, self.optimizer = plan, model, optimizer
        self.executor, self.held = executor, held
        self.transport = executor.transport
        self.tables: dict[str, RowTable] = {table.name: table for table in executor.tables}
        self.known = {parameter for unit in executor.units for parameter in unit.parameters}
        self.options: dict[str, dict[str, Any]] = {}  # of the optimizer for each window, as last seen
        self._refuse_new_options()
        self._undo = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        executor.deferral.late_steps = LateSteps(self)
        executor.deferral.stopped |= {t.name for t in self._windows() if not executor.deferral.late_steps.can_split(t)}
        if scaler is not None:
            self._share_found_inf(scaler)

    @property
    def rank(self) -> int:
        return self.transport.place.rank

    @property
    def workers(self) -> int:
        return self.transport.place.workers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank; the first backward outside exchanges the sum (as DDP's no_sync)."""
        before, self.executor.is_syncing = self.executor.is_syncing, False
        try:
            yield
        finally:
            self.executor.is_syncing = before

    def weigh(self, weight: float) -> None:
        """Declares the weight of this rank's next backward, for example its number of tokens.

        Raises:
            ValueError: the plan's mean is over workers, the weight is negative, or gradients of another weight have
                accumulated.
        """
        if self.plan.mean != "weights":
            raise ValueError("run.weigh: the plan averages over workers; plan with mean='weights'")
        if weight < 0:
            raise ValueError(f"run.weigh: rank {self.rank}: want a weight >= 0, got {weight}")
        if self.executor.is_owing and weight != self.executor.weight:
            raise ValueError(
                f"run.weigh: rank {self.rank}: gradients accumulated with weight {self.executor.weight} are not yet "
                f"exchanged, got {weight}; declare one weight for all batches that accumulate"
            )
        self.executor.weight = float(weight)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches, as many as the longest rank has.

        A rank whose data have run out repeats its last batch with weight zero, so that the loop, the optimizer and the
        schedulers go on alike everywhere. With the mean over workers the divisor stays the number of workers (as
        DDP's join).

        If the plan looks ahead, the loader may be three batches ahead of the loop (see `Source` for the loaders that
        are not). A loop that saves its place in the data must then save that of the batch it holds: iterate over
        pairs of a batch and its place.

        Raises:
            ValueError: this rank has no batch at all; there is nothing it could repeat.
        """
        ahead = self.executor.look_ups.look_ahead
        source = Source(loader, DEPTH if ahead.is_on else 0)
        batch: Batch | None = source.take()
        if batch is None:
            raise ValueError(f"run.batches: rank {self.rank} has no batch; give every rank at least one")
        last = batch
        ahead.begin()
        try:
            while True:
                last = batch if batch is not None else last
                if not self._is_any(batch is not None):
                    return
                self.executor.stand_by(batch is None)
                if ahead.is_on:
                    ahead.turn(self.executor.look_ups.moved, self.executor.look_ups.outlook)
                    ahead.foresee(leaves(last), leaves(source.glance()))
                yield last
                batch = source.take() if batch is not None else None
        finally:
            ahead.stop()
            self.executor.stand_by(False)

    def _is_any(self, mine: bool) -> bool:
        """Whether it is true of any rank; ranks that are still evaluating are served meanwhile."""
        look_ups = self.executor.look_ups
        if not look_ups.pulled:
            return bool(self.transport.agree_largest([float(mine)])[0])
        look_ups.serve_until("idle", float(mine))
        look_ups.look_ahead.close(look_ups.foreseen)
        return any(look_ups.weights)

    def finish(self) -> None:
        """Serves the other ranks' look-ups until every rank has called this. Call it when training is over."""
        self.executor.look_ups.serve_until("finished")
        self.executor.deferral.catch_up()
        self.transport.barrier()

    def take_trace(self) -> Trace:
        """The requests since recording began or the last call; set `run.transport.recording = True` first."""
        return Trace(self.rank, self.transport.take_records())

    def detach(self) -> None:
        """Stops exchanging. Tables stay handles; export first if the plain model is wanted."""
        for handle in self._undo:
            handle.remove()
        for remove in self.executor.removals:
            remove()

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> Any:
        """With a closure the gradients are there only when it returns."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._ready_for_step()
            return None

        def closed() -> Any:
            value = closure()
            self._ready_for_step()
            return value

        return (args[0], closed, *args[2:]), {key: value for key, value in kwargs.items() if key != "closure"}

    def _ready_for_step(self) -> None:
        if self.executor.is_open:
            raise RuntimeError(
                f"rank {self.rank}: a backward ended in an error and its exchange is half done; start again from a "
                "checkpoint"
            )
        self._refuse_strangers()
        self._refuse_new_options()
        if not self.executor.is_settled:  # this rank's backward touched nothing that is exchanged
            self.executor.settle()
        if self._is_watched():
            self.executor.deferral.join()
        with torch.no_grad():
            for table in self.tables.values():
                table.hand_gradient_over()
            self.executor.deferral.mark()
            for table in self._windows():
                open_window(table, self.optimizer, self.held[table.name])

    def _after_step(self, *_: Any) -> None:
        with torch.no_grad():
            for table in self._windows():
                close_window(table, self.optimizer, self.held[table.name])
            for table in self.tables.values():
                if table.gradient is not None:
                    table.show_gradient(table.gradient)
        self.executor.after_step()

    def _is_watched(self) -> bool:
        """Whether somebody else's hooks run with the step: they may look at all rows it moves."""
        mine = {handle.id for handle in self._undo}
        hooks = {**self.optimizer._optimizer_step_pre_hooks, **self.optimizer._optimizer_step_post_hooks}
        return bool(set(hooks) - mine or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    def _refuse_strangers(self) -> None:
        """Parameters that learn but are not in the plan would drift apart on the ranks."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.known:
                    name = next((name for name, p in self.model.named_parameters() if p is parameter), None)
                    raise ValueError(
                        f"rank {self.rank}: {name or 'a parameter outside the model'} {tuple(parameter.shape)} has a "
                        "gradient but is not in the plan (unfrozen after attach?); plan again and attach anew"
                    )

    def _refuse_new_options(self) -> None:
        """A window is exact as long as the optimizer leaves rows without gradient alone; options may change that."""
        for table in self._windows():
            group = options_of(self.optimizer, table.parameter)
            if group is None or any(one.is_lazy for one in self.plan.groups if table.name in one.parameters):
                continue
            options = {name: value for name, value in group.items() if name not in ("params", "lr")}
            if self.options.setdefault(table.name, options) != options:
                if not leaves_untouched_rows(self.optimizer, group):
                    raise ValueError(
                        f"rank {self.rank}: {table.name}: the optimizer's options are now {options}, with which "
                        "rows move that get no gradient; set them before attach, or plan with update='lazy'"
                    )
                self.options[table.name] = options

    def _windows(self) -> list[RowTable]:
        return [table for table in self.tables.values() if table.has_window]

    def _share_found_inf(self, scaler: Any) -> None:
        """Makes every rank skip a step that any rank's gradients (or owned rows) made non-finite."""
        unscale = scaler._unscale_grads_

        def unscale_alike(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
            found: dict[torch.device, Tensor] = unscale(*args, **kwargs)
            largest = self.transport.agree_largest([max((float(value) for value in found.values()), default=0.0)])
            for value in found.values():
                value.fill_(largest[0])
            return found

        scaler._unscale_grads_ = unscale_alike
