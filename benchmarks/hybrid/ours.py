"""Armillary's modes of the benchmark: each exchange forced on both tables, and what the planner chooses by itself.

The model, batches and loop are those of `peers.py`; a mode adds a plan and one `attach`.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from armillary.exchanges.exchange import row_exchanges
from armillary.facts.mesh import Mesh
from armillary.facts.plan import Choice, Group, Plan, model_fingerprint
from armillary.facts.topology import Link, Topology
from armillary.planning.planner import plan
from armillary.runtime.profiling.profiler import profile
from armillary.session.attach import attach
from benchmarks.hybrid.model import LanguageModel, Sizes, batches, seeded_model
from benchmarks.hybrid.peers import LEARNING_RATE, Step, train

TABLES = ("outputs.weight", "inputs.weight")
PROFILED_STEPS = 2
Optimize = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def ours(sizes: Sizes, mbit_per_second: float) -> Mapping[str, Callable[[], Step]]:
    """Every mode by name, ready to be built; all ranks must build the same ones in the same order."""
    return {
        "owned_rows": partial(forced, sizes, Choice("owned_rows"), sgd),
        "owned_rows_ahead": partial(forced, sizes, Choice("owned_rows"), sgd, prefetch="rows"),
        "gather_rows": partial(forced, sizes, Choice("gather_rows"), sgd),
        "all_reduce": partial(forced, sizes, Choice("all_reduce"), sgd),
        "owned_dense": partial(forced, sizes, Choice("owned_dense"), sgd),
        "planned": partial(planned, sizes, mbit_per_second),
        "owned_rows_adam": partial(forced, sizes, Choice("owned_rows"), adam),
        "owned_rows_adam_lazy": partial(forced, sizes, Choice("owned_rows"), adam, is_lazy=True),
    }


def forced(sizes: Sizes, exchange: Choice, optimize: Optimize, is_lazy: bool = False, prefetch: str = "none") -> Step:
    """Both tables by one exchange, the rest by all-reduce; groups in the order their gradients arrive."""
    model = seeded_model(sizes, sparse=False)
    entry = row_exchanges().get(exchange.name)
    layout = entry.make(**exchange.options).placement if entry else "replicated"
    departures = ("lazy",) if is_lazy and entry else ()
    dense = tuple(name for name, _ in model.named_parameters() if name not in TABLES)
    last, first = (
        Group(name, (name,), layout, exchange, departures=departures, prefetch=prefetch)  # type: ignore[arg-type]
        for name in reversed(TABLES)
    )
    middle = Group("dense", dense, "replicated", Choice("all_reduce"))
    listing = ((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in model.named_parameters())
    return _step(
        Plan(Mesh.of(data=dist.get_world_size()), (first, middle, last), model_fingerprint(listing)),
        model,
        optimize,
        sizes,
    )


def planned(sizes: Sizes, mbit_per_second: float) -> Step:
    """What `armillary.plan` chooses for a profile of the first batches and this speed of links."""
    model = seeded_model(sizes, sparse=False)
    workers = dist.get_world_size()
    link = Link(3e-4, (mbit_per_second or 8000) * 1e6 / 8)
    topology = Topology(workers, 1, link, link, 64 << 30)
    found: list[Plan | None] = [None]
    if dist.get_rank() == 0:
        seen = [
            batch
            for step in zip(*(islice(batches(sizes, r), PROFILED_STEPS) for r in range(workers)))
            for batch in step
        ]
        facts = profile(model, seen, _loss, workers=workers)
        found = [plan(facts, topology)]
        print(found[0], flush=True)
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return _step(found[0], model, sgd, sizes, topology)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    value: Tensor = model(*batch)
    return value


def _step(
    decided: Plan, model: LanguageModel, optimize: Optimize, sizes: Sizes, topology: Topology | None = None
) -> Step:
    optimizer = optimize(model.parameters())
    run = attach(decided, model, optimizer, topology=topology)
    stream = batches(sizes, dist.get_rank())
    looks_ahead = any(group.prefetch != "none" for group in decided.groups)
    step = partial(train, model, optimizer, run.batches(stream) if looks_ahead else stream)
    return partial(_keep, run, step)


def _keep(run: object, step: Step) -> float:
    """The run lives as long as its step does."""
    return step()
