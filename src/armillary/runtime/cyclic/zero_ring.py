"""One worker of a ring that keeps no weights but those it uses: they come before a forward and again before a backward.

Master weights and optimizer state of a stage live at its home only. A stage's weights arrive at a worker shortly before
its forward, are handed on with it and dropped; for the backward they come a second time, of the version of that
micro-batch's forward. Sums and steps are the ring's (`home_updates.py`), and so is what keeps workers from waiting for
ever (`courier.py`, Note [Nothing can hang]), without patience for sends: what is under way takes room. What is used in
the next step of another is waited for in the next step only, so workers may meet between two steps, as they like.

Note [Openings]. A token that crosses from one step into the next (`schedules/zero_messages.py`, Note [Crossing]) is not
there before the first step, and of no use after a drain. In a step that opens so, the home sends it itself, before
anything else it does in that step. Settling takes tokens that have crossed and keeps them for the next step, so that
no worker still in the step before waits to be rid of them; a drain throws them away.

Source: Fournier & Oyallon, 2024 (ZeRO mode). Departures: `schedules/zero_messages.py`.
"""

from collections.abc import Callable, Iterator, Sequence

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
from armillary.runtime.cyclic.loan import Loan
from armillary.schedules.clipping import Clip
from armillary.schedules.messages import Content, Message, home, used_at
from armillary.schedules.norm_in_time import refuse_in_ring
from armillary.schedules.zero_messages import TOKENS, Moment, crossing, departures, early, kept_until, zero_messages

__all__ = ["ZeroRing"]


class ZeroRing:
    """One worker's part; `worker_loop.py` tells it where its worker is.

    Args:
        fetch: called inside backward with a stage whose weights a graph reads: it says `before` of that backward.

    Raises:
        ValueError: the schedule gives no worker exactly one micro-batch, reads weights more than one step old, has
            other stages than the model, or leaves no time to know the norm to clip by.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        optimizer: Optimizer,
        course: Course,
        channel: Channel,
        worker: int,
        fetch: Callable[[int], None],
    ) -> None:
        schedule, clip = course.schedule, course.clip
        if len(stages) != schedule.stages or not 0 <= worker < schedule.workers:
            raise ValueError(
                f"schedule: {schedule.name} has {schedule.stages} stages and {schedule.workers} workers; "
                f"got {len(stages)} stages, worker {worker}"
            )
        refuse_in_ring(schedule, clip)
        self.schedule, self.worker, self.drains, self.steps = schedule, worker, list[int](), 0
        self.flat = {stage.index: FlatStage(dict(stage.module.named_parameters())) for stage in stages}
        messages = zero_messages(schedule, clip)
        self._courier = Courier(messages, worker, channel, self.flat, self._over)
        self._updates = HomeUpdates(optimizer, course, self._courier, self.flat, worker, self.drains)
        self._actions = schedule.ticks[worker]
        self._ahead = [self._to_post(action, clip) for action in range(len(self._actions))]
        self._departures = [(at, m) for j in sorted(self.home.owned) for at, m in departures(schedule, j, clip)]
        self._until = {j: kept_until(schedule, j, clip) for j in self.home.owned}
        crossed = [m for m in messages if m.content in TOKENS and crossing(schedule, m)]
        mine = sorted((used_at(schedule, m), m) for m in crossed if m.receiver == worker)
        self._crossed: dict[Key, int] = {(m.content, m.stage): action for action, m in mine}  # in the order of use
        self._openings = [m for m in crossed if m.stage in self.home.owned]
        self._opened = 0  # the step that opened last; see Note [Openings]
        self._next = {key: 0 for key in self._courier.into if key[0] in TOKENS}  # step of the next token to take
        self._arrived: dict[Key, Flats] = {}  # taken in settling, for the next step
        self._kept: dict[int, dict[int, Flats]] = {j: {} for j in self.home.owned}  # versions stepped beyond
        self.loan = Loan(self.flat, fetch)
        self._token_bytes = self._looks = 0

    @property
    def home(self) -> Home:
        """The stages whose master weights and optimizer state live on this worker."""
        return self._updates.home

    def before(self, action: int) -> None:
        """The weights before are dropped, those that the next action reads are brought, and what is due is sent."""
        self.loan.end()
        self._courier.reap(self._tick(self._actions[action].start))
        self._forget(action)
        if action == 0 and self.steps == self._opened:
            self._open()
        for key, steps in self._ahead[action]:
            if self._is_coming(key, self.steps + steps):
                self._courier.post(key, self._sender(key, self.steps + steps))
        self._close_at(Moment(self.steps, action), action)
        for moment, message in self._departures:
            if moment.action == action:
                self._depart(message)
        is_forward = action < self.schedule.stages
        stage = action if is_forward else 2 * self.schedule.stages - 1 - action
        self.loan.lend(stage, self._weights("forward weights" if is_forward else "backward weights", stage))
        self._token_bytes, self._looks = self._token_bytes + self.token_bytes, self._looks + 1

    def add(self, stage: int, gradients: Sequence[Tensor | None]) -> None:
        """Adds this worker's gradients (in the order of `flat[stage].parameters`) to the sum; they are dropped here."""
        self._updates.add(stage, gradients, self.steps)
        for parameter in self.flat[stage].parameters:
            parameter.grad = None

    def end_step(self, options: Options) -> None:
        """Closes this worker's training step, whose learning rate and other options these are."""
        self.loan.end()
        self._updates.end_step(self.steps, options)
        self.steps += 1

    def settle(self) -> None:
        """Every home makes its newest version; training goes on unchanged. See Note [Openings] for what is taken.

        In the order of the steps to come: whoever sends may wait to be rid of what was needed before.
        """
        crossed = self._crossed if self.steps > self._opened else {}
        for action in range(len(self._actions)):
            self._close_at(Moment(self.steps, action), 0)
            for key in [key for key, used in crossed.items() if used == action and self._next[key] == self.steps]:
                self._arrived[key] = self._take(key)
        for action in range(len(self._actions)):
            self._close_at(Moment(self.steps + 1, action), 0)
        self._updates.learn(self.steps)
        self._courier.reap(None)

    def drain(self) -> None:
        """Settles, and the next step starts as the first did: it reads the newest weights."""
        self.settle()
        self.drains.append(self.steps)
        self._opened = self.steps
        self._next.update(dict.fromkeys(self._arrived, self.steps))
        self._arrived.clear()
        for kept in self._kept.values():
            kept.clear()

    def tokens(self) -> Iterator[Tensor]:
        """What this worker holds beside master weights and optimizer state: weights and gradients, flat."""
        yield from self._courier.held()
        yield from self.loan.flats
        yield from (flat for flats in self._arrived.values() for flat in flats)
        yield from (flat for kept in self._kept.values() for flats in kept.values() for flat in flats)

    @property
    def token_bytes(self) -> int:
        """What `tokens` take now, beside master weights; a storage in several places counts once."""
        storages = {flat.untyped_storage().data_ptr(): flat.nbytes for flat in self.tokens()}
        masters = [flat.untyped_storage().data_ptr() for flats in self.home.flats.values() for flat in flats]
        return sum(size for storage, size in storages.items() if storage not in masters)

    @property
    def mean_token_bytes(self) -> float:
        """Over all actions so far."""
        return self._token_bytes / self._looks if self._looks else 0.0

    def _weights(self, content: Content, stage: int) -> Flats:
        """What this worker's next action reads; if it came from another, it is handed on."""
        if stage in self.home.owned:
            return self._at_home(stage, self.schedule.version((self.steps, self.worker, stage), self.drains))
        key = content, stage
        flats = self._arrived.pop(key) if key in self._arrived else self._take(key)
        if key in self._courier.out:
            self._send(self._courier.out[key], flats)
        return flats

    def _take(self, key: Key) -> Flats:
        step = self._next[key]
        self._next[key] += 1
        return self._courier.take(key, self._sender(key, step))

    def _sender(self, key: Key, step: int) -> int:
        """Who sends what is used in a step; see Note [Openings]."""
        is_opening = step == self._opened and key in self._crossed
        return home(self.schedule, key[1]) if is_opening else self._courier.into[key].sender

    def _at_home(self, stage: int, version: int) -> Flats:
        """
        Raises:
            RuntimeError: that version is not there; another one is never handed out instead.
        """
        if version == self._updates.newest[stage]:
            return self.home.flats[stage]
        if version not in self._kept[stage]:
            raise RuntimeError(
                f"stages: worker {self.worker} needs version {version} of stage {stage} and has "
                f"{[*self._kept[stage], self._updates.newest[stage]]}; the schedule was not kept to"
            )
        return self._kept[stage][version]

    def _open(self) -> None:
        copies = {message.stage: self.home.copy(message.stage) for message in self._openings}
        for message in self._openings:
            kind = TOKENS[message.content]
            needed = self._tick(self.schedule.action(kind, message.receiver, message.stage).start)
            self._courier.send((message.content, message.stage), copies[message.stage], message.receiver, needed)

    def _depart(self, message: Message) -> None:
        """At the home: sends the version that the receiver is to read."""
        place = self.steps + crossing(self.schedule, message), message.receiver, message.stage
        version = self.schedule.version(place, self.drains)
        flats = self._at_home(message.stage, version)
        is_master = version == self._updates.newest[message.stage]
        self._send(message, self.home.copy(message.stage) if is_master else flats)

    def _send(self, message: Message, flats: Flats) -> None:
        needed = self._tick(message.tick + message.lag)
        self._courier.send((message.content, message.stage), flats, message.receiver, needed)

    def _close_at(self, moment: Moment, now: int) -> None:
        """At a home: steps the stages that close then with the gradients they close with, if not done.

        Args:
            now: the action before which it is in truth, in the step under way.
        """
        for stage in [stage for stage, made in self._updates.closings.items() if made.action == moment.action]:
            version = min(self.steps, moment.steps - self._updates.closings[stage].steps)
            while (newest := self._updates.newest[stage]) < version:
                if not self._is_over(stage, newest, now):
                    self._kept[stage][newest] = self.home.copy(stage)
                self._updates.make(stage)

    def _forget(self, action: int) -> None:
        for stage, kept in self._kept.items():
            for version in [version for version in kept if self._is_over(stage, version, action)]:
                del kept[version]

    def _is_over(self, stage: int, version: int, action: int) -> bool:
        """Whether nobody reads or sends a version here any more, now, before an action of the step under way."""
        until = self._until[stage]
        return Moment(version + until.steps, until.action) < Moment(self.steps, action)

    def _over(self, receiver: int, needed: int) -> int:
        """Until when a send is not waited for: see the first note, and `schedules/zero_messages.py`."""
        crosses = needed >= self._tick(self.schedule.ticks[receiver][0].start) + self.schedule.period
        return max(needed, self._tick(self._actions[-1].start)) if crosses else needed

    def _tick(self, tick: int) -> int:
        """A tick of the step under way, counted from the first step."""
        return tick + self.steps * self.schedule.period

    def _to_post(self, action: int, clip: Clip | None) -> list[tuple[Key, int]]:
        """What is to be posted before an action, and how many steps later it is used."""
        found = []
        for key, message in self._courier.into.items():
            ahead = early(self.schedule, message, clip)
            if (used_at(self.schedule, message, clip) - ahead) % len(self._actions) == action:
                found.append((key, (action + ahead) // len(self._actions)))
        return found

    def _is_coming(self, key: Key, step: int) -> bool:
        """Whether a message will be used in a step and is not posted yet."""
        if key[0] in TOKENS:
            return self._next[key] + self._courier.posted(key) <= step
        return self._updates.is_coming(key, step)
