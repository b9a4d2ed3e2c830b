"""Bytes that torch.distributed is asked to send in a step, beside formulas written out here by hand."""

import pytest
import torch.distributed as dist
from cut_models import HIDDEN, SAMPLES, TOKENS, WIDE, batch, cut, loss
from test_tensor_ways import WORLDS

BYTES = 8  # of a number
BLOCKS = 2
# (inputs, outputs, whether it has a bias); moments a row of each norm, its parameters
LINEARS = {
    "own": [
        (WIDE, WIDE, True), (WIDE, WIDE, False), (WIDE, WIDE, True), (WIDE, WIDE, True), (WIDE, HIDDEN, True),
        (HIDDEN, WIDE, True),
    ],
    "torch's": [(WIDE, 3 * WIDE, True), (WIDE, WIDE, True), (WIDE, HIDDEN, True), (HIDDEN, WIDE, True)],
}  # fmt: skip
NORMS = {"own": [(8, 2), (4, 1)], "torch's": [(8, 2), (8, 2)]}


def counted(rank, world, name, way, mesh):
    """Bytes of the second step's forward and backward, as torch was asked; and as the part counted."""
    part, sent = cut(name, way, mesh), [0.0]
    names = ("all_reduce", "all_gather", "all_to_all_single", "isend")
    asked = {one: getattr(dist, one) for one in names}

    def counting(one, many, at):
        def called(*args, **kwargs):
            size = dist.get_world_size(kwargs["group"])
            sent[0] += many(size) * args[at].numel() * args[at].element_size()
            return asked[one](*args, **kwargs)

        return called

    loss(part.model, batch(part.data_rank, 0)).backward()
    for one, many, at in (
        ("all_reduce", lambda n: 2 * (n - 1) / n, 0),
        ("all_gather", lambda n: n - 1, 1),
        ("all_to_all_single", lambda n: (n - 1) / n, 1),
        ("isend", lambda n: 1, 0),
    ):
        setattr(dist, one, counting(one, many, at))
    before = part.sent_bytes
    try:
        loss(part.model, batch(part.data_rank, 1)).backward()
    finally:
        for one in names:
            setattr(dist, one, asked[one])
    return sent[0], part.sent_bytes - before


def on_a_grid(name, q, d):
    rows = -(-SAMPLES // (d * q)) * TOKENS
    small = 2 * (q - 1) / q + 2 * (d - 1) / d  # of biases and norms, a number
    total = 2 * (d * q * q - 1) * rows * WIDE / q / BLOCKS
    for inputs, outputs, has_bias in LINEARS[name]:
        x, w = rows * inputs / q, inputs * outputs / q**2
        total += 3 * (q - 1) * (x + w) + 2 * (d - 1) / d * w + has_bias * outputs / q * small
    for moments, parameters in NORMS[name]:
        total += moments * (q - 1) / q * rows + parameters * WIDE / q * small
    return BLOCKS * total


def on_a_cube(name, q):
    rows = -(-SAMPLES // q**2) * TOKENS
    small = 2 * 2 * (q - 1) / q
    total = 2 * (q**3 - 1) * rows * WIDE / q / BLOCKS
    for inputs, outputs, has_bias in LINEARS[name]:
        x, w, y = rows * inputs / q, inputs * outputs / q**3, rows * outputs / q
        total += 3 * (q - 1) * (x + w) + 2 * (q - 1) * y + has_bias * outputs / q * small
    for moments, parameters in NORMS[name]:
        total += moments * (q - 1) / q * rows + parameters * WIDE / q * small
    return BLOCKS * total


def by_tokens(name, t, is_ring):
    x = SAMPLES * -(-TOKENS // t) * WIDE
    weights = sum(inputs * outputs + has_bias * outputs for inputs, outputs, has_bias in LINEARS[name])
    weights += sum(parameters * WIDE for _, parameters in NORMS[name])
    attention = 2 * (t - 1) * x + 2 * (t - 1) * x + 2 * t * x if is_ring else 8 * (t - 1) / t * x
    return BLOCKS * (attention + 2 * (t - 1) / t * weights) + 2 * (t - 1) * x


FORMULAS = {
    "columns_rows": lambda name: BLOCKS * 8 * 3 / 4 * SAMPLES * TOKENS * WIDE,
    "2d": lambda name: on_a_grid(name, 2, 1),
    "2.5d": lambda name: on_a_grid(name, 2, 2),
    "3d": lambda name: on_a_cube(name, 2),
    "heads": lambda name: by_tokens(name, 4, False),
    "ring": lambda name: by_tokens(name, 4, True),
}


@pytest.mark.parametrize("way", WORLDS)
@pytest.mark.parametrize("name", LINEARS)
def test_a_step_sends_what_the_formula_says(crew, name, way):
    for asked, counted_by_part in crew(8).run(counted, name, way, WORLDS[way]):
        assert asked == pytest.approx(BYTES * FORMULAS[way](name), rel=1e-12) and counted_by_part == pytest.approx(
            asked
        )
