"""Edges that remember samples (AQ-SGD): bit for bit the reference, which keeps one value a sample; both ends alike."""

import warnings

import pytest
import torch

from armillary.codecs import codec_of
from armillary.codecs.registry import guarded
from armillary.plans import Choice
from armillary.reference.edges import Edges
from armillary.reference.versions import Reference
from armillary.schedules import EDGES, Edge, Remembered, codes_of
from armillary.schedules import edges as edge_file
from armillary.schedules.cyclic import cyclic_pipeline
from armillary.schedules.edges import SAME, sample_keys
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages import edge_codes as sample_memory
from armillary.stages.edge_codes import SampleMemory
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from channels import in_threads
from runtime.test_coded_edges import SEED, WIDE, Block, Carrying, made
from staged_models import OPTIMIZERS, as_stages, same, squared_error, weights

EPOCHS, STEPS, SAMPLES = 4, 3, 5
SAMPLE_BYTES = WIDE * 8


def aq(text="quantize(bits=4, tile=16)", cache_mb=1):
    return Choice.parse(f"aq_sgd({text}, cache_mb={cache_mb})")


def epochs(micro_batches, dtype=torch.float64):
    """The same samples in every epoch, in another order and company."""
    draw = torch.Generator().manual_seed(3)
    shape = (STEPS * micro_batches * SAMPLES, WIDE)
    inputs, targets = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    for _ in range(EPOCHS):
        for part in torch.randperm(len(inputs), generator=draw).view(STEPS, micro_batches, SAMPLES):
            yield [(inputs[one], targets[one]) for one in part]


def edges_of(count, choice, back=None):
    return [Edge(choice, back)] * (count - 1) + [Edge()]


def truth(schedule, edges, kind, dtype, data):
    stages = made(kind, schedule.stages, dtype)
    reference = Reference(stages, OPTIMIZERS["momentum"](stages.parameters()), schedule, squared_error, SEED)
    reference.edges = Edges(codes_of(edges), SEED, schedule.stages)
    losses = [loss for batches in data for loss in reference.step(batches)]
    return [weights(stage) for stage in stages], losses


def staged(rank, channel, schedule, edges, kind, dtype, data, recompute):
    stages = made(kind, schedule.stages, dtype)
    spec = TrainSpec(schedule, squared_error, SEED, recompute=frozenset(recompute), codes=codes_of(edges))
    seat = in_a_row(schedule, rank, channel)
    run = Interpreter(as_stages(stages), OPTIMIZERS["momentum"](stages[rank].parameters()), spec, seat)
    finished = [one for batches in data for one in run.step(batches)] + run.settle()
    assert run._crossed.samples == {}
    return weights(stages[rank]), [loss for one in finished for loss in one.losses], channel.sent, run._crossed


def trained(schedule, edges, kind=Block, dtype=torch.float64, data=None, recompute=()):
    data = list(epochs(schedule.micro_batches, dtype)) if data is None else data
    answers = in_threads(
        schedule.stages, lambda rank, link: staged(rank, link, schedule, edges, kind, dtype, data, recompute)
    )
    kept, losses = truth(schedule, edges, kind, dtype, data)
    apart = [stage for stage, answer in enumerate(answers) if not same(answer[0], kept[stage])]
    return apart + (["losses"] if not same(answers[-1][1], losses) else []), answers


SCHEDULES = {
    "gpipe": gpipe(2, 2),
    "1f1b": one_f_one_b(3, 3),
    "pipeline": cyclic_pipeline(2, 3),
    "slack": cyclic_pipeline(3, 3, 1),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float64) for name in SCHEDULES), ("slack", torch.float32)], ids=str
)
def test_epochs_over_the_same_samples_are_the_references_bit_for_bit(name, dtype):
    schedule = SCHEDULES[name]
    assert trained(schedule, edges_of(schedule.stages, aq(), Choice.parse("quantize(bits=8)")), dtype=dtype)[0] == []


def test_both_ends_hold_the_same_and_a_sample_that_is_known_crosses_in_fewer_bytes():
    apart, answers = trained(gpipe(2, 2), edges_of(2, aq()))
    (_, _, sent, sender), (_, _, _, receiver) = answers
    ours, theirs = sender.memories[0, 0, True], receiver.memories[0, 0, False]
    slots = sorted(ours.slots.values())
    assert apart == [] and len(slots) == STEPS * 2 * SAMPLES and not ours.watches_for_strangers
    assert torch.equal(ours.held[slots], theirs.held[slots])
    sizes = [size for _, what, size in sent if what == "activation of stage 0"]
    whole, changes = sizes[: 2 * STEPS], sizes[2 * STEPS :]
    assert len(set(whole)) == 1 and len(set(changes)) == 1 and whole[0] > 4 * changes[0]


def test_the_oldest_samples_go_where_there_is_no_room_and_it_is_said_if_none_was_met_again():
    room = 8 * SAMPLE_BYTES / 1e6
    schedule = gpipe(2, 2)
    with pytest.warns(UserWarning, match="edge of stage 0: 8 samples have crossed, and none was met again"):
        apart, answers = trained(schedule, edges_of(2, aq(cache_mb=room)))
    memory = answers[0][3].memories[0, 0, True]
    assert apart == [] and len(memory.slots) == len(memory.held) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(schedule, edges_of(2, aq(cache_mb=20 * SAMPLE_BYTES / 1e6)), data=[*epochs(2)][:2] * 3)[0] == []


def test_what_is_not_finite_arrives_so_and_is_not_kept():
    """A new sample, then one that is known, have a number that is infinite; both ends go on with what they held."""
    codec, sides = guarded(codec_of("one_bit")), [SampleMemory("edge", 10**6) for _ in range(2)]
    first = torch.arange(12.0).view(3, 4)
    sick, later = first.clone(), first + 1
    sick[1, 2] = later[0, 0] = torch.inf

    def crossed(values, keys):
        code = sides[0].write(values, keys, codec, None)
        return sides[1].read(code, values.shape, values.new_empty(0), codec)

    assert torch.equal(crossed(sick, [b"a", b"b", b"c"]), sick) and sides[0].slots.keys() == {b"a", b"c"}
    assert torch.equal(crossed(first, [b"a", b"b", b"c"])[1], first[1]) and len(sides[0].slots) == 3
    assert crossed(later, [b"a", b"b", b"c"]).isnan().all()
    slots = [sides[0].slots[key] for key in (b"a", b"b", b"c")]
    assert torch.equal(sides[0].held[slots], sides[1].held[slots]) and sides[0].held[slots].isfinite().all()
    assert crossed(first, [b"a", b"b", b"c"]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_sample_twice_in_a_micro_batch_what_passes_on_and_stages_that_run_again(dtype):
    draw = torch.Generator().manual_seed(5)
    rows = torch.randn(4, WIDE, generator=draw, dtype=torch.float64).to(dtype)
    twice = [(rows[[0, 1, 0, 2, 3]], rows[[1, 2, 3, 0, 1]]), (rows[[3, 3, 3, 2, 1]], rows[[0, 0, 1, 2, 3]])]
    assert trained(gpipe(2, 2), edges_of(2, aq()), data=[twice] * 3, dtype=dtype)[0] == []
    if dtype == torch.float64:
        edges = edges_of(3, aq("top_k(keep=0.25)"), SAME)
        assert trained(one_f_one_b(3, 3), edges, kind=Carrying, recompute=[0, 1])[0] == []


def test_more_than_a_limit_is_in_a_file_and_learns_alike(monkeypatch):
    monkeypatch.setattr(sample_memory, "IN_MEMORY_BYTES", 1000)
    assert trained(gpipe(2, 2), edges_of(2, aq()))[0] == []


def test_ends_that_hold_something_else_are_told():
    """Planted: a sender that holds the true values instead of what arrived."""
    codec, sides = guarded(codec_of("one_bit")), [SampleMemory("edge of stage 0", 10**6) for _ in range(2)]
    draw = torch.Generator().manual_seed(1)
    for step in range(3):
        values = torch.randn(3, 4, generator=draw)
        code = sides[0].write(values, [b"a", b"b", b"c"], codec, None)
        if step == 2:
            with pytest.raises(RuntimeError, match="edge of stage 0: its two ends no longer hold the same"):
                sides[1].read(code, values.shape, values.new_empty(0), codec)
        else:
            sides[1].read(code, values.shape, values.new_empty(0), codec)
        if step == 1:
            sides[0].held[list(sides[0].slots.values())] = values


def test_keys_of_the_wrong_samples_are_another_training(monkeypatch):
    """Planted: all samples of a micro-batch by the key of the first."""
    monkeypatch.setattr("armillary.stages.interpreter.sample_keys", lambda value: sample_keys(value)[:1] * len(value))
    assert trained(gpipe(2, 2), edges_of(2, aq()))[0] != []


def test_keys_taken_after_what_is_drawn_at_random_are_another_training(monkeypatch):
    """Planted: a sample is another one at every visit, so all cross whole."""
    monkeypatch.setattr(
        "armillary.stages.interpreter.sample_keys",
        lambda value: sample_keys(torch.nn.functional.dropout(value + 1, 0.5)),
    )
    assert trained(gpipe(2, 2), edges_of(2, aq()))[0] != []


def test_samples_are_known_by_all_that_the_first_stage_reads():
    words, mask = torch.arange(12).view(4, 3), torch.ones(4, 3)
    keys = sample_keys((words, {"mask": mask, "flag": 3}))
    assert len({*keys}) == 4 and sample_keys((words.clone(), {"mask": mask, "flag": 3})) == keys
    assert sample_keys((words, {"mask": 2 * mask, "flag": 3}))[0] != keys[0]
    for strange in ((words, torch.tensor(3)), (words, mask[:2]), ()):
        with pytest.raises(ValueError, match="want the same number of samples in all"):
            sample_keys(strange)


@pytest.mark.parametrize(
    ("edge", "back", "words"),
    [
        ("aq_sgd", None, r"want aq_sgd\(CODEC, cache_mb=256\)"),
        ("aq_sgd(quantize(bits=3))", None, "quantize knows 8, 4 and 2 bits"),
        ("aq_sgd(quantize(bits=4), bits=4)", None, r"want aq_sgd\(CODEC"),
        ("aq_sgd(quantize(), cache_mb=0)", None, "cache_mb is what each end may hold, megabytes above 0, got 0"),
        ("aq_sgd(aq_sgd(quantize()))", None, "no codec 'aq_sgd'"),
        ("quantize", "aq_sgd(quantize())", "a gradient does not come back alike"),
    ],
)
def test_what_cannot_be_remembered_is_refused(edge, back, words):
    named = Edge(Choice.parse(edge), None if back is None else Choice.parse(back))
    with pytest.raises(ValueError, match=words):
        codes_of([named, Edge()])


def test_a_method_of_ones_own_may_remember_nothing_and_must_say_what_it_codes_by(monkeypatch):
    monkeypatch.setattr(EDGES, "_entries", dict(EDGES.all()))
    EDGES.register("mine", lambda what, choice, options: Remembered(Choice("quantize", dict(options)), 0))
    found, plain = (codes_of([Edge(Choice.parse(one)), Edge()]) for one in ("mine(bits=4)", "quantize(bits=4)"))
    bits = torch.randn(1, 9).flatten()
    ways = [one["activation", 0].codec.meaning(bits, None) for one in (found, plain)]
    assert torch.equal(*ways) and not found["activation", 0].cache_bytes
    EDGES.register("half", lambda what, choice, options: Choice("quantize"))
    with pytest.raises(ValueError, match="edge half: half gives Choice; want a Remembered"):
        codes_of([Edge(Choice("half")), Edge()])


def test_evaluation_reads_values_whole():
    assert edge_file.at_eval(Edge(aq()), 5) is None
