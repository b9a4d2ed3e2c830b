"""The faults cyclic runtimes are known to make, planted: the comparison with the reference must catch each of them."""

import queue
from functools import cache

import pytest
import torch

import modes
from armillary.schedules import Schedule
from armillary.schedules import lower_ring as relay
from armillary.schedules import routes as messages
from armillary.schedules.cyclic import cyclic, cyclic_pipeline
from armillary.schedules.rank_list import ScheduledAction
from armillary.schedules.shared_stages import SharedPlacement
from armillary.schedules.simultaneous import simultaneous
from armillary.stages import optimizer_step as corrected_step
from armillary.stages.interpreter import Interpreter
from armillary.stages.optimizer_step import options_of, step_with
from armillary.stages.reducer import StageSums, StepMeans
from armillary.stages.weights import StageWeights, UnshardedStage
from modes import Case, in_threads_of, reference
from schedule_pictures import parse
from staged_models import OPTIMIZERS, as_stages, data, same, stages_of, weights


def case_of(schedule):
    return Case(schedule, steps=6, drop=3, drains=(4,), model={"dropout": 0.0})


def truth_of(schedule):
    return [weights(stage) for stage in reference("one_device", case_of(schedule))[0]]


def is_true(mode, schedule, truth):
    """Whether every rank shows the reference's weights."""
    answers = in_threads_of(mode, case_of(schedule))
    return all(same(mine, truth[j]) for got in answers for j, mine in got.weights.items())


RUNS = {
    "one_device": ("one_device", cyclic(3)),
    "one_device, slack 1": ("one_device", cyclic(3, slack=1)),
    "ring": ("ring", cyclic(3)),
    "ring, slack 1": ("ring", cyclic(3, slack=1)),
    "zero_ring": ("zero_ring", cyclic(3)),
    "zero_ring, slack 1": ("zero_ring", cyclic(3, 6, slack=1)),
    "pipeline": ("pipeline", cyclic_pipeline(3, 3)),
    "pipeline, slack 1": ("pipeline", cyclic_pipeline(3, 3, 1)),
    "shared": ("shared", cyclic(3)),
    "shared, slack 1": ("shared", cyclic(3, slack=1)),
}
_version, _data = Schedule.version, data


def older(self, place, drains=()):
    """Freshness off by one: the last stage is stale on one more micro-batch."""
    _, micro_batch, stage = place
    newest = _version(self, place, drains)
    return max(newest - 1, 0) if stage == self.stages - 1 and micro_batch == 0 else newest


def newer(self, place, drains=()):
    """Freshness off by one: every stale stage reads what does not exist yet."""
    return place[0]


def wrong_first_step(self, place, drains=()):
    """The first stale step reads weights one step newer than it should."""
    return min(place[0], 1) if place[0] < 2 else _version(self, place, drains)


def no_drain(self, place, drains=()):
    """A drain is carried out but the schedule goes on as if there had been none."""
    return _version(self, place, ())


def rate_of_the_wall(optimizer, gradients, options):
    """The learning rate of the moment of the update instead of the gradient's step."""
    step_with(optimizer, gradients, options_of(optimizer))


def parameters_in_the_graph(self):
    """Graphs hold the model's parameters, whose `.data` is swapped while they wait for their backward."""
    return dict(self._parameters)


_add = StepMeans.add
_init = StepMeans.__init__


def one_micro_batch_short(self, stage, parameters, micro_batches, take=None):
    """Steps when all but one gradient have been added."""
    _init(self, stage, parameters, micro_batches - 1, take)


def scaled_and_back(self, name, gradient):
    """Divides and multiplies every gradient by their number: equal in exact arithmetic only."""
    _add(self, name, gradient / self._micro_batches * self._micro_batches)


def adds_to_the_last_steps(self, name, gradient):
    """The first gradient of a step is added to the sum of the last one, instead of replacing it."""
    kept = None if name in self._sums else self._last_means.get(name)
    _add(self, name, gradient if kept is None else gradient + kept)


def forgets_one(self, message, came):
    """A rank hands on the sum without its own part, in the second step."""
    if message.step == 1 and message.step in self._own:
        self._own[message.step] = {}
    _join(self, message, came)


_join, _mean = StageSums.join, StageSums.mean


def sum_for_mean(self, step):
    """The owner steps with the sum instead of the mean."""
    return {parameter: mean * self._ranks for parameter, mean in _mean(self, step).items()}


def reads_on(self, flats):
    """A version that arrives is counted, and the one before is read on."""
    self.newest += 1
    self._versions[self.newest] = self._versions[self.newest - 1]


def token_of_the_step_before(self, message):
    """A token of another version: what was lent at the same place the last time."""
    sent = self.__dict__.setdefault("sent", {})
    flats = _to_lend(self, message)
    before = sent.get((message.what, message.stage), flats)
    sent[message.what, message.stage] = [flat.clone() for flat in flats]
    return before


_to_lend, _flats_for = Interpreter._to_lend, UnshardedStage.flats_for


def backward_by_others(self, what, version):
    """What comes for the backward is not what came for the forward."""
    flats = _flats_for(self, what, version)
    return [flat + 1e-12 for flat in flats] if what == "backward weights" else flats


def another_owner(schedule, stage):
    """Finished gradients go to the owner of the next stage."""
    return _owner_of(schedule, (stage + 1) % schedule.stages)


_owner_of = messages.owner_of
_last = SharedPlacement.last


def counted_anew(self, step, stage):
    """An owner looks for every sum on the device that finished the first step's."""
    return _last(self, 0, stage)


EVERYWHERE = [
    (Schedule, "version", older),
    (Schedule, "version", newer),
    (Schedule, "version", wrong_first_step),
    (Schedule, "version", no_drain),
]
STORES = [
    (corrected_step, "step_with", rate_of_the_wall),
    (StageWeights, "_leaves", parameters_in_the_graph),
    (StepMeans, "__init__", one_micro_batch_short),
    (StepMeans, "add", scaled_and_back),
    (StepMeans, "add", adds_to_the_last_steps),
]
RINGS = [
    (corrected_step, "step_with", rate_of_the_wall),
    (StageSums, "join", forgets_one),
    (StageSums, "mean", sum_for_mean),
    (StageWeights, "arrive", reads_on),
    (relay, "owner_of", another_owner),
]
ZEROS = [
    *(fault for fault in RINGS if fault[2] is not reads_on),
    (Interpreter, "_to_lend", token_of_the_step_before),
    (UnshardedStage, "flats_for", backward_by_others),
]
SHARES = [
    *(fault for fault in RINGS if fault[2] is not another_owner),
    (SharedPlacement, "last", counted_anew),
]
OWN = {"ring": RINGS, "zero_ring": ZEROS, "shared": SHARES}  # what runtimes without a store of versions may get wrong
CASES = [(run, *fault) for run in RUNS for fault in EVERYWHERE + OWN.get(run.split(",")[0], STORES)]


def opposed(steps, workers, dtype=torch.float64):
    """`data`, but the first two workers read the same and want opposite things of 1e8: their gradients all but cancel.

    Added up first, they leave the third worker's whole. Added to one of them, it loses its bits below 1e-8.
    """
    made = _data(steps, workers, dtype)
    for batches in made:
        (inputs, target), (_, other) = batches[:2]
        batches[0], batches[1] = (inputs, target + 1e8), (inputs, other - 1e8)
    return made


@pytest.mark.bits
@pytest.mark.parametrize("mode", ["ring", "zero_ring"])
def test_sums_in_another_order_of_workers_are_told_apart(mode, monkeypatch):
    """All workers begin at once, so that nothing but the order changes when the first and the last change places."""
    schedule = simultaneous(3, 2)
    monkeypatch.setattr(modes, "data", opposed)
    truth = truth_of(schedule)
    assert is_true(mode, schedule, truth)
    monkeypatch.setattr(modes, "data", lambda *sizes: [batches[::-1] for batches in opposed(*sizes)])
    other = truth_of(schedule)
    pairs = [pair for stages in zip(truth, other, strict=True) for pair in zip(*stages, strict=True)]
    assert not any(torch.equal(this, that) for this, that in pairs), "these data do not tell the orders apart"
    assert is_true(mode, schedule, other) and not is_true(mode, schedule, truth)


@cache
def truth_of_run(run):
    return truth_of(RUNS[run][1])


@pytest.mark.parametrize("run", RUNS)
def test_without_a_fault_the_comparison_is_passed(run):
    assert is_true(*RUNS[run], truth_of_run(run))


@pytest.mark.parametrize(("run", "owner", "name", "fault"), CASES)
def test_a_planted_fault_is_caught(run, owner, name, fault, monkeypatch):
    truth = truth_of_run(run)
    monkeypatch.setattr(owner, name, fault)
    try:
        got = is_true(*RUNS[run], truth)
    except (RuntimeError, AssertionError, LookupError, ValueError, queue.Empty):
        return  # refused, lost from the books, or a worker that waits for ever: as good
    assert not got


def test_a_schedule_that_is_too_fresh_cannot_be_made():
    picture = str(cyclic(3)).replace("staleness 1 1 0", "staleness 1 0 0")
    with pytest.raises(ValueError, match="micro-batch 0, stage 1: weights 0 steps old appear 2 ticks after"):
        parse(picture)


def test_gradients_out_of_worker_order_are_refused():
    """The last worker's backward before the first one's: the sum would be another."""
    stages = stages_of(1)
    means = StepMeans(0, dict(as_stages(stages)[0].module.named_parameters()), micro_batches=2)
    with pytest.raises(RuntimeError, match="gradient of step 0, micro-batch 1 came when step 0, micro-batch 0 was due"):
        means.expect(0, 1)


@pytest.mark.parametrize("other", [(3, 2), (3, 1), (2, 5)])
def test_sums_of_their_own_are_refused_out_of_order_too(other):
    """Where several ranks run a stage, some of its micro-batches come to others; those here keep their order."""
    means = StepMeans(0, dict(as_stages(stages_of(1))[0].module.named_parameters()), micro_batches=1)
    for place in ((0, 1), (3, 0), (3, 2)):
        means.expect(*place)
    with pytest.raises(
        RuntimeError, match=r"gradient of step ., micro-batch . came when a later one than \(3, 2\) was due"
    ):
        means.expect(*other)


def test_a_missing_version_raises_and_no_other_is_handed_out():
    stages = stages_of(1)
    store = StageWeights(as_stages(stages)[0], OPTIMIZERS["sgd"](stages.parameters()))
    with pytest.raises(RuntimeError, match=r"stage 0: version 1 of the weights is missing, there are \(0,\)"):
        store.read(1, 0, 1)


def test_swapping_data_under_a_graph_goes_wrong_without_an_error():
    """Why versions have tensors of their own."""
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    weight.data = torch.full((2,), 5.0)
    assert torch.autograd.grad(loss, weight)[0].tolist() == [10.0, 10.0]  # 2 would be right, and nothing was raised


def test_due_actions_put_backwards_first():
    assert ScheduledAction(3, 0, 2, 0, 2, 1) < ScheduledAction(3, 1, 0, 1, 0, 0)
