"""Runs whose schedule owns the loop, as tests of sessions begin them."""

from armillary.session.attach import attach


def started(made, model, optimizer, loss, example, *, seed=0, first_step=0):
    """Collective."""
    return attach(made, model, optimizer, loss=loss, example=example, seed=seed, first_step=first_step)


def rows_of(run):
    """Collective: on rank 0 tables (entry "") and their optimizer state by row, whole, by table and entry."""
    exported = run.export()
    engine = run._engine
    if exported is None:
        return {}
    found = {(name, ""): exported["model"][name] for name in engine.tables}
    for number, name in enumerate(engine.names):
        if name in engine.tables:
            entries = exported["optimizer"]["state"].get(number, {})
            found |= {(name, entry): rows for entry, rows in entries.items() if getattr(rows, "ndim", 0)}
    return found
