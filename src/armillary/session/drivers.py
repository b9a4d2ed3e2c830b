"""Who takes a plan's steps: drivers, by the name that the entry of its schedule gives (`Method.step_mode`).

A driver says what speaks against a plan, and makes the engine that a `Run` asks for everything. A file on a shelf that
brings a schedule may bring its driver with it, as it is imported:

    DRIVERS.register("my_driver", Driver(checks=..., begin=...))
    SCHEDULES.register("my_schedule", Method(..., step_mode="my_driver"))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from armillary.plans.plan import Plan
from armillary.plans.registry import Registry
from armillary.schedules.method import OWNED_LOOP, PARAMETER_SERVER, USER_LOOP
from armillary.schedules.registry import SCHEDULES, options_of
from armillary.session.data_check import FirstBatches
from armillary.session.hooks_engine import UserLoop
from armillary.session.hooks_state import units_of
from armillary.session.job import Job, TrainJob
from armillary.session.owners_engine import OwnersLoop
from armillary.session.plan_validation import OF_HOOKS, OF_OWNERS, OF_SCHEDULES, Check, PlanQuestion, why_unfit
from armillary.session.schedule_engine import OwnedLoop
from armillary.session.undo import rollback_on_error
from armillary.session.validation import refuse_on_every_rank
from armillary.tables.meta_init import begin_optimizer_state, materialise
from armillary.tables.optimizers import members
from armillary.transport.agreement import begin_alike
from armillary.transport.transport import Transport

__all__ = ["DRIVERS", "Driver", "driver_of", "open_plan"]


@dataclass(frozen=True)
class Driver:
    """
    Args:
        checks: of what may speak against a plan on this rank. They ask nobody.
        begin: (plan, job, transport, rows) -> the plan at work, from rank 0's values. rows: this rank's part of each
            table that is still on the meta device, by name. After an error model and optimizer are made as they were.
    """

    checks: Sequence[Check]
    begin: Callable[[Plan, TrainJob, Transport, Mapping[str, Tensor]], Job]


DRIVERS: Registry[Driver] = Registry("driver", __name__)


def driver_of(plan: Plan) -> Driver:
    """
    Raises:
        ValueError: nobody registered the driver that the plan's schedule names.
    """
    return DRIVERS[SCHEDULES[plan.schedule.name].step_mode]


def open_plan(plan: Plan, job: TrainJob, transport: Transport) -> Job:
    """Collective: the plan at work, by the driver that its schedule names.

    Raises:
        ValueError: it does not fit, on every rank; model and optimizer are as they were.
    """
    driver, model = driver_of(plan), job.model
    with rollback_on_error(model, job.optimizer):
        for one in members(job.optimizer):
            begin_optimizer_state(one)
        complaint = why_unfit(driver.checks, PlanQuestion(plan, job, transport))
        refuse_on_every_rank("attach", plan, complaint, transport, job.options)
        rows = materialise(model, job.optimizer, plan, transport)
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        begin_alike({name: tensor for name, tensor in tensors.items() if name not in rows}, transport)
        return driver.begin(plan, job, transport, rows)


def _user_loop(plan: Plan, job: TrainJob, transport: Transport, rows: Mapping[str, Tensor]) -> Job:
    first = FirstBatches(transport, job.check_data)
    return UserLoop(plan, job, units_of(plan, job, transport, first, rows), first)


def _owned_loop(plan: Plan, job: TrainJob, transport: Transport, _: Mapping[str, Tensor]) -> Job:
    if options_of(plan).method.is_cut:
        transport.open_lanes()
    return OwnedLoop(plan, job, transport)


def _owners_loop(plan: Plan, job: TrainJob, transport: Transport, _: Mapping[str, Tensor]) -> Job:
    return OwnersLoop(plan, job, transport)


DRIVERS.register(USER_LOOP, Driver(OF_HOOKS, _user_loop))
DRIVERS.register(OWNED_LOOP, Driver(OF_SCHEDULES, _owned_loop))
DRIVERS.register(PARAMETER_SERVER, Driver(OF_OWNERS, _owners_loop))
