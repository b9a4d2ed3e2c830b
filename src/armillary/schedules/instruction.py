"""One typed action of a rank's program, and what travels between ranks.

A plan is lowered to one list of these per rank (`lowering.py`). Who reads it: the interpreter carries it out, the
checker plays the lists of all ranks. Nothing in it says how: which stage, which step and micro-batch, with whom.

    F, B              forward and backward of a stage for a micro-batch
    SEND, RECEIVE     a letter to a peer: started; room made for one of a peer's
    OVER              a letter sent is waited for; its tensors may go
    REDUCE            a stage's mean gradients of a step are averaged over the ranks that hold the stage
    UPDATE            the stage's optimizer steps, now or when the norm to clip by is known
    NORM, KNOW        a stage's square joins those of the stages above; the whole is known on this rank
    SERVE, PUSH       this rank's part in the look-ups of another stage's forward; in its tables' step

Source: the action list of torch.distributed.pipelining, which has F, B, sends, receives, REDUCE_GRAD.
"""

from typing import Literal, NamedTuple

from armillary.schedules.schedule import Place

__all__ = ["Instruction", "Letter", "Op", "What"]

Op = Literal["F", "B", "SEND", "RECEIVE", "OVER", "REDUCE", "UPDATE", "NORM", "KNOW", "SERVE", "PUSH"]
What = Literal["activation", "activation gradient", "partial norm", "norm", "buffers"]


class Letter(NamedTuple):
    """What one rank sends another, named by the place where it was made. Norms are of a step: micro-batch -1."""

    what: What
    step: int
    micro_batch: int
    stage: int

    @property
    def edge(self) -> str:
        """Letters of one edge have one form."""
        return f"{self.what} of stage {self.stage}"

    @property
    def at(self) -> str:
        """Which letter of its edge."""
        return f"step {self.step}" + (f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")

    def __str__(self) -> str:
        return f"{self.edge}, {self.at}"


class Instruction(NamedTuple):
    """
    Args of note:
        tick: of the schedule's clock, counted from the first step; the order of the list, not a time to wait for.
        letter, peer: of SEND, RECEIVE and OVER.
    """

    op: Op
    tick: int
    step: int
    micro_batch: int
    stage: int
    letter: Letter | None = None
    peer: int = -1

    @property
    def place(self) -> Place:
        return self.step, self.micro_batch, self.stage

    def __str__(self) -> str:
        at = f"{self.op} {self.stage}.{self.micro_batch} of step {self.step}"
        return at if self.letter is None else f"{self.op} {self.letter} ({self.peer})"
