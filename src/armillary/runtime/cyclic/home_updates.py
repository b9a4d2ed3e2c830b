"""From a worker's gradients to new weights: the sums that go from worker to worker, and the steps taken at homes.

The same in a ring that keeps weights and in one that passes them round: only what is done with a new version differs.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.cyclic.courier import Courier, Key
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.home import Home
from armillary.runtime.cyclic.norms import Norms
from armillary.schedules.messages import closing, home, sum_path

__all__ = ["HomeUpdates"]


class HomeUpdates:
    """Of one worker.

    Args:
        drains: the run's own list; it grows.

    Raises:
        ValueError: the optimizer steps a parameter that is in no stage.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        course: Course,
        courier: Courier,
        flat: Mapping[int, FlatStage],
        worker: int,
        drains: Collection[int],
    ) -> None:
        self._schedule, self._courier, self._flat, self._worker = course.schedule, courier, flat, worker
        owned = frozenset(j for j in flat if home(course.schedule, j) == worker)
        self.home = Home(optimizer, flat, owned)
        self.closings = {j: closing(course.schedule, j, course.clip) for j in owned}
        self.newest = dict.fromkeys(owned, 0)  # version made here, by stage
        self.norms = Norms(course.clip, len(flat), drains, self._receive_norm)
        self._totals: dict[int, deque[Flats]] = {j: deque() for j in owned}  # finished here, not yet stepped with
        # of two workers, at the first: a + b is b + a, so its own gradients wait for what comes, and nobody copies them
        held = [j for j in owned if ("gradient", j) in courier.into]
        alone = [j for j in held if sum_path(course.schedule, j, course.clip) == (worker,)]
        self._own: dict[int, deque[Sequence[Tensor | None]]] = {j: deque() for j in alone}
        self._options: dict[int, Options] = {}

    def add(self, stage: int, gradients: Sequence[Tensor | None], step: int) -> None:
        """Adds this worker's gradients of `step` (in the order of the stage's parameters) to the sum; hands it on."""
        key: Key = ("partial gradient", stage)
        if stage in self._own:
            self._own[stage].append(gradients)
            return
        if key in self._courier.into:
            mine = self._courier.take(key)
            self._flat[stage].add_gradients(mine, gradients)
        else:
            mine = self._flat[stage].pack_gradients(gradients)
        if key in self._courier.out:
            self._send(key, mine, step)
            return
        self._add_norm(stage, mine, step)
        if stage in self._totals:
            self._totals[stage].append(mine)
        else:
            self._send(("gradient", stage), mine, step)

    def end_step(self, step: int, options: Options) -> None:
        """The optimizer's options of a step that ends here."""
        if self.home.owned:
            self._options[step] = options

    def make(self, stage: int) -> None:
        """Steps a home stage with the gradient of step `newest`: version `newest` + 1 is there then."""
        step = self.newest[stage]
        means = self.home.means(stage, self._total(stage), self._schedule.workers)
        self.home.step(stage, self.norms.clipped(step, means), self._options[step])
        self.newest[stage] += 1
        open_step = min(self.newest.values())
        self._options = {step: kept for step, kept in self._options.items() if step >= open_step}

    def is_coming(self, key: Key, step: int) -> bool:
        """Whether a gradient or a norm will be used in a step and is not posted yet."""
        content, stage = key
        if content == "partial gradient":
            return True
        posted, made = self._courier.posted(key), step - self.closings[stage].steps  # the version it is for
        if content == "norm":
            return self.norms.known + posted < self.norms.wanted(made)
        return self.newest[stage] + posted < made

    def learn(self, steps: int) -> None:
        """Receives the norms of all steps before `steps`, if they come here."""
        if any(key[0] == "norm" for key in self._courier.into):
            self.norms.learn(steps)

    def _total(self, stage: int) -> Flats:
        """The sum over all workers: as it came, as it was made here, or from here and the last worker's own."""
        if stage in self._own:
            came = self._courier.take(("gradient", stage))
            self._flat[stage].add_gradients(came, self._own[stage].popleft())
            return came
        is_kept = sum_path(self._schedule, stage, self.norms.clip)[-1] == self._worker
        kept = self._totals[stage].popleft() if is_kept else None
        if ("gradient", stage) not in self._courier.into and kept is not None:
            return kept
        came = self._courier.take(("gradient", stage))
        return came if kept is None else [flat.add_(more) for flat, more in zip(kept, came)]

    def _add_norm(self, stage: int, total: Flats, step: int) -> None:
        """On the last worker: a finished sum counts towards the norm, which with the last of them goes to the homes."""
        if self.norms.clip is None or not self.norms.clip.needs_all_stages:
            return
        sums = self._flat[stage].unpack_gradients(total)
        square = self.norms.add(stage, [sums[place] / self._schedule.workers for place in sorted(sums)])
        if square is not None:
            for key in [key for key in self._courier.out if key[0] == "norm"]:
                self._send(key, [square], step)

    def _receive_norm(self) -> Tensor:
        (key,) = (key for key in self._courier.into if key[0] == "norm")
        return self._courier.take(key)[0]

    def _send(self, key: Key, flats: Flats, step: int) -> None:
        message = self._courier.out[key]
        needed = message.tick + step * self._schedule.period + message.lag
        self._courier.send(key, flats, message.receiver, needed)
