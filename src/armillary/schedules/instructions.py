"""The table of instructions: what each one reads, uses up and makes, how long it takes, and how it runs.

A plan is lowered to one list of instructions per rank (`lowering.py`). All who read a list go by this table: the
checker plays the lists of all ranks, counts say what a rank holds, the simulator plays them against a clock, the
interpreter carries them out. Nothing in a list says how: which stage, which step and micro-batch, with whom.

A row is an instruction. What it reads, uses up and makes are *things*, named as messages are: an activation, a sum of
gradients, a version of weights. A schedule's own file may `register_operation` more of them.

    F, B              forward and backward of a stage for a micro-batch
    SEND, RECV        a message to a peer: started; room made for one of a peer's
    WAIT_SEND         a message sent is waited for; its tensors may go
    REDUCE            a stage's gradients of a step are averaged over the ranks that hold the stage, group by group:
                      each from now on as soon as it is final, from inside the B that follows if one does
    SUM               gradients of a stage from another rank join those here
    TIE               gradients of parameters that stages share join those of the stage that owns them; their sum
                      takes the place of a copy's
    UPDATE            the stage's optimizer steps, now or when the norm to clip by is known
    UNSHARD, RESHARD  weights of a stage come from another rank: the next version, to stay, or those that one action
                      reads; what came for an action goes, or, at the owner, a version that nobody needs any more
    LOAD_BUFFERS      buffers of a stage, as the rank that ran it before has left them, become those here
    NORM, RECV_NORM   a stage's square joins those of the stages above; the whole is known on this rank

Source: the action list of torch.distributed.pipelining, which has F, B, sends, receives, REDUCE_GRAD.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from armillary.schedules.clipping import Clip
from armillary.schedules.edges import EdgeCode
from armillary.schedules.schedule import Cell, Kind, Schedule

__all__ = [
    "ARRIVED",
    "KNOWN",
    "NO_MICRO_BATCH",
    "OWN",
    "SAVED",
    "SUMS",
    "TOKENS",
    "VERSION",
    "Holdings",
    "Instruction",
    "Operation",
    "StageMessage",
    "operation",
    "register_operation",
    "saved",
]

NO_MICRO_BATCH = -1
SUMS = ("partial gradient", "gradient")
TOKENS: dict[Kind, str] = {"F": "forward weights", "B": "backward weights"}
# Things that stay with a rank: an activation for its backward, a micro-batch's gradients, weights, a norm, and the news
# that a message has arrived.
SAVED, OWN, VERSION, KNOWN, ARRIVED = "saved activation", "own gradient", "version", "known norm", "arrived "
NEWEST = "newest weights"  # what weights are sent as: an older version may be forgotten by then


class StageMessage(NamedTuple):
    """What one rank sends another, named by the place where it was made. Norms are of a step: micro-batch -1. Weights
    are of the version that a step may read first; their micro-batch is that of the rank that sends them. Those lent for
    an action, its forward or backward weights, have the place of that action, and say their version. Gradients of
    parameters that stages share name the stage that has the copy."""

    what: str
    step: int
    micro_batch: int
    stage: int
    version: int = -1

    @property
    def edge(self) -> str:
        """Letters of one edge have one form."""
        return f"{self.what} of stage {self.stage}"

    @property
    def at(self) -> str:
        """Which message of its edge."""
        which = f"step {self.step}" + (f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")
        return which + (f", version {self.version}" if self.version >= 0 else "")

    def __str__(self) -> str:
        return f"{self.edge}, {self.at}"


class Instruction(NamedTuple):
    """
    Args of note:
        op: a row of the table.
        tick: of the schedule's clock, counted from the first step; the order of the list, not a time to wait for.
        message, peer: of SEND, RECV and WAIT_SEND. code: how the message is coded, if it is.
    """

    op: str
    tick: int
    step: int
    micro_batch: int
    stage: int
    message: StageMessage | None = None
    peer: int = -1
    code: EdgeCode | None = None

    @property
    def place(self) -> Cell:
        return self.step, self.micro_batch, self.stage

    def __str__(self) -> str:
        at = f"{self.op} {self.stage}.{self.micro_batch} of step {self.step}"
        return at if self.message is None else f"{self.op} {self.message} ({self.peer})"


def saved(one: Instruction) -> StageMessage:
    """What the backward of a place needs of its forward."""
    return StageMessage(SAVED, *one.place)


@dataclass(eq=False)
class Holdings:
    """What a rank holds while its list is gone through.

    Args of note:
        drains: steps before which the run drained.
        borrowed, brought: stages whose weights come for one action, and all whose weights come from other ranks.
        parts: micro-batches whose gradients a message holds; those of all ranks.
    """

    schedule: Schedule
    clip: Clip | None = None
    drains: Collection[int] = ()
    borrowed: Collection[int] = ()
    brought: Collection[int] = ()
    parts: dict[StageMessage, list[int]] = field(default_factory=dict)
    here: set[StageMessage] = field(default_factory=set)

    def begin(self, program: Iterable[Instruction]) -> None:
        """Of the rank whose list this is: version 0 of the stages that it does not borrow."""
        listed = [*program]
        came = [one for one in listed if one.op == "UNSHARD" and one.message is not None]
        self.brought = {one.stage for one in came}
        self.borrowed = {one.stage for one in came if one.message is not None and one.message.what in TOKENS.values()}
        self.here |= {_version(one.stage, 0) for one in listed if one.stage not in self.borrowed}

    def carry_out(self, one: Instruction) -> "Changed":
        row = operation(one.op)
        changed = Changed([*row.uses(one, self)], [*row.makes(one, self)])
        self.here.difference_update(changed.used)
        self.here.update(changed.made)
        return changed

    def own(self, step: int, stage: int) -> list[StageMessage]:
        """Gradients of a stage that are here, a micro-batch each."""
        every = (StageMessage(OWN, step, m, stage) for m in range(self.schedule.micro_batches))
        return [one for one in every if one in self.here]

    def weights(self, stage: int, version: int) -> Iterator[StageMessage]:
        """A version, and where it was made here and waits for a norm to be clipped by, that."""
        yield _version(stage, version)
        if version and self.clip is not None and self.clip.waits and stage not in self.brought:
            yield StageMessage(KNOWN, version - 1, NO_MICRO_BATCH, 0)

    def lent(self, message: StageMessage) -> Iterator[StageMessage]:
        """What another rank gets for an action: a token that came here, or a version that was made here."""
        if message.stage in self.borrowed:
            yield _token(message)
        else:
            yield from self.weights(message.stage, message.version)

    def read_by(self, one: Instruction, kind: Kind) -> Iterator[StageMessage]:
        """The weights that an action reads. A backward has those of its forward, unless they come for it alone."""
        version = self.schedule.version(one.place, self.drains)
        if one.stage in self.borrowed:
            yield StageMessage(TOKENS[kind], NO_MICRO_BATCH, NO_MICRO_BATCH, one.stage, version)
        elif kind == "F":
            yield from self.weights(one.stage, version)


class Changed(NamedTuple):
    """What an instruction took, and what there is since."""

    used: list[StageMessage]
    made: list[StageMessage]


Things = Callable[[Instruction, Holdings], Iterable[StageMessage]]


def _none(one: Instruction, held: Holdings) -> Iterable[StageMessage]:
    return ()


def _no_time(clock: Any, one: Instruction) -> None:
    """It takes none."""


@dataclass(frozen=True)
class Operation:
    """One row.

    Args:
        run: (interpreter, instruction): carries it out.
        seconds: (clock of a rank, instruction): plays it, once what it reads and uses is there.
        uses: things that it needs and that are gone then. reads: those that stay. makes: those that are there then.
    """

    run: Callable[[Any, Instruction], None]
    seconds: Callable[[Any, Instruction], None] = _no_time
    uses: Things = _none
    reads: Things = _none
    makes: Things = _none


def _version(stage: int, version: int) -> StageMessage:
    return StageMessage(VERSION, NO_MICRO_BATCH, NO_MICRO_BATCH, stage, version)


def _token(message: StageMessage) -> StageMessage:
    """Weights lent for an action, whichever it is."""
    return message._replace(step=NO_MICRO_BATCH, micro_batch=NO_MICRO_BATCH)


def _message(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    if one.message is not None:
        yield one.message


def _from_below(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    if one.stage > 0:  # what the user hands in is always there
        yield StageMessage("activation", one.step, one.micro_batch, one.stage - 1)


def _made_by_forward(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    yield saved(one)
    if one.stage < held.schedule.stages - 1:
        yield StageMessage("activation", *one.place)


def _used_by_backward(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    yield saved(one)
    if one.stage < held.schedule.stages - 1 and one.stage not in held.schedule.uncoupled:
        yield StageMessage("activation gradient", one.step, one.micro_batch, one.stage + 1)


def _made_by_backward(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    yield StageMessage(OWN, *one.place)
    if one.stage > 0 and one.stage - 1 not in held.schedule.uncoupled:
        yield StageMessage("activation gradient", *one.place)


def _sent(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    """What was made for one reader leaves, and so do gradients; of weights, norms and buffers a copy does."""
    message = one.message
    if message is None:
        return
    if message.what in ("activation", "activation gradient", "partial norm"):
        yield message
    elif message.what in SUMS:
        own = held.own(message.step, message.stage)
        held.parts[message] = [part.micro_batch for part in own]
        yield from own


def _read_to_send(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    message = one.message
    if message is None:
        return
    if message.what in SUMS and not held.own(message.step, message.stage):
        yield StageMessage(OWN, message.step, message.micro_batch, message.stage)
    elif message.what == "weights":
        yield from held.weights(message.stage, message.step)
        if _version(message.stage, message.step + 1) in held.here:
            yield StageMessage(NEWEST, message.step, NO_MICRO_BATCH, message.stage)
    elif message.what in TOKENS.values():
        yield from held.lent(message)
    elif message.what == "norm":
        yield StageMessage(KNOWN, message.step, NO_MICRO_BATCH, 0)


def _arrived(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    if one.message is not None:
        yield one.message._replace(what=ARRIVED + one.message.what)


def _summed(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    for micro_batch in held.parts.get(one.message, ()) if one.message is not None else ():
        yield StageMessage(OWN, one.step, micro_batch, one.stage)


def _whole_gradient(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    yield from (StageMessage(OWN, one.step, m, one.stage) for m in range(held.schedule.micro_batches))


def _unsharded(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    if one.message is not None:
        is_token = one.message.what in TOKENS.values()
        yield _token(one.message) if is_token else _version(one.stage, one.message.step)


def _above(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    if one.stage < held.schedule.stages - 1:
        yield StageMessage("partial norm", one.step, NO_MICRO_BATCH, one.stage + 1)


def _known(one: Instruction, held: Holdings) -> Iterator[StageMessage]:
    """With the first stage's square the norm of the step is known."""
    what = "partial norm" if one.op == "NORM" and one.stage else KNOWN
    yield StageMessage(what, one.step, NO_MICRO_BATCH, one.stage if what != KNOWN else 0)


_TABLE = {
    "F": Operation(
        run=lambda rank, one: rank.forward(one),
        seconds=lambda clock, one: clock.forward(one),
        uses=_from_below,
        reads=lambda one, held: held.read_by(one, "F"),
        makes=_made_by_forward,
    ),
    "B": Operation(
        run=lambda rank, one: rank.backward(one),
        seconds=lambda clock, one: clock.backward(one),
        uses=_used_by_backward,
        reads=lambda one, held: held.read_by(one, "B"),
        makes=_made_by_backward,
    ),
    "SEND": Operation(
        run=lambda rank, one: rank.send(one),
        seconds=lambda clock, one: clock.send_message(one),
        uses=_sent,
        reads=_read_to_send,
    ),
    "RECV": Operation(
        run=lambda rank, one: rank.expect(one), seconds=lambda clock, one: clock.make_room(one)
    ),
    "WAIT_SEND": Operation(run=lambda rank, one: rank.see_over(one), uses=_arrived),
    "REDUCE": Operation(run=lambda rank, one: rank.reduce(one), seconds=lambda clock, one: clock.reduce(one)),
    "SUM": Operation(
        run=lambda rank, one: rank.join(one),
        seconds=lambda clock, one: clock.add_up(one),
        uses=_message,
        makes=_summed,
    ),
    "TIE": Operation(run=lambda rank, one: rank.join(one), uses=_message),
    "UPDATE": Operation(
        run=lambda rank, one: rank.update(one),
        seconds=lambda clock, one: clock.update(one),
        uses=_whole_gradient,
        makes=lambda one, held: [_version(one.stage, one.step + 1)],
    ),
    "UNSHARD": Operation(run=lambda rank, one: rank.unshard(one), uses=_message, makes=_unsharded),
    "RESHARD": Operation(
        run=lambda rank, one: rank.reshard(one),
        uses=lambda one, held: [_version(one.stage, one.step) if one.message is None else _token(one.message)],
    ),
    "LOAD_BUFFERS": Operation(run=lambda rank, one: rank.adopt(one), uses=_message),
    "NORM": Operation(
        run=lambda rank, one: rank.add_norm(one),
        seconds=lambda clock, one: clock.land_means(one),
        uses=_above,
        makes=_known,
    ),
    "RECV_NORM": Operation(run=lambda rank, one: rank.learn_norm(one), uses=_message, makes=_known),
}  # fmt: skip


def operation(name: str) -> Operation:
    """
    Raises:
        ValueError: no such instruction.
    """
    if name not in _TABLE:
        raise ValueError(f"schedule: no instruction {name!r}; there are {', '.join(_TABLE)}; register_operation yours")
    return _TABLE[name]


def register_operation(name: str, row: Operation) -> None:
    """One more instruction, for the lists of a schedule of one's own.

    Raises:
        ValueError: another has that name.
    """
    if _TABLE.setdefault(name, row) is not row:
        raise ValueError(f"schedule: instruction {name!r} is registered twice; give one of them another name")
