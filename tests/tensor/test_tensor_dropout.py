"""Inside a region distinct pieces are dropped differently, copies alike; checkpointing drops the same again."""

from unittest.mock import patch

import pytest
import torch
from cut_models import MODELS, TOKENS, WIDE, Own, Torchs, batch, loss
from test_tensor_ways import WORLDS
from torch import nn
from torch.utils.checkpoint import checkpoint

from armillary import tensor
from armillary.tensor import dropout, region


def masks(rank, world, way, mesh, fault):
    """(coordinates, what each of the first block's two dropouts let through)."""
    torch.manual_seed(0)
    part = tensor.cut(Own(dropout=0.5), region="blocks", way=way, mesh=mesh)
    found = []
    part.model.blocks[0].drop.register_forward_hook(lambda module, args, y: found.append((y != 0).flatten().tolist()))
    at = {name: part.mesh.get_local_rank(name) for name in part.mesh.mesh_dim_names}
    with patch.object(region, "seeded", fault or region.seeded):
        loss(part.model, batch(part.data_rank, 0, samples=4, tokens=8))
    return at, found


def alike_on_pieces(base, piece, device):
    return dropout.seeded(base, 0, device)


def alike(found, number):
    """Pairs of ranks that let the same through."""
    drawn = [one[number] for _, one in found]
    return {(a, b) for a in range(len(drawn)) for b in range(a) if drawn[a] == drawn[b]}


@pytest.mark.parametrize("way", WORLDS)
def test_pieces_differ_and_copies_are_alike(crew, way):
    found = crew(8).run(masks, way, WORLDS[way], None)
    copies = set()
    if way == "columns_rows":  # between blocks all ranks of a replica hold the same
        copies = {(a, b) for a in range(8) for b in range(a) if found[a][0]["data"] == found[b][0]["data"]}
    assert alike(found, 0) == copies and alike(found, 1) == set()


def test_a_fault_that_draws_alike_on_pieces_is_seen(crew):
    assert alike(crew(8).run(masks, "2d", WORLDS["2d"], alike_on_pieces), 0)


def drift(rank, world, name):
    """Weights that lie whole after steps with every kind of dropout, as bytes."""
    torch.manual_seed(0)
    model = (Own if name == "own" else Torchs)(dropout=0.3)
    part = tensor.cut(model, region=MODELS[name][1], way="columns_rows", mesh={"data": 1, "tensor": 4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, batch(0, step)).backward()
        optimizer.step()
    whole = [one for one in model.parameters() if one.shape == (WIDE,)] + [model.head.weight, model.embedding.weight]
    assert part.replicas == 1 and len(whole) > 5
    return [one.detach().numpy().tobytes() for one in whole]


@pytest.mark.parametrize("name", ["own", "torch's"])
def test_ranks_of_a_replica_stay_alike_under_dropout(crew, name):
    first, *others = crew(4).run(drift, name)
    assert all(one == first for one in others)


class Checkpointed(Own):
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def gradients(rank, world, kind):
    torch.manual_seed(0)
    part = tensor.cut(kind(dropout=0.5), region="blocks", way="2d", mesh={"row": 2, "column": 2})
    torch.manual_seed(7)
    loss(part.model, batch(0, 0)).backward()
    return [one.grad for one in part.model.parameters()]


def test_checkpointing_drops_the_same_again(crew):
    for plain, again in zip(crew(4).run(gradients, Own), crew(4).run(gradients, Checkpointed), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def apart(rank, world, what):
    torch.manual_seed(rank if what == "random streams" else 0)
    model = Own(dropout=0.5 if what == "random streams" else 0.0)
    model.load_state_dict({name: torch.ones_like(one) * 0.01 for name, one in model.state_dict().items()})
    nn.init.normal_(model.embedding.weight, generator=torch.Generator().manual_seed(0))
    part = tensor.cut(model, region="blocks", way="columns_rows", mesh={"tensor": world})
    try:
        loss(part.model, batch(rank if what == "batches" else 0, 0, tokens=TOKENS))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("what", ["batches", "random streams"])
def test_ranks_of_a_replica_with_other_data_or_seeds_are_told(crew, what):
    for told in crew(4).run(apart, what):
        assert f"ranks of one replica have different {what};" in told and "part.data_rank of part.replicas" in told
