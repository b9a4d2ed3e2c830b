"""One codec on one kind of numbers: how long encoding and decoding take, how long the code is, what it loses."""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary import Choice
from armillary.codecs import CODECS, codec_of
from benchmarks.measuring.workloads import find

__all__ = ["Coding", "Row", "gradient_of", "kinds", "measured", "ours", "torchs"]

MILLION = 1_000_000
PRICED_BYTES_PER_SECOND = 5e9  # memory, as plans price it where it was not measured


@dataclass(frozen=True)
class Coding:
    """Numbers to a code and back. priced_numbers: read and written a number, as plans price it; 0: by nobody."""

    name: str
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]
    priced_numbers: float = 0.0


@dataclass(frozen=True)
class Row:
    """Of a million float32 numbers. errors: |decoded - values| / |values| in norm, by kind of numbers."""

    name: str
    encode_ms: float
    decode_ms: float
    priced_ms: float
    bytes_each: float
    errors: Mapping[str, float]


def ours() -> list[Coding]:
    """Every codec, with the options of its first example and of what it offers for gradients."""
    found = []
    for name, entry in CODECS.all().items():
        ways = [*entry.offers, *entry.examples[:1]]
        for way in [way for place, way in enumerate(ways) if way not in ways[:place]]:
            choice = Choice(name, way)
            found.append(_of_codec(choice))
    return found


def _of_codec(choice: Choice) -> Coding:
    codec = codec_of(choice)

    def encode(values: Tensor) -> Tensor:
        return codec.encode(values, torch.Generator().manual_seed(1) if codec.draws else None)

    return Coding(str(choice), encode, lambda code, like: codec.decode(code, len(like), like), codec.work)


def torchs() -> list[Coding]:
    """What torch has of the kind; its quantised tensors keep 8 bits a number and a scale, or one a row of 256."""

    def by_rows(values: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(values, (0, -len(values) % 256)).view(-1, 256)
        scales = (rows.abs().amax(1) / 127).double().clamp(min=1e-30)
        return torch.quantize_per_channel(rows, scales, torch.zeros(len(rows), dtype=torch.int64), 0, torch.qint8)

    def whole(values: Tensor) -> Tensor:
        return torch.quantize_per_tensor(values, float(values.abs().max()) / 127, 0, torch.qint8)

    return [
        Coding("torch: half", lambda values: values.half(), lambda code, like: code.float()),
        Coding("torch: bfloat16", lambda values: values.bfloat16(), lambda code, like: code.float()),
        Coding("torch: quantize_per_tensor", whole, lambda code, like: code.dequantize()),
        Coding("torch: quantize_per_channel", by_rows, lambda code, like: code.dequantize().view(-1)[: len(like)]),
    ]


def kinds(numbers: int) -> dict[str, Tensor]:
    """Numbers of each kind, all float32."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(numbers, generator=generator, dtype=torch.float64) - 0.5
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 1e-12))
    return {
        "gaussian": torch.randn(numbers, generator=generator),
        "laplace": laplace.float(),
        **{name: gradient_of(name, numbers) for name in ("language_model", "recommender", "vision")},
    }


def gradient_of(workload: str, numbers: int) -> Tensor:
    """The first gradient of a workload's small version, one parameter after another, again and again."""
    task = find(workload)
    torch.manual_seed(0)
    model = task.model()
    task.loss(model, next(iter(task.batches("train", 0, 1, 0)))).backward()
    found = [p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None]
    flat = torch.cat(found).float()
    return flat.repeat(-(-numbers // len(flat)))[:numbers]


def code_bytes(code: Tensor) -> int:
    """Of what would travel; of torch's quantised tensors with their scales and zero points."""
    if not code.is_quantized:
        return code.nbytes
    scales = code.q_per_channel_scales().numel() if code.qscheme() == torch.per_channel_affine else 1
    return code.numel() + scales * 16


def measured(coding: Coding, numbers: Mapping[str, Tensor], rounds: int) -> Row:
    """Medians over rounds on the first kind of numbers; the caller sets the threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's quantised tensors are to go
        return _measured(coding, numbers, rounds)


def _measured(coding: Coding, numbers: Mapping[str, Tensor], rounds: int) -> Row:
    values = next(iter(numbers.values()))
    code = coding.encode(values)
    encode = _median_ms(lambda: coding.encode(values), rounds)
    decode = _median_ms(lambda: coding.decode(code, values), rounds)
    scale = MILLION / len(values)
    errors = {
        kind: float((coding.decode(coding.encode(one), one).double() - one.double()).norm() / one.double().norm())
        for kind, one in numbers.items()
    }
    priced = coding.priced_numbers * values.itemsize * MILLION / PRICED_BYTES_PER_SECOND * 1e3
    return Row(coding.name, encode * scale, decode * scale, priced, code_bytes(code) / len(values), errors)


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):  # the first warms up
        began = time.perf_counter()
        work()
        taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken[1:])
