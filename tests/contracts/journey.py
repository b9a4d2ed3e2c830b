"""The way every method goes: registered in a test, planned, attached, held to its own oracle, compared with its
forecast, saved, resumed, moved."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.cli.names import find, small
from armillary.codecs import CODECS
from armillary.exchanges import DENSE, State, build_dense
from armillary.planning.planner import plan
from armillary.planning.request import PlanRequest
from armillary.plans import Choice, ParameterFact, Plan, Profile
from armillary.plans.group import Band
from armillary.reference.replicas import Replicas, SharedGroup
from armillary.session.attach import attach
from armillary.session.compare import compare_run
from armillary.session.plan_job import JobRequest
from armillary.session.run import Run
from armillary.session.train import train
from armillary.session.train_settings import Settings
from armillary.session.verify import verify_workload
from armillary.session.workload import Workload
from planning_cases import machines, model


@contextmanager
def registered(*pairs: Any) -> Iterator[None]:
    """Decorators and what they decorate, in turn; off the shelves again at the end."""
    shelves = (DENSE, CODECS)
    before = [dict(shelf.all()) for shelf in shelves]
    for decorate, make in list(zip(pairs[::2], pairs[1::2], strict=True))[::-1]:
        decorate(make)
    try:
        yield
    finally:
        for shelf, entries in zip(shelves, before, strict=True):
            shelf._entries = entries


class Net(nn.Module):
    """`rare` is used by worker 1 at every third step, `never` by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.rare, self.never = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))

    def forward(self, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        inputs, target, uses_rare = batch
        hidden = torch.tanh(self.first(inputs))
        return (self.second(hidden * self.rare if uses_rare else hidden) - target).square().mean()


def batch_of(worker: int, step: int) -> tuple[Tensor, Tensor, bool]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    inputs = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(4, 2, generator=generator, dtype=torch.float64) + worker, worker == step % 3 == 1


def loss(model: nn.Module, batch: Any) -> Tensor:
    value: Tensor = model(batch)
    return value


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def profile_of(workers: int) -> Profile:
    """Of `Net`, as if every parameter but `never` had been seen to get a gradient, the last one first."""
    named = list(net().named_parameters())
    facts = [
        ParameterFact(
            name, tuple(p.shape), "float64", p.nbytes, True, "dense",
            dense_readers=("mm",), arrival=None if name == "never" else place,
        )
        for place, (name, p) in enumerate(reversed(named))
    ]  # fmt: skip
    return model(*facts, workers=workers, seconds=1e-6)


def planned(workers: int, choice: Choice | None = None, per_node: int = 1, **asked: Any) -> Plan:
    """By price if nothing is chosen; links are slow."""
    constraints: Any = {} if choice is None else {"*": choice}
    nodes = machines(workers // per_node, per_node, megabits=0.1)
    return plan(profile_of(workers), nodes, constraints=constraints, **asked)


def truth_of(workers: int, choice: Choice) -> Replicas:
    exchange = build_dense(choice.name, **choice.options)
    return Replicas(
        net(), adam, workers, [SharedGroup(one.parameters, exchange) for one in planned(workers, choice).groups]
    )


def forget_what_is_not_finite(model: nn.Module) -> None:
    """As a loop that skips such a step, on every rank alike."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(gradient.isfinite().all()) for gradient in gradients):
        for parameter in model.parameters():
            parameter.grad = None


def one_step(run: Run, step: int, feed: Callable[[int, int], Any] = batch_of) -> None:
    run._optimizer.zero_grad()
    loss(run._model, feed(run.rank, step)).backward()
    forget_what_is_not_finite(run._model)
    run._optimizer.step()


def begun(
    workers: int,
    choice: Choice,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    per_node: int = 1,
    **asked: Any,
) -> Run:
    model = net()
    return attach(planned(workers, choice, per_node), model, optimizer(model), check_order=True, **asked)


def largest_gap(run: Run, truth: Replicas) -> float:
    """Between this rank's weights and states and those of its replica; infinite where one is not a number."""
    gaps = [(p - truth.named[run.rank][name]).detach().abs().max() for name, p in run._model.named_parameters()]
    for number, unit in enumerate(run._engine.executor.units):
        want = truth.states[number][run.rank]
        assert unit.state.keys() == want.keys(), (unit.state.keys(), want.keys())
        gaps += [(value - want[entry]).abs().max() for entry, value in unit.state.items()]
    return float(torch.stack(gaps).nan_to_num(float("inf")).max())


def sick_at_2(worker: int, step: int) -> tuple[Tensor, Tensor, bool]:
    """Worker 0 overflows at step 2."""
    inputs, target, uses_rare = batch_of(worker, step)
    return inputs * float("inf") if (worker, step) == (0, 2) else inputs, target, uses_rare


def trained_beside(
    rank: int, workers: int, shelf: Any, choice: Choice, feed: Any = batch_of, fault: Any = None, steps: int = 6
) -> tuple[float, list[str]]:
    """The largest gap after any of the steps; what was requested in each.

    fault: called with the run before it trains; what it returns mends it again.
    """
    with shelf():
        run, truth, worst, asked = begun(workers, choice), truth_of(workers, choice), 0.0, []
        mend = fault(run) if fault else None
        run._transport.recording = True
        for step in range(steps):
            one_step(run, step, feed)
            truth.step([feed(worker, step) for worker in range(workers)], loss, None, forget_what_is_not_finite)
            worst = max(worst, largest_gap(run, truth))
            asked.append(" ".join(record.group for record in run._transport.take_records()))
        if mend:
            mend()
        run.close()
        return worst, asked


def kept(run: Run) -> dict[str, Tensor]:
    """All that this rank holds: weights, what the optimizer keeps, states."""
    found = {name: p.detach().clone() for name, p in run._model.named_parameters()}
    for name, parameter in run._model.named_parameters():
        found |= {f"{name} {entry}": value.clone() for entry, value in run._optimizer.state[parameter].items()}
    for unit in run._engine.executor.units:
        found |= {f"{unit.name} {entry}": value.clone() for entry, value in unit.state.items()}
    return found


def unlike(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """What is not the same bit for bit."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    return [name for name in one if not torch.equal(one[name], other[name])]


def saved_and_resumed(rank: int, workers: int, shelf: Any, choice: Choice, folder: str) -> list[str]:
    """Trains 3 steps, saves, trains 3 more; then once more from what was saved. What differs in any bit."""
    with shelf():
        run = begun(workers, choice)
        for step in range(3):
            one_step(run, step)
        before = kept(run)
        run.save(folder)
        assert unlike(kept(run), before) == []
        for step in range(3, 6):
            one_step(run, step)
        want = kept(run)
        run.close()
        again = begun(workers, choice)
        again.load(f"{folder}/step-00000003")
        for step in range(3, 6):
            one_step(again, step)
        found = kept(again)
        again.close()
        return unlike(found, want)


def moved(rank: int, workers: int, shelf: Any, choice: Choice, folder: str) -> tuple[dict[str, Tensor], list[State]]:
    """Loads it on as many workers as there are here: weights and states then. Training goes on."""
    with shelf():
        run = begun(workers, choice)
        run.load(f"{folder}/step-00000003")
        weights = {name: p.detach().clone() for name, p in run._model.named_parameters()}
        states = [dict(unit.state) for unit in run._engine.executor.units]
        for step in range(3, 6):
            one_step(run, step)
        run.close()
        return weights, states


def of_few_tensors() -> Workload:
    """A transformer of one block: plans of few tensors are made in a moment."""
    return find("vision", {**small("vision"), "architecture": "vit", "width": 16, "depth": 1})


def verified(rank: int, workers: int, shelf: Any, choice: Choice) -> tuple[bool, str]:
    with shelf():
        found = verify_workload(
            of_few_tensors(),
            steps=4,
            exchanges=(),
            request=JobRequest(PlanRequest(constraints={"*": choice})),
        )
        return found.is_equal, str(found)


def compared(rank: int, workers: int, shelf: Any, choice: Choice, folder: str) -> tuple[bool, float]:
    """Trains a workload as the command line does, 4 steps. Whether `armillary compare` finds the bytes of every group
    within their band, and how many of them this exchange sent."""
    with shelf():
        settings = Settings(
            Path(folder), steps=4, every_seconds=0, request=JobRequest(PlanRequest(constraints={"*": choice}))
        )
        for _ in train(of_few_tensors(), settings):
            pass
        found = compare_run(Path(folder), Band(memory_bytes=1, seconds=1))
        sent = [line.measured.sent_bytes for line in found.lines if choice.name in line.exchange]
        return found.is_within, sum(sent)


def truth_after(steps: int, workers: int, shelf: Any, choice: Choice) -> Replicas:
    with shelf():
        truth = truth_of(workers, choice)
        for step in range(steps):
            truth.step([batch_of(worker, step) for worker in range(workers)], loss)
        return truth


def with_push(change):
    """A fault in every group's push: change(result, next state, place, state before) -> both, otherwise."""

    def fault(run):
        for unit in run._engine.executor.units:
            push = unit.exchange.push

            def faulty(parcel, state, place, push=push):
                result, after = yield from push(parcel, state, place)
                return change(result, after, place, state)

            unit.exchange = unit.exchange._replace(push=faulty)

    return fault
