"""Profiles a model: runs a few real batches through it and writes down what training it on many workers depends on.

The first batch is run forward and backward under watch, the others forward only: they add reads and look-ups, but no
stages. Nothing that training could notice is left behind.

`split_trial` tries on a float64 copy whether loss and gradients are the means over a batch's parts, which schedules
with micro-batches need. `watched_profile` is made from steps of a loop's own training instead. There one stage stands
for the whole model, its times include the watching, and parts of a batch were not tried.

Source: Parallax (Kim et al., EuroSys 2019), whose graph transformation reads the sparsity off the gradient's type.
Departure: alpha is measured on batches given by the user, where the paper leaves open how it is obtained.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from armillary.models.preserved_state import untouched
from armillary.models.structure import OUTSIDE, stage_of, stage_paths
from armillary.plans.profile import ParameterFact, Profile, Reads, RowFacts, StageFact
from armillary.profiler.access_patterns import NO_LOOKUPS, Lookups, Reading, WatchReads, row_facts
from armillary.profiler.loop_watch import SeenStep, Told
from armillary.profiler.probe import Loss as Loss_profiler
from armillary.profiler.probe import probe, scalar_loss, stage_seconds, step_bytes
from armillary.profiler.unfit_model import unfit_model
from armillary.tables.handle import why_fixed

__all__ = [
    "EXACT_SPLIT",
    "UNTRIED",
    "fact_of",
    "names_of",
    "profile",
    "rows_of",
    "running_modules",
    "split_trial",
    "watched_profile",
]

UNTRIED = "untried"
EXACT_SPLIT = "exact"
PARTS = 2
TOLERANCE = 1e-10  # of the norm, in float64
MOST_BYTES = 256 << 20  # of a model that is copied for the trial

Loss = Callable[[nn.Module, Any], Tensor]


def split_trial(model: nn.Module, batch: Any, loss: Loss) -> str:
    """`EXACT_SPLIT` if loss and gradients of the batch are the means over its halves, `UNTRIED` if the model is too
    large to be copied, else why not. Random layers are off in the trial, and whatever stops it is told, not raised."""
    if names := [path for path, module in model.named_modules() if getattr(module, "track_running_stats", False)]:
        return f"{names[0]} keeps statistics of its batches"
    if sum(parameter.nbytes for parameter in model.parameters()) > MOST_BYTES:
        return UNTRIED
    halves = _halves(batch)
    if halves is None:
        return "the tensors of a batch have no first dimension in common that can be halved"
    try:
        twin = copy.deepcopy(model).double().eval()
        whole = _loss_and_gradients(twin, _double(batch), loss)
        parts = [_loss_and_gradients(twin, _double(half), loss) for half in halves]
    except Exception as error:  # whatever stops the trial, in whatever form, is the answer here
        said = next(iter(str(error).splitlines()), type(error).__name__)
        return f"a float64 copy of the model cannot be run on half a batch: {said}"
    for name, value in whole.items():
        mean = sum(part[name] for part in parts) / PARTS
        if float((value - mean).norm()) > TOLERANCE * max(float(value.norm()), float(whole[""].norm())):
            return f"the {f'gradient of {name}' if name else 'loss'} is no mean over the parts of a batch"
    return EXACT_SPLIT


def _halves(batch: Any) -> list[Any] | None:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or (size := sizes.pop()) < PARTS or size % PARTS:
        return None
    half = size // PARTS
    return [
        tree_map(lambda leaf, at=first: leaf[at : at + half] if isinstance(leaf, Tensor) else leaf, batch)
        for first in range(0, size, half)
    ]


def _double(batch: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _loss_and_gradients(model: nn.Module, batch: Any, loss: Loss) -> dict[str, Tensor]:
    """By parameter name; the loss under the empty name. A parameter without gradient counts as zero."""
    model.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    found = {"": value.detach().double()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    return found


def profile(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss_profiler,
    *,
    workers: int = 1,
    workers_per_node: int = 1,
    stages: Sequence[str] = (),
) -> Profile:
    """What `model` is when trained on `batches`; it is left as it was.

    Args:
        batches: finite. One worker's share of one step each; worker w's are batches[w::workers].
        loss: loss(model, batch) -> scalar tensor.
        workers, workers_per_node: for how many workers the row facts are taken.
        stages: paths of the modules to cost one by one; the model's children if none are given.

    Raises:
        ValueError: a parameter has no values yet (lazy, meta); the loss is not a scalar to train by; fewer
            batches than workers.
        TypeError: the model is wrapped, compiled, or trained by an open run.
        IndexError: a look-up out of range.
    """
    names = names_of(model)
    _check(model, names)
    if workers < 1 or workers_per_node < 1 or workers % workers_per_node:
        raise ValueError(f"profile: {workers} workers do not fill nodes of {workers_per_node}")
    paths = stage_paths(model, stages)
    looked: list[dict[str, Lookups]] = []
    fixed = {name: why_fixed(parameter) for parameter, (name, *_) in names.items()}
    with untouched(model) as kept, torch.enable_grad():
        watch = WatchReads({name: parameter for parameter, (name, *_) in names.items()}, kept.keep)
        for name, why in fixed.items():
            watch.readings[name].refusals.update([why] if why else [])
        for batch in batches:
            if not looked:
                sample, (arrivals, operations, activations) = batch, probe(model, batch, loss, watch, paths)
            else:
                with watch:
                    scalar_loss(loss(model, batch))
            looked.append(watch.take())
        if len(looked) < workers:
            raise ValueError(f"profile: {workers} workers need a batch each, got {len(looked)}")
        facts = []
        for name, *aliases in names.values():
            lookups = [batch.get(name, NO_LOOKUPS) for batch in looked]
            rows = rows_of(watch.readings[name], lookups, workers, workers_per_node)
            stage = stage_of(name, paths)
            facts.append(fact_of(name, aliases, watch.readings[name], arrivals.get(name), stage, rows))
        tables = [fact.name for fact in facts if fact.shardable]
        forward, backward = stage_seconds(model, sample, loss, paths, tables)
        splits = split_trial(model, sample, loss)
        by_row = step_bytes(model, sample, loss, tables)
        by_whole = step_bytes(model, sample, loss, ()) if tables else by_row
    held = Counter(dict.fromkeys((*paths, OUTSIDE), 0))
    for fact in facts:
        held[fact.stage] += fact.bytes
    flops, returned = operations.flops, operations.output_bytes
    costed = tuple(
        StageFact(
            path,
            flops[path],
            held[path],
            activations[path],
            forward[path],
            backward[path],
            returned[path],
            operations.output_numbers.get(path, ()),
        )
        for path in held
    )
    running = running_modules(model)
    return Profile(tuple(facts), costed, len(looked), workers, workers_per_node, running, splits, by_row, by_whole)


def running_modules(model: nn.Module) -> tuple[str, ...]:
    """Paths of modules that keep statistics of their batches."""
    return tuple(path for path, module in model.named_modules() if getattr(module, "track_running_stats", False))


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter once, with all its names, in the model's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _check(model: nn.Module, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
    """Refuses models that cannot be run for a look, or whose operations would not be seen."""
    if complaint := unfit_model(model):
        raise TypeError(f"profile: {complaint}")
    tensors = [(name, parameter) for parameter, (name, *_) in names.items()]
    for name, tensor in (*tensors, *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"profile: {name!r} is lazy and has no shape yet; run one batch through the model first, "
                f"under torch.no_grad()"
            )
        if tensor.is_meta:
            raise ValueError(
                f"profile: {name!r} is on the meta device and has no values, so no batch can be run; "
                f"profile a materialised model (model.to_empty(device='cpu') is enough to see how it is read)"
            )


def rows_of(reading: Reading, lookups: Sequence[Lookups], workers: int, workers_per_node: int) -> RowFacts | None:
    """Row facts of a parameter that is only ever read by row."""
    if reading.dense or not reading.gathers:
        return None
    shape = reading.parameter.shape
    return row_facts(shape[0], reading.parameter.nbytes // shape[0], lookups, workers, workers_per_node)


def fact_of(
    name: str,
    aliases: Sequence[str],
    reading: Reading,
    arrival: int | None,
    stage: str,
    rows: RowFacts | None,
) -> ParameterFact:
    parameter = reading.parameter
    reads: Reads = "dense" if reading.dense else "never"
    if reading.gathers:
        reads = "both" if reading.dense else "rows"
    return ParameterFact(
        name=name,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        bytes=parameter.nbytes,
        requires_grad=parameter.requires_grad,
        reads=reads,
        stage=stage,
        aliases=tuple(aliases),
        dense_readers=tuple(sorted(reading.dense)),
        refusals=tuple(sorted(reading.refusals)),
        arrival=arrival,
        rows=rows,
        is_rewritten=reading.is_rewritten,
    )


def watched_profile(model: nn.Module, everyones: Sequence[Told], workers_per_node: int) -> Profile:
    """
    Args:
        everyones: in the order of ranks, of the same steps.
    """
    workers, steps = len(everyones), range(len(everyones[0].steps))
    batches = [told.steps[step] for step in steps for told in everyones]
    order = list(dict.fromkeys(name for told in everyones for name in told.arrivals))
    facts = []
    for parameter, (name, *aliases) in names_of(model).items():
        reading = Reading(parameter)
        for one in (told.seen[name] for told in everyones):
            reading.gathers.update(one.gathers)
            reading.dense.update(one.dense)
            reading.refusals.update(one.refusals)
            reading.is_rewritten |= one.is_rewritten
        looked = [batch.lookups.get(name, NO_LOOKUPS) for batch in batches]
        rows = rows_of(reading, looked, workers, workers_per_node)
        arrival = order.index(name) if name in order else None
        facts.append(fact_of(name, aliases, reading, arrival, OUTSIDE, rows))
    slowest = max((told.steps[-1] for told in everyones), key=_seconds)  # the first steps warm up
    held, activations = sum(fact.bytes for fact in facts), max(told.activation_bytes for told in everyones)
    stage = StageFact(OUTSIDE, 0, held, activations, slowest.forward_seconds, slowest.backward_seconds)
    return Profile(tuple(facts), (stage,), len(batches), workers, workers_per_node, running_modules(model))


def _seconds(step: SeenStep) -> float:
    return step.forward_seconds + step.backward_seconds
