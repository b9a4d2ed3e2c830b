"""What the user wants of a plan, whatever the prices say: honoured, or refused where it is asked.

One request goes through all of planning, so what is asked is written down, and checked, once. The names are those of
the keywords of `plan`, which says what each means.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from armillary.exchanges.exchange import DENSE, ROW
from armillary.planning.demand import PRICE, Constraint, refuse_other_allowed, refuse_with_rule, written
from armillary.planning.stage_costs import EdgeRequest, EdgeRequests
from armillary.plans.choice import Choice
from armillary.plans.plan import SIMULTANEOUS, Mean
from armillary.schedules.registry import SCHEDULES, owns_loop

__all__ = ["NO_CONSTRAINTS", "PlanRequest", "named"]

NO_CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType({})


@dataclass(frozen=True)
class PlanRequest:
    """
    Raises:
        ValueError: something is asked that is not written so, that there is not, or that does not go together.
    """

    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    lazy: Collection[str] = ()
    mean: Mean = "workers"
    schedule: Choice = SIMULTANEOUS
    prefetch: bool | None = False
    steps_by_run: bool = False
    micro_batches: int | None = None
    allow: Collection[str] = ()
    rule: str = PRICE
    edge: EdgeRequest = None
    edge_back: EdgeRequest = None

    def __post_init__(self) -> None:
        _refuse_misread(self.constraints, self.lazy)
        refuse_other_allowed(self.allow)
        constraints = {pattern: _without_alias(one) for pattern, one in self.constraints.items()}
        object.__setattr__(self, "constraints", constraints)
        object.__setattr__(self, "lazy", tuple(self.lazy))  # read more than once
        object.__setattr__(self, "allow", tuple(self.allow))
        priced = {
            f"schedule {self.schedule}": self.schedule != SIMULTANEOUS,
            "steps_by_run": self.steps_by_run,
            "micro_batches": self.micro_batches is not None,
            "allow": self.allow,
        }
        refuse_with_rule(self.rule, priced)
        self.edges.refuse_without_edges(self.schedule, SCHEDULES[self.schedule.name])

    @property
    def edges(self) -> EdgeRequests:
        return EdgeRequests(self.edge, self.edge_back)

    @property
    def owns_loop(self) -> bool:
        """Whether steps are taken by the schedule that is asked for."""
        return owns_loop(self.schedule)

    @property
    def deals_rows(self) -> bool:
        """Whether the schedule that is asked for keeps tables by row, with owners that answer at any time."""
        return SCHEDULES[self.schedule.name].placement.deals_rows


def named(asked: Choice | str) -> Choice:
    """The schedule that is asked for: as a choice or as text, by its name or an alias.

    Raises:
        ValueError: it is neither, or a text that is no choice.
    """
    if isinstance(asked, Choice | str):
        return SCHEDULES.named(asked)
    raise ValueError(
        f"plan: schedule is {asked!r}; want text, as in 'ring(slack=1)', or armillary.Choice('ring', {{'slack': 1}})"
    )


def _without_alias(constraint: Constraint) -> Constraint:
    """As it is written, without an alias of an exchange."""
    one = written(constraint)
    choice = one if isinstance(one, Choice) else Choice(one)
    meant = DENSE.named(ROW.named(choice))
    return one if meant == choice else meant


def _refuse_misread(constraints: object, lazy: object) -> None:
    """What is of another kind than is wanted, which would be taken for something else, or fail far from here.

    Raises:
        ValueError: one is; the message says how it is written.
    """
    if not isinstance(constraints, Mapping):
        raise ValueError(
            f"plan: constraints is {constraints!r}; want a mapping from names to what each shall have, as in "
            "{'emb.weight': 'row_sharded'}"
        )
    if isinstance(lazy, str):
        raise ValueError(f"plan: lazy is the text {lazy!r}, whose letters would be taken for names; write [{lazy!r}]")
