"""Faults planted in lossy exchanges, and in what carries them: each is somebody's real one, and shows in a few steps
of workers beside their oracle (`in_lockstep`)."""

from dataclasses import replace

import pytest
import torch

from armillary.codecs import build_codec
from armillary.exchanges import coded as coded_file
from armillary.reference.lockstep import OutOfStep
from armillary.runtime.bucket import Bucket
from armillary.runtime.dense_unit import DenseUnit
from in_lockstep import built, trained


def after_push(change):
    """A fault in what a push returns: change(result, next state, state before, place) -> both, otherwise."""

    def fault(exchange):
        def push(parcel, state, place):
            result, after = yield from exchange.push(parcel, state, place)
            return change(result, after, state, place)

        return exchange._replace(push=push)

    return fault


def before_push(change):
    """A fault in what a push begins with: change(state, parcel, place) -> another state."""
    return lambda exchange: exchange._replace(
        push=lambda parcel, state, place: exchange.push(parcel, change(state, parcel, place), place)
    )


def in_the_channel(change):
    """A fault in what a rank hears: change(answer, rank, number of the request) -> another answer."""

    def fault(exchange):
        def push(parcel, state, place):
            program, answer, number = exchange.push(parcel, state, place), None, 0
            while True:
                try:
                    request = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer, number = change((yield request), place.rank, number), number + 1

        return exchange._replace(push=push)

    return fault


def second_error_dropped(exchange):
    """The owner forgets what its own coding of the sum left out: as if the sum had crossed exactly."""
    codec = build_codec("quantize", bits=2, tile=8)

    def push(parcel, state, place):
        spans = coded_file._Way(codec, "scattered", True).cut(parcel.layout, place.workers)
        result, _ = yield from exchange.push(parcel, state, place)
        full = parcel.values + state["residual"]
        alone = torch.cat([codec.meaning(full[a:b], None) for a, b in spans if b > a])
        return result, {"residual": full - alone}

    return exchange._replace(push=push)


def kept_from(divisor):
    """What this rank lacks is taken from what all got instead of from what it sent."""

    def fault(exchange):
        def push(parcel, state, place):
            full = parcel.values + state["residual"]
            result, after = yield from exchange.push(parcel, state, place)
            return result, {**after, "residual": full - result.values / divisor}

        return exchange._replace(push=push)

    return fault


def thresholds_of_rank_0(exchange):
    kept = {}

    def of_rank_0(state, parcel, place):
        key = parcel.layout.names, float(state["age"].max())
        return {**state, "limit": kept.setdefault(key, state["limit"].clone())}

    return before_push(of_rank_0)(exchange)


def drawn_otherwise_on_each_rank(exchange):
    def push(parcel, state, place):
        result, after = yield from exchange.push(parcel, {**state, "rounds": state["rounds"] + place.rank}, place)
        return result, {**after, "rounds": after["rounds"] - place.rank}

    return exchange._replace(push=push)


residual_dropped = after_push(lambda result, after, was, place: (result, {**after, "residual": 0 * was["residual"]}))
mean_instead_of_sum = after_push(
    lambda result, after, was, place: (result.answered(result.values / place.workers, result.tail), after)
)
tail_coded_too = after_push(
    lambda result, after, was, place: (result.answered(result.values, (result.tail > 1).double()), after)
)
gaps_left_in_the_residual = after_push(
    lambda result, after, was, place: (
        result, {**after, "residual": torch.where(after["residual"] == 0, 0.5, after["residual"])}
    )
)  # fmt: skip
refresh_skipped_on_one_rank = after_push(
    lambda result, after, was, place: (result, {**after, "age": after["age"] + (place.rank == 1)})
)
one_threshold_for_all_layers = before_push(
    lambda state, parcel, place: {**state, "limit": state["limit"].amax().expand_as(state["limit"]).clone()}
)


def without_what_this_rank_skips(state, parcel, place):
    """What waits for a parameter that this rank does not use, while others do, is forgotten."""
    residual = state["residual"].clone()
    for used, (begin, end) in zip(parcel.used.tolist(), parcel.layout.spans, strict=True):
        residual[begin:end] *= used
    return {**state, "residual": residual}


residual_of_other_buckets = before_push(lambda state, parcel, place: {**state, "residual": state["residual"].roll(8)})
other_order_on_one_rank = in_the_channel(lambda answer, rank, number: answer.flip(0) if rank == 1 else answer)

QUARTER = "threshold(sparsity=0.75, lifespan=50, small=7)"
FAULTS = {
    "residual dropped": (residual_dropped, "quantize(bits=2, tile=8)"),
    "residual dropped by thresholds": (residual_dropped, QUARTER),
    "residual dropped by factors": (residual_dropped, "low_rank(rank=1, start=2)"),
    "residual of the buckets before": (residual_of_other_buckets, "quantize(bits=2, tile=8)"),
    "residual lost where a rank skips": (before_push(without_what_this_rank_skips), "random_k(keep=0.25)"),
    "second error dropped": (second_error_dropped, "quantize(bits=2, tile=8, wire=scattered)"),
    "kept from the result": (kept_from(1), "quantize(bits=2, tile=8)"),
    "kept from the mean, as torch's hook has it": (kept_from(3), "low_rank(rank=1, start=2)"),
    "mean instead of sum": (mean_instead_of_sum, "quantize(bits=8, tile=8)"),
    "mean instead of sum of factors": (mean_instead_of_sum, "low_rank(rank=1, start=2)"),
    "other order on one rank": (other_order_on_one_rank, "quantize(bits=8, tile=8, wire=gathered)"),
    "tail coded too": (tail_coded_too, "one_bit(tile=8)"),
    "tile across two parameters": (lambda exchange: exchange._replace(align=1), "one_bit(tile=8)"),
    "gaps left in the residual": (gaps_left_in_the_residual, "one_bit(tile=8)"),
    "lots drawn otherwise on each rank": (drawn_otherwise_on_each_rank, "random_k(keep=0.25)"),
    "one threshold for all layers": (one_threshold_for_all_layers, QUARTER),
    "thresholds of rank 0 for all": (thresholds_of_rank_0, QUARTER),
    "refresh skipped on one rank": (refresh_skipped_on_one_rank, QUARTER),
    "small layers thinned too": (lambda exchange: built(QUARTER.replace("7", "0")), QUARTER),
    "start off by one": (lambda exchange: built("low_rank(rank=1, start=3)"), "low_rank(rank=1, start=2)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name):
    fault, text = FAULTS[name]
    assert trained(text, 3, torch.float64, fault=fault)


def used_flags_of_others_ignored(self, result):
    """A parameter that this rank did not use gets no gradient here, though others used it."""
    own = [parameter.grad is not None for parameter in self.parameters]
    self._keep(result)
    for parameter, view, is_mine in zip(self.parameters, self.views, own, strict=True):
        parameter.grad = view if is_mine else None


def test_a_rank_that_ignores_what_others_use_shows(monkeypatch):
    monkeypatch.setattr(Bucket, "withdraw", used_flags_of_others_ignored)
    assert trained("quantize(bits=8, tile=8)", 3, torch.float64, steps=3)


PATCHES = {
    "a sick step moves the state": ("_commit", lambda self, moved: setattr(self, "state", moved[1])),
    "what nobody used moves its state": ("_without", lambda self, unused, state: state),
}


@pytest.mark.parametrize("fault", PATCHES)
def test_a_fault_planted_in_the_runtime_shows(fault, monkeypatch):
    monkeypatch.setattr(DenseUnit, *PATCHES[fault])
    assert trained("quantize(bits=2, tile=8)" if "sick" in fault else "random_k(keep=0.25)", 3, torch.float64, steps=5)


def test_a_residual_that_ignores_the_scale_shows(monkeypatch):
    monkeypatch.setattr(coded_file, "owed", lambda parcel, state: parcel.values + state["residual"])
    assert trained("quantize(bits=2, tile=8)", 3, torch.float32, scales=(1024.0, 2048.0))


def one_byte_short(request):
    """What rank 1 hears at that request of a push lacks its last byte."""
    return in_the_channel(lambda answer, rank, number: answer[..., :-1] if (rank, number) == (1, request) else answer)


SHORT = {  # by exchange and request: what the rank that heard it says
    ("quantize(bits=8, tile=8, wire=gathered)", 0): r"code of rank 0 has \d+ bytes, where \d+ are wanted",
    ("quantize(bits=8, tile=8, wire=scattered)", 0): r"codes have \d+ bytes, where \d+ were announced",
    ("quantize(bits=8, tile=8, wire=scattered)", 1): r"codes have \d+ bytes, where \d+ were announced",
    (QUARTER, 1): r"codes have \d+ bytes, where \d+ were announced",
}


@pytest.mark.parametrize(("text", "request_number"), SHORT)
def test_a_code_of_the_wrong_length_is_named_and_is_never_decoded(text, request_number):
    with pytest.raises(ValueError, match=SHORT[text, request_number]):
        trained(text, 2, torch.float64, fault=one_byte_short(request_number), steps=1)


def codes_of_rank_1_are(change):
    """Rank 1 codes its numbers otherwise than its version of the plan says."""

    def fault(exchange):
        def push(parcel, state, place):
            program, answer = exchange.push(parcel, state, place), None
            while True:
                try:
                    request = program.send(answer)
                except StopIteration as stop:
                    return stop.value
                answer = yield change(request) if place.rank == 1 else request

        return exchange._replace(push=push)

    return fault


def with_another_form(request):
    """A sparse code that says that it holds everything."""
    if not hasattr(request, "send"):
        return request
    code = request.tensor.clone()
    code[0] = 2
    return replace(request, tensor=code)


def test_a_sparse_code_that_is_not_as_long_as_its_form_is_named():
    with pytest.raises(ValueError, match=r"code of rank 1 has \d+ bytes, which is no code of \d+ numbers"):
        trained(QUARTER, 2, torch.float64, fault=codes_of_rank_1_are(with_another_form), steps=1)


def test_a_rank_whose_data_end_a_step_early_is_out_of_step():
    def gone(exchange):
        def push(parcel, state, place):
            if place.rank == 1:
                return parcel, state
            return (yield from exchange.push(parcel, state, place))

        return exchange._replace(push=push)

    with pytest.raises(OutOfStep, match="1: nothing"):
        trained("quantize(bits=8, tile=8)", 2, torch.float64, fault=gone, steps=1)
