"""The cases: the large tables Parallax was made for, a dense model, and the four workloads of the package."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.workloads import language_model, recommender, translation, vision
from benchmarks.measuring.model import LanguageModel, Sizes, batches, seeded_model
from benchmarks.peers.case import Batch, Case
from benchmarks.peers.sparse import sparse_bags, sparse_lstm

TORCHREC = ("torchrec", "torchrec_scrambled", "torchrec_by_hand")
BY_ROW = ("ddp_sparse", "deepspeed_0_sparse", "horovod_sparse", "horovod_merged")
WHOLE = ("ddp", "fsdp2", "zero_redundancy", "deepspeed_0", "deepspeed_2", "deepspeed_3", "horovod")
MOST_SECONDS = 5.0  # of a step that is still measured
LAYERS, WIDTH, SAMPLES = 10, 1000, 448


def lm(sizes: Sizes, workers: int, mbit: float, folder: Path) -> Case:
    """The language model (`measuring/model.py`) under plain SGD; its start lies in a file that all ranks map.

    Args:
        folder: where rank 0 has put the start by `write_start`.
    """
    whole_bytes = 2 * sizes.table_bytes * (workers - 1) / workers
    seconds = whole_bytes * 8 / 1e6 / mbit if mbit else 0.0
    why = f"sends whole tables: {whole_bytes / 1e9:.2f} GB a worker and step, {seconds:.0f} s at {mbit:g} Mbit/s"
    return Case(
        name=f"lm, V {sizes.vocabulary}, D {sizes.features}",
        model=partial(_from_file, sizes, folder, False, True),
        sparse_model=partial(_from_file, sizes, folder, True, True),
        borrowed=partial(_from_file, sizes, folder, False, False),
        loss=_own_loss,
        draw=partial(batches, sizes),
        samples=sizes.sentences * sizes.words,
        unit="words",
        kind=torch.optim.SGD,
        options={"lr": 0.1},
        unfused_options={"lr": 0.1},
        tables=("inputs.weight", "outputs.weight"),
        refused=dict.fromkeys(WHOLE, why) if seconds > MOST_SECONDS else {},
    )


def write_start(sizes: Sizes, folder: Path) -> None:
    torch.save(seeded_model(sizes, sparse=False).state_dict(), _start_of(sizes, folder))


def perceptron(mbit: float, workers: int, folder: Path, small: bool) -> Case:
    """A multi-layer perceptron whose all-reduce takes about as long as its compute with two workers at 1 Gbit/s."""
    width, samples = (8, 4) if small else (WIDTH, SAMPLES)
    model = partial(_seeded, partial(_layers, width))
    return Case(
        name=f"perceptron, {LAYERS} x {width} x {width}",
        model=model,
        sparse_model=model,
        borrowed=model,
        loss=_distance,
        draw=partial(_noise, width, samples),
        samples=samples,
        unit="samples",
        kind=torch.optim.SGD,
        options={"lr": 0.05},
        unfused_options={"lr": 0.05},
        tables=(),
        refused=dict.fromkeys((*BY_ROW, *TORCHREC), "nothing is read by row"),
    )


def workloads() -> Mapping[str, Callable[[float, int, Path, bool], Case]]:
    """By name: (Mbit/s, workers, folder, small) -> the workload with its own optimizer."""
    lazy = "its optimizer leaves rows without gradient where they are: another training than this Adam"
    refusing = "torch's Adam refuses sparse gradients"
    by_row = dict.fromkeys(BY_ROW, refusing) | dict.fromkeys(TORCHREC, lazy)
    no_tables = dict.fromkeys((*BY_ROW, *TORCHREC), "nothing is read by row")
    bags = dict.fromkeys(TORCHREC, "bags are summed by the owners of rows: see torchrec_bags")
    unwritten = dict.fromkeys(TORCHREC, "not written for this model; lm8 is the same case in large")
    return {
        "language_model": partial(
            _workload, language_model, {"batch_size": 16, "negatives": 512}, sparse_lstm, unwritten
        ),
        "translation": partial(_workload, translation, {"batch_size": 8}, None, by_row),
        "recommender": partial(_workload, recommender, {"rows": 200_000}, sparse_bags, bags),
        "vision": partial(_workload, vision, {"norm": "group", "batch_size": 16}, None, no_tables),
    }


def _workload(
    module: Any,
    options: Mapping[str, Any],
    sparse: Callable[[nn.Module], nn.Module] | None,
    refused: Mapping[str, str],
    *_where: Any,
) -> Case:
    small = _where[-1]
    chosen = module.workload(**(module.SMALL if small else options))
    model = partial(_seeded, chosen.model)
    sparse_model = (lambda: sparse(model())) if sparse else model
    example = chosen.optimizer([nn.Parameter(torch.zeros(1))])
    unfused = {"fused": False} if isinstance(example, torch.optim.Adagrad) else {}
    return Case(
        name=chosen.name,
        model=model,
        sparse_model=sparse_model,
        borrowed=model,
        loss=chosen.loss,
        draw=partial(_epochs, chosen, _where[1]),
        samples=chosen.samples(next(chosen.batches("train", 0, _where[1], 0))),
        unit=chosen.unit,
        kind=type(example),
        options=example.defaults,
        unfused_options=example.defaults | unfused,
        tables=tuple(f"{name}.weight" for name, m in sparse_model().named_modules() if getattr(m, "sparse", False)),
        refused=refused,
    )


def _epochs(workload: Any, workers: int, rank: int) -> Iterator[Batch]:
    for epoch in count():
        yield from workload.batches("train", rank, workers, epoch)


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def _layers(width: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)])


def _noise(width: int, samples: int, rank: int) -> Iterator[Batch]:
    """The same batch at every step: drawing would cost time that is nobody's exchange."""
    stream = torch.Generator().manual_seed(rank)
    batch = torch.randn(samples, width, generator=stream), torch.randn(samples, width, generator=stream)
    while True:
        yield batch


def _distance(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    value: Tensor = model(*batch)
    return value


def _start_of(sizes: Sizes, folder: Path) -> Path:
    return folder / f"start_{sizes.vocabulary}x{sizes.features}.pt"


def _from_file(sizes: Sizes, folder: Path, sparse: bool, own: bool) -> LanguageModel:
    start = torch.load(_start_of(sizes, folder), mmap=True)
    with torch.device("meta"):
        model = LanguageModel(sizes, sparse)
    model.load_state_dict({name: value.clone() if own else value for name, value in start.items()}, assign=True)
    return model
