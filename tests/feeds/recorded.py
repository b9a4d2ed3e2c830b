"""The truth of an ordered stream: a list of snapshots in the order of ids, and training in plain loops over it."""

import torch
from solver import snapshot


def listed(steps, ranks):
    """Recorded snapshots by (step, rank), as tensors."""
    found = []
    for step in range(steps):
        for rank in ranks:
            found.append({name: torch.as_tensor(value) for name, value in snapshot(step, rank).items()})
    return found


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def batches_of_all(rows, batch):
    """Each once, in order."""
    return [stacked(rows[at : at + batch]) for at in range(0, len(rows), batch)]


def batches_of_reservoir(rows, n, batch, fresh, seed):
    """Algorithm R over a list, drawn from the same generator as a stream's, one draw a snapshot and one a batch."""
    draw, held, told = torch.Generator().manual_seed(seed), [], []
    new = 0
    for seen, row in enumerate(rows):
        if len(held) < n:
            held.append(row)
        elif (at := int(torch.randint(seen + 1, (1,), generator=draw))) < n:
            held[at] = row
        new += 1
        if new >= fresh and len(held) >= min(batch, n):
            told.append(stacked([held[at] for at in torch.randperm(len(held), generator=draw)[:batch].tolist()]))
            new = 0
    if new:
        told.append(stacked([held[at] for at in torch.randperm(len(held), generator=draw)[:batch].tolist()]))
    return told


def model_of(dtype):
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def loss_of(model, batch):
    dtype = next(model.parameters()).dtype
    u = batch["u"].flatten(1).to(dtype) / 1000
    return (model(u) - batch["p"].to(dtype) / 10).square().mean()


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained(batches, dtype=torch.float32):
    """Parameters after one loop over them."""
    model = model_of(dtype)
    optimizer = optimizer_of(model)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


def trained_together(by_rank, dtype=torch.float64):
    """As `trained`, by the mean of the ranks' gradients."""
    model = model_of(dtype)
    optimizer = optimizer_of(model)
    for batches in zip(*by_rank, strict=True):
        optimizer.zero_grad()
        (sum(loss_of(model, batch) for batch in batches) / len(batches)).backward()
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]
