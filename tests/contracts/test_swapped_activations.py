"""Proof of the table of instructions: activations that wait in a file, by two instructions of a schedule's own."""

import os
import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import armillary
from armillary import schedules
from armillary.models.preserved_state import LiveBytes
from armillary.plans import Choice, Link, Topology
from armillary.schedules.gpipe import gpipe

BYTES_PER_SECOND = 1e9
KEPT, SWAPPED = "gpipe(micro_batches=4, points=[7])", "swapped(micro_batches=4, points=[7])"


def path_of(one):
    return Path(tempfile.gettempdir()) / f"activation {os.getpid()} {one.place}"


def swap_out(rank, one):
    torch.save(rank.activations[one.place].reads.apart.take(), path_of(one))


def swap_in(rank, one):
    rank.activations[one.place].reads.apart.put_back(torch.load(path_of(one)))
    path_of(one).unlink()


def moved(action, clock, one):
    nbytes = clock.play.plan.stages[one.stage].forecast.peak_bytes
    clock.wait(one, clock.carry_apart(one, "file", action, nbytes, nbytes / BYTES_PER_SECOND))


def in_file(one, held):
    return [schedules.StageMessage("activation in a file", *one.place)]


def here(one, held):
    return [schedules.saved(one)]


schedules.register_operation(
    "SWAP_OUT", schedules.Operation(swap_out, partial(moved, "write"), uses=here, makes=in_file)
)
schedules.register_operation("SWAP_IN", schedules.Operation(swap_in, partial(moved, "read"), uses=in_file, makes=here))


def swapped_or_kept(options, back="SWAP_IN"):
    """Kept is a single micro-batch, whose backward comes right behind its forward."""
    apart = schedules.Residency("swapped", "SWAP_OUT", back)
    return dict.fromkeys(range(options.stages), apart) if options.micro_batches > 1 else {}


@contextmanager
def shelf(residency=swapped_or_kept):
    before, made = dict(schedules.SCHEDULES.all()), lambda options: gpipe(options.stages, options.micro_batches)
    method = schedules.pipeline_method(table=made, notes=lambda planned: [])
    schedules.SCHEDULES.register("swapped", replace(method, residency=schedules.Residencies(residency)))
    try:
        yield
    finally:
        schedules.SCHEDULES._entries = before


def test_a_list_that_never_brings_an_activation_back_is_found():
    with shelf():
        assert "keeps its 3 rules" in armillary.check("swapped")
    with shelf(partial(swapped_or_kept, back="LOAD_BUFFERS")), pytest.raises(ValueError, match="saved activation"):
        armillary.check("swapped")


def loss(model, batch):
    return model(batch).square().mean()


def subject():
    torch.manual_seed(0)
    half = [nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)]
    model = nn.Sequential(*half, *deepcopy(half)).double()
    return model, [torch.randn(2048, 4, dtype=torch.float64) for _ in range(4)]


def trained(rank, world, folder, profile):
    """By schedule: its plan, what is simulated, the peak of the last step, weights. Half of the steps are resumed."""
    found, saved, machines = [], [], Topology(2, 1, Link(1e-4, 1e8), Link(1e-4, 1e8), 1 << 33)
    for text in (KEPT, SWAPPED):
        with shelf():
            made = armillary.plan(profile, machines, schedule=Choice.parse(text))
            model, batches = subject()
            for half in range(2):
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                with armillary.attach(made, model, optimizer, loss=loss, example=batches[0]) as run:
                    assert not half or run.load(saved[-1])["step"] == 2
                    run.step(batches)
                    with LiveBytes() as live:
                        live.mark()
                        run.step(batches)
                    saved.append(run.save(folder, loop={"step": 2}))
            played = armillary.simulate(made, profile, machines).played
        found.append((made, played, live.added_bytes, [one.detach().clone() for one in model.parameters()]))
    return found


def test_it_is_priced_simulated_and_trains_as_the_schedule_that_keeps_them(crew, tmp_path):
    profile = armillary.profile(*subject(), loss, workers=2)
    for (kept, plain, most, weights), (made, played, least, same) in crew(2).run(trained, str(tmp_path), profile):
        assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
        assert most - least == pytest.approx(kept.activation_bytes - made.activation_bytes, rel=0.05)
        lanes = [{(one.action, one.sent_bytes) for one in step.spans if one.lane == "file"} for step in (plain, played)]
        assert not lanes[0] and {action for action, _ in lanes[1]} == {"write", "read"}
        assert made.step_seconds - kept.step_seconds >= 2 * 4 * max(lanes[1])[1] / BYTES_PER_SECOND
