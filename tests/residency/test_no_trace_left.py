"""Nothing is left behind: no file after a kill in mid-step, no hook, thread or descriptor after `with`."""

import os
import threading
import time

import pytest
import torch
from torch import nn

from armillary import residency
from forked import forkserver
from held_models import KINDS, adam, held_by, steps

KIND = KINDS["convolution"]


def swapping(folder, tells):
    """Steps for ever on a slow tier; tells once the first bytes are on their way out."""
    torch.set_num_threads(1)
    model = KIND.model()
    batch = KIND.batch(0)
    plan = residency.hold(model, [batch], KIND.loss, tier=folder).plan
    held = held_by(plan, ["swap"] * 6, 2, model, folder, tier_bytes_per_second=1e6)
    with held:
        plain = held._tier.write

        def write(*args):
            tells.send("swapping")
            plain(*args)

        held._tier.write = write
        while True:
            KIND.loss(model, batch).backward()


def test_a_process_that_is_killed_while_it_swaps_leaves_no_file(tmp_path):
    context = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=swapping, args=(str(tmp_path), there), daemon=True)
    process.start()
    try:
        assert here.poll(30) and here.recv() == "swapping"
        assert tmp_path.as_posix() in open_files(process.pid), "the scratch file is not in the folder that was named"
        assert process.is_alive()
    finally:
        process.kill()  # SIGKILL: nothing of the process runs any more
        process.join()
    assert process.exitcode == -9
    assert os.listdir(tmp_path) == []


def open_files(process):
    """Paths that the descriptors of a process lead to, one a line."""
    folder = f"/proc/{process}/fd"
    return "\n".join(os.readlink(f"{folder}/{one}") for one in os.listdir(folder) if os.path.lexists(f"{folder}/{one}"))


def fail_inside(held, model, batch):
    with held:
        KIND.loss(model, batch)
        raise RuntimeError("in mid-step")


@pytest.mark.parametrize("is_raised", [False, True], ids=["left", "left by an error"])
def test_no_hook_thread_or_descriptor_is_left(tmp_path, is_raised):
    model = KIND.model()
    optimizer = adam(model)
    batch = KIND.batch(0)
    attributes = [set(vars(module)) for module in model.modules()]
    threads, descriptors = set(threading.enumerate()), open_files(os.getpid())
    held = residency.hold(model, [batch], KIND.loss, tier=tmp_path, optimizer=optimizer, constraints={"*": "swap"})
    assert set(threading.enumerate()) == threads and open_files(os.getpid()) == descriptors  # planning leaves none
    with held:
        assert len(threading.enumerate()) == len(threads) + 2 and open_files(os.getpid()) != descriptors  # both seen
    if is_raised:
        with pytest.raises(RuntimeError, match="in mid-step"):
            fail_inside(held, model, batch)
    else:
        steps(KIND, model, optimizer, held)
    assert set(threading.enumerate()) == threads
    assert open_files(os.getpid()) == descriptors
    assert [set(vars(module)) for module in model.modules()] == attributes
    for module in model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks), module
    assert not any(one._backward_hooks or one._post_accumulate_grad_hooks for one in model.parameters())
    assert not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    assert type(optimizer) is torch.optim.Adam and "step" not in vars(optimizer)
    assert os.listdir(tmp_path) == []


class Counting(nn.Module):
    """Its buffer is another tensor after each forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.inner(x)


def test_measuring_leaves_buffers_that_a_forward_replaces():
    model = nn.Sequential(Counting(), nn.Linear(8, 8))
    residency.hold(model, [torch.ones(2, 8)], lambda model, x: model(x).sum())
    assert float(model[0].passes) == 0


def test_a_scheduler_made_inside_steps_as_before_once_left(tmp_path):
    model, batch = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.ones(2, 256)
    optimizer = adam(model)
    with residency.hold(model, [batch], lambda model, x: model(x).sum(), tier=tmp_path, optimizer=optimizer):
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepping = threading.Thread(target=optimizer.step, daemon=True)  # it waited for a tier that is closed
    stepping.start()
    stepping.join(20)
    assert not stepping.is_alive()


class Slept(nn.Module):
    """Runs one stage twice, and takes its time between."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.twice(x)
        time.sleep(0.1)
        return self.once(self.twice(x))


def test_a_pass_begins_once_though_a_stage_runs_twice():
    model = Slept()
    held = residency.hold(model, [torch.ones(2, 8)], lambda model, x: model(x).sum())
    with held:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
    assert held.measured.seconds > 0.1


def test_one_budget_keeps_all():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    held = residency.hold(model, [torch.ones(2, 8)], lambda model, x: model(x).sum())
    (only,) = residency.for_budgets(held.plan, 1)
    assert only.residencies == ("keep", "keep")
