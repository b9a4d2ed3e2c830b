"""A step against a clock: small cases by hand, and the laws that hold for every plan on any machines."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.exchanges.look_up import HEADER_BYTES
from armillary.planning.planner import plan
from armillary.planning.pricing import ADAGRAD, ADAM, SGD, Case, row_forecast
from armillary.planning.simulator import simulate
from armillary.plans import Choice, Link, Processor, Profile, RequestLink, RowRate, StageFact
from planning_cases import LINKS_ONLY, dense, machines, table

MB = 1_000_000
KINDS = ("AllReduce", "AllToAll", "AllGather")
ROW_EXCHANGES = (
    Choice("owned_rows"),
    Choice("owned_rows", {"owners": 1}),
    Choice("owned_rows", {"order": "hashed"}),
    Choice("gather_rows"),
    Choice("all_reduce"),
)


def staged(*stages, workers=2):
    """stages: (name, forward seconds, backward seconds, facts), in the model's order."""
    facts = tuple(replace(fact, stage=name) for name, _, _, own in stages for fact in own)
    costs = tuple(StageFact(name, 0, 0, 0, forward, backward) for name, forward, backward, _ in stages)
    return Profile(facts, (*costs, StageFact("", 0, 0, 0, 0.0, 0.0)), batches=workers, workers=workers)


def spans(simulation, lane):
    """What a processor of next to unlimited speed does in next to no time is left out."""
    found = [span for span in simulation.spans if span.lane == lane and span.seconds > 1e-12]
    return [(span.what, span.action, span.start_seconds, span.end_seconds) for span in found]


def two_layers(workers=2):
    """Two layers of 1 MB; forward 1 s and 2 s, backward 3 s and 4 s. The second one's gradient comes first."""
    first, second = dense("first.weight", MB // 4, arrival=1), dense("second.weight", MB // 4, arrival=0)
    return staged(("first", 1.0, 3.0, [first]), ("second", 2.0, 4.0, [second]), workers=workers)


def separate(profile, topology):
    """Every dense parameter in a bucket of its own."""
    return plan(profile, topology, constraints={"*": Choice("all_reduce")}, assumptions=LINKS_ONLY)


def test_two_layers_by_hand():
    """On 2 workers at 0.25 MB/s each bucket of 1 MB (and a flag of 4 B) takes 4 s: the second layer's hides behind the
    first one's backward but for 1 s, and the first one's follows it."""
    case = Case(two_layers(), machines(2, megabits=2.0, latency=0.0), LINKS_ONLY)
    buckets = [replace(g, parameters=(n,), name=n) for g in separate(*_both(case)).groups for n in g.parameters]
    made = replace(separate(*_both(case)), groups=tuple(buckets))
    found = simulate(made, case)
    wire = (MB + 4) / 250_000
    assert spans(found, "processor") == [
        ("first", "forward", 0.0, 1.0),
        ("second", "forward", 1.0, 3.0),
        ("second", "backward", 3.0, 7.0),
        ("first", "backward", 7.0, 10.0),
    ]
    assert spans(found, "between") == [
        ("second.weight", "push", 7.0, pytest.approx(7 + wire)),
        ("first.weight", "push", pytest.approx(7 + wire), pytest.approx(7 + 2 * wire)),
    ]
    assert found.step_seconds == pytest.approx(7 + 2 * wire)
    assert found.exposed_seconds == {
        "second.weight": pytest.approx(7 + wire - 10), "first.weight": pytest.approx(wire)
    }  # fmt: skip


def _both(case):
    return case.profile, case.topology


def test_one_bucket_leaves_with_its_last_gradient():
    case = Case(two_layers(), machines(2, megabits=2.0, latency=0.0), LINKS_ONLY)
    ((_, _, start, _),) = spans(simulate(separate(*_both(case)), case), "between")
    assert start == 10.0


def test_a_table_is_pulled_before_the_stage_that_reads_it_and_pushed_when_its_gradient_is_there():
    """10 rows of 4 B on 2 workers at 1 B/s: half of them live elsewhere. Header 40 B, ids 20 B, rows 20 B; then the
    round that ends look-ups, 40 B; gradients 20 B, while the first layer's backward runs."""
    rows = replace(table("t.weight", 0, rows=100, width=1, alpha=0.1, workers=2), stage="")
    first = dense("first.weight", 1, arrival=1)
    profile = staged(("first", 1.0, 500.0, [first]), ("t", 2.0, 4.0, [rows]))
    case = Case(profile, machines(2, megabits=8e-6, latency=0.0), LINKS_ONLY)
    wishes = {"t.weight": Choice("owned_rows"), "first.weight": Choice("all_reduce")}
    made = plan(profile, case.topology, constraints=wishes, assumptions=LINKS_ONLY)
    found = simulate(made, case)
    assert spans(found, "between") == [
        ("look-ups", "pull", 1.0, 41.0),
        ("t.weight", "pull", 41.0, 81.0),
        ("look-ups", "pull", 87.0, 127.0),
        ("t.weight", "push", 127.0, 147.0),
        ("bucket 0", "push", 627.0, 635.0),
    ]
    assert [name for name, *_ in spans(found, "processor")] == ["first", "t", "t", "first"]
    assert found.exposed_seconds == {"t.weight": 40.0, "look-ups": 80.0, "bucket 0": pytest.approx(8.0)}


def test_index_work_and_the_optimizer_take_the_processor():
    """1 s a row: 10 asked for and 10 served, half of it before the stage, half after the gradients are there."""
    rows = table("t.weight", 0, rows=100, width=1, alpha=0.1, workers=2)
    profile = staged(("t", 1.0, 2.0, [rows]))
    assumed = replace(LINKS_ONLY, row_seconds=1.0)
    case = Case(profile, machines(2, megabits=1e12, latency=0.0), assumed)
    made = plan(profile, case.topology, constraints={"t.weight": Choice("owned_rows")}, assumptions=assumed)
    actions = [
        (action, pytest.approx(end - start)) for _, action, start, end in spans(simulate(made, case), "processor")
    ]
    assert actions == [("gather rows", 10.0), ("forward", 1.0), ("backward", 2.0), ("merge rows", 10.0)]


# Any plan on any machines ------------------------------------------------------------------------------------------


@st.composite
def cases(draw):
    """A model of a few layers and tables on a few machines, and a plan for them."""
    nodes, per_node = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (16, 8)]))
    workers = nodes * per_node
    inside = Link(draw(st.floats(0, 1e-3)), draw(st.floats(1e6, 1e10)))
    topology = machines(nodes, per_node, draw(st.floats(1, 1e4)), draw(st.floats(0, 1e-3)), inside=inside)
    calls = [RequestLink(kind, "between", topology.between, beside_seconds=draw(st.floats(0, 1e-3))) for kind in KINDS]
    topology = replace(topology, requests=tuple(calls) if draw(st.booleans()) else ())
    stages, wishes, arrival = [], {}, 2 * draw(st.integers(1, 3))
    for number in range(arrival // 2):
        arrival -= 2
        facts = [dense(f"{number}.d", draw(st.integers(1, 300_000)), arrival + 1)]
        if draw(st.booleans()):
            facts.append(table(f"{number}.t", arrival, workers=4, alpha=draw(st.floats(1e-4, 0.2))))
            wishes[f"{number}.t"] = draw(st.sampled_from(ROW_EXCHANGES if workers > 1 else ROW_EXCHANGES[-1:]))
        stages.append((str(number), draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1)), facts))
    profile = staged(*stages, workers=4)
    assumptions = draw(st.sampled_from([LINKS_ONLY, SGD, ADAGRAD, ADAM]))
    mean = draw(st.sampled_from(["workers", "weights"]))
    made = plan(profile, topology, constraints=wishes, assumptions=assumptions, mean=mean)
    return made, Case(profile, topology, assumptions)


def faster(topology, factor):
    def link(one):
        return Link(one.latency_seconds, one.bytes_per_second * factor)

    requests = tuple(replace(one, link=link(one.link)) for one in topology.requests)
    return replace(topology, inside=link(topology.inside), between=link(topology.between), requests=requests)


@pytest.mark.parametrize("assumptions", [LINKS_ONLY, SGD, ADAGRAD, ADAM])
@pytest.mark.parametrize("choice", [*ROW_EXCHANGES, Choice("owned_rows_by_node")], ids=str)
def test_nothing_of_the_forecast_of_a_table_is_lost(choice, assumptions):
    profile = staged(("t", 1e-3, 2e-3, [table("t", 0, workers=4)]), workers=4)
    case = Case(profile, machines(2, 2, megabits=50.0, inside=Link(1e-5, 1e7)), assumptions)
    made = plan(profile, case.topology, constraints={"t": choice}, assumptions=assumptions)
    assert simulate(made, case, overlap=False).step_seconds == pytest.approx(made.forecast.seconds)


def test_what_never_got_a_gradient_leaves_at_the_end_of_backward():
    first = [dense("a.weight", MB // 4, 0), dense("a.quiet", MB // 4, None)]
    case = Case(staged(("a", 1.0, 2.0, first)), machines(2, megabits=8.0, latency=0.0), LINKS_ONLY)
    made = separate(*_both(case))
    assert [(what, start) for what, _, start, _ in spans(simulate(made, case), "between")] == [
        ("bucket 0", 3.0),
        ("bucket 1", pytest.approx(4.0, abs=1e-5)),
    ]
    assert sum(simulate(made, case).sent_bytes.values()) == pytest.approx(made.forecast.sent_bytes)


@given(cases())
def test_without_overlap_a_step_takes_the_sum_that_the_plan_forecasts(case):
    made, of = case
    assert simulate(made, of, overlap=False).step_seconds == pytest.approx(made.forecast.seconds)


@given(cases())
def test_bytes_are_those_the_plan_forecasts(case):
    made, of = case
    for overlap in (False, True):
        found = simulate(made, of, overlap)
        sent = found.sent_bytes
        by_row = [group.name for group in made.groups if group.layout == "row_sharded"]
        header = HEADER_BYTES * (made.workers - 1)  # each table is looked up once, and once all say that they are done
        assert sent.pop("look-ups", 0.0) == pytest.approx((len(by_row) + 1) * header if by_row else 0.0)
        for group in made.groups:
            headers = header * ((group.name in by_row) + (group.name in by_row[:1]))
            assert sent.get(group.name, 0.0) + headers == pytest.approx(group.forecast.sent_bytes)
        on_lanes = sum(span.sent_bytes for span in found.spans)
        assert on_lanes == pytest.approx(made.forecast.sent_bytes)


@given(cases())
def test_a_step_takes_at_least_its_compute_and_at_least_the_time_of_its_links(case):
    made, of = case
    found, summed = simulate(made, of), simulate(made, of, overlap=False)
    busy = {lane: sum(s.seconds for s in found.spans if s.lane == lane) for lane in ("inside", "between", "processor")}
    rounding = 1 + 1e-9
    assert max(busy.values()) <= found.step_seconds * rounding
    assert made.compute_seconds <= found.processor_seconds * rounding
    assert found.step_seconds <= summed.step_seconds * rounding
    assert found.step_seconds == pytest.approx(found.processor_seconds + sum(found.exposed_seconds.values()))


@given(cases())
def test_with_links_of_unlimited_speed_a_step_is_its_compute(case):
    made, of = case
    free = Link(0.0, float("inf"))
    found = simulate(made, replace(of, topology=replace(of.topology, inside=free, between=free, requests=())))
    assert found.step_seconds == pytest.approx(found.processor_seconds) and not found.exposed_seconds
    if of.assumptions is LINKS_ONLY:
        assert found.step_seconds == pytest.approx(made.compute_seconds)


@given(cases(), st.floats(1.0, 100.0))
def test_more_bandwidth_never_makes_a_step_longer(case, factor):
    made, of = case
    quick = simulate(made, replace(of, topology=faster(of.topology, factor)))
    assert quick.step_seconds <= simulate(made, of).step_seconds * (1 + 1e-9)


@given(cases())
def test_no_lane_does_two_things_at_once(case):
    found = simulate(*case)
    for lane in ("processor", "inside", "between"):
        taken = sorted((s.start_seconds, s.end_seconds) for s in found.spans if s.lane == lane)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(taken))
    alone = sorted((s.start_seconds, s.end_seconds) for s in found.spans if s.lane in ("processor", "exposed"))
    assert all(end == pytest.approx(start) for (_, end), (start, _) in itertools.pairwise(alone))


def test_measured_links_and_rates_take_the_place_of_the_assumed():
    """All-reduces at half the speed of the link, and rows at 3 s each where 0 was assumed; 2 s more for each of 7
    that a step touches: gathered for the optimizer, and put back."""
    profile = staged(("t", 0.0, 0.0, [table("t", 0, rows=100, width=1, alpha=0.1, workers=2)]))
    plain = machines(2, megabits=8.0, latency=0.0)
    slow = RequestLink("AllReduce", "between", Link(0.0, 0.5 * MB))
    rate = RowRate(0.0, 1.0, 0.0)
    measured = replace(plain, requests=(slow,), processor=Processor(rate, rate, rate, 1e300))
    for choice, factor, added in (("all_reduce", 2.0, 0.0), ("owned_rows", 1.0, 60.0 + 14.0)):
        before, after = (
            plan(profile, topology, constraints={"t": choice}, assumptions=LINKS_ONLY).forecast.seconds
            for topology in (plain, measured)
        )
        assert after == pytest.approx(factor * before + added)
    whole = staged(("d", 0.0, 0.0, [dense("d", MB // 4)]))
    copied = replace(plain, processor=Processor(rate, rate, rate, 1e6))
    spent = (
        plan(whole, copied, assumptions=SGD).forecast.seconds
        - plan(whole, plain, assumptions=LINKS_ONLY).forecast.seconds
    )
    assert spent == pytest.approx(5.0, rel=1e-5)  # packed: read and written; updated: gradient and weight, and written


def test_another_model_is_refused():
    case = Case(two_layers(), machines(2), LINKS_ONLY)
    made = separate(*_both(case))
    with pytest.raises(ValueError, match=r"the plan was made for model .* give the profile.json"):
        simulate(made, replace(case, profile=staged(("a", 1.0, 1.0, [dense("a.weight", 3)]))))


def test_what_compute_cannot_hide_of_a_push_takes_the_processor():
    """The second layer's bucket takes 1 s of link; a quarter of it, 0.25 s, delays the first layer's backward. With
    nothing hidden it is as if backward waited, and the first layer's own bucket is waited for once, not twice."""
    topology = replace(machines(2, megabits=8.0, latency=0.0), hidden_share=0.75)
    case = Case(two_layers(), topology, LINKS_ONLY)
    buckets = [replace(g, parameters=(n,), name=n) for g in separate(*_both(case)).groups for n in g.parameters]
    made = replace(separate(*_both(case)), groups=tuple(buckets))
    wire = (MB + 4) / MB
    assert simulate(made, case).step_seconds == pytest.approx(10 + wire / 4 + wire)
    for share, seconds in ((1.0, 10 + wire), (0.0, 10 + 2 * wire)):
        other = replace(case, topology=replace(topology, hidden_share=share))
        assert simulate(made, other).step_seconds == pytest.approx(seconds)


def test_latency_is_waited_for_and_takes_no_processor():
    """A second of latency on both buckets: the first layer's backward hides that of the second layer's bucket, whatever
    of the bytes it cannot hide."""
    topology = replace(machines(2, megabits=8e6, latency=0.5), hidden_share=0.0)  # two messages an all-reduce
    case = Case(two_layers(), topology, LINKS_ONLY)
    buckets = [replace(g, parameters=(n,), name=n) for g in separate(*_both(case)).groups for n in g.parameters]
    made = replace(separate(*_both(case)), groups=tuple(buckets))
    assert simulate(made, case).step_seconds == pytest.approx(10 + 1, rel=1e-3)


def test_a_request_takes_of_compute_what_was_measured_however_small_it_is():
    """0.25 s each: that of the second layer's bucket delays the first layer's backward, that of the last its bytes."""
    plain = machines(2, megabits=8.0, latency=0.0)
    taken = (RequestLink("AllReduce", "between", plain.between, beside_seconds=0.25),)
    steps = []
    for topology in (plain, replace(plain, requests=taken)):
        case = Case(two_layers(), topology, LINKS_ONLY)
        whole = separate(*_both(case))
        buckets = [replace(g, parameters=(n,), name=n) for g in whole.groups for n in g.parameters]
        steps.append(simulate(replace(whole, groups=tuple(buckets)), case))
    assert steps[1].step_seconds == pytest.approx(steps[0].step_seconds + 0.5)


def test_a_look_up_pays_for_its_calls_though_nothing_is_computed_meanwhile():
    """Header; ids and rows, which follow at once and so wake nobody anew; the round that ends look-ups; gradients."""
    plain = machines(2, megabits=1e9, latency=0.0)
    called = replace(plain, requests=(RequestLink("AllToAll", "between", plain.between, beside_seconds=0.25),))
    profile = staged(("t", 1.0, 2.0, [table("t", 0, rows=100, width=1, alpha=0.1, workers=2)]), workers=2)
    found = []
    for topology in (plain, called):
        case = Case(profile, topology, LINKS_ONLY)
        found.append(simulate(plan(profile, topology, constraints={"t": Choice("owned_rows")}), case).step_seconds)
    assert found[1] == pytest.approx(found[0] + 4 * 0.25)


def test_the_calls_of_index_work_and_the_rows_of_a_window_are_paid_for():
    """A call of each kind at 1 s: once for the rows that pass, and for weight and moment gathered and put back."""
    calls = RowRate(1.0, 0.0, 0.0)
    one = replace(machines(2, megabits=1e12, latency=0.0), processor=Processor(calls, calls, calls, 1e300))
    rows = table("t", 0, rows=100, width=1, alpha=0.1, workers=2)
    for assumptions, seconds in ((SGD, 3 + 2), (ADAGRAD, 3 + 2 * 2)):
        case = Case(staged(("t", 0.0, 0.0, [rows])), one, assumptions)
        assert row_forecast(rows, Choice("owned_rows"), False, case).seconds == pytest.approx(seconds)
