"""The contract of codecs, which names none of them."""

import inspect

import pytest
import torch

from armillary.codecs import CODECS, build_codec, codec_of
from armillary.codecs.hadamard import rotated
from armillary.contracts.codec import CODEC_RULES, drawn, is_read_back, is_within_its_bound, normal
from armillary.plans import Choice

CASES = [(name, options) for name, entry in CODECS.all().items() for options in entry.examples]


@pytest.mark.parametrize("rule", CODEC_RULES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_codec_keeps_the_rules(name, options, rule):
    assert CODEC_RULES[rule](build_codec(name, **options)) == ""


@pytest.mark.parametrize(("name", "options"), CASES)
def test_its_options_can_be_typed_as_they_print(name, options):
    text = str(Choice(name, options))
    codec = codec_of(Choice.parse(text))
    values = normal(600, torch.float32)
    assert torch.equal(codec.meaning(values, drawn()), build_codec(name, **options).meaning(values, drawn()))


# Planted faults: each is somebody's real one.


def scale_of_the_whole(codec):
    """One scale for all tiles."""

    def encode(values, draw):
        return codec.encode(values.sign() * (values.abs().max() if len(values) else 0), draw)

    return codec._replace(encode=encode)


def one_byte_short(codec):
    return codec._replace(encode=lambda values, draw: codec.encode(values, draw)[:-1], decode=lambda c, n, like: like)


def twice_as_exact_as_it_is(codec):
    return codec._replace(bound=lambda values: codec.bound(values) / 2)


def other_places_at_the_receiver(codec):
    def decode(code, n, like):
        return codec.decode(code, n, like).flip(0)

    return codec._replace(decode=decode)


def chosen_by_size(codec):
    """Lots are drawn, and the numbers beside them sent: of every chunk the largest, in size."""

    def encode(values, draw):
        places = values.abs().view(-1, codec.align).argmax(1) if len(values) and not len(values) % codec.align else None
        if places is None:
            return codec.encode(values, draw)
        largest = values.view(-1, codec.align).gather(1, places.unsqueeze(1)).expand(-1, codec.align)
        return codec.encode(largest.reshape(-1), draw)

    return codec._replace(encode=encode)


def values_changed_in_place(codec):
    return codec._replace(encode=lambda values, draw: codec.encode(values.mul_(0.5), draw))


FAULTS = {
    scale_of_the_whole: ("quantize", {"bits": 8}),
    one_byte_short: ("one_bit", {}),
    other_places_at_the_receiver: ("top_k", {"keep": 0.25}),
    chosen_by_size: ("random_k", {"keep": 0.25}),
    values_changed_in_place: ("quantize", {"bits": 4}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault):
    name, options = FAULTS[fault]
    assert is_read_back(fault(build_codec(name, **options)))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_bound_that_is_half_as_wide_is_too_narrow_somewhere(name, options):
    """So the bounds are not idle."""
    assert (
        is_within_its_bound(twice_as_exact_as_it_is(build_codec(name, **options))) or name == "hadamard"
    )  # which states the norm of a tile's error for each of its numbers


# Each codec's own promise.


def test_top_k_keeps_the_first_of_equals_and_says_its_true_share():
    codec = build_codec("top_k", keep=0.3)
    assert codec.says == "1 of every 3 numbers at once, 0.333 of all"
    kept = codec.meaning(torch.tensor([2.0, -2.0, 1.0, 0.5, 1.0, -1.0]), None)
    assert kept.tolist() == [2, 0, 0, 0, 1, 0]
    two = build_codec("top_k", keep=0.5, chunk=4)
    assert two.meaning(torch.tensor([1.0, -3, 3, 3, 0, 0, 0, 1]), None).tolist() == [0, -3, 3, 0, 0, 0, 0, 1]


def test_random_k_asks_the_lot_and_not_the_size_of_numbers():
    """Seen where the largest numbers are always the same: they go as often as the others."""
    values = torch.where(torch.arange(1000) % 10 == 3, 100.0, 1.0)
    for codec, is_fair in ((build_codec("random_k", keep=0.1), True), (build_codec("top_k", keep=0.1), False)):
        draw, large = drawn(), 0
        for _ in range(100):
            large += int((codec.meaning(values, draw) == 100).sum())
        assert (800 < large < 1200) is is_fair


def test_random_k_draws_other_numbers_at_every_draw_and_every_number_in_the_end():
    codec, values = build_codec("random_k", keep=0.1), torch.ones(1000)
    draw, seen = drawn(), torch.zeros(1000)
    for _ in range(100):
        seen += codec.decode(codec.encode(values, draw), 1000, values)
    assert seen.min() > 0 and seen.sum() == 100 * 100 and seen.max() < 30


def test_a_rotation_is_the_matrix_of_hadamard_by_eight_and_its_own_inverse():
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 64:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    assert torch.equal(rotated(torch.eye(64, dtype=torch.float64)), matrix / 8)
    values = normal(640, torch.float64).view(-1, 64)
    torch.testing.assert_close(rotated(rotated(values)), values, rtol=1e-12, atol=1e-12)


def test_a_rotation_helps_where_few_numbers_are_large():
    values = normal(6400, torch.float32)
    values[::64] *= 100
    plain, turned = (codec_of(Choice.parse(text)) for text in ("quantize(bits=8)", "hadamard(quantize(bits=8))"))
    errors = [(codec.meaning(values, None) - values).norm() for codec in (plain, turned)]
    assert errors[1] < 0.5 * errors[0]


def test_threshold_sends_its_share_in_the_shortest_form_and_nothing_of_zeros():
    values = normal(10_000, torch.float32)
    for sparsity, form_bytes in ((0.99, 100 * 6), (0.9, 1250 + 1000 * 4), (0.0, 40_000)):
        codec = build_codec("threshold", sparsity=sparsity)
        assert codec.encode(values, None).numel() == 1 + form_bytes
    assert build_codec("threshold", sparsity=0.0).encode(torch.zeros(1000), None).numel() == 1
    tall = normal(200_000, torch.float32)  # a sample decides
    kept = build_codec("threshold", sparsity=0.99).meaning(tall, None).count_nonzero()
    assert 0.8 * 2000 < kept < 1.2 * 2000


def test_places_are_told_page_by_page_and_wrong_counts_of_a_page_are_refused():
    codec, values, page = build_codec("threshold", sparsity=0.9), torch.zeros(200_000), 1 << 16
    places = torch.tensor([0, 1, page - 1, page, 3 * page - 1, 3 * page, 199_999])  # the third page has but its last
    values[places] = torch.arange(1.0, 8.0)
    code = codec.encode(values, None)
    assert len(code) == 1 + 3 * 4 + 7 * (2 + 4)
    assert torch.equal(codec.decode(code, len(values), values), values)
    assert code[1:13].clone().view(torch.int32).tolist() == [3, 1, 1]
    for counts in ([-1, 1, 1], [3, 1, 4]):
        wrong = code.clone()
        wrong[1:13] = torch.tensor(counts, dtype=torch.int32).view(torch.uint8)
        with pytest.raises(ValueError, match="55 bytes are no code of 200000 numbers"):
            codec.decode(wrong, len(values), values)


@pytest.mark.parametrize("shape", [(20_000, 16), (40_000, 7), (1_024, 1_024)])
def test_the_threshold_of_a_long_matrix_is_of_all_its_columns(shape):
    """Units that never fire, or a feature of another scale, are a column."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    matrix[:, 0] = 0.0
    kept = build_codec("threshold", sparsity=0.9).meaning(matrix.view(-1), None).count_nonzero()
    assert 0.09 < int(kept) / matrix.numel() < 0.11


@pytest.mark.parametrize("sparsity", [0.99, 0.9, 0.0])  # by places, by a bit each, all
def test_threshold_refuses_a_code_of_another_length(sparsity):
    values = normal(10_000, torch.float32)
    codec = build_codec("threshold", sparsity=sparsity)
    code = codec.encode(values, None)
    for wrong in (code[:-1], code[:0], torch.cat([code, code[:1]])):
        with pytest.raises(ValueError, match=rf"threshold: {len(wrong)} bytes are no code of 10000 numbers"):
            codec.decode(wrong, 10_000, values)


BAD = [
    ("lower_precision(dtype=float8)", "knows bfloat16 and float16, got 'float8'"),
    ("quantize(bits=3)", "knows 8, 4 and 2 bits, got 3"),
    ("quantize(tile=100)", "wants tiles of 8, 16, 32, ... numbers, got 100"),
    ("one_bit(tile=0)", "wants tiles of 8, 16, 32, ... numbers, got 0"),
    ("top_k(keep=0)", "keeps a share above 0 and at most 1, got 0"),
    ("top_k(keep=1.5)", "keeps a share above 0 and at most 1, got 1.5"),
    ("random_k(keep=-0.1)", "keeps a share above 0 and at most 1, got -0.1"),
    ("random_k(chunk=-1)", "chunks of 1 number or more"),
    ("threshold(sparsity=1)", "sparsity of 0 or more and below 1, got 1"),
    ("threshold(sparsity=-0.5)", "sparsity of 0 or more and below 1, got -0.5"),
    ("hadamard(gzip(level=9))", "no codec 'gzip'; there are"),
    ("hadamard", "refuses options {}: it wants 'of'"),
    ("quantize(bit=8)", "refuses options {'bit': 8}: it has no bit; it may have bits, tile$"),
    ("gzip", "no codec 'gzip'; there are .*lower_precision"),
]


@pytest.mark.parametrize(("text", "said"), BAD)
def test_bad_options_are_refused_by_name(text, said):
    with pytest.raises(ValueError, match=said):
        codec_of(Choice.parse(text))


def test_every_codec_has_a_file_of_its_name():
    for name, entry in CODECS.all().items():
        assert inspect.getmodule(entry.make).__name__ == f"armillary.codecs.{name}"
