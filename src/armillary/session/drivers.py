"""Who takes a plan's steps: drivers, by the name that the entry of its schedule gives (`Method.step_mode`).

A driver says what speaks against a plan, and makes the engine that a `Run` asks for everything. A file on a shelf that
brings a schedule may bring its driver with it, as it is imported:

    DRIVERS.register("my_driver", Driver(misfit=..., begin=...))
    SCHEDULES.register("my_schedule", Method(..., step_mode="my_driver"))

A change to a model and its optimizer that is made whole or not at all.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.plans.plan import Plan
from armillary.plans.registry import Registry
from armillary.schedules.method import OWNED_LOOP, PARAMETER_SERVER, USER_LOOP
from armillary.schedules.registry import SCHEDULES, options_of
from armillary.session.data_check import FirstBatches
from armillary.session.hooks_engine import UserLoop
from armillary.session.hooks_state import units_of
from armillary.session.job import Job, TrainJob
from armillary.session.owners_engine import OwnersLoop
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.schedule_validation import owned_misfit, pushed_misfit
from armillary.session.validation import refuse_on_every_rank, why_not_apart, why_unfit
from armillary.tables.handle import TableHandle, become
from armillary.tables.meta_init import begin_optimizer_state, materialise
from armillary.tables.optimizers import members
from armillary.transport.agreement import begin_alike
from armillary.transport.transport import Transport

__all__ = ["DRIVERS", "Driver", "driver_of", "open_plan", "rollback_on_error"]


@dataclass(frozen=True)
class Driver:
    """
    Args:
        misfit: (plan, job, transport) -> what speaks against the plan on this rank, with its remedy; empty if nothing
            does. Asks nobody; model and optimizer stay as they were.
        begin: (plan, job, transport, rows) -> the plan at work, from rank 0's values. rows: this rank's part of each
            table that is still on the meta device, by name. After an error model and optimizer are made as they were.
    """

    misfit: Callable[[Plan, TrainJob, Transport], str]
    begin: Callable[[Plan, TrainJob, Transport, Mapping[str, Tensor]], Job]


DRIVERS: Registry[Driver] = Registry("driver", __name__)


def driver_of(plan: Plan) -> Driver:
    """
    Raises:
        ValueError: nobody registered the driver that the plan's schedule names.
    """
    return DRIVERS[SCHEDULES[plan.schedule.name].step_mode]


@contextmanager
def rollback_on_error(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """After an error inside, parameters are what they were, and the optimizer holds them and the state that it held.
    Values that were written to in place stay written."""
    plain = [parameter for parameter in model.parameters() if not isinstance(parameter, TableHandle)]
    held = [(parameter, parameter.data, parameter.requires_grad) for parameter in plain]
    groups = [(group, list(group["params"])) for group in optimizer.param_groups]
    state = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter, values, requires_grad in held:
            if isinstance(parameter, TableHandle):
                become(parameter, nn.Parameter(values, requires_grad))
        for group, params in groups:
            group["params"][:] = params
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def open_plan(plan: Plan, job: TrainJob, transport: Transport) -> Job:
    """Collective: the plan at work, by the driver that its schedule names.

    Raises:
        ValueError: it does not fit, on every rank; model and optimizer are as they were.
    """
    driver, model = driver_of(plan), job.model
    complaint = _other_nodes(plan, transport) or driver.misfit(plan, job, transport)
    refuse_on_every_rank("attach", plan, complaint, transport, job.options)
    rows = materialise(model, job.optimizer, plan, transport)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    begin_alike({name: tensor for name, tensor in tensors.items() if name not in rows}, transport)
    with rollback_on_error(model, job.optimizer):
        return driver.begin(plan, job, transport, rows)


def _other_nodes(plan: Plan, transport: Transport) -> str:
    """That those connections are made for other nodes than the plan's, with the remedy; empty if they are not."""
    wanted, there = plan.workers_per_node, transport.place.workers_per_node
    if wanted == there:
        return ""
    return (
        f"the transport given has nodes of {there}, the plan wants nodes of {wanted}; make it with "
        f"Transport(workers_per_node={wanted})"
    )


def _user_misfit(plan: Plan, job: TrainJob, transport: Transport) -> str:
    trainable = {name: p for name, p in job.model.named_parameters() if p.requires_grad}
    for one in members(job.optimizer):
        begin_optimizer_state(one)
    return why_unfit(plan, trainable, job.optimizer, transport.place.workers) or why_not_apart(plan, job)


def _user_loop(plan: Plan, job: TrainJob, transport: Transport, rows: Mapping[str, Tensor]) -> Job:
    first = FirstBatches(transport, job.check_data)
    units = units_of(plan, job, transport, first, rows)
    try:
        return UserLoop(plan, job, units, first)
    except BaseException:
        units.executor.release()
        raise


def _owned_misfit(plan: Plan, job: TrainJob, transport: Transport) -> str:
    return owned_misfit(plan, job, transport.place.workers) or _no_road(plan, job.model, transport)


def _owned_loop(plan: Plan, job: TrainJob, transport: Transport, _: Mapping[str, Tensor]) -> Job:
    if options_of(plan).method.is_cut:
        transport.open_lanes()
    return OwnedLoop(plan, job, transport)


def _no_road(plan: Plan, model: nn.Module, transport: Transport) -> str:
    """That stages cannot send to one another from where they are, with the remedy; empty if they can."""
    away = {parameter.device.type for parameter in model.parameters()} - {"cpu", "meta"}
    if (
        not options_of(plan).method.is_cut
        or transport.place.workers == 1
        or all(("world", device) in transport.groups for device in away)
    ):
        return ""
    device = min(away)
    return (
        f"schedule: {plan.schedule.name} sends activations from rank to rank, and gloo carries no messages of {device}"
        f" (it ends the process); start the process group with backend 'cpu:gloo,{device}:nccl' and a device for every"
        " rank, or leave it to Armillary; or train on the CPU"
    )


def _owners_loop(plan: Plan, job: TrainJob, transport: Transport, _: Mapping[str, Tensor]) -> Job:
    return OwnersLoop(plan, job, transport)


DRIVERS.register(USER_LOOP, Driver(_user_misfit, _user_loop))
DRIVERS.register(OWNED_LOOP, Driver(_owned_misfit, _owned_loop))
DRIVERS.register(PARAMETER_SERVER, Driver(pushed_misfit, _owners_loop))
