"""What tests of sessions train where a schedule owns the loop, how they begin such runs, and equality to the bit."""

import torch
from torch.nn import functional

from armillary.session.attach import attach


def optimizer_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decayed}], lr=0.02, weight_decay=0.1)


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def same(these, those):
    """Bit for bit, whatever nests the tensors."""
    if isinstance(these, torch.Tensor):
        return torch.equal(these, those)
    if isinstance(these, dict):
        return these.keys() == those.keys() and all(same(these[key], those[key]) for key in these)
    if isinstance(these, list | tuple):
        return len(these) == len(those) and all(map(same, these, those))
    return these == those


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
