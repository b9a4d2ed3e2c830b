"""What coding takes of a processor: timed by the exchanges' own programs, priced where it was timed, else a default."""

from dataclasses import replace

import pytest
import torch

from armillary import Choice
from armillary.exchanges import RankInfo, build_dense, dense_exchanges
from armillary.measuring import processor as coding_timer
from armillary.measuring.processor import coding_rates
from armillary.planning.planner import plan
from armillary.planning.pricing import Case, coding_seconds, dense_forecast
from armillary.plans import CodingRate, Processor, RowRate, Topology, layout_of
from armillary.reference import lockstep
from planning_cases import dense, machines, model

RATE = RowRate(1e-6, 1e-8, 1e-10)
INT8 = CodingRate("quantize(bits=8)", 4, 1e-3, 2.0)
FACT = dense(elements=1_000_000)


def timed(*rates, workers=4):
    return replace(machines(workers), processor=Processor(RATE, RATE, RATE, 1e10, tuple(rates)))


def seconds(text, topology, fact=FACT):
    choice = Choice.parse(text)
    exchange = build_dense(choice.name, **choice.options)
    return coding_seconds(choice, layout_of([fact], exchange.align, exchange.is_guarded), Case(model(fact), topology))


def test_what_was_timed_is_priced_and_so_is_the_forecast():
    assert seconds("quantize(bits=8)", timed(INT8)) == pytest.approx(1e-3 + 2.0, rel=1e-3)
    choice, case = Choice.parse("quantize(bits=8)"), Case(model(FACT), timed(INT8))
    none = Case(model(FACT), timed(replace(INT8, call_seconds=0.0, million_seconds=0.0)))
    gap = dense_forecast([FACT], choice, case).seconds - dense_forecast([FACT], choice, none).seconds
    assert gap == pytest.approx(2.001, rel=1e-3)


def test_other_options_workers_and_dtypes_are_priced_by_the_work_they_are():
    exact = seconds("quantize(bits=8)", timed(INT8)) - 1e-3
    assert seconds("quantize(bits=4)", timed(INT8)) == pytest.approx(exact + 1e-3, rel=1e-3)
    gathered = seconds("quantize(bits=8, wire=gathered)", timed(INT8, workers=8)) - 1e-3
    assert gathered == pytest.approx(exact * (4 * (1 + 8) / 2 + 3 * 8) / (4 * 3 / 2 + 6), rel=1e-3)
    assert seconds("quantize(bits=8)", timed(INT8), dense(elements=1_000_000, dtype="bfloat16")) < 0.51 * exact + 1e-3


def test_without_a_rate_a_default_is_priced_and_the_note_says_so():
    assert seconds("one_bit", timed(INT8)) == seconds("one_bit", machines()) > 0
    notes = [
        next(note for note in plan(model(FACT), topology).notes if "lossy" in note or "NOT exact" in note)
        for topology in (timed(), timed(INT8))
    ]
    assert "priced by a default here, armillary measure times it" in notes[0] and "default" not in notes[1]


def test_rates_go_to_a_file_and_back_and_a_file_without_them_has_none(tmp_path):
    topology = timed(INT8)
    assert Topology.from_json(topology.to_json()) == topology
    old = topology.to_json().replace('"coding": [', '"coding_": [')
    assert '"coding_"' in old and Topology.from_json(old).processor.coding == ()
    with pytest.raises(ValueError, match="coding rate of 2 workers or more"):
        replace(INT8, workers=1)


class MadeUpClock:
    """Says how many values the pushes that it times have; every rank agrees on twice that."""

    def seconds(self, pushes):
        self.before = {key: value.clone() for key, value in pushes.state.items()}
        pushes()
        numel = pushes.parcel.layout.numel
        assert all(bool(value.isfinite().all()) for value in pushes.state.values())
        return 1e-3 + numel * 1e-9

    def agree(self, mine):
        return [2 * one for one in mine]


def test_every_way_that_is_offered_is_timed_by_its_own_pushes(monkeypatch):
    monkeypatch.setattr(coding_timer, "VALUES", (1 << 16, 1 << 18))
    rates = coding_rates(machines(3), MadeUpClock())
    offered = {
        str(Choice(name, dict(way)))
        for name, entry in dense_exchanges().items() if entry.departs for way in entry.offers(FACT, machines(3))
    }  # fmt: skip
    assert {rate.exchange for rate in rates} == offered and {rate.workers for rate in rates} == {3}
    for rate in rates:
        assert rate.call_seconds == pytest.approx(2e-3, rel=1e-6) and rate.million_seconds == pytest.approx(2e-3, 1e-6)


@pytest.mark.parametrize("text", ["quantize(bits=8)", "threshold(sparsity=0.9)", "low_rank(rank=2, start=0)"])
def test_answers_at_once_are_those_of_ranks_that_all_send_the_same(text):
    choice = Choice.parse(text)
    layout = coding_timer._layout(choice, 3, 1 << 14)
    pushes = coding_timer._Pushes(choice, layout, 3)
    before = {key: value.clone() for key, value in pushes.state.items()}
    pushes()
    programs = [pushes.exchange.push(pushes.parcel, before, RankInfo(rank, 3)) for rank in range(3)]
    (_, want), *_ = lockstep.run(programs)[0]
    assert all(torch.equal(value, want[key]) for key, value in pushes.state.items())
