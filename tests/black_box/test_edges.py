"""What crosses between the stages of a pipeline, coded: what a user names, reads in the plan, and gets."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import armillary
import face
from armillary.cli.request import edge_request
from armillary.cli.verify import code_of
from armillary.codecs import codec_of
from armillary.planning.pricing import Case
from armillary.planning.request import PlanRequest
from armillary.planning.simulator import simulate
from armillary.schedules.edges import NEVER
from armillary.session import stage_setup as cut
from armillary.session import truth as schedule_truth
from armillary.session.plan_job import JobRequest
from armillary.session.verify import verify_workload
from armillary.stages.edge_codes import CodedLetter
from contracts.journey import of_few_tensors

WIDTH, ROWS, STEPS = 32, 6, 3
EIGHT, HALF = "quantize(bits=8)", "threshold(sparsity=0.5)"


def chain():
    torch.manual_seed(2)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 4))


def dropping_chain():
    """Samples are known by what the first stage reads, before it draws."""
    return nn.Sequential(nn.Dropout(0.3), *chain())


def batch(step, micro_batch):
    generator = torch.Generator().manual_seed(100 * step + micro_batch)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 4, generator=generator)


def loss(model, pair):
    return (model(pair[0]) - pair[1]).square().mean()


def choice(text):
    return None if text is None else armillary.Choice.parse(text)


def plan_of(schedule, workers, edge=None, back=None, model=chain, **asked):
    batches = [batch(0, number) for number in range(workers)]
    return face.plan_for(
        model(), loss, batches, workers, schedule=schedule, edge=choice(edge), edge_back=choice(back), **asked
    )


def test_a_plan_says_what_is_coded_that_it_is_not_exact_and_what_it_saves():
    plain, made = plan_of("gpipe(micro_batches=3)", 2), plan_of("gpipe(micro_batches=3)", 2, EIGHT, "same")
    assert plain.departures == () and made.departures == ("lossy",)
    assert [(one.edge, one.edge_back) for one in made.stages] == [(choice(EIGHT), choice("same")), (None, None)]
    said = " ".join(str(made).split())
    assert "NOT exact: lossy" in said and EIGHT in said and "what a code of an edge leaves out is lost" in said
    assert armillary.Plan.from_json(made.to_json()) == made
    numbers = ROWS * WIDTH
    codes = 1 + numbers + 4 * -(-numbers // 256)
    raw, coded = (face.sent_bytes_planned(one) for one in (plain, made))
    assert raw == 3 * 2 * 4 * numbers / 2 and coded == 3 * 2 * codes / 2
    assert made.activation_bytes > plain.activation_bytes  # codes are held as long as activations
    edited = replace(plain, stages=(replace(plain.stages[0], edge_back=choice(EIGHT)), plain.stages[1]))
    assert [edited.departures_of(group) for group in edited.groups] == [("lossy",), ()]


@pytest.mark.parametrize(
    ("schedule", "workers", "edge", "back", "words"),
    [
        ("ring", 2, EIGHT, None, "under ring weights and gradients go from process to process, activations stay"),
        ("zero_ring", 2, EIGHT, None, "activations stay where they are made"),
        ("shared_stages", 3, "aq_sgd(quantize(bits=8))", None, "samples of stage 0 come to other processes"),
        ("one_device(stages=2, micro_batches=2)", 2, EIGHT, None, "every process runs the whole model"),
        ("accumulation", 2, None, EIGHT, "every process runs the whole model"),
        ("simultaneous", 2, EIGHT, None, "every process runs the whole model"),
        ("gpipe", 1, EIGHT, None, "there is one stage"),
        ("gpipe", 2, None, "same", "whose edge is not coded; name the edge's codec too"),
        ("gpipe", 2, "quantise(bits=8)", None, "did you mean 'quantize'"),
        ("gpipe", 2, "quantize(bits=3)", None, "edge quantize.bits=3.: codec: quantize knows 8, 4 and 2 bits"),
        ("gpipe", 2, "one_bit(warm_up=-1)", None, "warm_up is a number of steps"),
        ("gpipe", 2, EIGHT, "one_bit(at_eval=off)", "at_eval is same or off, and of an edge"),
        ("gpipe", 2, "one_bit(at_eval=never)", None, "at_eval is same or off"),
    ],
)
def test_what_cannot_be_coded_is_refused_with_the_reason(schedule, workers, edge, back, words):
    with pytest.raises(ValueError, match=words):
        plan_of(schedule, workers, edge, back)


@pytest.mark.parametrize(
    ("edge", "back", "words"),
    [
        (None, "quantize(bits=2)", "comes back to stage 0 has fewer than 4 bits a number"),
        (EIGHT, HALF, "comes back to stage 0 is thinned for itself, which is biased"),
        (EIGHT, "quantize(bits=4)", ""), (HALF, "same", ""), ("quantize(bits=2)", None, ""),
    ],
)  # fmt: skip
def test_a_plan_warns_of_gradients_that_come_back_in_too_little(edge, back, words):
    said = " ".join(" ".join(plan_of("gpipe", 2, edge, back).notes).split())
    assert words in said if words else "comes back to stage" not in said


def test_an_edge_that_there_is_not_is_refused_by_its_number():
    seen = armillary.profile(chain(), [batch(0, 0)], loss)
    for edge, words in (({1: choice(EIGHT)}, "stage 1 hands nothing on"), ({"0": choice(EIGHT)}, "numbers of stages")):
        with pytest.raises(ValueError, match=words):
            armillary.plan(seen, face.machines(2), schedule=choice("gpipe"), edge=edge)
    old = replace(seen, stages=tuple(replace(stage, output_numbers=()) for stage in seen.stages))
    with pytest.raises(ValueError, match="the profile knows no floating numbers"):
        armillary.plan(old, face.machines(2), schedule=choice("gpipe"), edge=choice(EIGHT))


def sent_in_steps(rank, world, plans):
    """Bytes of three steps with others before them, which bring the forms of messages; and the losses."""
    found = []
    for plan in plans:
        model = chain()
        run = face.start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch(0, 0), check_order=True)
        for step in range(2 * STEPS):
            if step == STEPS:
                face.count_bytes(run)
            face.step(run, [batch(step, number) for number in range(3)])
        found.append((face.count_bytes(run), face.losses(run)))
        face.close(run)
    return found


def test_what_is_sent_is_what_the_plan_says_and_a_run_learns(crew):
    texts = ((None, None), (EIGHT, "hadamard(quantize(bits=4))"), (HALF, "same"))
    plans = [plan_of("one_f_one_b(micro_batches=3)", 3, *text) for text in texts]
    answers = crew(3).run(sent_in_steps, plans)
    sent = [sum(answer[number][0] for answer in answers) / 3 / STEPS for number in range(3)]
    raw, fixed, decided = map(face.sent_bytes_planned, plans)
    assert sent[:2] == pytest.approx([raw, fixed], rel=1e-9) and fixed < 0.3 * raw
    assert sent[2] == pytest.approx(decided, rel=0.3)
    losses = [[sum(step) for step in answers[0][number][1]] for number in range(3)]
    assert all(told[-1] < told[0] for told in losses) and losses[0] != losses[1]


def verified(rank, world, request, plant=nullcontext):
    with plant():
        return [verify_workload(of_few_tensors(), steps=4, request=one) for one in request]


def differing(found):
    return [one.parameter for one in found.differences if one.verdict != "equal"]


def test_processes_that_code_their_edges_are_the_reference_bit_for_bit(crew):
    random = choice("random_k(keep=0.3, warm_up=1)")
    two, four = choice("one_f_one_b(stages=2, micro_batches=2)"), choice("pipeline(stages=4, recompute=[1])")
    request = [
        JobRequest(PlanRequest(schedule=two, edge=choice(HALF), edge_back=random)),
        JobRequest(PlanRequest(schedule=four, edge={1: random}, edge_back=choice(EIGHT))),
    ]
    for of_a_rank in crew(4).run(verified, request):
        assert [(one.tolerance, differing(one), one.idle) for one in of_a_rank] == [(0.0, [], ())] * 2
    for (found,) in crew(4).run(verified, request[:1], one_lot_for_all_replicas):
        assert differing(found)


@contextmanager
def one_lot_for_all_replicas():
    """Planted: each draws as if its micro-batches were the first ones."""
    draw = CodedLetter._draw
    CodedLetter._draw = lambda self, leaf: draw(replace(self, crossed=replace(self.crossed, first=0)), leaf)
    yield
    CodedLetter._draw = draw


def test_stages_by_turns_code_their_edges_as_the_reference_does(crew):
    same = choice("same")
    request = [JobRequest(PlanRequest(schedule=choice("shared_stages"), edge=choice(HALF), edge_back=same))]
    for (found,) in crew(3).run(verified, request):
        assert (found.tolerance, differing(found), found.idle) == (0.0, [], ())


def test_dct_as_published_codes_gradients_between_replicas_and_activations_between_stages(crew):
    wish = JobRequest(
        PlanRequest(
            {"*": choice("threshold(sparsity=0.99)")},
            schedule=choice("one_f_one_b(stages=2)"),
            edge=choice("threshold(sparsity=0.9)"),
            edge_back=choice("same"),
        )
    )
    for (found,) in crew(4).run(verified, [wish]):
        assert not differing(found)
        assert {"thresholds refreshed", "activations coded", "activation gradients coded"} <= times_of(found).keys()


def times_of(found):
    return {one.mechanism: one.times for one in found.acted}


AQ = "aq_sgd(quantize(bits=4), cache_mb=2)"


def test_an_edge_that_remembers_samples_says_so_is_priced_and_verified(crew):
    """What the samples of the second epoch cross as is told by the bytes."""
    plain, made = plan_of("gpipe(micro_batches=3)", 2), plan_of("gpipe(micro_batches=3)", 2, AQ)
    said = " ".join(str(made).split())
    assert made.departures == ("lossy",) and AQ in said and "bytes are forecast for samples met before" in said
    assert "Each end holds up to 1.9 MiB of every tensor; the oldest go first" in said
    assert made.activation_bytes - plain.activation_bytes > 2e6
    wish = JobRequest(
        PlanRequest(schedule=choice("gpipe(stages=2, micro_batches=2)"), edge=choice(AQ), edge_back=choice(EIGHT))
    )
    for (found,) in crew(2).run(verified, [wish]):
        assert not differing(found) and times_of(found)["activations coded"] >= 2 and code_of(found) == 0
    for model in (chain, dropping_chain):
        plan = plan_of("gpipe(micro_batches=3)", 2, AQ, model=model)
        sent = crew(2).run(sent_by_epochs, plan, model)
        first, later = (sum(answer[epoch] for answer in sent) / 2 for epoch in (0, 1))
        assert later == pytest.approx(face.sent_bytes_planned(plan), rel=0.15) and first > 1.3 * later


def sent_by_epochs(rank, world, plan, make):
    """Bytes of a step of the first epoch, and of one of the second, after a step that brings the forms of messages."""
    model, found = make(), []
    run = face.start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch(9, 0))
    face.step(run, [batch(9, number) for number in range(3)])
    for _ in range(2):
        face.count_bytes(run)
        face.step(run, [batch(0, number) for number in range(3)])
        found.append(face.count_bytes(run))
    face.close(run)
    return found


@contextmanager
def never_coded():
    """By the run, and by a reference that does not code either."""
    was = cut.codes_of

    def resting(*given):
        return {way: code._replace(warm_up=NEVER) for way, code in was(*given).items()}

    cut.codes_of = schedule_truth.codes_of = resting
    yield
    cut.codes_of = schedule_truth.codes_of = was


def test_verify_shortens_a_warm_up_and_counts_what_edges_did(crew):
    late = choice("quantize(bits=8, warm_up=100)")
    wish = JobRequest(
        PlanRequest(schedule=choice("gpipe(stages=2, micro_batches=2)"), edge=late, edge_back=choice("same"))
    )
    ((found,), _), ((never,), _) = (crew(2).run(verified, [wish], plant) for plant in (nullcontext, never_coded))
    before, coded = "sent as they are, in the warm-up", "coded"
    want = {f"{what} {how}": 2 * steps for what in ("activations", "activation gradients")
            for how, steps in ((coded, 3), (before, 1))}  # fmt: skip
    assert times_of(found) == want and not differing(found) and code_of(found) == 0
    said = " ".join(str(found).split())
    assert "quantize(bits=8, warm_up=100) to quantize(bits=8, warm_up=1)" in said
    assert f"edge of stage 0: {choice(EIGHT).name}" in said and "edge_back of stage 0: same" in said
    assert not differing(never) and code_of(never) == 1
    assert {one.mechanism for one in never.idle} == {"activations coded", "activation gradients coded"}
    assert "NOT exercised: edge_back of stage 0: same: activation gradients coded" in " ".join(str(never).split())


def seen_in_evaluation(rank, world, plans):
    found = []
    for plan in plans:
        model = chain()
        run = face.start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch(0, 0))
        face.step(run, [batch(0, number) for number in range(3)])
        (out,) = face.evaluate(run, lambda model, given: model(given), [batch(7, 0)[0]])
        found.append((out, face.weights(run)))
        face.close(run)
    return found


def test_evaluation_reads_what_crosses_as_training_does_unless_it_is_switched_off(crew):
    texts = (EIGHT, "quantize(bits=8, at_eval=off)", "quantize(bits=8, warm_up=9)")
    plans = [plan_of("gpipe(micro_batches=3)", 2, text, "same") for text in texts]
    begins = int(plans[0].stages[1].begins.split(".")[0])
    for number, (out, weights) in enumerate(crew(2).run(seen_in_evaluation, plans)[0]):
        model = chain()
        model.load_state_dict(weights)
        with torch.no_grad():
            hidden = model[:begins](batch(7, 0)[0])
            meant = codec_of(choice(EIGHT)).meaning(hidden.view(-1), None).view(hidden.shape)
            assert not torch.equal(meant, hidden)
            assert torch.equal(out, model[begins:](hidden if number else meant))


class Masking(nn.Module):
    """Makes hidden numbers, and a mask of the same dtype that asks for no gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        return self.inner(value), torch.full((len(value), len(value)), -torch.inf).triu(1)


class Masked(nn.Module):
    """Reads the hidden numbers under the mask, and hands both on beside what it makes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        hidden, mask = value
        return (hidden @ hidden.T + mask).softmax(-1) @ self.inner(hidden), hidden, mask


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)

    def forward(self, value):
        made, hidden, mask = value
        return self.inner(made + hidden + mask.exp() @ made)


def masked_chain():
    torch.manual_seed(2)
    return nn.Sequential(Masking(), Masked(), Joined())


def seen_in_masked_evaluation(rank, world, plan):
    model = masked_chain()
    run = face.start(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch(0, 0))
    (early,) = face.evaluate(run, lambda model, given: model(given), [batch(7, 0)[0]])
    face.step(run, [batch(0, number) for number in range(3)])
    (out,) = face.evaluate(run, lambda model, given: model(given), [batch(7, 0)[0]])
    found = early, out, face.weights(run)
    face.close(run)
    return found


@pytest.mark.parametrize("again", ["", ", recompute=[0, 1]"])
def test_evaluation_codes_no_mask_and_no_value_a_second_time(crew, again):
    schedule = f"gpipe(micro_batches=3, points=['1', '2']{again})"
    plan = plan_of(schedule, 3, "quantize(bits=2)", "same", model=masked_chain)
    before = masked_chain()
    early, out, weights = crew(3).run(seen_in_masked_evaluation, plan)[0]
    after = masked_chain()
    after.load_state_dict(weights)
    for found, model in ((early, before), (out, after)):
        with torch.no_grad():
            hidden, mask = model[0](batch(7, 0)[0])
            made, passed_on, mask = model[1]((at_two_bits(hidden), mask))
            want = model[2]((at_two_bits(made), passed_on, mask))
        assert torch.equal(found, want) and bool(want.isfinite().all())


def at_two_bits(tensor):
    return codec_of(choice("quantize(bits=2)")).meaning(tensor.view(-1), None).view(tensor.shape)


def test_the_clock_plays_codes_and_what_coding_costs():
    """On a slow link a step is shorter for it, on a quick one longer."""
    seen = armillary.profile(chain(), [batch(0, 0)], loss)
    for speed, is_shorter in ((1e5, True), (1e12, False)):
        link = armillary.Link(1e-5, speed)
        case = Case(seen, armillary.Topology(1, 2, link, link, 1 << 33))
        named = {"edge": choice("hadamard(quantize(bits=4))"), "edge_back": choice(EIGHT)}
        plans = [armillary.plan(seen, case.topology, schedule=choice("gpipe"), **ways) for ways in ({}, named)]
        plain, coded = (simulate(plan, case) for plan in plans)
        assert (coded.step_seconds < plain.step_seconds) is is_shorter
        said = [note for note in plans[1].notes if "coded edges do not help at these links: simulated step" in note]
        assert len(said) == (not is_shorter) and not any("coded edges" in note for note in plans[0].notes)
        assert sum(flight.sent_bytes for flight in coded.flights) == pytest.approx(plans[1].forecast.sent_bytes)
        assert {"encode", "decode"} <= {span.action for span in coded.spans} - {span.action for span in plain.spans}


def test_the_command_line_reads_edges_as_they_are_written():
    assert edge_request("--edge", []) is None and edge_request("--edge", [HALF]) == choice(HALF)
    assert edge_request("--edge", [f"{HALF}=0,2", "one_bit=1"]) == {
        0: choice(HALF),
        2: choice(HALF),
        1: choice("one_bit"),
    }
    assert edge_request("--edge-back", ["same=1"]) == {1: choice("same")}
    for texts, words in (
        ([f"{EIGHT}=layer.*"], r"--edge: choice: .*Want CHOICE or CHOICE=STAGES"),
        ([EIGHT, f"{HALF}=0"], "is for all stages; name the stages of each"),
        ([f"{EIGHT}=0", f"{HALF}=0,1"], "stage 0 has quantize.bits=8. and threshold"),
    ):
        with pytest.raises(ValueError, match=words):
            edge_request("--edge", texts)
    with pytest.raises(ValueError, match="says its own edges"):
        armillary.verify(None, None, [], None, plan=plan_of("gpipe", 2), edge=choice(EIGHT))
