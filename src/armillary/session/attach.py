"""Puts a plan to work on a model and its optimizer; the user's training loop stays as it was.

`attach` refuses what it cannot carry out, before the first step: a plan for another model or number of workers, ranks
that hold different plans or models, an optimizer that mixes rows on a row-sharded table.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.exchanges.exchange import build_dense, row_exchanges
from armillary.facts.plan import Plan
from armillary.facts.topology import Topology, turn_bytes_on
from armillary.runtime.agreement import begin_alike
from armillary.runtime.hybrid.bucket import Bucket
from armillary.runtime.hybrid.executor import DenseUnit, Executor, RowUnit
from armillary.runtime.hybrid.row_update import Held
from armillary.runtime.transport import Transport
from armillary.session.materialise import begin_optimizer_state, materialise
from armillary.session.misfit import misfit, refuse_on_every_rank
from armillary.session.run import Run
from armillary.session.tables import make_table, put_handle

__all__ = ["attach"]


def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    check_order: bool = False,
    topology: Topology | None = None,
    transport: Transport | None = None,
) -> Run:
    """Carries out `plan`: from now on every backward ends with final gradients on every worker.

    Args:
        plan: made for this model and number of workers.
        model: an ordinary module on this rank; row-sharded tables in it become handles that are read by row. It may
            be on the meta device: then it gets its values here (see `materialise`).
        optimizer: over the model's parameters; keeps its class and options, and holds this rank's rows of the tables.
        scaler: the loop's GradScaler, if it has one: ranks then agree on skipped steps.
        check_order: compare every request across ranks before it is made (slow; finds ranks out of order).
        topology: the links, where they are known: what they carry quickly takes no turns on them. Changes nothing but
            time. Without, as on links of 100 Mbit/s.
        transport: connections to use, where several runs take turns: with the plan's nodes, the topology's turns if
            one is given, and made to check orders if this run shall. Without, the run has its own.

    Raises:
        ValueError: the plan, the model or the optimizer do not fit; the message says how to mend it.
    """
    if transport is None:
        transport = Transport(plan.workers_per_node, check_order, turn_bytes=turn_bytes_on(topology))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    begin_optimizer_state(optimizer)
    complaint = _other_way(plan, check_order, topology, transport)
    complaint = complaint or misfit(plan, trainable, optimizer, transport.place.workers)
    refuse_on_every_rank("attach", plan, complaint, transport)
    shards = materialise(model, optimizer, plan, transport)
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    begin_alike({name: tensor for name, tensor in tensors.items() if name not in shards}, transport)
    units: list[DenseUnit | RowUnit] = []
    held: dict[str, Held] = {}
    for group in plan.groups:
        if group.exchange.name in row_exchanges():
            name = group.parameters[0]
            table, held[name] = make_table(group, trainable[name], optimizer, transport, shards.get(name))
            put_handle(model.modules(), trainable[name], table)
            units.append(RowUnit(group.name, table))
        else:
            bucket = Bucket([trainable[name] for name in group.parameters], plan.mean == "weights")
            exchange = build_dense(group.exchange.name, **group.exchange.options)
            units.append(DenseUnit(group.name, bucket, exchange))
    executor = Executor(units, transport, plan.mean)
    return Run(plan, model, optimizer, executor, held, scaler)


def _other_way(plan: Plan, check_order: bool, topology: Topology | None, transport: Transport) -> str:
    """In what those connections are not made for this run, with the remedy; empty if they are."""
    turn_bytes = transport.pairwise.turn_bytes
    wanted = {
        "workers_per_node": plan.workers_per_node,
        "turn_bytes": turn_bytes if topology is None else topology.turn_bytes,
        "check_order": check_order,
    }
    there = {
        "workers_per_node": transport.place.workers_per_node,
        "turn_bytes": turn_bytes,
        "check_order": transport.check_order and check_order,  # one that checks unasked only takes longer
    }
    if wanted == there:
        return ""
    arguments = ", ".join(f"{name}={value}" for name, value in wanted.items())
    return f"the transport given has {there}, this run wants {wanted}; make it with Transport({arguments})"
