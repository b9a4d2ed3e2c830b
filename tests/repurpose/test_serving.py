"""Ranks against the one plain model, and what they say where something is wrong."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from nets import WORKERS, block_diagonal, closeness, convolutions, cut, data, perceptron

from armillary import repurpose
from forked import Job

MODELS = {"Linear": perceptron, "Conv2d": convolutions}


def batches_of(model, sizes):
    return [data(model, many=1, size=max(sizes))[0][:size] for size in sizes]


def served(rank, workers, folder, batches):
    """Outputs of a run, and how many values crossed in each of its all-to-alls, as torch was asked."""
    crossed, asked = [], dist.all_to_all_single

    def counting(into, leaving, arriving, sent, group):
        assert leaving.numel() % max(len(leaving), 1) == 0 and len(leaving) == sum(sent) and len(into) == sum(arriving)
        crossed.append((leaving.numel(), sent[rank]))
        return asked(into, leaving, arriving, sent, group=group)

    dist.all_to_all_single = counting
    try:
        with repurpose.serve(folder) as run:
            outputs = [run(x if rank == 0 else None) for x in batches]
    finally:
        dist.all_to_all_single = asked
    return outputs, crossed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"inputs": "rank 0", "capacities": (0.2, 0.5, 0.3)}], ids=["spread", "rank 0"])
def test_ranks_give_what_the_plain_model_gives_and_send_what_was_printed(crew, tmp_path, name, options):
    model = MODELS[name]()
    shards = cut(model, **options)
    shards.save(tmp_path)
    batches = batches_of(model, (1, 7, 0))
    found = crew(WORKERS).run(served, str(tmp_path), batches)
    for x, y in zip(batches, found[0][0], strict=True):
        torch.testing.assert_close(y, shards.model()(x), rtol=0, atol=1e-10)
    assert [outputs for outputs, _ in found[1:]] == [[None] * 3] * (WORKERS - 1)
    printed = [row.sent for row in shards.cut.traffic()]
    exchanged = [values for values in printed if values]  # the rest makes no request
    assert [len(crossed) for _, crossed in found] == [3 * len(exchanged)] * WORKERS
    wanted = [values * len(x) for x in batches for values in exchanged]
    assert [sum(many for many, _ in each) for each in zip(*(crossed for _, crossed in found))] == wanted
    assert not any(own for _, crossed in found for _, own in crossed)


def test_layers_that_nobody_needs_anything_for_make_no_request(crew, tmp_path):
    model = block_diagonal()
    batches = [torch.randn(250, 32, dtype=torch.float64) for _ in range(2)]
    shards = repurpose.cut(model, 4, batches, closeness(model, batches), drop=1e-3)
    shards.save(tmp_path)
    found = crew(4).run(served, str(tmp_path), batches[:1])
    assert [len(crossed) for _, crossed in found] == [2] * 4  # inputs from rank 0, outputs to it
    torch.testing.assert_close(found[0][0][0], shards.model()(batches[0]), rtol=0, atol=1e-10)


def test_neurons_whose_inputs_are_all_cut_are_constant(crew, tmp_path):
    """Also on a rank that is left without any column, and one without any neuron."""
    model = convolutions()
    shards = cut(model, drop=1e9)
    assert shards.curve[shards.chosen].sent < shards.curve[0].sent / 5
    shards.save(tmp_path)
    batches = batches_of(model, (3,))
    found = crew(WORKERS).run(served, str(tmp_path), batches)
    torch.testing.assert_close(found[0][0][0], shards.model()(batches[0]), rtol=0, atol=1e-10)


def refused(rank, workers, folder, x):
    told, joined = [], dist.group.WORLD
    with repurpose.serve(folder) as run:
        for given in (x[:, :5], x.float(), None, x):
            try:
                run(given if rank == 0 else None)
                told.append("served")
            except ValueError as error:
                told.append(str(error))
    try:
        run(x)
    except RuntimeError as error:
        told.append(str(error))
    return told, dist.group.WORLD is joined


def test_an_input_of_another_shape_is_refused_on_every_rank_and_the_next_is_served(crew, tmp_path):
    model = perceptron()
    cut(model).save(tmp_path)
    (first, is_joined), *others = crew(WORKERS).run(refused, str(tmp_path), data(model)[0])
    want = "repurpose: rank 0: want a torch.float64 tensor (batch, 12), got "
    assert first[:4] == [f"{want}torch.float64 (40, 5)", f"{want}torch.float32 (40, 12)", f"{want}NoneType", "served"]
    assert first[4].startswith("repurpose: this run is closed") and is_joined
    assert all("rank 0 gave something else" in text for told, _ in others for text in told[:3])
    assert all(told[3] == "served" for told, _ in others)


def opened(rank, workers, folders):
    told = []
    for folder in folders:
        try:
            repurpose.serve(folder if isinstance(folder, str) else folder[rank]).close()
        except ValueError as error:
            told.append(str(error))
    return told


def test_shards_that_do_not_fit_are_refused_on_every_rank(crew, tmp_path):
    model = perceptron()
    cut(model).save(tmp_path / "three")
    cut(model, workers=2).save(tmp_path / "two")
    cut(model).save(tmp_path / "broken")
    next((tmp_path / "broken").glob("rank-00001*")).unlink()
    three, two, broken = (str(tmp_path / name) for name in ("three", "two", "broken"))
    found = crew(WORKERS).run(opened, [two, broken, str(tmp_path / "nowhere"), three])
    assert all(told == found[0] for told in found) and len(found[0]) == 3
    assert f"{two} is saved for 2 ranks, the job has 3; start as many, or cut for as many" in found[0][0]
    assert found[0][1].startswith("rank 1: repurpose: ") and "cannot be read" in found[0][1]
    assert "holds no shards" in found[0][2]


def until_one_is_gone(rank, ranks, folder, x, signal_number):
    with repurpose.serve(folder, timeout_seconds=2) as run:
        run(x)
        if rank == 1:
            os.kill(os.getpid(), signal_number)
        begun = time.monotonic()
        try:
            run(x)
        except RuntimeError as error:
            print(f"{time.monotonic() - begun:.1f} {error}")
    assert not dist.is_initialized()


def test_a_rank_that_is_gone_is_named_on_the_others_within_10_seconds(tmp_path):
    """Killed, or stopped."""
    model = perceptron()
    cut(model).save(tmp_path)
    given = str(tmp_path), data(model)[0]
    for job in [Job(WORKERS, until_one_is_gone, *given, kind) for kind in (signal.SIGKILL, signal.SIGSTOP)]:
        ended = job.ended(stopped=(1,))
        for one in (ended[0], ended[2]):
            seconds, _, text = one.out.partition(" ")
            assert one.code == 0, one
            assert float(seconds) < 10 and ": rank 1; start the job again on every rank" in text, one


def test_one_process_serves_a_model_that_is_not_cut(tmp_path):
    model = perceptron()
    shards = cut(model, workers=1)
    shards.save(tmp_path)
    x = data(model)[0]
    with repurpose.serve(tmp_path) as run:
        torch.testing.assert_close(run(x), model(x).detach(), rtol=0, atol=1e-10)
    assert not dist.is_initialized()
