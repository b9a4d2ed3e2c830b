"""A profile on paper: tables with units.

The reader wants to see which parameters are read by row, how many of their rows a step touches, whether
owners would share the load, and which stages cost what.
"""

import math
from collections.abc import Sequence

from armillary.facts.parameter import ParameterFact
from armillary.facts.stage import StageFact
from armillary.facts.table import Page, Table

__all__ = ["bytes_text", "count_text", "enough_text", "profile_page", "seconds_text"]

WIDEST_NOTE = 60
ALPHA_LEGEND = "per worker and step; alpha is distinct rows / rows, merged over a node and over all workers"
LOAD_LEGEND = "load is the busiest owner's / mean, rows dealt modulo the workers, hashed, or in contiguous blocks"
DENSE_SHOWN = 20  # the other dense parameters, smaller ones, are summed up in one line


def bytes_text(count: float) -> str:
    """Bytes with three or four digits: 512 B, 31.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def enough_text(count: float) -> str:
    """The same, rounded up, so that as many bytes as it says are enough."""
    unit = 1.0
    while count / unit >= 1024:
        unit *= 1024
    return bytes_text(math.ceil(count / unit * 10 - 1e-9) / 10 * unit if unit > 1 else math.ceil(count))


def count_text(count: float) -> str:
    """A large count in SI units: 970, 1.2 k, 3.4 G."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 999.5:
            return f"{count:.3g} {unit}".rstrip()
        count /= 1000
    return f"{count:.3g} P"


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def profile_page(title: str, parameters: Sequence[ParameterFact], stages: Sequence[StageFact]) -> Page:
    """The title, then parameters and tables read by row, the largest first, then stages in the model's order."""
    largest = sorted(parameters, key=lambda fact: (-fact.bytes, fact.name))
    by_row = [fact for fact in largest if fact.rows is not None]
    sections = [title, *_parameters(largest)]
    if by_row:
        sections += [_rows(by_row), ALPHA_LEGEND, _loads(by_row), LOAD_LEGEND]
    return (*sections, *([_stages(stages)] if stages else []))


def _parameters(facts: Sequence[ParameterFact]) -> Page:
    plain = [fact for fact in facts if fact.reads == "dense" and not _note(fact) and not fact.refusals]
    folded = plain[DENSE_SHOWN:]
    hidden = {fact.name for fact in folded}
    rows = [
        (
            fact.name,
            " x ".join(map(str, fact.shape)) or "scalar",
            fact.dtype,
            bytes_text(fact.bytes),
            fact.reads,
            "-" if fact.arrival is None else str(fact.arrival),
            fact.stage or "(model)",
            _note(fact),
        )
        for fact in facts
        if fact.name not in hidden
    ]
    header = ("parameter", "shape", "dtype", "bytes", "read", "arrival", "stage", "note")
    more = f"and {len(folded)} smaller dense ones, {bytes_text(sum(fact.bytes for fact in folded))}"
    below = [more] if folded else []
    below += [f"{fact.name} not shardable: {reason}" for fact in facts for reason in fact.refusals]
    return Table(header, rows, (0, 2, 4, 6, 7)), *(["\n".join(below)] if below else [])


def _note(fact: ParameterFact) -> str:
    parts = [] if fact.requires_grad else ["frozen"]
    parts += [f"also {', '.join(fact.aliases)}"] if fact.aliases else []
    parts += [f"whole in {', '.join(fact.dense_readers)}"] if fact.reads == "both" else []
    parts += [f"padding row {fact.rows.padding_idx}"] if fact.rows and fact.rows.padding_idx is not None else []
    note = "; ".join(parts)
    return note if len(note) <= WIDEST_NOTE else note[: WIDEST_NOTE - 3] + "..."


def _rows(facts: Sequence[ParameterFact]) -> Table:
    rows = []
    for fact in facts:
        row = fact.rows
        assert row is not None, fact.name
        alphas = (
            f"{alpha:.4f}" if alpha >= 1e-3 else f"{alpha:.2g}"
            for alpha in (row.alpha_worker, row.alpha_node, row.alpha_union)
        )
        counts = (f"{row.rows:,}", bytes_text(row.row_bytes), f"{row.lookups:g}", f"{row.ids:,.0f}")
        rows.append((fact.name, *counts, *alphas))
    return Table(("read by row", "rows", "row", "lookups", "ids", "alpha worker", "node", "union"), rows)


def _loads(facts: Sequence[ParameterFact]) -> Table:
    rows = []
    for fact in facts:
        row = fact.rows
        assert row is not None, fact.name
        hottest = f"{row.hottest[0][0]} ({row.hottest[0][1]:.1%})" if row.hottest else "-"
        loads = (f"{load:.2f}" for load in (row.imbalance_modulo, row.imbalance_hashed, row.imbalance_blocks))
        rows.append((fact.name, *loads, hottest))
    return Table(("read by row", "load modulo", "hashed", "blocks", "hottest row"), rows)


def _stages(stages: Sequence[StageFact]) -> Table:
    rows = [
        (
            stage.name or "(model)",
            count_text(stage.forward_flops),
            bytes_text(stage.parameter_bytes),
            bytes_text(stage.activation_bytes),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
        )
        for stage in stages
    ]
    header = ("stage", "forward FLOP", "parameters", "activations", "forward", "backward")
    return Table(header, rows)
