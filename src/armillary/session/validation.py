"""What speaks against a model and an optimizer, whatever the plan, and how all ranks hear what one complains of.

An open run's optimizer that has a part of its state only is refused where somebody asks for it (`refuse_state`). torch
would write that part without a word, and only a later job would find out.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from armillary.plans.plan import Plan, Trainable, model_fingerprint
from armillary.plans.plan_text import number_of
from armillary.profiler.unfit_model import unfit_model
from armillary.tables.optimizer_trial import wants_listed_rows
from armillary.tables.optimizers import kind_of, members
from armillary.transport.transport import Transport

__all__ = [
    "NOT_HELD",
    "dtype_of",
    "handed_in",
    "other_job",
    "other_workers",
    "refuse_on_every_rank",
    "refuse_other_models",
    "refuse_state",
    "refuse_unfit",
    "unheld",
]

TO_SAVE = "run.export() gives the whole, run.save(folder) writes it (every rank calls them)"
TO_LOAD = "run.load(path) takes a file of it, or load it before the run begins"


def refuse_state(optimizer: Optimizer, refuse: Callable[[Optimizer, str, str], None]) -> list[RemovableHandle]:
    """Until the handles are removed, calls refuse(optimizer, call, remedy) whenever somebody asks for the state, or
    gives one."""

    def asked(one: Optimizer) -> None:
        refuse(one, "state_dict", TO_SAVE)

    def given(one: Optimizer, state: dict[str, Any]) -> None:
        refuse(one, "load_state_dict", TO_LOAD)

    return [optimizer.register_state_dict_pre_hook(asked), optimizer.register_load_state_dict_pre_hook(given)]


NOT_HELD = "the optimizer does not hold it; freeze it, or add it"
SPREAD_BY_ITSELF = ("ZeroRedundancyOptimizer",)  # known by name, so that nothing is imported
NO_OPTIONS: Mapping[str, Any] = {}


def handed_in(model: nn.Module, optimizer: Optimizer) -> str:
    """What speaks against these, whatever the plan, with its remedy; empty if nothing does."""
    return unfit_model(model) or next(_of_optimizer(model, optimizer), "") or next(_unlisted(model, optimizer), "")


def _of_optimizer(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    if not any(parameter.requires_grad for parameter in names):
        yield (
            "no parameter of the model requires a gradient, so there is nothing to train; call requires_grad_(True) on "
            "what is to learn, or use the model as it is"
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind, seen = kind_of(optimizer), set[Tensor]()
    if strangers := [tuple(parameter.shape) for parameter in held if parameter not in names]:
        yield (
            f"{len(strangers)} of the {len(held)} tensors of {kind} are not parameters of the model, the first of "
            f"shape {strangers[0]}; make it over model.parameters(), and put what else learns into one nn.ModuleDict"
        )
    for one in members(optimizer):
        if any(base.__name__ in SPREAD_BY_ITSELF for base in type(one).__mro__):
            inner = getattr(getattr(one, "optim", None), "__class__", type(one)).__qualname__
            yield (
                f"{type(one).__name__} spreads state over the ranks and sends parameters by itself, so nobody else can "
                f"plan, save or load it; hand in the optimizer inside it: torch.optim.{inner}(model.parameters(), ...)"
            )
    for parameter in held:
        if parameter in seen:
            yield f"{kind} holds {names[parameter]!r} twice, and would step it twice; give it each parameter once"
        seen.add(parameter)


class _Built(NamedTuple):
    """A parameter as a rank built it: its name; shape, dtype and whether it is frozen."""

    name: str
    form: str


def refuse_other_models(who: str, model: nn.Module, transport: Transport) -> None:
    """Collective, before anything is measured or planned: ranks must have built the same model.

    Raises:
        ValueError: they have not. On every rank; the message names the first parameter that differs.
    """
    mine = [_Built(name, _form(parameter)) for name, parameter in model.named_parameters()]
    everyones = transport.share(hashlib.sha256(repr(mine).encode()).digest())
    if len(set(everyones)) == 1:
        return
    first, *others = transport.share(mine)
    for rank, theirs in enumerate(others, start=1):
        for number in range(max(len(theirs), len(first))):
            one, other = (held[number] if number < len(held) else None for held in (theirs, first))
            if one != other:
                raise ValueError(
                    f"{who}: ranks built different models: parameter {number} is {_said(one)} on rank {rank} and "
                    f"{_said(other)} on rank 0; build the same model on every rank, in the same order"
                )


def _form(parameter: Tensor) -> str:
    return f"{tuple(parameter.shape)} {dtype_of(parameter)}{'' if parameter.requires_grad else ', frozen'}"


def _said(held: _Built | None) -> str:
    return "nothing" if held is None else f"{held.name} {held.form}"


def _unlisted(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Parameters whose gradients do not list rows, though their optimizer takes no others."""
    listed = {one.weight for one in model.modules() if getattr(one, "sparse", False) and hasattr(one, "weight")}
    plain = {one: name for name, one in model.named_parameters() if one not in listed}
    plain = {one: name for one, name in plain.items() if name.rpartition(".")[0] not in _bare(model)}
    for one in members(optimizer):
        for group in one.param_groups:
            found = [plain[parameter] for parameter in group["params"] if parameter in plain]
            if found and wants_listed_rows(one, group):
                yield (
                    f"{type(one).__name__} cannot step a matrix with a plain dense gradient, which is what {found[0]} "
                    "gets; make its module with sparse=True, or take one that can, such as Adagrad or Adam"
                )


def _bare(model: nn.Module) -> set[str]:
    """Paths of modules of the user's own, which may read a parameter by F.embedding(..., sparse=True)."""
    return {path for path, module in model.named_modules() if not type(module).__module__.startswith("torch.nn.")}


def unheld(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Trainable parameters that no optimizer steps: one may be given them later, but until then none goes by row."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, one in model.named_parameters() if one.requires_grad and one not in held]


def refuse_unfit(who: str, complaint: str, transport: Transport) -> None:
    """Collective: raises on every rank what any complains of.

    Raises:
        ValueError: a rank complains.
    """
    for rank, theirs in enumerate(transport.share(complaint)):
        if theirs:
            raise ValueError(f"{who}: rank {rank}: {theirs}")


def other_workers(plan: Plan, workers: int) -> str:
    """That the plan is for another number of workers, with the remedy; empty if it is not."""
    if plan.workers == workers:
        return ""
    return (
        f"the plan is for {number_of(plan.workers, 'worker')}, this job has {workers}; plan again, or launch with "
        f"--nproc-per-node {plan.workers}"
    )


def other_job(plan: Plan, trainable: Mapping[str, nn.Parameter], workers: int) -> Iterator[str]:
    """What says that the plan was made for another model or another number of workers, whatever its schedule."""
    if complaint := other_workers(plan, workers):
        yield complaint
    missing, extra = sorted(set(plan.parameters) - set(trainable)), sorted(set(trainable) - set(plan.parameters))
    if missing or extra:
        yield (
            f"the plan was made for another model: it has {missing or 'nothing'} which this one does not train and "
            f"misses {extra or 'nothing'}; plan again for this model"
        )
        return
    mine = model_fingerprint(Trainable(name, tuple(p.shape), dtype_of(p)) for name, p in trainable.items())
    if mine != plan.model_fingerprint:
        yield (
            f"the plan was made for model {plan.model_fingerprint}, this is {mine}: the same names with other shapes "
            "or dtypes; plan again for this model"
        )


def refuse_on_every_rank(
    who: str, plan: Plan, complaint: str, transport: Transport, options: Mapping[str, Any] = NO_OPTIONS
) -> None:
    """Shares complaints, plans and options first: a rank that fitted would else wait for the one that did not.

    Raises:
        ValueError: a rank complains, or ranks hold different plans or options.
    """
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()[:12]
    everyones = transport.share((complaint, digest, dict(options)))
    for rank, (theirs, _, _) in enumerate(everyones):
        if theirs:
            raise ValueError(f"{who}: rank {rank}: {theirs}")
    if len({digest for _, digest, _ in everyones}) > 1:
        listing = ", ".join(f"rank {rank}: {digest}" for rank, (_, digest, _) in enumerate(everyones))
        raise ValueError(
            f"{who}: ranks hold different plans ({listing}); plan on one rank and give all of them the file"
        )
    if any(theirs != everyones[0][2] for _, _, theirs in everyones):
        listing = ", ".join(f"rank {rank}: {theirs}" for rank, (_, _, theirs) in enumerate(everyones))
        raise ValueError(f"{who}: ranks give different options ({listing}); give every rank the same")


def dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
