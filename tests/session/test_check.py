"""`armillary.check`: what is said of a method that keeps its rules, and of one that breaks each of them."""

from dataclasses import replace

import pytest
import torch

import armillary
from armillary.codecs.codec import Codec, codec
from armillary.exchanges.dense import DenseExchange
from armillary.exchanges.exchange import dense_exchange
from armillary.exchanges.leg import Leg
from armillary.facts.collectives import AllGather
from armillary.reference import schedule_contract
from armillary.schedules.gpipe import gpipe
from armillary.schedules.in_pipeline import pipeline_method
from armillary.schedules.lowering import Lowering
from armillary.schedules.registry import SCHEDULES
from contracts.journey import registered


def test_a_name_that_nothing_has_is_answered_with_the_remedy():
    with pytest.raises(
        ValueError, match=r"check: no codec, dense exchange or schedule 'nothing'; .*import its file first"
    ):
        armillary.check("nothing")


# A codec: a sign drawn by lot, times the largest number of a tile of two.

TILE = 2


def spread(values):
    padded = torch.nn.functional.pad(values, (0, len(values) % TILE)).view(-1, TILE)
    return padded.abs().amax(1).repeat_interleave(TILE)[: len(values)]


def signs():
    def is_up(values, draw):
        lot = torch.rand(len(values), generator=draw, dtype=torch.float64)
        share = values.double() / spread(values).double()
        return lot < (1 + share.nan_to_num(0.0)) / 2

    def meaning(values, draw):
        return torch.where(is_up(values, draw), spread(values), -spread(values))

    return Codec(
        encode=lambda values, draw: meaning(values, draw).view(torch.uint8),
        decode=lambda code, n, like: code.clone().view(like.dtype),
        meaning=meaning,
        coded_bytes=lambda n, item_bytes: n * item_bytes,
        bound=lambda values: values.abs().double() + spread(values).double(),
        align=TILE,
        draws=True,
    )


def in_their_dtype(made):
    return made._replace(bound=lambda values: values.abs() + spread(values))


def half_as_wide(made):
    return made._replace(bound=lambda values: made.bound(values) / 2)


def drawn_again(made):
    def encode(values, draw):
        torch.rand(1, generator=draw)
        return made.encode(values, draw)

    return made._replace(encode=encode)


def drawn_from_elsewhere(made):
    return made._replace(
        encode=lambda values, draw: made.encode(values, None), meaning=lambda values, draw: made.meaning(values, None)
    )


def too_short_a_code(made):
    return made._replace(encode=lambda values, draw: made.encode(values, draw)[: len(values)])


def length_not_known(made):
    def coded_bytes(n, item_bytes):
        return {1: item_bytes}[n]

    return made._replace(coded_bytes=coded_bytes)


def longer_than_it_says(made):
    return made._replace(coded_bytes=lambda n, item_bytes: n * item_bytes - (n > 100))


def in_place(made):
    return made._replace(encode=lambda values, draw: made.encode(values.mul_(0.5), draw))


def one_more(made):
    return made._replace(
        meaning=lambda values, draw: made.meaning(values, draw) + 1,
        encode=lambda values, draw: (made.meaning(values, draw) + 1).view(torch.uint8),
        bound=lambda values: made.bound(values) + values.abs() + 2,
    )


def always_double(made):
    return made._replace(meaning=lambda values, draw: made.meaning(values, draw).double())


def read_where_it_lies(made):
    return made._replace(decode=lambda code, n, like: code.view(like.dtype))


def without_a_lot(made):
    """The sign alone, which is no lot any more."""

    def meaning(values, draw):
        return values.sign() * spread(values)

    return made._replace(meaning=meaning, encode=lambda values, draw: meaning(values, draw).view(torch.uint8))


def one_tile(made):
    """Of all numbers; so pieces cannot be cut."""
    plain = without_a_lot(made)

    def meaning(values, draw):
        return values.sign() * (values.abs().amax() if len(values) else 0)

    encode = lambda values, draw: meaning(values, draw).view(torch.uint8)  # noqa: E731
    bound = lambda values: values.abs().double() + values.abs().amax().double()  # noqa: E731
    return plain._replace(meaning=meaning, encode=encode, bound=bound, draws=False)


CODEC_FAULTS = {
    in_their_dtype: r"further off than the bound says, by up to .*it must cover how the values' dtype rounds",
    half_as_wide: r"further off than the bound says, by up to [\d.e+-]+$",
    drawn_again: "decode gives other numbers than meaning; both are given generators in the same state",
    drawn_from_elsewhere: "two codes from generators in the same state differ",
    longer_than_it_says: "coded_bytes says",
    too_short_a_code: r"the code has 1 bytes, coded_bytes says 4",
    length_not_known: r"coded_bytes raises KeyError: 0 \(.*test_check.py, line \d+\)",
    in_place: "encode changes the values it is given",
    one_more: "zeros come back as something else",
    always_double: r"meaning torch.float64; want the dtype of the values",
    read_where_it_lies: "from the middle of a message cannot be decoded",
    without_a_lot: "draws is True, and other draws give the same numbers",
    one_tile: "pieces mean other numbers than the whole",
}


def test_a_codec_that_keeps_its_rules_is_said_to_as_is_the_exchange_of_its_name():
    with registered(codec(costs="a sign each"), signs):
        said = armillary.check("signs").splitlines()
    assert said[0] == "codec signs keeps its 7 rules"
    assert [line.split("(")[0].split(" keeps")[0] for line in said[1:]] == ["exchange signs"] * 3


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("fault", CODEC_FAULTS)
def test_what_is_wrong_with_a_codec_is_named(fault, carries):
    def faulty():
        return fault(signs())

    with registered(codec(carries=carries), faulty), pytest.raises(ValueError, match=r"breaks .* of its rules") as told:
        armillary.check("faulty")
    assert [line for line in str(told.value).splitlines()[1:] if line.startswith("codec faulty: it is not so that ")]
    told.match(f"(?m){CODEC_FAULTS[fault]}")


def test_options_that_stand_in_no_example_can_be_held_too():
    assert armillary.check("top_k(keep=0.3)").splitlines()[0] == "codec top_k(keep=0.3) keeps its 7 rules"
    assert armillary.check("gpipe(micro_batches=6)").startswith("schedule gpipe(micro_batches=6) on ")
    with pytest.raises(ValueError, match="top_k refuses options"):
        armillary.check("top_k(kept=0.3)")


# An exchange: everybody gets everybody's numbers.


def gathered():
    def push(parcel, state, place):
        everyones = yield AllGather(parcel.values)
        tails = yield AllGather(parcel.tail)
        return parcel.answered(everyones.sum(0), tails.sum(0)), state

    def sent_bytes(layout, topology):
        return [(topology.workers - 1) * (layout.nbytes + 8.0 * layout.tail)] * topology.workers

    def legs(layout, topology):
        return [Leg("everyone", sent_bytes(layout, topology)[0], 2 * (topology.workers - 1), "AllGather")]

    return DenseExchange(push, 2, sent_bytes, legs)


def with_push(answer):
    def fault(made):
        def push(parcel, state, place):
            found, state = yield from made.push(parcel, state, place)
            return answer(found, state, place)

        return made._replace(push=push)

    return fault


def rounded(found, state, place):
    is_real = found.values.is_floating_point()
    return found.answered(found.values.half().to(found.values.dtype) if is_real else found.values, found.tail), state


def tail_in_bytes(found, state, place):
    return found.answered(found.values, found.tail.to(torch.int8).double()), state


def twice_in_the_oracle(made):
    def oracle(parcels, states):
        results, after = made.oracle(parcels, states)
        return [one.answered(2 * one.values, one.tail) for one in results], after

    return with_push(lambda found, state, place: (found.answered(2 * found.values, found.tail), state))(
        made._replace(oracle=oracle)
    )


def counting_in_place(made):
    def push(parcel, state, place):
        state["pushes"] += 1
        return (yield from made.push(parcel, state, place))

    def oracle(parcels, states):
        return made.oracle(parcels, [{"pushes": state["pushes"] + 1} for state in states])

    begin = lambda layout, place, values: {"pushes": torch.zeros(1)}  # noqa: E731
    return made._replace(push=push, oracle=oracle, begin=begin)


EXCHANGE_FAULTS = {
    with_push(rounded): "push gives .*, the oracle",
    with_push(tail_in_bytes): r"200 workers, 2 a node: .* arrives for",
    twice_in_the_oracle: "it departs from nothing, but its oracle gives",
    (lambda made: made._replace(requests=1)): r"1 workers, 1 a node: ranks make \[2\] requests, it says 1 at most",
    (lambda made: made._replace(sent_bytes=lambda *both: [2 * x for x in made.sent_bytes(*both)])): "bytes, it says",
    counting_in_place: "push changes pushes in place",
}


def test_an_exchange_that_keeps_its_rules_is_said_to():
    with registered(dense_exchange(), gathered):
        assert armillary.check("gathered") == "exchange gathered keeps its 6 rules"


@pytest.mark.parametrize("fault", EXCHANGE_FAULTS)
def test_what_is_wrong_with_an_exchange_is_named(fault):
    def faulty():
        return fault(gathered())

    with registered(dense_exchange(), faulty), pytest.raises(ValueError, match=EXCHANGE_FAULTS[fault]):
        armillary.check("faulty")


# A schedule.


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES.all()))


def method(**changed):
    made = pipeline_method(
        table=lambda options: gpipe(options.stages, options.micro_batches),
        pace=lambda options, stages: sum(stages) * options.micro_batches,
        notes=lambda planned: [],
    )
    return replace(made, **changed)


@pytest.mark.usefixtures("shelf")
def test_a_schedule_is_held_to_its_own_table():
    SCHEDULES.register("mine", method())
    assert armillary.check("mine") == "schedule mine(micro_batches=4) on 3 processes keeps its 3 rules"
    SCHEDULES.register("owned_elsewhere", method(owner=lambda options, stage: 7))
    with pytest.raises(ValueError, match="the owner of stage 0 is process 7 of 3"):
        armillary.check("owned_elsewhere")
    SCHEDULES.register("larger", method(table=lambda options: gpipe(options.stages, options.micro_batches + 1)))
    with pytest.raises(ValueError, match=r"its options say \(3, 4\) stages and micro-batches, its table \(3, 5\)"):
        armillary.check("larger")


class Deaf(Lowering):
    """Process 1 makes no room for what comes."""

    def next_step(self):
        made = super().next_step()
        return made if self.rank != 1 else [one for one in made if one.op != "RECEIVE"]


@pytest.mark.usefixtures("shelf")
def test_ranks_that_wait_for_ever_are_named(monkeypatch):
    monkeypatch.setattr(schedule_contract, "Lowering", Deaf)
    SCHEDULES.register("mine", method())
    with pytest.raises(ValueError, match=r"on 3 processes, under the rules of gloo: .*rank 1 waits at F"):
        armillary.check("mine")
