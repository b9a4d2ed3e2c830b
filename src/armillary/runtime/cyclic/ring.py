"""One worker per device, one uniform delay apart; gradients and weights go from hand to hand, never by a collective.

After its backward of a stage a worker adds its gradients to the sum from the worker before and hands it on; the last
worker hands the finished sum to the stage's home, one more hop. The home steps the optimizer and hands the new weights
to the first worker that reads them, that one to the next, each at its own forward of that stage.

Note [Nothing can hang]. Every wait is for a message that the schedule's clock places earlier: a receive is posted with
the action during which the message is sent, one ahead of its use at the latest, and a send is waited for only after the
tick at which its receiver needed it. Waiting always for earlier things, workers cannot wait in a circle. There is no
clock at run time; ranks drift into the stagger. Sends are waited for one uniform delay later than they might be, so
that a worker who is late for a moment does not hold up those before it.

Note [Posting early]. Gloo moves nothing before the receive is posted, so the time a message has to travel begins there,
and what is posted late is waited for. What may never be sent is not posted: of a step that has not begun, no partial
gradients; those of a step are posted when it begins.

Source: Fournier & Oyallon, 2024 (multi-device mode). Departures: states live on the home only; sums in worker order.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.runtime.channel import Channel, Pending
from armillary.runtime.cut.stages import Stage
from armillary.runtime.cyclic.course import Course
from armillary.runtime.cyclic.delayed_step import Options
from armillary.runtime.cyclic.flat_stage import FlatStage
from armillary.runtime.cyclic.home import Home
from armillary.runtime.cyclic.norms import Norms
from armillary.schedules.messages import Content, Message, closing, home, lead, ring_messages, sum_path
from armillary.schedules.norm_in_time import refuse_in_ring

__all__ = ["Ring"]

Flats = list[Tensor]
Key = tuple[Content, int]  # what travels, of which stage

_CONTENTS: tuple[Content, ...] = ("partial gradient", "gradient", "weights", "norm")


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
        owned = frozenset(j for j in self.flat if home(schedule, j) == worker)
        self.home = Home(optimizer, self.flat, owned)
        self._actions = schedule.ticks[worker]
        self._closings = {j: self._actions.index(closing(schedule, j, course.clip)) for j in owned}
        messages = ring_messages(schedule, course.clip)
        self._norms = Norms(course.clip, len(stages), self.drains, self._receive_norm)
        self._out: dict[Key, Message] = {(m.content, m.stage): m for m in messages if m.sender == worker}
        self._in: dict[Key, Message] = {(m.content, m.stage): m for m in messages if m.receiver == worker}
        self._channel = channel
        self._ahead = [self._to_post(action) for action in range(len(self._actions))]
        self._posted: dict[Key, deque[list[tuple[Pending, Tensor]]]] = defaultdict(deque)
        self._under_way: list[tuple[int, list[tuple[Pending, Tensor]]]] = []  # (tick after which to wait, message)
        self._totals: dict[int, deque[Flats]] = {j: deque() for j in owned}  # finished here, not yet stepped with
        self._options: dict[int, Options] = {}
        self._arrived: dict[int, dict[int, Flats]] = {j: {} for j in self.flat}
        self._newest = dict.fromkeys(self.flat, 0)  # version here, made or received
        self.reading = dict.fromkeys(self.flat, 0)  # version in the model's parameters, by stage

    @property
    def home_stages(self) -> tuple[int, ...]:
        """The stages whose master weights and optimizer state live on this worker."""
        return tuple(sorted(self.home.owned))

    def before(self, action: int) -> None:
        """Everything the next action needs is brought; what is sent to this worker meanwhile is made room for."""
        for key, steps in self._ahead[action]:
            if self._is_coming(key, self.steps + steps):
                self._post(key)
        self._reap(self._actions[action].start + self.steps * self.schedule.period)
        for stage, closes in self._closings.items():
            if closes == action:
                self._close(stage, self.steps)
        if action < self.schedule.stages:
            self._read(action, self.schedule.version((self.steps, self.worker, action), self.drains))

    def add(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Adds this worker's gradients (in the order of `flat[stage].parameters`) to the sum and hands it on."""
        if ("partial gradient", stage) in self._in:
            mine = self._take(("partial gradient", stage))
            self.flat[stage].add_gradients(mine, gradients)
        else:
            mine = self.flat[stage].pack_gradients(gradients)
        if ("partial gradient", stage) in self._out:
            self._send(("partial gradient", stage), mine)
            return
        self._add_norm(stage, mine)
        if stage in self._totals:
            self._totals[stage].append(mine)
        else:
            self._send(("gradient", stage), mine)

    def end_step(self, options: Options) -> None:
        """Closes this worker's training step, whose learning rate and other options these are."""
        if self.home.owned:
            self._options[self.steps] = options
        self.steps += 1

    def settle(self) -> None:
        """Brings the newest version of every stage here without reading it; training goes on unchanged."""
        away = [stage for stage in self.flat if stage not in self.home.owned]
        for stage in away:  # what workers still busy with this step may be waiting to be rid of
            self._receive_until(stage, self.steps - 1)
        for stage in sorted(self.home.owned, reverse=True):  # in the order in which backward finishes them
            self._close(stage, self.steps)
        if any(key[0] == "norm" for key in self._in):
            self._norms.learn(self.steps)
        for stage in away:
            self._receive_until(stage, self.steps)
        self._reap(None)

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
            weights = self._take(("weights", stage))
            self._newest[stage] += 1
            self._arrived[stage][self._newest[stage]] = weights
            self._send(("weights", stage), weights)

    def _close(self, stage: int, version: int) -> None:
        """At the home: steps with the gradient of step `version` - 1, if that is still to be done, and hands on."""
        while self._newest[stage] < version:
            step = self._newest[stage]
            means = self.home.means(stage, self._total(stage), self.schedule.workers)
            made = self.home.step(stage, self._norms.clipped(step, means), self._options[step])
            self._newest[stage] = step + 1
            self._arrived[stage][step + 1] = made
            self._send(("weights", stage), made)
        open_step = min(self._newest[j] for j in self.home.owned)
        self._options = {step: kept for step, kept in self._options.items() if step >= open_step}

    def _total(self, stage: int) -> Flats:
        """The sum over all workers: as it came, as it was made here, or from here and the last worker's own."""
        is_kept = sum_path(self.schedule, stage, self._norms.clip)[-1] == self.worker
        kept = self._totals[stage].popleft() if is_kept else None
        if ("gradient", stage) not in self._in and kept is not None:
            return kept
        came = self._take(("gradient", stage))
        return came if kept is None else [flat.add_(more) for flat, more in zip(kept, came)]

    def _add_norm(self, stage: int, total: Flats) -> None:
        """On the last worker: a finished sum counts towards the norm, which with the last of them goes to the homes."""
        if self._norms.clip is None or not self._norms.clip.needs_all_stages:
            return
        sums = self.flat[stage].unpack_gradients(total)
        square = self._norms.add(stage, [sums[place] / self.schedule.workers for place in sorted(sums)])
        if square is not None:
            for key in [key for key in self._out if key[0] == "norm"]:
                self._send(key, [square])

    def _receive_norm(self) -> Tensor:
        (key,) = (key for key in self._in if key[0] == "norm")
        return self._take(key)[0]

    def _send(self, key: Key, flats: Flats) -> None:
        message = self._out.get(key)
        if message is None:
            return
        started = [(self._channel.send(flat, message.receiver, self._tag(key)), flat) for flat in flats]
        patience = self.schedule.period // self.schedule.workers
        needed = message.tick + self.steps * self.schedule.period + message.lag
        self._under_way.append((needed + patience, started))

    def _reap(self, tick: int | None) -> None:
        """Waits for the sends that are to be over at `tick`, or for all; see Note [Nothing can hang]."""
        later = []
        for over, started in self._under_way:
            if tick is not None and over >= tick:
                later.append((over, started))
                continue
            for pending, _ in started:
                pending.wait()
        self._under_way = later

    def _take(self, key: Key) -> Flats:
        if not self._posted[key]:
            self._post(key)
        flats = []
        for pending, flat in self._posted[key].popleft():
            pending.wait()
            flats.append(flat)
        return flats

    def _post(self, key: Key) -> None:
        content, stage = key
        make = {"weights": self.flat[stage].empty_weights, "norm": self.flat[stage].empty_norm}
        flats = make.get(content, self.flat[stage].empty_gradients)()
        sender = self._in[key].sender
        self._posted[key].append([(self._channel.receive(flat, sender, self._tag(key)), flat) for flat in flats])

    def _to_post(self, action: int) -> list[tuple[Key, int]]:
        """What is to be posted before an action, and how many steps later it is used; see Note [Posting early]."""
        found = []
        for key, message in self._in.items():
            used = self._used(key)
            # with its step a partial gradient may be posted at the earliest; stragglers need it then
            early = used if key[0] == "partial gradient" else lead(self.schedule, message)
            if (used - early) % len(self._actions) == action:
                found.append((key, (action + early) // len(self._actions)))
        return found

    def _used(self, key: Key) -> int:
        """The action for which a message comes."""
        content, stage = key
        if content in ("gradient", "norm"):
            return self._closings[stage]
        return stage if content == "weights" else 2 * self.schedule.stages - 1 - stage

    def _is_coming(self, key: Key, step: int) -> bool:
        """Whether a message will be used in a step and is not posted yet."""
        content, stage = key
        if content == "partial gradient":
            return True
        if content == "norm":
            return self._norms.known + len(self._posted[key]) < self._norms.wanted(step)
        wanted = step if content == "gradient" else self.schedule.version((step, self.worker, stage), self.drains)
        return self._newest[stage] + len(self._posted[key]) < wanted

    def _tag(self, key: Key) -> int:
        return key[1] * len(_CONTENTS) + _CONTENTS.index(key[0])
