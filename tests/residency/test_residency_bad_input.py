"""What cannot be done is refused in one sentence with its remedy, and the model is as it was."""

import errno
import os

import pytest
import torch
from torch import nn

import armillary
from armillary import residency
from armillary.residency import tier as tier_file
from forked import command
from held_models import CONVOLUTION, TRANSFORMER, adam, held_by, steps


def held(model=None, kind=TRANSFORMER, **more):
    model = kind.model(3) if model is None else model
    return residency.hold(model, [kind.batch(0)], kind.loss, **more)


@pytest.fixture
def disk(tmp_path):
    return str(tmp_path)


def test_a_budget_below_what_a_step_needs_names_the_stage_and_the_need(disk):
    with pytest.raises(ValueError, match=r"1\.0 KiB of memory do not hold a step; .* are needed. Stage '\d' "):
        held(memory_bytes=1024, tier=disk)


def test_a_tier_must_be_a_folder_on_a_disk(disk):
    with pytest.raises(ValueError, match="'/nowhere' is no folder"):
        held(memory_bytes=1 << 30, tier="/nowhere")
    with pytest.raises(ValueError, match="lies on tmpfs, which is memory itself"):
        held(memory_bytes=1 << 30, tier="/dev/shm")
    with pytest.raises(ValueError, match="'pinned' is the host's memory, where a model on cpu lies itself"):
        held(memory_bytes=1 << 30, tier="pinned")


def test_a_tier_that_cannot_be_written(disk, monkeypatch):
    def refused(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tier_file.tempfile, "mkstemp", refused)
    with pytest.raises(ValueError, match="cannot be written: Read-only file system"):
        held(tier=disk)


def test_a_full_tier_is_refused_up_front_or_told_where_it_happens(disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tier_file.FileTier, "free_bytes", lambda tier: 1000)
        with pytest.raises(ValueError, match=r"has 0.001 MiB free, .* are swapped; free some"):
            held(tier=disk, constraints={"*": "swap"})
    one = held(tier=disk, constraints={"*": "swap"})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tier_file.os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device"):
        steps(TRANSFORMER, one._model, adam(one._model), one)


def test_no_direct_access_is_said_and_works(disk, monkeypatch):
    plain = os.open

    def opened(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *more)

    monkeypatch.setattr(tier_file.os, "open", opened)
    one = held(tier=disk, constraints={"0": "swap"})
    assert "page cache" in str(one)
    steps(TRANSFORMER, one._model, adam(one._model), one)


class Counting(nn.Module):
    """Gives other values each time."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x).tanh() * self.calls


def test_a_stage_that_gives_other_values_is_never_recomputed(disk):
    model = nn.Sequential(nn.Linear(32, 32), Counting(), nn.Linear(32, 32))
    with pytest.raises(ValueError, match="want recompute for '1', but a second run of its forward gives other values"):
        held(model, constraints={"1": "recompute"})


def test_a_module_called_twice_is_kept(disk):
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    assert "it is called more than once in a forward" in str(held(model, tier=disk))
    with pytest.raises(ValueError, match="it can be kept"):
        held(model, tier=disk, constraints={"0": "swap"})


def test_a_table_that_is_read_by_row_is_never_recomputed(disk):
    table = nn.Embedding(500, 32)
    model = nn.Sequential(table, TRANSFORMER.stage())
    batch = torch.randint(0, 500, (4, 64))
    with pytest.raises(ValueError, match="it reads a table by row"):
        residency.hold(model, [batch], TRANSFORMER.loss, constraints={"0": "recompute"})


def test_constraints_that_say_nothing(disk):
    with pytest.raises(ValueError, match=r"constraints\['blocks.7'\] fits no stage; there are 0, 1, 2"):
        held(constraints={"blocks.7": "swap"})
    with pytest.raises(ValueError, match="want keep, recompute or swap, got 'offload'"):
        held(constraints={"0": "offload"})
    with pytest.raises(ValueError, match="swap a stage, but there is no tier"):
        held(constraints={"0": "swap"})
    with pytest.raises(ValueError, match=r"stages \['layers.*'\] name no module"):
        held(stages=["layers.*"])


def test_a_second_backward_is_told(disk):
    one = held(tier=disk, constraints={"*": "swap"})
    with one:
        loss = TRANSFORMER.loss(one._model, TRANSFORMER.batch(0))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="call backward once a forward"):
            loss.backward()


def test_a_backward_after_with_is_told(disk):
    one = held(tier=disk, constraints={"*": "swap"})
    with one:
        loss = TRANSFORMER.loss(one._model, TRANSFORMER.batch(0))
    with pytest.raises(RuntimeError, match="its backward came after `with` was left; call backward inside"):
        loss.backward()


def test_it_is_entered_again_after_it_was_left(disk):
    one = held(tier=disk, constraints={"*": "swap"})
    for _ in range(2):
        steps(TRANSFORMER, one._model, adam(one._model), one)


class Writing(nn.Module):
    """Writes into a tensor that was saved for backward."""

    def forward(self, x):
        doubled = x * 2
        squared = doubled * doubled
        doubled.add_(1)
        return squared


def test_a_swapped_tensor_that_is_written_is_told_as_torch_tells_it(disk):
    model = nn.Sequential(nn.Linear(32, 32), Writing())
    x = torch.randn(64, 16, 32)
    chain = held(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), tier=disk).plan
    with (
        held_by(chain, ["keep", "swap"], 1, model, disk),
        pytest.raises(RuntimeError, match="written in place before it"),
    ):
        model(x).sum().backward()


def test_compiled_and_sharded_models(disk):
    with pytest.raises(TypeError, match="is compiled, which chooses what to save itself"):
        held(nn.Sequential(torch.compile(nn.Linear(32, 32)), nn.Linear(32, 32)))


def test_two_residencies_at_once(disk):
    kind = CONVOLUTION
    model = kind.model(2)
    first, second = (residency.hold(model, [kind.batch(0)], kind.loss) for _ in range(2))
    with first, pytest.raises(RuntimeError, match="is held to a residency plan; leave that"), second:
        pass
    with second:
        pass


def test_an_optimizer_that_mixes_parameters(disk):
    class Mixing(torch.optim.SGD):
        def step(self, closure=None):
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
            super().step(closure)

    model = TRANSFORMER.model(2)
    with pytest.raises(ValueError, match="mixes what it does to one parameter with others"):
        held(model, tier=disk, optimizer=Mixing(model.parameters(), lr=0.1))


def test_a_plan_goes_to_json_and_back_and_belongs_to_its_model(disk):
    plan = held(memory_bytes=1 << 30, tier=disk).plan
    again = residency.ResidencyPlan.from_json(plan.to_json())
    assert again == plan and str(again) == str(plan)
    with pytest.raises(ValueError, match=r"of another model; this one has no \['2'\]"):
        residency.hold(TRANSFORMER.model(2), [], TRANSFORMER.loss, plan=plan, tier=disk)
    with pytest.raises(ValueError, match="this is no residency plan"):
        residency.ResidencyPlan.from_json("{}")


def test_what_ends_without_a_backward_gives_its_room_back(disk):
    one = held(tier=disk, constraints={"*": "swap"})
    with one:
        for _ in range(5):
            TRANSFORMER.loss(one._model, TRANSFORMER.batch(0))
        one._tier.writes.close()
        free = sum(size * len(places) for size, places in one._tier._free.items())
        assert free == one._tier._end


def test_a_schedule_that_owns_the_loop_says_what_to_give_it_instead(disk):
    kind = TRANSFORMER
    model = kind.model(2)
    batches = [kind.batch(0)] * 2
    held_now = residency.hold(model, batches, kind.loss)
    schedule = "accumulation(micro_batches=2)"
    with held_now, pytest.raises(ValueError, match=r"held to a residency plan; .* give the schedule recompute="):
        armillary.parallelize(model, adam(model), batches, kind.loss, schedule=schedule)


def test_the_command_prints_plan_report_and_six_budgets(tmp_path):
    (ended,) = command(["residency", "vision", "--small", "--memory", "1MiB", "--tier", tmp_path], tmp_path)
    assert ended.code == 0 and "budget 1.0 MiB" in ended.out and "of 10 passes" in ended.out, ended
    rows = ended.out.split("budget MiB")[1].strip().splitlines()
    assert len(rows) == 1 + 1 + 6, ended.out
    (ended,) = command(["residency", "vision", "--small", "--memory", "1KiB", "--tier", tmp_path], tmp_path)
    assert ended.code == 2 and "do not hold a step" in ended.err and "Stage" in ended.err, ended
