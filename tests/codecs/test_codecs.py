"""The contract of codecs, which names none of them."""

import pytest
import torch

from armillary.codecs.codec import CODECS, build_codec

CASES = [(name, options) for name, entry in CODECS.all().items() for options in entry.examples]
DTYPES = ["float32", "float64", "bfloat16"]


def drawn():
    return torch.Generator().manual_seed(7)


def values_of(n, dtype, kind="normal"):
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator, dtype=torch.float64)
    if kind == "wide":  # from what vanishes to what overflows in 16 bits
        values = values * 10.0 ** torch.randint(-12, 8, (n,), generator=generator)
    return values.to(getattr(torch, dtype))


def sizes(codec):
    return sorted({0, 1, max(0, codec.align - 1), codec.align, 1000})


def there_and_back(codec, values):
    code = codec.encode(values, drawn())
    assert code.dtype == torch.uint8 and code.dim() == 1
    return code, codec.decode(code, len(values), values[:0])


@pytest.mark.parametrize("kind", ["normal", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_is_decoded_is_what_the_code_means_bit_for_bit(name, options, dtype, kind):
    codec = build_codec(name, **options)
    for n in sizes(codec):
        values = values_of(n, dtype, kind)
        code, back = there_and_back(codec, values.clone())
        assert back.dtype == values.dtype and torch.equal(back, codec.meaning(values, drawn()))
        expected = codec.coded_bytes(n, values.itemsize)
        assert code.numel() == expected if codec.is_fixed else code.numel() <= expected


@pytest.mark.parametrize("kind", ["normal", "wide"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_no_value_is_further_off_than_the_bound(name, options, dtype, kind):
    codec = build_codec(name, **options)
    values = values_of(1000, dtype, kind)
    meaning = codec.meaning(values, drawn())
    assert meaning.isfinite().all()
    assert ((values.double() - meaning.double()).abs() <= codec.bound(values) * (1 + 1e-12)).all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_zeros_stay_zeros_and_the_same_draw_gives_the_same_code(name, options):
    codec, zeros = build_codec(name, **options), torch.zeros(1000)
    assert torch.equal(there_and_back(codec, zeros)[1], zeros)
    values = values_of(1000, "float32")
    assert torch.equal(codec.encode(values, drawn()), codec.encode(values, drawn()))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_pieces_cut_between_tiles_mean_what_the_whole_means(name, options):
    codec, values = build_codec(name, **options), values_of(8 * 320, "float32")
    cut = 3 * codec.align
    whole = codec.meaning(values, None)
    assert torch.equal(torch.cat([codec.meaning(values[:cut], None), codec.meaning(values[cut:], None)]), whole)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_code_is_read_from_the_middle_of_a_message(name, options):
    codec, values = build_codec(name, **options), values_of(64, "float64")
    code = codec.encode(values, drawn())
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), code, torch.zeros(5, dtype=torch.uint8)])
    assert torch.equal(codec.decode(message[3:-5], 64, values), codec.meaning(values, drawn()))


def test_an_unknown_name_and_an_unknown_dtype_are_refused():
    with pytest.raises(ValueError, match="no codec 'gzip'; there are lower_precision"):
        build_codec("gzip")
    with pytest.raises(ValueError, match="knows bfloat16 and float16, got 'float8'"):
        build_codec("lower_precision", dtype="float8")
