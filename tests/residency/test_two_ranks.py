"""Held models under DDP and `parallelize`, the optimizer's state in the tier, beside the same loop that keeps all."""

import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

import armillary
from armillary import residency
from held_models import TRANSFORMER, adam, different, held_by, steps

RESIDENCIES = ["swap", "recompute", "keep", "swap", "recompute", "swap"]


def trained(rank, folder, way, when):
    """Weights, gradients and buffers after three steps. way: "ddp" or "parallelize"; when the model is held."""
    kind = TRANSFORMER
    model = kind.model()
    optimizer = adam(model)
    with ExitStack() as stack:
        held = None
        if when:
            plan = residency.hold(model, [kind.batch(0)], kind.loss, tier=folder).plan
            held = held_by(plan, RESIDENCIES, 2, model, folder, optimizer=optimizer)
        if when == "before":
            stack.enter_context(held)
        run, wrapped = None, model
        if way == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            run = stack.enter_context(armillary.parallelize(model, optimizer))
        if when == "after":
            stack.enter_context(held)
        found = steps(kind, wrapped, optimizer, None, rank)
        if run is not None:
            run.save(Path(folder) / f"checkpoints {when}")
            saved = {f"saved {name}": one for name, one in _saved(Path(folder) / f"checkpoints {when}")}
            assert any("exp_avg" in name for name in saved), saved.keys()
            found |= saved
    return {name.replace("module.", ""): one for name, one in found.items()}


def _saved(folder):
    """Tensors of a checkpoint, by name; none of its tables is cut by row."""
    (rest,) = Path(folder).rglob("rest.pt")

    def leaves(tree, path):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, torch.Tensor):
                yield f"{path}.{key}", value
            elif isinstance(value, dict | list | tuple):
                yield from leaves(value, f"{path}.{key}")

    return leaves(torch.load(rest, weights_only=False), "")


def compared(rank, workers, folder, way, whens):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = trained(rank, folder, way, "")
        return [different(trained(rank, folder, way, when), expected) for when in whens]


def test_under_ddp(crew, tmp_path):
    assert crew(2).run(compared, str(tmp_path), "ddp", ["before", "after"]) == [[[], []]] * 2


def test_under_parallelize_with_a_checkpoint_inside(crew, tmp_path):
    assert crew(2).run(compared, str(tmp_path), "parallelize", ["before", "after"]) == [[[], []]] * 2
