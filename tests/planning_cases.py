"""Models and machines for the tests of planning, written by hand."""

from armillary.planning.pricing import Assumptions
from armillary.plans import Link, ParameterFact, Profile, RowFacts, StageFact, Topology

# Nothing but links: no index work, memory of unlimited speed.
LINKS_ONLY = Assumptions(optimizer_slots=0, moves_quiet_rows=False, row_seconds=0.0, memory_bytes_per_second=1e300)


def machines(nodes=4, per_node=1, megabits=1000.0, latency=1e-4, memory=1 << 40, backend="gloo", inside=None):
    between = Link(latency, megabits * 1e6 / 8)
    return Topology(nodes, per_node, inside or between, between, memory, backend)


def row_facts(rows=100_000, width=128, alpha=0.01, union=None, workers=4, lookups=1.0, ids=None, node=None):
    return RowFacts(
        rows=rows,
        row_bytes=4 * width,
        lookups=lookups,
        ids=ids if ids is not None else max(1.0, 1.5 * alpha * rows),
        alpha_worker=alpha,
        alpha_node=alpha if node is None else node,
        alpha_union=min(1.0, alpha * workers * 0.7 if workers > 1 else alpha) if union is None else union,
        load_modulo=(1 / workers,) * workers,
        load_hashed=(1 / workers,) * workers,
        load_blocks=(1 / workers,) * workers,
    )


def table(name="table.weight", arrival=0, refusals=(), facts=None, requires_grad=True, aliases=(), **of_rows):
    facts = facts or row_facts(**of_rows)
    shape = (facts.rows, facts.row_bytes // 4)
    return ParameterFact(
        name, shape, "float32", facts.rows * facts.row_bytes, requires_grad, "rows",
        aliases=aliases, refusals=refusals, arrival=arrival, rows=facts,
    )  # fmt: skip


def dense(name="head.weight", elements=1000, arrival=0, reads="dense", dtype="float32", requires_grad=True):
    item_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    readers = ("mm",) if reads in ("dense", "both") else ()
    return ParameterFact(
        name, (elements,), dtype, item_bytes * elements, requires_grad, reads, dense_readers=readers, arrival=arrival
    )


def model(*parameters, workers=4, per_node=1, activations=0, seconds=0.0):
    stage = StageFact("", 0, 0, activations, seconds / 3, seconds * 2 / 3)
    return Profile(tuple(parameters), (stage,), batches=workers, workers=workers, workers_per_node=per_node)
