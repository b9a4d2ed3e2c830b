"""Stages that run on one rank each: activations and their gradients cross from rank to rank, and the norms do.

Note [Norms]. Where gradients are clipped by a norm over all stages, a stage adds its square to that of the stages
above, behind the last gradient of the step. The whole goes up again rank by rank, each ahead of the forward of the
micro-batch that `routes.carrier` names.

Note [Replicas]. A stage's gradients set out to their mean over replicas (`REDUCE`) from inside its last backward. Where
a message follows that backward, it goes first: another rank waits for it, and meanwhile the means have time. They
are waited for by the stage's `UPDATE`, which comes as late as it may: before the first forward that reads what it
makes, at the end of the step at the latest, or of the one after where every micro-batch reads old weights. What the
rank does meanwhile hides them. Where squares of several stages travel, they are waited for at once.

Note [Ties]. Stages that share parameters keep a copy each. Gradients of a copy go to the stage that owns the parameter
behind its last backward, and are added there behind the owner's (`TIE`). The sum goes back, and takes the place of the
copy's own: so both step alike, and only the owner's square counts it. A copy's stage is stepped when the sum is there.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

from armillary.schedules.clipping import Clip
from armillary.schedules.instructions import NO_MICRO_BATCH, Instruction, StageMessage
from armillary.schedules.rank_list import InstructionWriter, ScheduledAction
from armillary.schedules.routes import carrier, workers_of_stages
from armillary.schedules.schedule import Schedule

__all__ = ["PipelineLowering", "ranks_of_stages"]


def ranks_of_stages(schedule: Schedule, ranks: Sequence[int]) -> tuple[int, ...]:
    """The rank that holds each stage.

    Args:
        ranks: by worker of the schedule.

    Raises:
        ValueError: a stage runs on several ranks.
    """
    if len(set(ranks)) == 1:
        return (ranks[0],) * schedule.stages
    return tuple(ranks[worker] for worker in workers_of_stages(schedule))


class PipelineLowering:
    """Of all stages of a schedule. Told of every action of every rank, in the one order.

    Args:
        ranks: by worker of the schedule.
        reduces: whether gradients are averaged over the ranks that hold the same stages, with data of their own.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Sequence[int],
        clip: Clip | None,
        written: InstructionWriter,
        reduces: bool = False,
    ) -> None:
        self._schedule, self._workers, self._written = schedule, tuple(ranks), written
        self._stages = ranks_of_stages(schedule, ranks)
        self._path = tuple(dict.fromkeys(self._stages))  # on which a norm goes up
        self._lowest = {one: self._stages.index(one) for one in self._path}
        self._reduces = reduces
        self._has_norms = clip is not None and clip.needs_all_stages
        self._carrier = carrier(schedule) if self._has_norms else 0
        self._known = [0] * len(self._path)  # steps whose norm is known, by place on the path
        self._reduced: list[deque[ScheduledAction]] = [
            deque() for _ in self._stages
        ]  # last backwards, whose update is to come
        self._made = [0] * schedule.stages  # versions
        self._summed = [0] * schedule.stages  # steps whose square has been added
        self._ties = written.wires.ties
        self._copies: dict[int, list[int]] = defaultdict(list)  # by owner, the stages that hold copies
        for copy, of in sorted(self._ties.items()):
            self._copies[of].append(copy)
        self._unsummed: dict[int, ScheduledAction] = {}  # last backwards of stages with copies, see Note [Ties]
        self._waiting: dict[tuple[int, int], ScheduledAction] = {}  # last backwards, by step and stage

    @property
    def owned(self) -> frozenset[int]:
        """The stages whose optimizer steps on this rank."""
        return frozenset(j for j, rank in enumerate(self._stages) if rank == self._written.rank)

    @property
    def passed(self) -> frozenset[int]:
        """None: buffers stay where their stage runs."""
        return frozenset()

    def before(self, due: ScheduledAction) -> None:
        """What a forward needs: weights, see Note [Replicas], and the norms that its rank knows, see Note [Norms]."""
        owner = self._workers[due.worker]
        if due.kind == "B":
            if self._is_last(due) and not self._is_followed(due.stage):
                self._reduce(due, owner)
            return
        self._make(due.stage, self._schedule.version(due.place))
        if due.stage != self._lowest[owner]:
            return
        place = self._path.index(owner)
        if self._has_norms and place > 0:
            wanted = due.step + (due.micro_batch - self._carrier) // self._schedule.micro_batches
            while self._known[place] < wanted:
                self._know(place, due.tick)

    def after(self, due: ScheduledAction) -> None:
        """What the action needed, and what it has made."""
        owner, j = self._workers[due.worker], due.stage
        before, after = (j - 1, j + 1) if due.kind == "F" else (j + 1, j - 1)
        alone = self._schedule.uncoupled
        comes_back = due.kind == "B" and j not in alone
        if owner == self._written.rank and comes_back and j + 1 < self._schedule.stages:
            upper = self._stages[j + 1]
            if upper != owner:
                self._written.over(StageMessage("activation", due.step, due.micro_batch, j), upper, due.tick)
        reads = comes_back or (due.kind == "F" and before in alone)  # of another forward its gradient says so
        if 0 <= before < self._schedule.stages and reads:
            self._written.reads(self._message(due, before), self._stages[before], owner, due.tick)
        if 0 <= after < self._schedule.stages and not (due.kind == "B" and after in alone):
            self._written.passes(self._message(due, j), owner, self._stages[after], due.tick)
        if self._is_last(due):
            self._finish(due, owner)

    def begin_step(self, step: int) -> None:
        """Nothing: what a step reads is made at the end of the one before."""

    def end_step(self, steps: int) -> None:
        """So many steps were handed in. Weights that the next one may read are made; see Note [Replicas]."""
        for j in reversed(range(self._schedule.stages)):
            self._make(j, steps - min(ages[j] for ages in self._schedule.staleness))

    def rest(self, steps: int, tick: int) -> None:
        """Every stage is stepped, and every rank learns of the norms."""
        for j in reversed(range(self._schedule.stages)):
            self._make(j, steps)
        for place in range(1, len(self._path) if self._has_norms else 0):
            while self._known[place] < steps:
                self._know(place, tick)

    def drain(self, steps: int, tick: int) -> None:
        """Nothing more: all is made."""

    @staticmethod
    def _message(due: ScheduledAction, stage: int) -> StageMessage:
        return StageMessage(
            "activation" if due.kind == "F" else "activation gradient", due.step, due.micro_batch, stage
        )

    def _finish(self, due: ScheduledAction, owner: int) -> None:
        """A stage has all its gradients of a step."""
        if self._is_followed(due.stage):
            self._reduce(due, owner)
        self._give_copies_gradients(due, owner)
        self._add_copies_gradients(due, owner)
        if not self._has_norms:
            if due.stage not in self._ties:
                self._step(due)
            self._step_copies(due)
            return
        self._count_squares(due)
        self._step_copies(due)

    def _step(self, due: ScheduledAction) -> None:
        """The stage's update may come."""
        self._reduced[due.stage].append(due)
        if not self._reduces:
            self._make(due.stage, due.step + 1)

    def _give_copies_gradients(self, due: ScheduledAction, owner: int) -> None:
        """To the owner of what this stage has copies of; see Note [Ties]."""
        if due.stage in self._ties:
            self._unsummed[due.stage] = due
            self._written.passes(_of_copy(due, due.stage), owner, self._stages[self._ties[due.stage]], due.tick)

    def _add_copies_gradients(self, due: ScheduledAction, owner: int) -> None:
        """This stage owns parameters of which others have copies; see Note [Ties]."""
        for copy in self._copies.get(due.stage, ()):
            self._tie(_of_copy(due, copy), due, self._stages[copy], owner)
        for copy in self._copies.get(due.stage, ()):
            self._written.passes(_shared(due, copy), owner, self._stages[copy], due.tick)

    def _step_copies(self, due: ScheduledAction) -> None:
        """The sums of what this stage owns are on their way."""
        for copy in self._copies.get(due.stage, ()):
            waiting = self._unsummed.pop(copy)
            self._tie(_shared(due, copy), due._replace(stage=copy), self._stages[due.stage], self._stages[copy])
            if self._has_norms:
                self._do("UPDATE", waiting, self._stages[copy])
            else:
                self._step(waiting)

    def _tie(self, message: StageMessage, due: ScheduledAction, sender: int, reader: int) -> None:
        if reader == self._written.rank:
            place = due.tick, due.step, due.micro_batch, due.stage
            self._written.add(Instruction("TIE", *place, message, sender))
        self._written.reads(message, sender, reader, due.tick)

    def _count_squares(self, due: ScheduledAction) -> None:
        """Where they travel; stages are stepped that have added theirs."""
        self._waiting[due.step, due.stage] = due
        for j in reversed(range(self._schedule.stages)):  # squares are added the last stage first
            if self._summed[j] > due.step:
                continue
            if self._summed[j] < due.step or (due.step, j) not in self._waiting:
                return
            self._summed[j] += 1
            self._add_norm(self._waiting.pop((due.step, j)), due.tick)

    def _is_last(self, due: ScheduledAction) -> bool:
        """Whether a stage has all its gradients of a step after that."""
        return due.kind == "B" and due.micro_batch == self._schedule.micro_batches - 1

    def _is_followed(self, j: int) -> bool:
        """Whether a message to another rank follows a stage's backward."""
        return j > 0 and self._stages[j - 1] != self._stages[j] and j - 1 not in self._schedule.uncoupled

    def _reduce(self, due: ScheduledAction, owner: int) -> None:
        if self._reduces:
            self._do("REDUCE", due, owner)

    def _make(self, j: int, version: int) -> None:
        """The stage is stepped until that version is there, as far as its gradients are."""
        while self._reduced[j] and self._made[j] < version:
            self._do("UPDATE", self._reduced[j].popleft(), self._stages[j])
            self._made[j] += 1

    def _add_norm(self, due: ScheduledAction, tick: int) -> None:
        """The stages after this one have added theirs."""
        j, owner = due.stage, self._stages[due.stage]
        above, own = (StageMessage("partial norm", due.step, NO_MICRO_BATCH, stage) for stage in (j + 1, j))
        self._do("NORM", due, owner)
        if j + 1 < self._schedule.stages:
            self._written.reads(above, self._stages[j + 1], owner, tick)
        if j > 0:
            self._written.passes(own, owner, self._stages[j - 1], tick)
        else:
            self._known[0] += 1
            self._pass_up(0, due.step, tick)
        if j not in self._ties:
            self._do("UPDATE", due, owner)

    def _know(self, place: int, tick: int) -> None:
        step, sender, reader = self._known[place], self._path[place - 1], self._path[place]
        message = StageMessage("norm", step, NO_MICRO_BATCH, self._lowest[sender])
        self._known[place] += 1
        if reader == self._written.rank:
            stage = self._lowest[reader]
            self._written.add(Instruction("RECV_NORM", tick, step, NO_MICRO_BATCH, stage, message, sender))
        self._written.reads(message, sender, reader, tick)
        self._pass_up(place, step, tick)

    def _pass_up(self, place: int, step: int, tick: int) -> None:
        if place + 1 < len(self._path):
            message = StageMessage("norm", step, NO_MICRO_BATCH, self._lowest[self._path[place]])
            self._written.passes(message, self._path[place], self._path[place + 1], tick)

    def _do(self, op: str, due: ScheduledAction, owner: int) -> None:
        if owner == self._written.rank:
            self._written.add(Instruction(op, due.tick, due.step, due.micro_batch, due.stage))


def _of_copy(due: ScheduledAction, copy: int) -> StageMessage:
    return StageMessage("copy's gradient", due.step, NO_MICRO_BATCH, copy)


def _shared(due: ScheduledAction, copy: int) -> StageMessage:
    return StageMessage("shared gradient", due.step, NO_MICRO_BATCH, copy)
