"""On an accelerator the face trains what it trains on a CPU: two ranks that share it over gloo, one with NCCL alone."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import armillary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an accelerator: torch.cuda.is_available() is False"
    ),
]
DENSE = [
    "all_reduce", "quantize(bits=8)", "quantize(bits=4)", "one_bit", "top_k(keep=0.1)", "random_k(keep=0.1)",
    "threshold(sparsity=0.9)", "hadamard(quantize(bits=4))", "lower_precision(dtype=bfloat16)", "low_rank(rank=2)",
]  # fmt: skip
ROWS = [("owned_rows", False), ("owned_rows", True), ("gather_rows", False), ("sparse_all_reduce", False)]
WIDTH, ROW_COUNT = 16, 500


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(ROW_COUNT, WIDTH, mode="sum")
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids):
        return self.body(self.emb(ids))


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def words(device, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = (torch.rand(8, 3, generator=draw) ** 3 * ROW_COUNT).long()
    return ids.to(device), torch.randn(8, WIDTH, generator=draw, dtype=torch.float64).to(device)


def trained(device, rank, constraints, prefetch):
    torch.manual_seed(3)
    model = Words().double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = [words(device, seed) for seed in range(4)]
    run = armillary.parallelize(
        model, optimizer, batches, loss, constraints=constraints, prefetch=prefetch, report_after=None
    )
    for step in range(5):
        optimizer.zero_grad()
        loss(model, words(device, 100 * step + rank)).backward()
        optimizer.step()
    state = run.export()
    run.close()
    return None if state is None else state["model"]


def apart(rank, workers, constraints, prefetch=None):
    """Of every parameter, how far the accelerator's is from the CPU's."""
    host, device = (trained(kind, rank, constraints, prefetch) for kind in ("cpu", "cuda"))
    return host and {name: float((host[name] - device[name].cpu()).abs().max()) for name in host}


@pytest.mark.parametrize("dense", DENSE)
def test_a_dense_exchange_between_two_ranks(crew, dense):
    far = crew(2).run(apart, {"*": armillary.Choice.parse(dense)})[0]
    assert set(far) == {name for name, _ in Words().named_parameters()}
    assert max(far.values()) < 1e-12


@pytest.mark.parametrize(("rows", "prefetch"), ROWS)
def test_a_table_read_by_two_ranks(crew, rows, prefetch):
    far = crew(2).run(apart, {"emb.weight": armillary.Choice.parse(rows)}, prefetch)[0]
    assert max(far.values()) < 1e-12


def cut(rank, workers):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(4, WIDTH).cuda(), torch.randn(4, WIDTH).cuda()) for _ in range(3)]
    with pytest.raises(ValueError, match="gpipe") as caught:
        armillary.parallelize(model, optimizer, batches, loss, schedule=armillary.Choice("gpipe", {"micro_batches": 2}))
    return str(caught.value)


def test_messages_from_rank_to_rank_are_refused_on_gloo(crew):
    for told in crew(2).run(cut):
        assert "gloo carries no messages of cuda" in told


ALONE = """
import torch, torch.distributed as dist
from test_cuda_face import Words, apart
print(apart(0, 1, {}))
print(dist.get_backend_config())
"""


def test_one_rank_with_nccl(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    far, backends = ended.stdout.splitlines()[-2:]
    assert "nccl" in backends
    assert max(eval(far).values()) < 1e-12
