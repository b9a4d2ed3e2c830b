"""Coded edges: bit for bit the reference that applies each codec's meaning at the cut. Stages are threads, which share
torch's random numbers, so there is no dropout here."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from armillary.codecs import CODECS, codec_of
from armillary.codecs.registry import at_places, guarded
from armillary.codecs.threshold import sparse_bytes
from armillary.plans import Choice
from armillary.reference.edges import Edges
from armillary.reference.versions import Reference
from armillary.schedules import Edge, codes_of
from armillary.schedules.cyclic import cyclic_pipeline
from armillary.schedules.edges import SAME, draw_of
from armillary.schedules.gpipe import gpipe
from armillary.schedules.one_f_one_b import one_f_one_b
from armillary.stages.edge_codes import CodedLetter
from armillary.stages.interpreter import Interpreter
from armillary.stages.train_spec import TrainSpec, in_a_row
from armillary.transport.point_to_point import AS_IT_IS
from channels import in_threads
from staged_models import OPTIMIZERS, as_stages, same, squared_error, weights

STEPS, SEED = 3, 11
WIDE = 24  # numbers a row, so that a micro-batch fills tiles and chunks

CODED = [Choice(name, options) for name, entry in CODECS.all().items() for options in entry.examples[:1]]
RANDOM = Choice.parse("random_k(keep=0.25)")
EIGHT, FOUR = Choice.parse("quantize(bits=8, tile=16)"), Choice.parse("hadamard(quantize(bits=4))")
HALF, FEW = Choice.parse("threshold(sparsity=0.5)"), Choice.parse("top_k(keep=0.25)")


class Block(nn.Module):
    """From a tensor to a tensor."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)

    def forward(self, value):
        return torch.relu(self.inner(value))


class Carrying(nn.Module):
    """Beside what it computes it hands on what the first stage made, row numbers and a flag."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.inner = stage, nn.Linear(WIDE, WIDE)

    def forward(self, value):
        if self.stage == 0:
            value = {
                "now": value,
                "first": value * 2,
                "rows": torch.arange(len(value)),
                "scale": self.inner(value).mean(1),
                "flag": 3,
            }
        now = torch.relu(self.inner(value["now"]))
        if self.stage == 0:
            value = {**value, "first": torch.tanh(self.inner(value["first"]))}
        if self.stage == LAST:
            rows = value["first"][value["rows"]] * value["scale"].unsqueeze(1) * value["flag"]
            return now + rows
        return {**value, "now": now}


LAST = 2


class Masked(nn.Module):
    """The first of two stages makes a mask of its own, which asks for no gradient."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.inner = stage, nn.Linear(WIDE, WIDE)

    def forward(self, value):
        if self.stage == 0:
            return self.inner(value), torch.full_like(value, -torch.inf).triu(1)
        hidden, mask = value
        return torch.relu(self.inner(hidden * mask.exp()))


def made(kind, count, dtype):
    modules = nn.ModuleList([Block() if kind is Block else kind(stage) for stage in range(count)]).to(dtype)
    generator = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in modules.parameters():
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_((draw - 0.5) * (0.6 if parameter.dim() > 1 else 0.2))
    return modules


def wide_data(micro_batches, dtype):
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn(STEPS, micro_batches, 2, 5, WIDE, generator=generator, dtype=torch.float64).to(dtype)
    return [[(pair[0], pair[1]) for pair in step] for step in draw]


def edges_of(count, choice, back):
    return [Edge(choice, back)] * (count - 1) + [Edge()]


def truth(schedule, edges, kind=Block, dtype=torch.float64, autocast=False):
    stages = made(kind, schedule.stages, dtype)
    optimizer = OPTIMIZERS["momentum"](stages.parameters())
    reference = Reference(stages, optimizer, schedule, squared_error, SEED)
    reference.edges = Edges(codes_of(edges), SEED, schedule.stages)
    losses = []
    for batches in wide_data(schedule.micro_batches, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses += reference.step(batches)
    return [weights(stage) for stage in stages], losses


def staged(rank, channel, schedule, edges, kind=Block, dtype=torch.float64, autocast=False, recompute=(), rule="gloo"):
    """Weights of this stage and the losses; bytes of every message by what it is."""
    stages = made(kind, schedule.stages, dtype)
    optimizer = OPTIMIZERS["momentum"](stages[rank].parameters())
    spec = TrainSpec(schedule, squared_error, SEED, recompute=frozenset(recompute), codes=codes_of(edges))
    run = Interpreter(as_stages(stages), optimizer, spec, in_a_row(schedule, rank, channel, one_queue=rule == "nccl"))
    finished = []
    for batches in wide_data(schedule.micro_batches, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            finished += run.step(batches)
    finished += run.settle()
    assert run._crossed.kept == {}
    return weights(stages[rank]), [loss for one in finished for loss in one.losses], channel.sent


def trained(schedule, edges, **options):
    rule = options.get("rule", "gloo")
    return in_threads(schedule.stages, lambda rank, link: staged(rank, link, schedule, edges, **options), rule)


def differs(schedule, edges, **options):
    """Stages whose weights, or "losses", are not the reference's bit for bit."""
    shared = {key: value for key, value in options.items() if key not in ("recompute", "rule")}
    kept, losses = truth(schedule, edges, **shared)
    answers = trained(schedule, edges, **options)
    found = [stage for stage, (got, _, _) in enumerate(answers) if not same(got, kept[stage])]
    return found + (["losses"] if not same(answers[-1][1], losses) else [])


@pytest.mark.parametrize("choice", CODED, ids=str)
def test_every_codec_on_two_and_three_stages_is_the_references_bit_for_bit(choice):
    assert differs(gpipe(2, 2), edges_of(2, choice, choice), dtype=torch.float32) == []
    assert differs(one_f_one_b(3, 3), edges_of(3, choice, SAME)) == []


def test_what_is_no_activation_of_the_stage_travels_as_it_is():
    """Three stages; what the first made goes on through the second unchanged, and is coded once."""
    schedule, edges = one_f_one_b(3, 3), edges_of(3, EIGHT, FEW)
    assert differs(schedule, edges, kind=Carrying) == []
    answers = trained(schedule, edges, kind=Carrying)
    kinds = [Counter(size for _, what, size in answers[stage][2] if what == f"activation of stage {stage}")
             for stage in (0, 1)]  # fmt: skip
    raw, coded, each = 5 * WIDE * 8, guarded_bytes(EIGHT, 5 * WIDE), STEPS * 3
    beside = {5 * 8: 2 * each}  # row numbers, and a scale of one dimension
    assert kinds == [{coded: 2 * each, **beside}, {coded: each, raw: each, **beside}]


def guarded_bytes(choice, count, item_bytes=8):
    return guarded(codec_of(choice)).coded_bytes(count, item_bytes)


def test_parts_that_run_again_autocast_and_one_queue_change_nothing():
    for back, rule in ((RANDOM, "gloo"), (SAME, "nccl")):
        assert differs(one_f_one_b(3, 3), edges_of(3, RANDOM, back), recompute=(0, 1, 2), rule=rule) == []
        assert differs(cyclic_pipeline(3, 3, 1), edges_of(3, HALF, back), rule=rule) == []
    for choice in (EIGHT, HALF):
        assert differs(gpipe(2, 3), edges_of(2, choice, SAME), dtype=torch.float32, autocast=True) == []


@pytest.mark.parametrize("recompute", [(), (0,), (0, 1)], ids=str)
def test_a_mask_that_asks_for_no_gradient_is_not_coded_where_its_stage_runs_again_either(recompute):
    schedule, edges = gpipe(2, 2), edges_of(2, EIGHT, FOUR)
    assert differs(schedule, edges, kind=Masked, recompute=recompute) == []
    assert all(bool(loss.isfinite()) for loss in trained(schedule, edges, kind=Masked, recompute=recompute)[1][1])


def test_an_edge_that_warms_up_is_exact_until_then_and_only_named_edges_are_coded():
    schedule, warm = gpipe(3, 2), Choice("quantize", {"bits": 2, "tile": 16, "warm_up": 2})
    exact = truth(schedule, [])[1]
    for edges in ([Edge(None, warm), Edge(HALF), Edge()], [Edge(), Edge(warm, FOUR), Edge()]):
        assert differs(schedule, edges) == []
    losses = truth(schedule, edges_of(3, warm, SAME))[1]
    assert same(losses[:4], exact[:4]) and not same(losses[4:], exact[4:])
    assert codes_of(edges_of(3, warm, SAME), 5)["activation", 0].warm_up == 0


def test_codes_are_as_long_as_they_say_and_lengths_go_ahead_of_the_others():
    schedule, count = gpipe(2, 3), 5 * WIDE
    sent = trained(schedule, edges_of(2, EIGHT, HALF))
    messages = STEPS * 3
    there = [size for _, what, size in sent[0][2] if what == "activation of stage 0"]
    assert there == [guarded_bytes(EIGHT, count)] * messages
    back = [size for _, what, size in sent[1][2] if what == "activation gradient of stage 1"]
    lengths = [size for _, what, size in sent[1][2] if what == "lengths of activation gradient of stage 1"]
    assert lengths == [8] * messages and len(back) == messages
    kept = [(size - 1 - 1 - count // 8) // 8 for size in back]
    assert [1 + sparse_bytes(count, one, 8) for one in kept] == back


@pytest.mark.parametrize("choice", [RANDOM, EIGHT, HALF], ids=str)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_hidden(choice, odd):
    values = torch.randn(64, dtype=torch.float64)
    values[5] = odd
    codec = guarded(codec_of(choice))
    code = codec.encode(values, torch.Generator().manual_seed(1))
    assert code.numel() <= codec.coded_bytes(64, 8)
    assert codec.decode(code, 64, values[:0]).isnan().all() and codec.meaning(values, None).isnan().all()
    followed = guarded(at_places(torch.arange(64) > 9))
    assert followed.decode(followed.encode(values, None), 64, values[:0]).isnan().all()


# planted faults


def only_there(monkeypatch):
    """Gradients come back as they are."""
    write, read = CodedLetter.write, CodedLetter.read
    monkeypatch.setattr(CodedLetter, "varying", lambda self, form: [])
    monkeypatch.setattr(CodedLetter, "room", lambda self, form, _: AS_IT_IS.room(form, []) if self._is_back
                        else [self._room(leaf, iter(())) for leaf in self._leaves(form)])  # fmt: skip
    monkeypatch.setattr(CodedLetter, "write", lambda self, *a: a[1] if self._is_back else write(self, *a))
    monkeypatch.setattr(CodedLetter, "read", lambda self, *a: a[1] if self._is_back else read(self, *a))


def code_of_another_micro_batch(monkeypatch):
    """A stage decodes what it got before."""
    read, before = CodedLetter.read, {}

    def late(self, form, written):
        arrived = read(self, form, written)
        key = self.message.edge, self.message.stage
        before[key], given = arrived, before.get(key, arrived)
        return [one.clone() for one in given]

    monkeypatch.setattr(CodedLetter, "read", late)


def stale_scale(monkeypatch):
    """The largest number of a tile is that of the message before."""
    write, before = CodedLetter.write, {}

    def stale(self, form, tensors):
        written = write(self, form, tensors)
        scale = written[0][1:9].clone()
        written[0][1:9] = before.get(self.message.edge, scale)
        before[self.message.edge] = scale
        return written

    monkeypatch.setattr(CodedLetter, "write", stale)


def coded_twice(monkeypatch):
    """As a part would that runs again, with a fresh draw."""
    write = CodedLetter.write

    def twice(self, form, tensors):
        again = self._arrived(form, write(self, form, tensors))
        return write(replace(self, message=self.message._replace(step=self.message.step + 50)), form, again)

    monkeypatch.setattr(CodedLetter, "write", twice)


def places_of_another_micro_batch(monkeypatch):
    """On both sides alike."""
    note, before = CodedLetter._note, {}

    def late(self, form, arrived):
        note(self, form, arrived)
        if self.code.leads:
            sides = id(self.crossed), self._edge
            mine = self.crossed.kept[self._made]
            before[sides], self.crossed.kept[self._made] = mine, before.get(sides, mine)

    monkeypatch.setattr(CodedLetter, "_note", late)


def rounding_lets_no_gradient_through(monkeypatch):
    """As if the codec were a part of the model."""
    write = CodedLetter.write
    monkeypatch.setattr(CodedLetter, "write", lambda self, form, tensors: write(
        self, form, [torch.zeros_like(one) for one in tensors] if self._is_back else tensors))  # fmt: skip


def ids_are_coded(monkeypatch):
    monkeypatch.setattr("armillary.stages.edge_codes.is_codable", lambda leaf: leaf.is_floating_point())


def the_loss_is_coded(monkeypatch):
    """And its gradient passes by the code."""
    half = codec_of(Choice("lower_precision"))

    def coded(loss):
        return lambda *given: (told := loss(*given)) + (half.meaning(told.detach().view(1), None)[0] - told.detach())

    spec = TrainSpec
    monkeypatch.setitem(
        globals(), "TrainSpec", lambda table, loss, *rest, **more: spec(table, coded(loss), *rest, **more)
    )


def the_same_lot_for_all_micro_batches(monkeypatch):
    monkeypatch.setattr(
        "armillary.stages.edge_codes.draw_of",
        lambda codec, seed, place, *rest: draw_of(codec, seed, (place[0], 0, place[2]), *rest),
    )


FAULTS = {
    the_loss_is_coded: EIGHT,
    the_same_lot_for_all_micro_batches: RANDOM,
    only_there: EIGHT,
    code_of_another_micro_batch: EIGHT,
    stale_scale: EIGHT,
    coded_twice: RANDOM,
    places_of_another_micro_batch: HALF,
    rounding_lets_no_gradient_through: EIGHT,
    ids_are_coded: EIGHT,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    schedule, edges = gpipe(3, 3), edges_of(3, FAULTS[fault], RANDOM if fault is coded_twice else SAME)
    kind = Carrying if fault is ids_are_coded else Block
    fault(monkeypatch)
    assert differs(schedule, edges, kind=kind) != []
