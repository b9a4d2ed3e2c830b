"""The modes in which the interpreter carries a schedule out, each trained alike on the small staged models, beside the
reference's loop in one process."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.plans import Message, Send
from armillary.reference.versions import Reference
from armillary.schedules import Clip, Schedule
from armillary.schedules.routes import owner_of
from armillary.schedules.shared_stages import SharedPlacement, devices_for
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import StageContext, TrainSpec, in_a_row
from channels import GlooChannel, in_threads
from staged_models import OPTIMIZERS, as_stages, data, drop, same, squared_error, stages_of, weights

STEPS, DROP = 5, 2  # steps of a case; after how many of them its learning rate falls
WAIT_SECONDS = 20.0  # for a message between threads
COLLECTIVES = ("all_reduce", "broadcast", "barrier", "all_gather", "reduce", "all_to_all_single", "reduce_scatter")


@dataclass(frozen=True)
class Case:
    """A schedule and how it is trained. model: keywords of `stages_of`, or `make`, which makes the stages.

    drains, settles: steps before which the loop does so. autocast: around "forward and loss", or "everything".
    """

    schedule: Schedule
    optimizer: str = "momentum"
    dtype: torch.dtype = torch.float64
    drains: tuple[int, ...] = ()
    settles: tuple[int, ...] = ()
    clip: Clip | None = None
    autocast: str = ""
    recompute: frozenset[int] = frozenset()
    rule: str = "gloo"
    steps: int = STEPS
    drop: int = DROP
    model: dict[str, Any] = field(default_factory=dict)

    def stages(self) -> nn.ModuleList:
        make: Callable[[torch.dtype], nn.ModuleList] | None = self.model.get("make")
        return make(self.dtype) if make else stages_of(self.schedule.stages, self.dtype, **self.model)


@dataclass(frozen=True)
class Mode:
    """
    Args:
        ranks: that carry a schedule out. seat: of a rank; the channel is None where there is one rank.
        owns: stages whose optimizer state a rank keeps. shows: stages whose newest weights it has after the last step.
        runs: (micro-batch, stage) that it runs in a step.
        is_ring: each rank hands in its own micro-batch, has buffers of its own, and drains at the end.
        lends: only owners keep weights. has_all: each rank's optimizer has every stage.
    """

    ranks: Callable[[Schedule], int]
    seat: Callable[[Schedule, int, Any, bool], StageContext | None]
    owns: Callable[[Schedule, int], list[int]]
    shows: Callable[[Schedule, int], list[int]]
    runs: Callable[[Schedule, int, int], list[tuple[int, int]]]
    is_ring: bool = False
    lends: bool = False
    has_all: bool = True


def _every(schedule: Schedule, *_: int) -> list[int]:
    return list(range(schedule.stages))


def _owned(schedule: Schedule, rank: int) -> list[int]:
    return [j for j in range(schedule.stages) if owner_of(schedule, j) == rank]


def _row(schedule: Schedule, rank: int, channel: Any, one_queue: bool) -> StageContext:
    return in_a_row(schedule, rank, channel, one_queue=one_queue)


def _own_micro_batch(schedule: Schedule, rank: int, step: int) -> list[tuple[int, int]]:
    return [(rank, j) for j in range(schedule.stages)]


def _own_stage(schedule: Schedule, rank: int) -> list[int]:
    return [rank]


def _shared_stage(schedule: Schedule, rank: int) -> list[int]:
    return [SharedPlacement(schedule).stage_of(rank)]


def _owned_of_shared(schedule: Schedule, rank: int) -> list[int]:
    return [j for j in _shared_stage(schedule, rank) if SharedPlacement(schedule).owner(j) == rank]


MODES = {
    "one_device": Mode(
        lambda schedule: 1, lambda *_: None, _every, _every,
        lambda s, rank, step: [(m, j) for m in range(s.micro_batches) for j in range(s.stages)],
    ),
    "ring": Mode(lambda s: s.workers, _row, _owned, _every, _own_micro_batch, is_ring=True),
    "zero_ring": Mode(lambda s: s.workers, _row, _owned, _owned, _own_micro_batch, is_ring=True, lends=True),
    "pipeline": Mode(
        lambda s: s.stages, _row, _own_stage, _own_stage,
        lambda s, rank, step: [(m, rank) for m in range(s.micro_batches)], has_all=False,
    ),
    "shared": Mode(
        lambda s: devices_for(s.workers),
        lambda s, rank, channel, one_queue: StageContext(rank, SharedPlacement(s), channel, one_queue=one_queue),
        _owned_of_shared, _shared_stage,
        lambda s, rank, step: [
            (one.micro_batch, j) for j in _shared_stage(s, rank)
            for one in SharedPlacement(s).actions(rank, step) if one.kind == "F"
        ],
    ),
}  # fmt: skip


@dataclass
class Trained:
    """What a rank has to show. weights, buffers: by stage. seen: place -> versions read; most_held: activations."""

    weights: dict[int, list[Tensor]]
    buffers: dict[int, list[Tensor]]
    losses: list[Tensor]
    seen: dict[tuple[int, int, int], list[int]]
    states: int
    most_held: int


def worker(
    mode: str, case: Case, rank: int, channel: Any, stages: nn.ModuleList, **spec: Any
) -> tuple[Interpreter, Optimizer]:
    """The interpreter of a rank, and the user's optimizer there."""
    how = MODES[mode]
    optimizer = OPTIMIZERS[case.optimizer]((stages if how.has_all else stages[rank]).parameters())
    told = TrainSpec(case.schedule, squared_error, recompute=case.recompute, clip=case.clip, lends=how.lends, **spec)
    seat = how.seat(case.schedule, rank, channel, case.rule == "nccl")
    return Interpreter(as_stages(stages), optimizer, told, seat), optimizer


def handed_in(mode: str, batches: Sequence[Any], rank: int) -> Sequence[Any]:
    """Of the micro-batches of a step, those that a rank hands in."""
    return [batches[rank]] if MODES[mode].is_ring else batches


def train(mode: str, case: Case, rank: int, channel: Any = None) -> Trained:
    """A rank's part of all steps of a case."""
    how, stages, seen, most_held = MODES[mode], case.stages(), {}, 0

    def observe(due: Any, version: int, held: Any) -> None:
        nonlocal most_held
        seen.setdefault(due.place, []).append(version)
        most_held = max(most_held, len(held))

    run, optimizer = worker(mode, case, rank, channel, stages, observe=observe)
    finished = _loop(run, optimizer, case, lambda batches: handed_in(mode, batches, rank))
    with _bfloat16(case.autocast == "everything"):
        finished += run.drain() if how.is_ring else run.settle()
    assert [one.step for one in finished] == list(range(len(finished)))
    shown = how.shows(case.schedule, rank)
    return Trained(
        {j: weights(stages[j]) for j in shown},
        {j: list(stages[j].buffers()) for j in (_every(case.schedule) if how.is_ring else shown)},
        [loss for one in finished for loss in one.losses],
        seen, len(optimizer.state), most_held,
    )  # fmt: skip


def _loop(run: Any, optimizer: Optimizer, case: Case, pick: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """The user's loop, with drains or a look at the newest weights before some steps; what each step returned."""
    scheduler, finished = drop(optimizer, case.drop), []
    with _bfloat16(case.autocast == "everything"):
        for step, batches in enumerate(data(case.steps, case.schedule.micro_batches, case.dtype)):
            if step in case.drains:
                finished += run.drain() or []
            if step in case.settles and isinstance(run, Interpreter):
                finished += run.settle()
            with _bfloat16(bool(case.autocast)):
                finished += [run.step(pick(batches))] if isinstance(run, Reference) else run.step(pick(batches))
            scheduler.step()
    return finished


def _bfloat16(enabled: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def reference(mode: str, case: Case) -> tuple[nn.ModuleList, list[list[Tensor]], list[list[dict[str, Tensor]]]]:
    """Its stages at the end, losses [step][micro-batch], and under a ring buffers [worker][stage]."""
    stages = case.stages()
    optimizer = OPTIMIZERS[case.optimizer](stages.parameters())
    copies = {"copies": range(case.schedule.workers)} if MODES[mode].is_ring else {}
    truth = Reference(stages, optimizer, case.schedule, squared_error, clip=case.clip, **copies)
    losses = _loop(truth, optimizer, case, lambda batches: batches)
    return stages, losses, truth.buffers if copies else []


def holds(mode: str, case: Case, answers: Sequence[Trained]) -> None:
    """Asserts that every rank did what the reference and the schedule say, to the bit."""
    how, schedule, told = MODES[mode], case.schedule, (mode, case)
    stages, losses, copies = reference(mode, case)
    shown = set[int]()
    for rank, got in enumerate(answers):
        assert [*got.weights] == how.shows(schedule, rank), told
        assert all(same(mine, weights(stages[j])) for j, mine in got.weights.items()), (rank, *told)
        shown |= got.weights.keys()
        for j, mine in got.buffers.items():
            if mode != "shared" or rank == SharedPlacement(schedule).last(case.steps - 1, j):
                assert same(mine, copies[rank][j].values() if copies else stages[j].buffers()), (rank, j, *told)
        is_last = (mode != "pipeline" and mode != "shared") or schedule.stages - 1 in got.weights
        want = [step[rank] for step in losses] if how.is_ring else [loss for step in losses for loss in step]
        assert same(got.losses, want if is_last else []), (rank, *told)
        cells = {(step, m, j) for step in range(case.steps) for m, j in how.runs(schedule, rank, step)}
        assert got.seen == {place: [schedule.version(place, case.drains)] * 2 for place in cells}, (rank, *told)
        if case.optimizer != "sgd":
            assert got.states == sum(len(list(stages[j].parameters())) for j in how.owns(schedule, rank)), (rank, *told)
    assert shown == set(range(schedule.stages)), told


def job(rank: int, world: int, mode: str, cases: Sequence[Case]) -> list[Trained | None]:
    """Every case one after the other; ranks that a case has no use for rest. A collective would raise."""
    with without_collectives():
        return [
            train(mode, case, rank, GlooChannel()) if rank < MODES[mode].ranks(case.schedule) else None
            for case in cases
        ]


def compare(crew: Callable[[int], Any], mode: str, cases: Sequence[Case]) -> None:
    """On rank processes over gloo, or in this process where one rank does all."""
    most = max(MODES[mode].ranks(case.schedule) for case in cases)
    replies = [[train(mode, case, 0) for case in cases]] if most == 1 else crew(most).run(job, mode, cases)
    for place, case in enumerate(cases):
        holds(mode, case, [reply[place] for reply in replies[: MODES[mode].ranks(case.schedule)]])


def compare_in_threads(mode: str, cases: Sequence[Case], is_late: bool = False) -> None:
    """With ranks as threads, which take half the time of processes. Several share one random number generator, so that
    nothing is dropped out."""
    for case in cases:
        is_dry = MODES[mode].ranks(case.schedule) > 1 and "make" not in case.model
        dry = replace(case, model={**case.model, "dropout": 0.0}) if is_dry else case
        holds(mode, dry, in_threads_of(mode, dry, is_late))


def in_threads_of(mode: str, case: Case, is_late: bool = False) -> list[Trained]:
    """is_late: each dawdles before every send."""

    def ranked(rank: int, channel: Any) -> Trained:
        channel.board.timeout_seconds = WAIT_SECONDS
        return train(mode, case, rank, Late(channel, rank) if is_late else channel)

    return in_threads(MODES[mode].ranks(case.schedule), ranked, case.rule)


class Late:
    """A channel whose process dawdles before every send, by its own dice."""

    def __init__(self, channel: Any, rank: int) -> None:
        self.channel, self.dice = channel, random.Random(rank)

    def post(self, message: Message) -> Any:
        if isinstance(message, Send):
            time.sleep(self.dice.random() * 0.001)
        return self.channel.post(message)


@contextmanager
def without_collectives() -> Iterator[None]:
    """Inside, a collective raises."""
    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, _refuse)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def _refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("a collective was called inside the training loop")
