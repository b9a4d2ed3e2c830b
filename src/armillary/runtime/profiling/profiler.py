"""Profiles a model: runs a few real batches through it and writes down what training it on many workers
depends on.

The first batch is run forward and backward under watch; the others forward only, because they can add reads
and look-ups but not stages. Nothing the training could notice is left behind.

Source: Parallax (Kim et al., EuroSys 2019), whose graph transformation reads the sparsity off the gradient's
type.
Departure: alpha is measured on batches given by the user, where the paper leaves open how it is obtained.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from armillary.facts.parameter import ParameterFact, Reads, RowFacts
from armillary.facts.profile import Profile
from armillary.facts.stage import StageFact
from armillary.facts.stage_paths import OUTSIDE, stage_of, stage_paths
from armillary.facts.untouched import untouched
from armillary.runtime.hybrid.identity import why_fixed
from armillary.runtime.profiling.probe import Loss, probe, scalar_loss, stage_seconds, step_bytes
from armillary.runtime.profiling.reads import Reading, WatchReads
from armillary.runtime.profiling.row_counts import NO_LOOKUPS, Lookups, row_facts
from armillary.runtime.profiling.splitting import split_trial
from armillary.runtime.unfit_model import unfit_model

__all__ = ["fact_of", "names_of", "profile", "rows_of", "running_modules"]


def profile(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
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
