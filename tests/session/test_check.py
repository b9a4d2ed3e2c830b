"""`armillary.check`: what is said of a method that keeps its rules, and of one that breaks each of them."""

from dataclasses import replace

import pytest
import torch

import armillary
from armillary.codecs import Codec, codec
from armillary.contracts import schedule as schedule_contract
from armillary.exchanges import DENSE, DenseExchange, Leg, dense_exchange
from armillary.plans import AllGather
from armillary.schedules import SCHEDULES, Placing, pipeline_method
from armillary.schedules.gpipe import gpipe
from armillary.schedules.lowering import Lowering, placed
from contracts import test_meet_every, test_ring_gossip
from contracts.journey import registered


def test_a_name_that_nothing_has_is_answered_with_all_that_there_are_and_the_remedy():
    with pytest.raises(
        ValueError, match=r"no codec, dense exchange or schedule 'nothing'; there are .*one_bit"
    ) as told:
        armillary.check("nothing")
    told.match(r"import its file first \(--import FILE\); in a script, import it")


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
        is_biased=False,
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


def other_way_round(made):
    """Nothing is wrong with what it draws."""
    return made._replace(decode=lambda code, n, like: -made.decode(code, n, like))


def half_a_lot(made):
    """Drawn, and yet off in the mean."""

    def meaning(values, draw):
        return torch.maximum(made.meaning(values, draw), -0.9 * spread(values))

    return made._replace(meaning=meaning, encode=lambda values, draw: meaning(values, draw).view(torch.uint8))


def no_lot_at_all(made):
    return without_a_lot(made)._replace(draws=False)


def tile_of_one(made):
    return made._replace(align=1)


def beyond_its_dtype(made):
    def meaning(values, draw):
        found = made.meaning(values, draw)
        return torch.where(found.abs() >= torch.finfo(values.dtype).max, 2 * found, found)

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
    half_as_wide: r"further off than the bound says, by up to [\d.e+-]+; worst number \d+: \S+ comes back as \S+, "
    r"off by \S+, bound \S+$",
    drawn_again: r"numbers than meaning; first number \d+: decode gives .*; both are given generators in the same",
    drawn_from_elsewhere: "two codes from generators in the same state differ",
    longer_than_it_says: "coded_bytes says",
    (
        lambda made: made._replace(bound=lambda values: 0.25)
    ): r"bound gives float; want a tensor of \(1537,\), a number for",
    too_short_a_code: r"the code has 1 bytes, coded_bytes says 4",
    length_not_known: r"\(0 numbers, normal, torch.float32\): coded_bytes raises KeyError: 0 \(.*test_check.py",
    in_place: "encode changes the values it is given",
    one_more: "zeros come back as something else",
    always_double: r"meaning torch.float64; want the dtype of the values",
    read_where_it_lies: "from the middle of a message cannot be decoded",
    without_a_lot: "draws is True, and other draws give the same numbers",
    other_way_round: r"decode gives other numbers than meaning; first number \d+: decode gives \S+, meaning \S+$",
    half_a_lot: r"but the mean of 256 draws is off by .*; worst number \d+: \S+ comes back as \S+ in the mean",
    no_lot_at_all: r"but nothing is drawn and numbers are changed; first number .*say is_biased=True",
    tile_of_one: r"inf in the first tile of `align`=1 changes others; first number 1: .*how many numbers a tile has",
    beyond_its_dtype: r"are no finite numbers any more; first number 0: \S+ comes back as -?inf",
    one_tile: "pieces mean other numbers than the whole",
}


def test_a_codec_that_keeps_its_rules_is_said_to_as_is_the_exchange_of_its_name():
    with registered(codec(costs="a sign each"), signs):
        said = armillary.check("signs").splitlines()
    assert said[0] == "codec signs keeps its 8 rules"
    assert [line.split("(")[0].split(" keeps")[0] for line in said[1:]] == ["exchange signs"] * 3


@pytest.mark.parametrize("carries", [True, False])
@pytest.mark.parametrize("fault", CODEC_FAULTS)
def test_what_is_wrong_with_a_codec_is_named(fault, carries):
    def faulty():
        return fault(signs())

    with (
        registered(codec(carries=carries), faulty),
        pytest.raises(ValueError, match=r"breaks .* of its rules") as told,
    ):
        armillary.check("faulty")
    assert [line for line in str(told.value).splitlines()[1:] if line.startswith("codec faulty: it is not so that ")]
    told.match(f"(?m){CODEC_FAULTS[fault]}")


def test_a_claim_of_no_bias_is_held_of_what_changes_nothing_too_and_is_not_made_unasked():
    def identity():
        return Codec(
            encode=lambda values, draw: values.contiguous().view(torch.uint8).clone(),
            decode=lambda code, n, like: code.clone().view(like.dtype),
            meaning=lambda values, draw: values,
            coded_bytes=lambda n, item_bytes: n * item_bytes,
            bound=lambda values: torch.zeros(len(values)),
            is_biased=False,
        )

    def unsaid():
        made = half_a_lot(signs())
        return Codec(*made[:5], align=TILE, draws=True)

    with registered(codec(carries=False), identity, codec(carries=False), unsaid):
        assert armillary.check("identity") == "codec identity keeps its 8 rules"
        assert armillary.check("unsaid") == "codec unsaid keeps its 8 rules"


@pytest.mark.parametrize("said", [{"is_fixed": False}, {"align": 0}, {"is_fixed": False, "align": 0}])
def test_a_codec_that_no_exchange_can_carry_is_told_by_what_it_says(said):
    def unfit():
        return signs()._replace(**said)

    named = " and ".join(f"{name}={value}" for name, value in said.items())
    with registered(codec(), unfit), pytest.raises(ValueError, match=f"the codec says {named};.*carries=False"):
        armillary.check("unfit")
    with registered(codec(carries=False), unfit):
        assert armillary.check("unfit") == "codec unfit keeps its 8 rules"


def test_a_constructor_that_is_called_wrongly_is_told_with_its_line_and_the_fields():
    def boundless():
        return Codec(encode=None, decode=None, meaning=None, coded_bytes=None)

    def pushing():
        return DenseExchange(None, 1)

    with (
        registered(codec(), boundless),
        pytest.raises(ValueError, match=r"a Codec wants encode, .*, bound, and") as told,
    ):
        armillary.check("boundless")
    told.match(r"missing 1 required positional argument: 'bound' \(.*test_check.py, line \d+\)")
    with registered(dense_exchange(), pushing), pytest.raises(ValueError, match=r"'legs' \(.*test_check.py, line \d+"):
        armillary.check("pushing")


def test_options_that_stand_in_no_example_can_be_held_too():
    assert armillary.check("top_k(keep=0.3)").splitlines()[0] == "codec top_k(keep=0.3) keeps its 8 rules"
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


def no_imaginary_part(found, state, place):
    values = found.values
    return found.answered(
        values.to(torch.float32).to(values.dtype) if values.is_complex() else values, found.tail
    ), state


def asking_strangely(parcel, state, place):
    yield "everyones"


def tail_forgotten(made):
    return lambda *both: [leg._replace(messages=leg.messages / 2) for leg in made.legs(*both)]


def half_carried(made):
    return lambda *both: [leg._replace(link_bytes=leg.link_bytes / 2) for leg in made.legs(*both)]


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

    begin = lambda layout, place, values: {"pushes": torch.zeros(3)}  # noqa: E731
    return made._replace(push=push, oracle=oracle, begin=begin, counts={"pushes": lambda shape: 1})


def counting_once_for_all(made):
    """One number for the whole group, which no checkpoint could deal to parameters."""

    def push(parcel, state, place):
        found, _ = yield from made.push(parcel, state, place)
        return found, {"pushes": state["pushes"] + 1}

    def oracle(parcels, states):
        return made.oracle(parcels, states)[0], [{"pushes": state["pushes"] + 1} for state in states]

    begin = lambda layout, place, values: {"pushes": torch.zeros(1)}  # noqa: E731
    return made._replace(push=push, oracle=oracle, begin=begin)


def emptied_in_place(made):
    """Nothing changes in the first push, whose residual is zero."""

    def push(parcel, state, place):
        state["residual"].zero_()
        found, _ = yield from made.push(parcel, state, place)
        return found, {"residual": parcel.values.clone()}

    def oracle(parcels, states):
        return made.oracle(parcels, states)[0], [{"residual": parcel.values} for parcel in parcels]

    begin = lambda layout, place, values: {"residual": torch.zeros_like(values)}  # noqa: E731
    return made._replace(push=push, oracle=oracle, begin=begin)


EXCHANGE_FAULTS = {
    with_push(rounded): r"push gives .*, the exact sum .*; first number 0: \S+ instead of \S+, off by \S+$",
    with_push(lambda found, state, place: (found, None)): r"push must return \(parcel, state\); .* \(Parcel, None\)$",
    with_push(lambda found, state, place: found): r"and 6 other rules .*: push must return .*; it returned Parcel$",
    (lambda made: made._replace(push=lambda *three: None)): "push must be a generator, .*; it returned None",
    (lambda made: made._replace(push=asking_strangely)): "push must yield AllReduce, .*; it yielded str",
    with_push(no_imaginary_part): "values in complex64: push drops their imaginary part",
    (lambda made: made._replace(oracle=lambda parcels, states: parcels)): r"oracle must return \(parcels, states\)",
    (
        lambda made: made._replace(legs=lambda *both: made.legs(*both)[:0])
    ): r"legs are of \[\], requests of \['AllGather",
    (
        lambda made: made._replace(legs=tail_forgotten(made))
    ): "legs have 1 messages that wait for one another, requests 2",
    (lambda made: made._replace(legs=half_carried(made))): r"legs carry 38 bytes, but a rank sends 76$",
    with_push(tail_in_bytes): r"200 workers, 2 a node: .* arrives for",
    twice_in_the_oracle: "it departs from nothing, but its oracle gives",
    (lambda made: made._replace(requests=1)): r"1 workers, 1 a node: ranks make \[2\] requests, it says 1 at most",
    (lambda made: made._replace(sent_bytes=lambda *both: [2 * x for x in made.sent_bytes(*both)])): "bytes, it says",
    (
        lambda made: made._replace(sent_bytes=lambda *both: 4.0)
    ): "sent_bytes must give one number a rank, 1 here; it gave f",
    (lambda made: made._replace(legs=lambda *both: made.legs(*both)[0])): "legs must give a list of Leg; it gave Leg$",
    (
        lambda made: made._replace(legs=lambda *both: [one._replace(links="ring") for one in made.legs(*both)])
    ): "no link of a leg is called ring; want slowest, everyone, neighbour, node, rail",
    (lambda made: made._replace(resharding={"left": "add"})): "resharding of 'left' is 'add'; want one of sum, mean, ",
    (lambda made: made._replace(oracle=None)): r"wants oracle=\(parcels, states\) -> ",
    counting_in_place: "push changes pushes in place",
    emptied_in_place: "push changes residual in place",
    counting_once_for_all: r"state 'pushes' has shape \(1,\); want \(\d+,\), as the values are: a checkpoint keeps it",
}


def test_an_exchange_that_keeps_its_rules_is_said_to():
    with registered(dense_exchange(), gathered):
        assert armillary.check("gathered") == "exchange gathered keeps its 8 rules"


@pytest.mark.parametrize("fault", EXCHANGE_FAULTS)
def test_what_is_wrong_with_an_exchange_is_named(fault):
    def faulty():
        return fault(gathered())

    with registered(dense_exchange(), faulty), pytest.raises(ValueError, match=EXCHANGE_FAULTS[fault]):
        armillary.check("faulty")


def test_what_is_raised_is_told_once_however_many_rules_it_breaks():
    def raising(parcel, state, place):
        yield AllGather([] + 1)

    def faulty():
        return gathered()._replace(push=raising)

    with registered(dense_exchange({}, {}), faulty), pytest.raises(ValueError, match="breaks 14 of its rules") as told:
        armillary.check("faulty")
    told.match(
        r"and 13 other rules are broken for the same reason: raising raises TypeError: .*test_check.py, line \d+"
    )
    assert len(str(told.value).splitlines()) == 2


def test_what_is_lossy_and_has_no_oracle_is_refused_by_name():
    def faulty():
        return with_push(rounded)(gathered())

    lossy = dense_exchange(departs=("lossy",), costs="numbers are rounded")
    with registered(lossy, faulty), pytest.raises(ValueError, match="faulty is lossy, but has no oracle"):
        armillary.check("faulty")


# A schedule.


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES.all()))


class Elsewhere:
    """Every worker a process; owners are none of them."""

    def __init__(self, schedule):
        self.inside = placed(schedule, range(schedule.workers))

    def __getattr__(self, name):
        return getattr(self.inside, name)

    def owner(self, stage):
        return 7


def method(**changed):
    made = pipeline_method(
        table=lambda options: gpipe(options.stages, options.micro_batches),
        notes=lambda planned: [],
    )
    return replace(made, **changed)


@pytest.mark.usefixtures("shelf")
def test_a_schedule_is_held_to_its_own_table():
    SCHEDULES.register("mine", method())
    assert armillary.check("mine") == "schedule mine(micro_batches=4) on 3 processes keeps its 3 rules"
    SCHEDULES.register("owned_elsewhere", method(placement=Placing(parts=1, of=Elsewhere)))
    with pytest.raises(ValueError, match="the owner of stage 0 is process 7 of 3"):
        armillary.check("owned_elsewhere")
    SCHEDULES.register("rows", method(table=lambda options: gpipe(options.stages, options.micro_batches).ticks))
    with pytest.raises(ValueError, match=r"and 2 other rules .*: table must give a Schedule; it gave tuple$"):
        armillary.check("rows")
    SCHEDULES.register("larger", method(table=lambda options: gpipe(options.stages, options.micro_batches + 1)))
    with pytest.raises(ValueError, match=r"its options say \(3, 4\) stages and micro-batches, its table \(3, 5\)"):
        armillary.check("larger")


@pytest.mark.usefixtures("shelf")
def test_a_table_that_cannot_be_computed_is_shown_once():
    def table(options):
        made = gpipe(options.stages, options.micro_batches)
        return replace(made, period=made.period - 1)

    SCHEDULES.register("short", method(table=table))
    with pytest.raises(
        ValueError, match=r"not so that its table can be computed, and 2 other rules .*line \d+\)"
    ) as told:
        armillary.check("short")
    assert str(told.value).count("<- here") == 1


class Deaf(Lowering):
    """Process 1 makes no room for what comes."""

    def next_step(self):
        made = super().next_step()
        return made if self.rank != 1 else [one for one in made if one.op != "RECV"]


@pytest.mark.usefixtures("shelf")
def test_ranks_that_wait_for_ever_are_named(monkeypatch):
    monkeypatch.setattr(schedule_contract, "Lowering", Deaf)
    SCHEDULES.register("mine", method())
    with pytest.raises(ValueError, match=r"on 3 processes, under the rules of gloo: .*rank 1 waits at F"):
        armillary.check("mine")


# Exchanges of weights: what arrives takes the place of a rank's own, whoever used them.


def half_precision(found, state, place):
    return found.answered(found.values.half(), found.tail), state


@pytest.mark.parametrize("example", [test_meet_every, test_ring_gossip])
def test_of_weights_no_tail_is_asked_but_all_else_is(example):
    name = example.CHOICE.name
    with example.shelf():
        assert f"exchange {name}" in armillary.check(name) and "keeps its 7 rules" in armillary.check(name)
        kept, faulty = DENSE[name], with_push(half_precision)
        changed = kept._replace(make=lambda **options: faulty(kept.make(**options)))
        DENSE._entries = {**DENSE.all(), name: changed}
        with pytest.raises(ValueError, match="it is not so that values arrive in their dtype"):
            armillary.check(name)
