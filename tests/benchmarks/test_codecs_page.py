"""The codecs' table holds every codec and torch's own, with bytes and errors that are checked by hand."""

import json

import pytest
import torch
from benchmarks.codecs.measure import Coding, code_bytes, kinds, measured, ours, torchs
from benchmarks.codecs.run import main

from armillary.codecs import CODECS


def test_a_small_run_writes_a_row_for_every_codec_and_for_torchs_own(tmp_path, capsys):
    assert main(["--small", "--out", str(tmp_path / "found" / "codecs.json")]) == 0
    rows = json.loads((tmp_path / "found" / "codecs.json").read_text())
    named = {row["name"].split("(")[0] for row in rows}
    assert set(CODECS.all()) <= named and {"torch: half", "torch: quantize_per_channel"} <= named
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 and 0 < row["bytes_each"] <= 4.1 for row in rows)
    by_name = {row["name"]: row for row in rows}
    assert by_name["quantize(bits=8)"]["bytes_each"] == pytest.approx(1 + 4 / 256, rel=0.01)
    assert by_name["torch: half"]["bytes_each"] == 2
    ours_error, theirs = (by_name[name]["errors"] for name in ("quantize(bits=8)", "torch: quantize_per_channel"))
    assert all(ours_error[kind] == pytest.approx(theirs[kind], rel=0.1) for kind in ours_error)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 + len(rows) and printed[2].startswith("| codec | encode, ms/M")
    assert not (tmp_path / "figures.md").exists()


def test_an_error_is_relative_and_of_the_kind_it_is_said_of():
    half = Coding("half of it", lambda values: values / 2, lambda code, like: code)
    row = measured(half, {"ones": torch.ones(100), "twos": 2 * torch.ones(100)}, 1)
    assert row.errors == {"ones": 0.5, "twos": 0.5} and row.bytes_each == 4 and row.priced_ms == 0


@pytest.mark.filterwarnings("ignore:.*quantized tensor")
def test_codes_of_torch_count_their_scales():
    per_row = next(one for one in torchs() if one.name.endswith("per_channel"))
    assert code_bytes(per_row.encode(torch.randn(512))) == 512 + 2 * 16
    assert all(one.priced_numbers > 0 for one in ours())


def test_kinds_are_as_long_as_asked_and_not_all_zero():
    for values in kinds(3000).values():
        assert values.shape == (3000,) and values.dtype == torch.float32 and values.count_nonzero() > 30
