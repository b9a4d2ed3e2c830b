"""The example scripts: how many lines they change, and that they train on two ranks and go on after a restart."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(path):
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["transformer", "recommender", "resnet"])
def test_a_script_changes_no_more_lines_than_for_ddp(script):
    changed = load(EXAMPLES / "changed_lines.py").changed
    assert sum(changed(script, "with_armillary")) <= sum(changed(script, "ddp"))
    assert changed(script, "with_armillary")[0] < changed(script, "ddp")[0]


def trained(rank, workers, script, folder):
    """What the script says at its end, the first time and started once more in the same folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        main = load(EXAMPLES / script / "with_armillary.py").main
        return main(), main()
    finally:
        os.chdir(before)


@pytest.mark.parametrize(("script", "least", "most"), [
    ("transformer", 1, 300),  # perplexity of 500 words; the second start finds its last epoch done
    ("recommender", 0.7, 1),  # area under the curve
    ("resnet", 0.9, 1),  # accuracy
])  # fmt: skip
def test_a_script_trains_on_two_ranks(crew, tmp_path, script, least, most):
    (first, again), other = crew(2).run(trained, script, str(tmp_path))
    assert (first, again) == other
    assert least < first <= most
    assert again == (0.0 if script == "transformer" else pytest.approx(first, abs=0.1))


def ended(rank, workers, script, folder):
    """What the script's main returns, in a folder of its own."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return load(EXAMPLES / script).main()
    finally:
        os.chdir(before)


def test_a_cut_net_reads_digits_on_two_ranks(crew, tmp_path):
    first, other = crew(2).run(ended, "cut_and_serve.py", str(tmp_path))
    assert first > 0.85 and other == 0 and (tmp_path / "shards" / "index.json").exists()


def test_a_cut_transformer_sorts_digits_on_four_ranks_and_then_in_one_process(crew, tmp_path):
    first, *others = crew(4).run(ended, "tensor_parallel.py", str(tmp_path))
    assert first > 0.9 and others == [0, 0, 0]
    assert set(torch.load(tmp_path / "sorter.pt")) == {"model", "optimizer"}


def test_a_solver_and_its_training_run_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = load(EXAMPLES / "in_situ" / "train.py").main(steps=80)
    assert sum(losses[-5:]) / 5 < 0.9  # 1 is a model that says nothing changes
    assert (tmp_path / "in_situ.png").stat().st_size > 10_000
