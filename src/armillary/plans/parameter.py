"""One parameter of a model: its size, how training reads it, how batches look its rows up; and the costs of a stage.

Whether a parameter is only ever gathered by row decides how it may cross the workers, so that fact stands beside the
measure of how many rows are touched. Costs are counted by stage, because schedules place stages and price memory by the
activations that a stage keeps.

Source: Kim et al., Parallax (EuroSys 2019), for alpha. Departures: alpha is also given per node and for the union over
the workers, because merged rows are denser. A parameter is sparse by how it is read, never by the values of its
gradient.
"""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

__all__ = ["Numbers", "ParameterFact", "Reads", "RowFacts", "StageFact"]


class Numbers(NamedTuple):
    """Of one tensor: how many, and bytes of each."""

    numel: int
    item_bytes: int


@dataclass(frozen=True)
class StageFact:
    """One part of the model, per worker and step. "" is what runs outside every stage (the loss, the glue).

    Args of note:
        forward_flops: multiply and add counted as two; matrix products, convolutions, attention only.
        activation_bytes: storages kept for the backward pass, each once, parameters and buffers left out.
        forward_seconds, backward_seconds: on the machine that made the profile, without exchange.
        output_bytes: of what the stage's last call returned: what crosses to another device if the model is cut there.
        output_numbers: of those tensors among them that have floating numbers of two dimensions or more.
    """

    name: str
    forward_flops: int
    parameter_bytes: int
    activation_bytes: int
    forward_seconds: float
    backward_seconds: float
    output_bytes: int = 0
    output_numbers: tuple[Numbers, ...] = ()

    def __post_init__(self) -> None:
        negative = [
            name for name, value in asdict(self).items() if name not in ("name", "output_numbers") and value < 0
        ]
        if negative:
            raise ValueError(f"profile: stage {self.name!r} has negative {', '.join(negative)}")


Reads = Literal["rows", "dense", "both", "never"]

ROUNDING = 1e-9


@dataclass(frozen=True)
class RowFacts:
    """How real batches look rows up in one table.

    A row is an index of dimension 0; a 1-D bias has rows of one element.

    Args of note:
        lookups: gather calls per worker and step.
        ids: row numbers asked for per worker and step, repeats included.
        alpha_worker, alpha_node, alpha_union: distinct rows / rows, in one worker's batch, merged over the
            workers of a node, merged over all workers; means over steps (and workers, and nodes).
        hottest: (row, share of all ids), the most asked for first.
        load_modulo, load_hashed, load_blocks: share of the rows sent (repeats merged per worker) that each owner
            gets when all workers own rows, dealt as `exchanges/ownership.py` does, or contiguous blocks.
        padding_idx: the row that gets no gradient, where every lookup agrees on it. It is read all the same.
        repeated: share of the distinct rows of a worker's batch that some worker read in the step before; None where
            that was not seen. These rows may have moved since, so prefetch cannot send them before that step ends.
        asked_rows: distinct rows of every look-up, added up over those of a worker's step; None where they were not
            told apart.
    """

    rows: int
    row_bytes: int
    lookups: float
    ids: float
    alpha_worker: float
    alpha_node: float
    alpha_union: float
    hottest: tuple[tuple[int, float], ...] = ()
    load_modulo: tuple[float, ...] = (1.0,)
    load_hashed: tuple[float, ...] = (1.0,)
    load_blocks: tuple[float, ...] = (1.0,)
    padding_idx: int | None = None
    repeated: float | None = None
    asked_rows: float | None = None

    def __post_init__(self) -> None:
        alphas = (0.0, self.alpha_worker, self.alpha_node, self.alpha_union, 1.0)
        if any(low > high + ROUNDING for low, high in pairwise(alphas)):
            raise ValueError(f"profile: want 0 <= alpha worker <= node <= union <= 1, got {alphas[1:4]}")
        for name in ("load_modulo", "load_hashed", "load_blocks"):
            load = getattr(self, name)
            if not load or min(load) < 0 or abs(math.fsum(load) - 1) > ROUNDING:
                raise ValueError(f"profile: {name} must be shares that add up to 1, got {load}")
        if self.repeated is not None and not 0 <= self.repeated <= 1:
            raise ValueError(f"profile: repeated is a share between 0 and 1, got {self.repeated}")
        if self.asked_rows is not None and self.asked_rows < self.alpha_worker * self.rows * (1 - ROUNDING):
            raise ValueError(f"profile: {self.asked_rows} rows asked for are fewer than the distinct ones among them")

    @property
    def imbalance_modulo(self) -> float:
        """Load of the busiest owner over the mean owner's; 1 is perfect."""
        return max(self.load_modulo) * len(self.load_modulo)

    @property
    def imbalance_hashed(self) -> float:
        """As `imbalance_modulo`, for rows scattered before they are cut into blocks."""
        return max(self.load_hashed) * len(self.load_hashed)

    @property
    def imbalance_blocks(self) -> float:
        """As `imbalance_modulo`, for contiguous blocks."""
        return max(self.load_blocks) * len(self.load_blocks)


@dataclass(frozen=True)
class ParameterFact:
    """One parameter, under the first of its names.

    Args of note:
        reads: "rows" (only ever gathered by row), "dense", "both", "never", over all batches.
        stage: the stage that owns it, "" for the model itself.
        aliases: its other names, where modules share it.
        dense_readers: the operations that read or write it whole.
        refusals: why its rows cannot live with owners, though it be read by row.
        arrival: its place in the order in which the first batch's gradients became final; None without one.
        is_rewritten: whether forward or backward write into it, as max_norm does.
        rows: present exactly when `reads` is "rows".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool
    reads: Reads
    stage: str = ""
    aliases: tuple[str, ...] = ()
    dense_readers: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    arrival: int | None = None
    rows: RowFacts | None = None
    is_rewritten: bool = False

    def __post_init__(self) -> None:
        if self.reads not in get_args(Reads):
            raise ValueError(f"profile: {self.name!r} has reads {self.reads!r}, want one of {get_args(Reads)}")
        if (self.rows is not None) != (self.reads == "rows"):
            raise ValueError(
                f"profile: {self.name!r} is read {self.reads!r}; row facts go with 'rows' and only with it"
            )
        if self.rows is not None and (not self.shape or self.rows.rows != self.shape[0]):
            raise ValueError(f"profile: {self.name!r} of shape {self.shape} has not {self.rows.rows} rows")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def shardable(self) -> bool:
        """Whether its rows may live with owners: read by row only, and nothing speaks against it."""
        return self.reads == "rows" and not self.refusals

    @property
    def alpha(self) -> float:
        """Share of the elements one worker reads in one step: 1 when read whole, 0 when never read."""
        if self.rows is not None:
            return self.rows.alpha_worker
        return 0.0 if self.reads == "never" else 1.0
