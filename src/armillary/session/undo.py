"""Takes a run out of model and optimizer again: at its end, before it begins anew, and after an error of its beginning.

A driver says which parameters do not hold their newest values here, or are held by the optimizer in another's place
(`Job.whole`). The rest is the same for all drivers: hooks come off, the parameter objects that the user gave hold the
values, and the optimizer holds these objects with their state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.session.job import Job
from armillary.tables.build import WholeParameter, refuse_reads
from armillary.tables.handle import TableHandle, become, why_fixed
from armillary.transport.agreement import FirstError

__all__ = ["begun_anew", "copies", "give_up", "rollback_on_error", "undo"]

NOT_GATHERED = "the run was closed with gather=False; export it first, or close it with gather=True"


def undo(run: Job, gather: bool) -> None:
    """Collective, after `finish`: model and optimizer are plain again. gather: whether whole tables come back.

    Raises:
        ValueError: something keeps a table on some rank from becoming a plain parameter. Nothing was changed.
    """
    with torch.no_grad(), run.transport.unrecorded():
        if gather:
            _refuse_fixed(run)
        found = run.whole(gather)
        run.hooks.close()
        _put_back(run.model, run.optimizer, found, {name: table.parameter for name, table in run.tables.items()})
        if not gather:
            refuse_reads(run.tables.values(), run.optimizer, NOT_GATHERED)


def give_up(run: Job, why: str) -> None:
    """Stops at once; asks nobody. What is under way, or with other ranks, is lost."""
    run.hooks.close()
    refuse_reads(run.tables.values(), run.optimizer, why)


@contextmanager
def begun_anew(run: Job, begin: Callable[[], None]) -> Iterator[None]:
    """Collective. Inside, model and optimizer are plain, and may be given other values."""
    undo(run, gather=True)
    yield
    begin()


def copies(run: Job) -> dict[str, WholeParameter]:
    """Collective: of every parameter, where its newest values may be with other ranks between steps."""
    with run.rest() as rest:
        state = rest["optimizer"]["state"]
        return {
            name: WholeParameter(p.detach().clone(), state.get(name, {})) for name, p in run.model.named_parameters()
        }


@contextmanager
def rollback_on_error(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After an error inside, parameters and buffers are what they were, on the meta device too, and the optimizer holds
    them and the state that it held. So is torch's random state. Values that were written to in place stay written."""
    plain = {name: p for name, p in model.named_parameters() if not isinstance(p, TableHandle)}
    before = {name: WholeParameter(parameter.data, {}) for name, parameter in plain.items()}
    held = [(group, list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    stream = torch.get_rng_state()
    try:
        yield
    except BaseException:
        _put_back(model, optimizer, before, {})
        for module, named in buffers:
            module._buffers.update(named)
        torch.set_rng_state(stream)
        for group, parameters in held:
            group["params"][:] = parameters
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def _put_back(
    model: nn.Module, optimizer: Optimizer, found: Mapping[str, WholeParameter], stand_ins: Mapping[str, Tensor]
) -> None:
    """stand_ins: what the optimizer holds in the place of parameters."""
    parameters = dict(model.named_parameters())
    for name, (values, state) in found.items():
        parameter = parameters[name]
        if isinstance(parameter, TableHandle) or parameter.is_meta != values.is_meta:
            become(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
        else:
            parameter.data = values
        other = stand_ins.get(name, parameter)
        for group in optimizer.param_groups if other is not parameter else ():
            group["params"][:] = [parameter if there is other else there for there in group["params"]]
        optimizer.state.pop(other, None)
        if state:
            optimizer.state[parameter] = dict(state)


def _refuse_fixed(run: Job) -> None:
    handles = {name: one for name, one in run.model.named_parameters() if isinstance(one, TableHandle)}
    if not handles:
        return
    trouble = FirstError("close")
    with trouble.kept():
        for name, handle in handles.items():
            if fixed := why_fixed(handle):
                raise ValueError(f"{name} cannot be a plain parameter again: {fixed}, then close once more")
    trouble.agree(run.transport)
