"""The table of instructions: what each one reads, uses up and makes, how long it takes, and how it runs.

A plan is lowered to one list of instructions per rank (`lowering.py`). All who read a list go by this table: the
checker plays the lists of all ranks, counts say what a rank holds, the simulator plays them against a clock, the
interpreter carries them out. Nothing in a list says how: which stage, which step and micro-batch, with whom.

A row is an instruction. What it reads, uses up and makes are *things*, named as letters are: an activation, a sum of
gradients, a version of weights. A schedule's own file may `register_operation` more of them.

    F, B              forward and backward of a stage for a micro-batch
    SEND, RECEIVE     a letter to a peer: started; room made for one of a peer's
    OVER              a letter sent is waited for; its tensors may go
    REDUCE            a stage's gradients of a step are averaged over the ranks that hold the stage, group by group:
                      each from now on as soon as it is final, from inside the B that follows if one does
    SUM               gradients of a stage from another rank join those here
    TIE               gradients of parameters that stages share join those of the stage that owns them; their sum
                      takes the place of a copy's
    UPDATE            the stage's optimizer steps, now or when the norm to clip by is known
    UNSHARD, RESHARD  weights of a stage come from another rank: the next version, to stay, or those that one action
                      reads; what came for an action goes, or, at the owner, a version that nobody needs any more
    ADOPT             buffers of a stage, as the rank that ran it before has left them, become those here
    NORM, KNOW        a stage's square joins those of the stages above; the whole is known on this rank

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
    "Letter",
    "Operation",
    "operation",
    "register_operation",
    "saved",
]

NO_MICRO_BATCH = -1
SUMS = ("partial gradient", "gradient")
TOKENS: dict[Kind, str] = {"F": "forward weights", "B": "backward weights"}
# Things that stay with a rank: an activation for its backward, a micro-batch's gradients, weights, a norm, and the news
# that a letter has arrived.
SAVED, OWN, VERSION, KNOWN, ARRIVED = "saved activation", "own gradient", "version", "known norm", "arrived "
NEWEST = "newest weights"  # what weights are sent as: an older version may be forgotten by then


class Letter(NamedTuple):
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
        """Which letter of its edge."""
        which = f"step {self.step}" + (f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")
        return which + (f", version {self.version}" if self.version >= 0 else "")

    def __str__(self) -> str:
        return f"{self.edge}, {self.at}"


class Instruction(NamedTuple):
    """
    Args of note:
        op: a row of the table.
        tick: of the schedule's clock, counted from the first step; the order of the list, not a time to wait for.
        letter, peer: of SEND, RECEIVE and OVER. code: how the letter is coded, if it is.
    """

    op: str
    tick: int
    step: int
    micro_batch: int
    stage: int
    letter: Letter | None = None
    peer: int = -1
    code: EdgeCode | None = None

    @property
    def place(self) -> Cell:
        return self.step, self.micro_batch, self.stage

    def __str__(self) -> str:
        at = f"{self.op} {self.stage}.{self.micro_batch} of step {self.step}"
        return at if self.letter is None else f"{self.op} {self.letter} ({self.peer})"


def saved(one: Instruction) -> Letter:
    """What the backward of a place needs of its forward."""
    return Letter(SAVED, *one.place)


@dataclass(eq=False)
class Holdings:
    """What a rank holds while its list is gone through.

    Args of note:
        drains: steps before which the run drained.
        borrowed, brought: stages whose weights come for one action, and all whose weights come from other ranks.
        parts: micro-batches whose gradients a letter holds; those of all ranks.
    """

    schedule: Schedule
    clip: Clip | None = None
    drains: Collection[int] = ()
    borrowed: Collection[int] = ()
    brought: Collection[int] = ()
    parts: dict[Letter, list[int]] = field(default_factory=dict)
    here: set[Letter] = field(default_factory=set)

    def begin(self, program: Iterable[Instruction]) -> None:
        """Of the rank whose list this is: version 0 of the stages that it does not borrow."""
        listed = [*program]
        came = [one for one in listed if one.op == "UNSHARD" and one.letter is not None]
        self.brought = {one.stage for one in came}
        self.borrowed = {one.stage for one in came if one.letter is not None and one.letter.what in TOKENS.values()}
        self.here |= {_version(one.stage, 0) for one in listed if one.stage not in self.borrowed}

    def carry_out(self, one: Instruction) -> "Changed":
        row = operation(one.op)
        changed = Changed([*row.uses(one, self)], [*row.makes(one, self)])
        self.here.difference_update(changed.used)
        self.here.update(changed.made)
        return changed

    def own(self, step: int, stage: int) -> list[Letter]:
        """Gradients of a stage that are here, a micro-batch each."""
        every = (Letter(OWN, step, m, stage) for m in range(self.schedule.micro_batches))
        return [one for one in every if one in self.here]

    def weights(self, stage: int, version: int) -> Iterator[Letter]:
        """A version, and where it was made here and waits for a norm to be clipped by, that."""
        yield _version(stage, version)
        if version and self.clip is not None and self.clip.waits and stage not in self.brought:
            yield Letter(KNOWN, version - 1, NO_MICRO_BATCH, 0)

    def lent(self, letter: Letter) -> Iterator[Letter]:
        """What another rank gets for an action: a token that came here, or a version that was made here."""
        if letter.stage in self.borrowed:
            yield _token(letter)
        else:
            yield from self.weights(letter.stage, letter.version)

    def read_by(self, one: Instruction, kind: Kind) -> Iterator[Letter]:
        """The weights that an action reads. A backward has those of its forward, unless they come for it alone."""
        version = self.schedule.version(one.place, self.drains)
        if one.stage in self.borrowed:
            yield Letter(TOKENS[kind], NO_MICRO_BATCH, NO_MICRO_BATCH, one.stage, version)
        elif kind == "F":
            yield from self.weights(one.stage, version)


class Changed(NamedTuple):
    """What an instruction took, and what there is since."""

    used: list[Letter]
    made: list[Letter]


Things = Callable[[Instruction, Holdings], Iterable[Letter]]


def _none(one: Instruction, held: Holdings) -> Iterable[Letter]:
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


def _version(stage: int, version: int) -> Letter:
    return Letter(VERSION, NO_MICRO_BATCH, NO_MICRO_BATCH, stage, version)


def _token(letter: Letter) -> Letter:
    """Weights lent for an action, whichever it is."""
    return letter._replace(step=NO_MICRO_BATCH, micro_batch=NO_MICRO_BATCH)


def _letter(one: Instruction, held: Holdings) -> Iterator[Letter]:
    if one.letter is not None:
        yield one.letter


def _from_below(one: Instruction, held: Holdings) -> Iterator[Letter]:
    if one.stage > 0:  # what the user hands in is always there
        yield Letter("activation", one.step, one.micro_batch, one.stage - 1)


def _made_by_forward(one: Instruction, held: Holdings) -> Iterator[Letter]:
    yield saved(one)
    if one.stage < held.schedule.stages - 1:
        yield Letter("activation", *one.place)


def _used_by_backward(one: Instruction, held: Holdings) -> Iterator[Letter]:
    yield saved(one)
    if one.stage < held.schedule.stages - 1 and one.stage not in held.schedule.uncoupled:
        yield Letter("activation gradient", one.step, one.micro_batch, one.stage + 1)


def _made_by_backward(one: Instruction, held: Holdings) -> Iterator[Letter]:
    yield Letter(OWN, *one.place)
    if one.stage > 0 and one.stage - 1 not in held.schedule.uncoupled:
        yield Letter("activation gradient", *one.place)


def _sent(one: Instruction, held: Holdings) -> Iterator[Letter]:
    """What was made for one reader leaves, and so do gradients; of weights, norms and buffers a copy does."""
    letter = one.letter
    if letter is None:
        return
    if letter.what in ("activation", "activation gradient", "partial norm"):
        yield letter
    elif letter.what in SUMS:
        own = held.own(letter.step, letter.stage)
        held.parts[letter] = [part.micro_batch for part in own]
        yield from own


def _read_to_send(one: Instruction, held: Holdings) -> Iterator[Letter]:
    letter = one.letter
    if letter is None:
        return
    if letter.what in SUMS and not held.own(letter.step, letter.stage):
        yield Letter(OWN, letter.step, letter.micro_batch, letter.stage)
    elif letter.what == "weights":
        yield from held.weights(letter.stage, letter.step)
        if _version(letter.stage, letter.step + 1) in held.here:
            yield Letter(NEWEST, letter.step, NO_MICRO_BATCH, letter.stage)
    elif letter.what in TOKENS.values():
        yield from held.lent(letter)
    elif letter.what == "norm":
        yield Letter(KNOWN, letter.step, NO_MICRO_BATCH, 0)


def _arrived(one: Instruction, held: Holdings) -> Iterator[Letter]:
    if one.letter is not None:
        yield one.letter._replace(what=ARRIVED + one.letter.what)


def _summed(one: Instruction, held: Holdings) -> Iterator[Letter]:
    for micro_batch in held.parts.get(one.letter, ()) if one.letter is not None else ():
        yield Letter(OWN, one.step, micro_batch, one.stage)


def _whole_gradient(one: Instruction, held: Holdings) -> Iterator[Letter]:
    yield from (Letter(OWN, one.step, m, one.stage) for m in range(held.schedule.micro_batches))


def _unsharded(one: Instruction, held: Holdings) -> Iterator[Letter]:
    if one.letter is not None:
        is_token = one.letter.what in TOKENS.values()
        yield _token(one.letter) if is_token else _version(one.stage, one.letter.step)


def _above(one: Instruction, held: Holdings) -> Iterator[Letter]:
    if one.stage < held.schedule.stages - 1:
        yield Letter("partial norm", one.step, NO_MICRO_BATCH, one.stage + 1)


def _known(one: Instruction, held: Holdings) -> Iterator[Letter]:
    """With the first stage's square the norm of the step is known."""
    what = "partial norm" if one.op == "NORM" and one.stage else KNOWN
    yield Letter(what, one.step, NO_MICRO_BATCH, one.stage if what != KNOWN else 0)


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
        seconds=lambda clock, one: clock.send_letter(one),
        uses=_sent,
        reads=_read_to_send,
    ),
    "RECEIVE": Operation(
        run=lambda rank, one: rank.expect(one), seconds=lambda clock, one: clock.make_room(one)
    ),
    "OVER": Operation(run=lambda rank, one: rank.see_over(one), uses=_arrived),
    "REDUCE": Operation(run=lambda rank, one: rank.reduce(one), seconds=lambda clock, one: clock.reduce(one)),
    "SUM": Operation(
        run=lambda rank, one: rank.join(one),
        seconds=lambda clock, one: clock.add_up(one),
        uses=_letter,
        makes=_summed,
    ),
    "TIE": Operation(run=lambda rank, one: rank.join(one), uses=_letter),
    "UPDATE": Operation(
        run=lambda rank, one: rank.update(one),
        seconds=lambda clock, one: clock.update(one),
        uses=_whole_gradient,
        makes=lambda one, held: [_version(one.stage, one.step + 1)],
    ),
    "UNSHARD": Operation(run=lambda rank, one: rank.unshard(one), uses=_letter, makes=_unsharded),
    "RESHARD": Operation(
        run=lambda rank, one: rank.reshard(one),
        uses=lambda one, held: [_version(one.stage, one.step) if one.letter is None else _token(one.letter)],
    ),
    "ADOPT": Operation(run=lambda rank, one: rank.adopt(one), uses=_letter),
    "NORM": Operation(
        run=lambda rank, one: rank.add_norm(one),
        seconds=lambda clock, one: clock.land_means(one),
        uses=_above,
        makes=_known,
    ),
    "KNOW": Operation(run=lambda rank, one: rank.learn_norm(one), uses=_letter, makes=_known),
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
