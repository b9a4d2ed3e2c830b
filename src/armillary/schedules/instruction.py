"""One typed action of a rank's program, and what travels between ranks.

A plan is lowered to one list of these per rank (`lowering.py`). Who reads it: the interpreter carries it out, the
checker plays the lists of all ranks. Nothing in it says how: which stage, which step and micro-batch, with whom.

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

from typing import Literal, NamedTuple

from armillary.schedules.edge import EdgeCode
from armillary.schedules.schedule import Cell

__all__ = ["NO_MICRO_BATCH", "Instruction", "Letter", "Op", "What"]

NO_MICRO_BATCH = -1

Op = Literal[
    "F", "B", "SEND", "RECEIVE", "OVER", "REDUCE", "SUM", "UPDATE", "UNSHARD", "RESHARD", "ADOPT", "NORM",
    "KNOW", "TIE",
]  # fmt: skip
What = Literal[
    "activation", "activation gradient", "partial gradient", "gradient", "weights", "forward weights",
    "backward weights", "partial norm", "norm", "buffers", "copy's gradient", "shared gradient",
]  # fmt: skip


class Letter(NamedTuple):
    """What one rank sends another, named by the place where it was made. Norms are of a step: micro-batch -1. Weights
    are of the version that a step may read first; their micro-batch is that of the rank that sends them. Those lent for
    an action, its forward or backward weights, have the place of that action, and say their version. Gradients of
    parameters that stages share name the stage that has the copy."""

    what: What
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
        tick: of the schedule's clock, counted from the first step; the order of the list, not a time to wait for.
        letter, peer: of SEND, RECEIVE and OVER. code: how the letter is coded, if it is.
    """

    op: Op
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

    @property
    def reads(self) -> Letter | None:
        """The letter that it cannot do without, if that comes from another action or rank; the ends have none."""
        if self.op == "F":
            return Letter("activation", self.step, self.micro_batch, self.stage - 1)
        if self.op == "B":
            return Letter("activation gradient", self.step, self.micro_batch, self.stage + 1)
        if self.op == "NORM":
            return Letter("partial norm", self.step, NO_MICRO_BATCH, self.stage + 1)
        return self.letter if self.op in ("SUM", "TIE", "UNSHARD", "ADOPT", "KNOW") else None

    def __str__(self) -> str:
        at = f"{self.op} {self.stage}.{self.micro_batch} of step {self.step}"
        return at if self.letter is None else f"{self.op} {self.letter} ({self.peer})"
