"""One worker per device, one uniform delay apart; gradients and weights go from hand to hand, never by a collective.

After its backward of a stage a worker adds its gradients to the sum from the worker before and hands it on; the last
worker hands the finished sum to the stage's home, one more hop. The home steps the optimizer and hands the new weights
to the first worker that reads them, that one to the next, each at its own forward of that stage.

Nothing can hang: see the note of that name in `courier.py`. Sends are waited for one uniform delay later than they
might be, so that a worker who is late for a moment does not hold up those before it.

Note [Posting early]. Gloo moves nothing before the receive is posted, so the time a message has to travel begins there,
and what is posted late is waited for. What may never be sent is not posted: of a step that has not begun, no partial
gradients; those of a step are posted when it begins.

Source: Fournier & Oyallon, 2024 (multi-device mode). Departures: states live on the home only; sums in worker order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.channel import Channel
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.courier import Courier, Key
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.flat_stage import Flats, FlatStage
from armillary.runtime.cyclic.home import Home
from armillary.runtime.cyclic.home_updates import HomeUpdates
from armillary.schedules.clipping import Clip
from armillary.schedules.messages import lead, ring_messages, used_at
from armillary.schedules.norm_in_time import refuse_in_ring

__all__ = ["Ring"]


class Ring:
    """One worker's part. Its caller runs the actions of a step and says so; `ring_loop.py` does it.

    Per step: `before(action)` before each of the 2K actions (forwards 0..K-1, then backwards K-1..0), `add` after each
    backward, `end_step` at the end. Every worker makes the same calls.

    Raises:
        ValueError: the schedule gives no worker exactly one micro-batch, has other stages than the model, or leaves no
            time to know the norm to clip by.
    """

    def __init__(
        self, stages: Sequence[Stage], optimizer: Optimizer, course: Course, channel: Channel, worker: int
    ) -> None:
        schedule = course.schedule
        if len(stages) != schedule.stages or not 0 <= worker < schedule.workers:
            raise ValueError(
                f"ring: the schedule has {schedule.stages} stages and {schedule.workers} workers; "
                f"got {len(stages)} stages, worker {worker}"
            )
        refuse_in_ring(schedule, course.clip)
        self.schedule, self.worker, self.drains, self.steps = schedule, worker, list[int](), 0
        self.flat = {stage.index: FlatStage(dict(stage.module.named_parameters())) for stage in stages}
        messages = ring_messages(schedule, course.clip)
        patience = schedule.period // schedule.workers
        self._courier = Courier(messages, worker, channel, self.flat, lambda _, needed: needed + patience)
        self._updates = HomeUpdates(optimizer, course, self._courier, self.flat, worker, self.drains)
        self._actions = schedule.ticks[worker]
        self._ahead = [self._to_post(action, course.clip) for action in range(len(self._actions))]
        self._arrived: dict[int, dict[int, Flats]] = {j: {} for j in self.flat}
        self._newest = dict.fromkeys(self.flat, 0)  # version here, made or received
        self.reading = dict.fromkeys(self.flat, 0)  # version in the model's parameters, by stage

    @property
    def home(self) -> Home:
        """The stages whose master weights and optimizer state live on this worker."""
        return self._updates.home

    def before(self, action: int) -> None:
        """Everything the next action needs is brought; what is sent to this worker meanwhile is made room for."""
        for key, steps in self._ahead[action]:
            if self._is_coming(key, self.steps + steps):
                self._courier.post(key)
        self._courier.reap(self._actions[action].start + self.steps * self.schedule.period)
        for stage, closing in self._updates.closings.items():
            if closing.action == action:
                self._close(stage, self.steps - closing.steps)
        if action < self.schedule.stages:
            self._read(action, self.schedule.version((self.steps, self.worker, action), self.drains))

    def add(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Adds this worker's gradients (in the order of `flat[stage].parameters`) to the sum and hands it on."""
        self._updates.add(stage, gradients, self.steps)

    def end_step(self, options: Options) -> None:
        """Closes this worker's training step, whose learning rate and other options these are."""
        self._updates.end_step(self.steps, options)
        self.steps += 1

    def settle(self) -> None:
        """Brings the newest version of every stage here without reading it; training goes on unchanged.

        Version by version: workers still busy with this step may be waiting to be rid of what belongs to older ones.
        """
        away = [stage for stage in self.flat if stage not in self.home.owned]
        for version in range(min(self._newest.values()) + 1, self.steps + 1):
            for stage in sorted(self.home.owned, reverse=True):  # in the order in which backward finishes them
                self._close(stage, version)
            for stage in away:
                self._receive_until(stage, version)
        self._updates.learn(self.steps)
        self._courier.reap(None)

    def drain(self) -> None:
        """Settles, and reads the newest version of every stage; the next step starts as the first did."""
        self.settle()
        self.drains.append(self.steps)
        for stage in self.flat:
            self._read(stage, self.steps)

    def newest_weights(self, stage: int) -> list[Tensor]:
        """After `settle`: the newest version of a stage, in the order of its parameters."""
        if self._newest[stage] == self.reading[stage]:
            return [parameter.detach() for parameter in self.flat[stage].parameters]
        return self.flat[stage].unpack_weights(self._arrived[stage][self._newest[stage]])

    def _read(self, stage: int, version: int) -> None:
        """Puts a version into the model's parameters; no graph holds them between two steps of one worker."""
        self._receive_until(stage, version)
        if version == self.reading[stage]:
            return
        if version not in self._arrived[stage]:
            raise RuntimeError(
                f"ring: worker {self.worker} needs version {version} of stage {stage} and has "
                f"{sorted(self._arrived[stage])}; the schedule was not kept to"
            )
        # no copy: the parameters become views of what arrived. What still travels on is only read
        for parameter, weight in zip(
            self.flat[stage].parameters, self.flat[stage].unpack_weights(self._arrived[stage][version])
        ):
            parameter.data = weight
        torch.clear_autocast_cache()  # it would go on handing out casts of the weights before
        self.reading[stage] = version
        for old in [v for v in self._arrived[stage] if v <= version]:
            del self._arrived[stage][old]

    def _receive_until(self, stage: int, version: int) -> None:
        """Takes versions from the worker before on the stage's path and hands them on."""
        while self._newest[stage] < version:
            if stage in self.home.owned:
                raise RuntimeError(f"ring: worker {self.worker} must make version {version} of stage {stage} first")
            weights = self._courier.take(("weights", stage))
            self._newest[stage] += 1
            self._arrived[stage][self._newest[stage]] = weights
            self._hand_on(stage, weights)

    def _close(self, stage: int, version: int) -> None:
        """At the home: steps with the gradient of step `version` - 1, if that is still to be done, and hands on."""
        while self._newest[stage] < version:
            self._updates.make(stage)
            self._newest[stage] += 1
            made = self._arrived[stage][self._newest[stage]] = self.home.copy(stage)
            self._hand_on(stage, made)

    def _hand_on(self, stage: int, weights: Flats) -> None:
        message = self._courier.out.get(("weights", stage))
        if message is not None:
            needed = message.tick + self.steps * self.schedule.period + message.lag
            self._courier.send(("weights", stage), weights, message.receiver, needed)

    def _to_post(self, action: int, clip: Clip | None) -> list[tuple[Key, int]]:
        """What is to be posted before an action, and how many steps later it is used; see Note [Posting early]."""
        found = []
        for key, message in self._courier.into.items():
            used = used_at(self.schedule, message, clip)
            # with its step a partial gradient may be posted at the earliest; stragglers need it then
            early = used if key[0] == "partial gradient" else lead(self.schedule, message)
            if (used - early) % len(self._actions) == action:
                found.append((key, (action + early) // len(self._actions)))
        return found

    def _is_coming(self, key: Key, step: int) -> bool:
        """Whether a message will be used in a step and is not posted yet."""
        content, stage = key
        if content != "weights":
            return self._updates.is_coming(key, step)
        wanted = self.schedule.version((step, self.worker, stage), self.drains)
        return self._newest[stage] + self._courier.posted(key) < wanted
