"""A model attached on this rank beside its one-process reference, and how far they are apart."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from armillary.exchanges import row_exchanges
from armillary.plans import Choice, Group, Mesh, Plan, model_fingerprint
from armillary.session.attach import attach
from armillary.session.run import Run


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def fingerprint(model: nn.Module) -> str:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return model_fingerprint((name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)


def plan_of(
    model: nn.Module, workers: int, tables: Mapping[str, str], departures: tuple[str, ...] = (), **fields: Any
) -> Plan:
    """`tables`: name -> row exchange; everything else by one all_reduce."""
    rest = tuple(name for name, p in model.named_parameters() if p.requires_grad and name not in tables)
    groups = [Group("dense", rest, "replicated", Choice("all_reduce"))] if rest else []
    for name, exchange in tables.items():
        layout = row_exchanges()[exchange].make().placement
        groups.append(Group(name, (name,), layout, Choice(exchange), departures=departures))  # type: ignore[arg-type]
    return Plan(Mesh.of(data=workers), tuple(groups), fingerprint(model), **fields)


def pair(
    make: Callable[[], nn.Module],
    workers: int,
    tables: Mapping[str, str],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float64,
    scaler: Any = None,
    **fields: Any,
) -> tuple[Run, nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    """(run, attached model, its optimizer, reference model, its optimizer), the same weights in both."""
    torch.manual_seed(11)
    reference = make().to(dtype)
    model = copy.deepcopy(reference)
    mine, truth = optimizer(model.parameters()), optimizer(reference.parameters())
    run = attach(plan_of(model, workers, tables, **fields), model, mine, scaler=scaler, check_order=True)
    return run, model, mine, reference, truth


def own_part(run: Run, name: str, whole: Tensor) -> Tensor:
    """What this rank holds of a table whose global value is `whole`."""
    table = run._engine.tables[name]
    if not table.is_pulled:
        return whole
    return whole[table.ownership.ids(run.rank)] if run.rank in table.ownership.owners else whole[:0]


def differences(run: Run, model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Norm of the difference per parameter, relative to the parameter."""
    far = {}
    for name, want in reference.named_parameters():
        mine = own_part(run, name, want) if name in run._engine.tables else want
        got = run._engine.tables[name].shard if name in run._engine.tables else model.get_parameter(name)
        far[name] = float((got - mine).detach().norm() / (1e-30 + want.detach().norm()))
    return far


def close(run: Run, model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Ends the run everywhere; the differences above 1e-10, which should be none."""
    run._engine.finish()
    run._transport.close()
    return {name: value for name, value in differences(run, model, reference).items() if not value <= 1e-10}
