"""What the user demands of single parameters, honoured or refused with the reason; and Parallax's rule.

A demand names a parameter (or one of its aliases, or a glob pattern) and says a layout ("replicated", "row_sharded"),
an exchange by name, or an exchange with its options (a `Choice`).

By Parallax's rule how a parameter is read decides how its gradient travels. Source: Kim et al., Parallax (EuroSys
2019), section 3.1. Departures: "sparse" is how the parameter is read, not the type of its gradient (a tied table, read
by row and whole, is dense). Servers are the workers themselves. Nothing is said of nearly dense tables, whose threshold
the paper leaves open and the price finds.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import signature
from types import MappingProxyType

from armillary.codecs.registry import CODECS
from armillary.exchanges.exchange import build_dense, build_row, dense_exchanges, row_exchanges
from armillary.planning.demand import LAYOUTS, Constraint, refuse_unlisted
from armillary.plans.group import Layout
from armillary.plans.parcel import layout_of as flat
from armillary.plans.profile import ParameterFact, Profile
from armillary.plans.registry import Choice, why_not_given
from armillary.plans.topology import Topology

__all__ = [
    "LISTED",
    "PLAIN",
    "UNKNOWN",
    "allows",
    "coded_beside",
    "departs",
    "is_spread",
    "layout_of",
    "names_of",
    "needs_rows",
    "parallax",
    "plain",
    "refuse_unknown",
    "resolve",
    "why_not",
    "why_not_by_row",
]

# The exchange that a layout means where nobody says more.
PLAIN: Mapping[Layout, Choice] = MappingProxyType(
    {"replicated": Choice("all_reduce"), "row_sharded": Choice("owned_rows")}
)

# What a parameter goes by while nobody knows how it is read: the rows that some worker touched, or all.
UNKNOWN = Choice("sparse_all_reduce")

# What it goes by where its optimizer takes no gradient but one that lists its rows.
LISTED = Choice("sparse_all_reduce", {"keeps_rows": True})


def parallax(fact: ParameterFact) -> Choice:
    """`owned_rows` for a table that is only ever read by row and may live with owners; `all_reduce` for the rest."""
    return PLAIN["row_sharded" if fact.shardable else "replicated"]


def plain(name: str) -> Choice:
    """What a layout or an exchange means where it is only named."""
    return next((choice for layout, choice in PLAIN.items() if layout == name), Choice(name))


Against = Callable[[str, bool], str]


def nothing_against(parameter: str, is_spread: bool) -> str:
    """Nobody has tried the optimizer."""
    return ""


def layout_of(choice: Choice) -> Layout:
    """How an exchange lays the parameter out over the workers."""
    is_split = choice.name in row_exchanges() and build_row(choice.name, **choice.options).placement != "replicated"
    return "row_sharded" if is_split else "replicated"


def allows(constraint: Constraint | None, choice: Choice) -> bool:
    """Whether a choice is what the constraint demands; a name alone leaves the options open."""
    if constraint is None:
        return True
    if isinstance(constraint, Choice):
        return constraint == choice
    return constraint == (layout_of(choice) if constraint in LAYOUTS else choice.name)


def departs(constraint: Constraint) -> bool:
    """Whether what is demanded is not exact."""
    choice, entries = Choice(constraint) if isinstance(constraint, str) else constraint, dense_exchanges()
    if choice.name in row_exchanges():
        return bool(build_row(choice.name, **choice.options).codes.departs)
    return choice.name in entries and bool(entries[choice.name].departs)


def matching(pattern: str, parameters: Sequence[ParameterFact]) -> list[ParameterFact]:
    """The trainable ones that a name, alias or glob pattern means.

    Raises:
        ValueError: it means none, or only frozen ones.
    """
    found = [fact for fact in parameters if _means(pattern, fact)]
    if not found:
        names = [name for fact in parameters for name in (fact.name, *fact.aliases)]
        near = _near(pattern, names) or [one for one in names if pattern in one][:3]
        others = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names)}"
        raise ValueError(f"plan: {pattern!r} names no parameter of the model; {others}")
    if trained := [fact for fact in found if fact.requires_grad]:
        return trained
    raise ValueError(
        f"plan: {pattern!r} names only frozen parameters, which never travel; drop the constraint, or train "
        f"{', '.join(fact.name for fact in found)}"
    )


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Those that are about as like it as the most like one."""
    alike = {name: difflib.SequenceMatcher(None, name, pattern).ratio() for name in names}
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    return [name for name in close if alike[name] > alike[close[0]] - 0.1]


def _means(pattern: str, fact: ParameterFact) -> bool:
    return any(pattern == name or fnmatchcase(name, pattern) for name in (fact.name, *fact.aliases))


def resolve(
    constraints: Mapping[str, Constraint],
    profile: Profile,
    topology: Topology,
    against: Against = nothing_against,
) -> dict[str, Constraint]:
    """What is demanded of each parameter that something is demanded of. A name outweighs a pattern. A pattern that
    wants rows spread means those that can be, so {"*": "row_sharded"} spreads every table that can be.

    Args:
        against(parameter, is_spread): why its optimizer cannot have it by row, or spread by row; empty if it can.

    Raises:
        ValueError: a constraint names no parameter, is unknown, contradicts another, or cannot be honoured.
    """
    named: dict[str, tuple[bool, str, Constraint]] = {}
    for pattern, constraint in constraints.items():
        refuse_unknown(pattern, constraint)
        _refuse_more_owners(pattern, constraint, topology)
        for fact in _able(pattern, constraint, matching(pattern, profile.parameters), against):
            entry = (pattern in (fact.name, *fact.aliases), pattern, constraint)
            other = named.get(fact.name, entry)
            if other[0] == entry[0] and other[2] != constraint:
                both = _rows_coded(other[2], constraint) or _rows_coded(constraint, other[2])
                raise ValueError(
                    f"plan: {fact.name!r} is {other[2]} by {other[1]!r} and {constraint} by {pattern!r}; want one"
                    f"{f', or both in one: {both}' if both else ''}"
                )
            named[fact.name] = max(other, entry, key=lambda one: one[0])
    for name, (_, _, constraint) in named.items():
        _refuse_impossible(profile.parameter(name), constraint, against)
    return {name: constraint for name, (_, _, constraint) in named.items()}


def coded_beside(constraints: Mapping[str, Constraint], parameters: Sequence[ParameterFact]) -> frozenset[str]:
    """Tables that are to be coded only because a pattern for others means them too, as "*" does. Such a pattern means
    what does not travel by row: a table's rows say all of its gradient, and the whole of it in code may be hundreds of
    times as long."""
    found: set[str] = set()
    for pattern, constraint in constraints.items():
        meant = matching(pattern, parameters) if _codes(constraint) else []
        if any(not fact.shardable for fact in meant):
            found |= {fact.name for fact in meant if fact.shardable}
    named = {fact.name for pattern in constraints for fact in parameters if pattern in (fact.name, *fact.aliases)}
    return frozenset(found - named)


def refuse_unknown(pattern: str, constraint: Constraint) -> None:
    """
    Raises:
        ValueError: it is no layout and no exchange, or the exchange refuses its options.
    """
    refuse_unlisted(pattern, constraint, (*dense_exchanges(), *row_exchanges()))
    if not isinstance(constraint, Choice):
        return
    is_row = constraint.name in row_exchanges()
    entry = (row_exchanges() if is_row else dense_exchanges())[constraint.name]
    if why := why_not_given(entry.make, constraint.options):
        nested = [_coding_rows(value) for value in constraint.options.values() if isinstance(value, Choice)]
        remedy = f"; to code rows, ask for {nested[0]}" if nested and nested[0] else ""
        raise ValueError(
            f"plan: {pattern!r}: {constraint.name} refuses options {dict(constraint.options)}: {why}{remedy}"
        )
    (build_row if is_row else build_dense)(constraint.name, **constraint.options)


def _coding_rows(codec: Choice) -> Choice | None:
    """Rows with owners, that travel by a codec there and back; None where rows cannot be written by it."""
    name, entry = next((name, entry) for name, entry in row_exchanges().items() if entry.coded_by)
    way = Choice(name, dict.fromkeys(entry.coded_by, codec))
    try:
        build_row(way.name, **way.options)
    except ValueError:
        return None
    return way


def _rows_coded(by_row: Constraint, coded: Constraint) -> Choice | None:
    """What gives a table owners and codes its rows, where the one constraint wants that and the other a codec."""
    named = coded if isinstance(coded, Choice) else Choice(coded)
    if not needs_rows(by_row) or named.name not in CODECS.all():
        return None
    its_own = signature(CODECS[named.name].make).parameters  # others are of the exchange that carries it
    return _coding_rows(Choice(named.name, {key: value for key, value in named.options.items() if key in its_own}))


def _refuse_more_owners(pattern: str, constraint: Constraint, topology: Topology) -> None:
    if not isinstance(constraint, Choice) or constraint.name not in row_exchanges():
        return
    owners = constraint.options.get(row_exchanges()[constraint.name].owner_option, 0)
    if not 0 <= owners <= topology.workers:
        raise ValueError(
            f"plan: {pattern!r} is to have {owners} owners among {topology.workers} workers; want 1 to "
            f"{topology.workers}, or 0 for all"
        )


def _able(pattern: str, constraint: Constraint, meant: list[ParameterFact], against: Against) -> list[ParameterFact]:
    """Those that the constraint can be honoured for, where it is for a pattern.

    Raises:
        ValueError: there is none.
    """
    if not needs_rows(constraint) or any(pattern in (fact.name, *fact.aliases) for fact in meant):
        return meant
    why = {fact.name: against(fact.name, is_spread(constraint)) for fact in meant if fact.shardable}
    if able := [fact for fact in meant if fact.shardable and not why[fact.name]]:
        return able
    reasons = "; ".join(f"{fact.name}: {why.get(fact.name) or why_not_by_row(fact)}" for fact in meant)
    raise ValueError(f"plan: nothing that {pattern!r} means can be {constraint} ({reasons}); drop the constraint")


def needs_rows(constraint: Constraint) -> bool:
    """Whether it can be honoured only for what is read by row."""
    name = constraint.name if isinstance(constraint, Choice) else constraint
    return name == "row_sharded" or name in row_exchanges()


def is_spread(constraint: Constraint) -> bool:
    """Whether it wants rows with owners, who step them."""
    name = constraint.name if isinstance(constraint, Choice) else constraint
    if isinstance(constraint, str) and constraint in LAYOUTS:
        return constraint == "row_sharded"
    return name in row_exchanges() and layout_of(plain(name) if isinstance(constraint, str) else constraint) != (
        "replicated"
    )


def _codes(constraint: Constraint) -> bool:
    """Whether gradients are to be rounded or thinned."""
    entry = dense_exchanges().get(constraint.name if isinstance(constraint, Choice) else constraint)
    return entry is not None and "lossy" in entry.departs


def why_not(fact: ParameterFact, choice: Choice) -> str:
    """Why a dense exchange cannot carry a parameter; empty where it can."""
    exchange = build_dense(choice.name, **choice.options)
    return exchange.refuses(flat([fact], exchange.align, exchange.is_guarded))


def _refuse_impossible(fact: ParameterFact, constraint: Constraint, against: Against) -> None:
    is_row = needs_rows(constraint)
    reason = why_not(fact, constraint) if isinstance(constraint, Choice) and not is_row else ""
    if reason:
        raise ValueError(f"plan: {fact.name!r} cannot be {constraint}: {reason}; drop the constraint for it")
    if is_row and fact.shardable and (why := against(fact.name, is_spread(constraint))):
        raise ValueError(
            f"plan: {fact.name!r} cannot be {constraint}: {why}; take an element-wise optimizer for it, or drop the "
            "constraint"
        )
    if isinstance(constraint, Choice) and is_row and fact.shardable:
        codes = build_row(constraint.name, **constraint.options).codes
        if reason := codes.refuses(fact.bytes // fact.shape[0], fact.bytes // fact.elements):
            raise ValueError(f"plan: {fact.name!r} cannot be {constraint}: {reason}; leave that option out for it")
    if is_row and not fact.shardable:
        raise ValueError(
            f"plan: {fact.name!r} cannot be {constraint}: {why_not_by_row(fact)}; it can be 'replicated' "
            f"({PLAIN['replicated']})"
        )


def why_not_by_row(fact: ParameterFact) -> str:
    """Why a parameter cannot be exchanged by row."""
    if fact.dense_readers:
        return f"it is read whole by {', '.join(fact.dense_readers)}"
    if fact.refusals:
        return "; ".join(fact.refusals)
    return "no batch read it" if fact.reads == "never" else "it is read whole by an operation"


def names_of(patterns: Iterable[str], parameters: Sequence[ParameterFact]) -> frozenset[str]:
    """Every trainable parameter that one of the patterns means."""
    return frozenset(fact.name for pattern in patterns for fact in matching(pattern, parameters))
