"""One stage on one of the devices that share it: the sum of its gradients and its weights, from device to device.

After its backward a device adds its gradients to the sum from the micro-batch before and hands it on. The home gets the
finished sum, steps, and hands the new weights to the device that reads them first, that one to the next, each when it
reads them (or settles). A stage of one device does the same without a message.

Note [Nothing can hang]. Every wait is for something that the schedule's clock places earlier. What a home does between
two of its own actions (it takes a sum, steps, hands on weights and norms) is done at the end of the tick that finished
the sum or the norm; in its program it stands before its first action after that tick, and at the latest where its call
ends. A call of `step` covers the same ticks on all devices, so nobody waits within a call for what another does in the
next one. Of what may never be sent nothing is posted. And nothing is polled: what a device does next depends on what it
has done, never on time, so whether a run ends does not either.

Source: `schedules/shared.py`, Note [Home].
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.channel import Channel
from armillary.runtime.cyclic.delayed_step import Options, options_of
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.cyclic.home import Home
from armillary.runtime.cyclic.norm_chain import NormChain
from armillary.runtime.cyclic.parcels import ParcelRoute, Parcels
from armillary.runtime.cyclic.replica import Replica
from armillary.runtime.cyclic.step_means import Means
from armillary.runtime.cyclic.train_spec import TrainSpec
from armillary.runtime.cyclic.updates import Updates
from armillary.runtime.partition.stages import Stage
from armillary.schedules.clipping import square_of_stage
from armillary.schedules.schedule import Cell
from armillary.schedules.shared import Sharing

__all__ = ["SharedStage"]

_PARTIAL, _SUM, _WEIGHTS = "partial gradient", "gradient", "weights"
_PATIENCE_TICKS = 2  # that a send is waited for later than it might be
_NEVER = 1 << 62  # a tick


class SharedStage:
    """
    Args:
        stages: of the whole model; the optimizer may hold the parameters of all of them.
        rank: of this device.
        drains: the run's own list; it grows.
    """

    def __init__(
        self, stages: Sequence[Stage], optimizer: Optimizer, spec: TrainSpec, channel: Channel, rank: int
    ) -> None:
        self.sharing, self.drains, self.steps = Sharing(spec.schedule), list[int](), 0
        self.rank, self.index = rank, self.sharing.stage_of(rank)
        self.replica = Replica(stages[self.index])
        self._ranks, self._home_rank = self.sharing.ranks(self.index), self.sharing.home(self.index)
        self._parcels, self._optimizer = Parcels(channel), optimizer
        owned = frozenset({self.index} if self._is_home else ())
        flats = {stage.index: FlatStage(dict(stage.module.named_parameters())) for stage in stages}
        self._home = Home(optimizer, flats, owned)
        self._steps_taken = _AtHome(self)
        self._updates = Updates([self._steps_taken], spec.clip, self.drains)
        needs_norms = self._is_home and spec.clip is not None and spec.clip.needs_all_stages
        homes = [self.sharing.home(stage.index) for stage in stages]
        self._norms = NormChain(channel, self.index, homes, self.replica.flat.device) if needs_norms else None
        self._gathered, self._known = 0, 0  # steps whose sum was taken here, whose norm is known here
        self._sums: dict[int, list[Tensor]] = {}  # finished or handed on to this device itself, by step

    @property
    def _is_home(self) -> bool:
        return self.rank == self._home_rank

    def begin(self) -> None:
        """One more step is handed in, with the optimizer's options of this moment."""
        if self._is_home:
            self._updates.begin(self.steps, options_of(self._optimizer))
        if self._norms is not None:
            self._norms.begin()
        self.steps += 1

    def before(self, tick: int) -> None:
        """This device's next action is at `tick`: what is due here before it is done."""
        self._close(tick)
        self._parcels.reap(tick)

    def weights(self, place: Cell) -> tuple[int, Mapping[str, Tensor]]:
        """What a forward reads, and its version; makes room for what will be sent to this device until the next one."""
        version = self.sharing.schedule.version(place, self.drains)
        self._receive_until(version)
        self.replica.forget(version)
        self._make_room(place)
        return version, self.replica.at(version)

    def add(self, place: Cell, gradients: Mapping[str, Tensor]) -> None:
        """A backward is done; its gradients are by the stage's own names, unused ones left out."""
        step, micro_batch, _ = place
        mine, flat = self.replica.in_order(gradients), self.replica.flat
        if micro_batch == 0:
            total = flat.pack_gradients(mine)
        else:
            before = self.sharing.rank_of((step, micro_batch - 1, self.index))
            is_here = before == self.rank
            total = self._sums.pop(step) if is_here else self._take(before, _PARTIAL)
            flat.add_gradients(total, mine)
        is_last = micro_batch + 1 == self.sharing.schedule.micro_batches
        after = self._home_rank if is_last else self.sharing.rank_of((step, micro_batch + 1, self.index))
        if after == self.rank:
            self._sums[step] = total
        else:
            needed = self.sharing.start("B", place) + (0 if is_last else 2)
            self._send(after, _SUM if is_last else _PARTIAL, total, needed)

    def close(self) -> None:
        """The call ends: everything is done that others may need before the next one begins."""
        self._close(self.steps * self.sharing.schedule.period)

    def settle(self) -> None:
        """Brings the newest version here, after this device's last action; training goes on unchanged."""
        self._close(None)
        self._receive_until(self.steps)
        self._parcels.reap(None)
        if self._norms is not None:
            self._norms.wait()

    def drain(self) -> None:
        """After `settle`: the next step reads the newest weights everywhere."""
        self.drains.append(self.steps)
        self.replica.forget(self.steps)

    def made(self, gradients: Means, options: Options) -> None:
        """At the home: makes the next version and hands it on."""
        self._home.step(self.index, gradients, options)
        weights = self._home.copy(self.index)
        self.replica.arrive(weights)
        self._hand_on(weights)

    def _close(self, tick: int | None) -> None:
        """At the home: takes the sums and norms that are finished before `tick` (or at all), in their order."""
        while self._is_home and self._first_due(tick):
            step = self._gathered if self._next_sum() <= self._next_norm() else self._known
            if self._next_sum() <= self._next_norm():
                self._gather(step)
            else:
                assert self._norms is not None
                self._learn(step, self._norms.take())

    def _first_due(self, tick: int | None) -> bool:
        first = min(self._next_sum(), self._next_norm())
        return first < (_NEVER if tick is None else tick)

    def _next_sum(self) -> int:
        """The tick that finishes the next sum to be taken."""
        return self.sharing.complete(self._gathered, self.index) if self._gathered < self.steps else _NEVER

    def _next_norm(self) -> int:
        """The tick that finishes the next norm to be learnt; stage 0 learns with its sum."""
        is_told = self._norms is not None and self.index > 0 and self._known < self.steps
        return self.sharing.complete(self._known, 0) if is_told else _NEVER

    def _gather(self, step: int) -> None:
        last, count = self.sharing.last(step, self.index), self.sharing.schedule.micro_batches
        total = self._sums.pop(step) if last == self.rank else self._take(last, _SUM)
        means = self._home.means(self.index, total, count)
        self._gathered += 1
        whole = None if self._norms is None else self._norms.add(square_of_stage(means.values()))
        self._updates.complete(self._steps_taken, step, means)
        if whole is not None:
            self._learn(step, whole)

    def _learn(self, step: int, square: Tensor) -> None:
        self._known += 1
        self._updates.know(step, square)

    def _receive_until(self, version: int) -> None:
        while not self._is_home and self.replica.newest < version:
            path = self.sharing.weight_path(self.replica.newest + 1, self.index)
            weights = self._take(path[path.index(self.rank) - 1], _WEIGHTS)
            self.replica.arrive(weights)
            self._hand_on(weights)

    def _hand_on(self, weights: list[Tensor]) -> None:
        """The newest version, to the device after this one on its path."""
        version = self.replica.newest
        path = self.sharing.weight_path(version, self.index)
        after = path[path.index(self.rank) + 1 :]
        if after:
            self._send(after[0], _WEIGHTS, weights, self.sharing.readers(version, self.index)[after[0]])

    def _make_room(self, place: Cell) -> None:
        """Posts what comes until this device's next forward: the sums before its backward, the weights after it."""
        step, micro_batch, j = place
        ahead = step * self.sharing.schedule.micro_batches + micro_batch + len(self._ranks)
        following = *divmod(ahead, self.sharing.schedule.micro_batches), j
        if micro_batch and len(self._ranks) > 1:
            self._post(self.sharing.rank_of((step, micro_batch - 1, j)), _PARTIAL)
        if self._is_home:
            back = self.sharing.start("B", place)
            for done in range(self._gathered, self.steps):
                last = self.sharing.last(done, j)
                if last != self.rank and self.sharing.complete(done, j) < back:
                    self._post(last, _SUM)
            return
        wanted = min(self.sharing.schedule.version(following, self.drains), self.steps)
        for version in range(self.replica.newest + 1, wanted + 1):
            path = self.sharing.weight_path(version, j)
            self._post(path[path.index(self.rank) - 1], _WEIGHTS)

    def _post(self, peer: int, what: str) -> None:
        if not self._parcels.posted(ParcelRoute(peer, what)):
            self._parcels.post(ParcelRoute(peer, what), self._room(what))

    def _take(self, peer: int, what: str) -> list[Tensor]:
        return self._parcels.take(ParcelRoute(peer, what), lambda: self._room(what))

    def _send(self, peer: int, what: str, parts: list[Tensor], needed: int) -> None:
        self._parcels.send(ParcelRoute(peer, what), parts, needed + _PATIENCE_TICKS)

    def _room(self, what: str) -> list[Tensor]:
        return self.replica.flat.empty_weights() if what == _WEIGHTS else self.replica.flat.empty_gradients()


class _AtHome:
    """What `Updates` steps: the stage's master weights."""

    def __init__(self, stage: SharedStage) -> None:
        self._stage = stage

    @property
    def newest(self) -> int:
        return self._stage.replica.newest

    def advance(self, gradients: Means, options: Options) -> None:
        self._stage.made(gradients, options)
