"""What a model is to those who spread its training over workers: its parameters, its stages, how sparse it is.

Of a parameter: its size, how training reads it, how batches look its rows up. Whether it is only ever gathered by row
decides how it may cross the workers, so that fact stands beside the measure of how many rows are touched. Costs are
counted by stage, because schedules place stages and price memory by the activations that a stage keeps. The planner
needs nothing else of a model. The profile is frozen, goes to JSON and back, prints as tables, and says with its
fingerprints whether a plan was made for it.

Source: Kim et al., Parallax (EuroSys 2019), for alpha. Departures: alpha is also given per node and for the union over
the workers, because merged rows are denser. A parameter is sparse by how it is read, never by the values of its
gradient. Parameters that are frozen or never read stay out of the mean over the model, since they never travel.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from armillary.plans.plan import Trainable, model_fingerprint
from armillary.plans.units import Page, Table, bytes_text, count_text, page_text, seconds_text

__all__ = ["Numbers", "ParameterFact", "Profile", "Reads", "RowFacts", "StageFact"]


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
            raise ValueError(f"profile: {self.name!r} is read {self.reads!r}; row facts go with 'rows', and only then")
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


@dataclass(frozen=True)
class Profile:
    """A model read, with the batches of `workers` workers in nodes of `workers_per_node`.

    Args of note:
        parameters: in the model's own order, each once. batches: how many were read; the row facts are means
            over the `steps` complete steps among them.
        running: paths of modules that keep running statistics of the batches they see (BatchNorm).
        splits: "exact" if loss and gradients of a batch were tried to be the means over its parts; "untried"; else why
            they are not.
        step_bytes, whole_step_bytes: of tensors, the most that a plain step held at once besides parameters and
            finished gradients: with look-ups that end at the rows they bring, and with gradients of whole tables; 0
            where nobody looked.
    """

    parameters: tuple[ParameterFact, ...]
    stages: tuple[StageFact, ...]
    batches: int
    workers: int = 1
    workers_per_node: int = 1
    running: tuple[str, ...] = ()
    splits: str = "untried"
    step_bytes: int = 0
    whole_step_bytes: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1 or self.workers_per_node < 1 or self.workers % self.workers_per_node:
            raise ValueError(f"profile: {self.workers} workers do not fill nodes of {self.workers_per_node}")
        if min(self.step_bytes, self.whole_step_bytes) < 0:
            raise ValueError(f"profile: want bytes >= 0, got {self.step_bytes} and {self.whole_step_bytes} for a step")
        if self.batches < self.workers:
            raise ValueError(f"profile: {self.workers} workers need a batch each, got {self.batches}")
        names = Counter(name for fact in self.parameters for name in (fact.name, *fact.aliases))
        if twice := sorted(name for name, count in names.items() if count > 1):
            raise ValueError(f"profile: parameters listed more than once: {', '.join(twice)}")

    @property
    def steps(self) -> int:
        return self.batches // self.workers

    @property
    def parameter_bytes(self) -> int:
        return sum(fact.bytes for fact in self.parameters)

    @property
    def row_bytes(self) -> int:
        """Bytes of the parameters that are read by row only."""
        return sum(fact.bytes for fact in self.parameters if fact.reads == "rows")

    @property
    def dense_bytes(self) -> int:
        """Bytes of the parameters that some operation reads whole."""
        return sum(fact.bytes for fact in self.parameters if fact.reads in ("dense", "both"))

    @property
    def activation_bytes(self) -> int:
        """Kept for backward, by all stages."""
        return sum(stage.activation_bytes for stage in self.stages)

    @property
    def peak_bytes(self) -> int:
        """What a plain step adds to parameters, gradients and state in its fullest moment."""
        return max(self.step_bytes, self.activation_bytes)

    @property
    def alpha(self) -> float:
        """Parallax's model-level alpha: the mean over trained parameters, weighted by elements (1 if none)."""
        trained = [fact for fact in self.parameters if fact.requires_grad and fact.reads != "never"]
        elements = sum(fact.elements for fact in trained)
        return sum(fact.alpha * fact.elements for fact in trained) / elements if elements else 1.0

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of names, shapes, dtypes, gradients wanted and reads: what a plan is made for."""
        model = [
            [fact.name, list(fact.aliases), list(fact.shape), fact.dtype, fact.requires_grad, fact.reads]
            for fact in self.parameters
        ]
        return hashlib.sha256(json.dumps(model).encode()).hexdigest()[:16]

    @property
    def model_fingerprint(self) -> str:
        """What a plan for this model carries: of the trained parameters only, and however they are read."""
        trained = (fact for fact in self.parameters if fact.requires_grad)
        return model_fingerprint(Trainable(fact.name, fact.shape, fact.dtype) for fact in trained)

    @property
    def arrivals(self) -> tuple[ParameterFact, ...]:
        """The parameters in the order in which gradients become final; those without one are left out."""
        arrived = [(fact.arrival, fact) for fact in self.parameters if fact.arrival is not None]
        return tuple(fact for _, fact in sorted(arrived, key=lambda pair: pair[0]))

    def parameter(self, name: str) -> ParameterFact:
        """The parameter of that name or alias.

        Raises:
            KeyError: the model has none.
        """
        for fact in self.parameters:
            if name == fact.name or name in fact.aliases:
                return fact
        raise KeyError(f"profile: no parameter {name!r}; there are {', '.join(fact.name for fact in self.parameters)}")

    def page(self) -> Page:
        """What it prints, its tables apart: parameters and those read by row, the largest first; stages in order."""
        size = f"{len(self.parameters)} parameters, {bytes_text(self.parameter_bytes)}"
        split = f"{bytes_text(self.row_bytes)} read by row, {bytes_text(self.dense_bytes)} whole"
        seen = f"{self.batches} batches; workers: {self.workers}, per node: {self.workers_per_node}"
        title = f"profile {self.fingerprint}: {size} ({split})\nmodel alpha {self.alpha:.4f} over {seen}"
        if self.step_bytes:
            title += f"\na step adds {bytes_text(self.step_bytes)} in its fullest moment"
        largest = sorted(self.parameters, key=lambda fact: (-fact.bytes, fact.name))
        by_row = [fact for fact in largest if fact.rows is not None]
        looked_up: Page = (_rows(by_row), ALPHA_LEGEND, _loads(by_row), LOAD_LEGEND) if by_row else ()
        return title, *_parameters(largest), *looked_up, *([_stages(self.stages)] if self.stages else [])

    def __str__(self) -> str:
        return page_text(self.page())

    def to_json(self) -> str:
        return json.dumps({"fingerprint": self.fingerprint, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """
        Raises:
            ValueError: the parameters are not those the file's fingerprint was taken of.
        """
        fields = json.loads(text)
        wanted = fields.pop("fingerprint")
        parameters = tuple(_parameter(fact) for fact in fields.pop("parameters"))
        stages = tuple(_stage(stage) for stage in fields.pop("stages"))
        profile = cls(parameters, stages, **{**fields, "running": tuple(fields.get("running", ()))})
        if profile.fingerprint != wanted:
            raise ValueError(
                f"profile: the file says fingerprint {wanted} but holds {profile.fingerprint}; profile again"
            )
        return profile

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        return cls.from_json(Path(path).read_text())


def _stage(fields: Mapping[str, Any]) -> StageFact:
    numbers = tuple(Numbers(*found) for found in fields.get("output_numbers", ()))
    return StageFact(**{**fields, "output_numbers": numbers})


def _parameter(fields: Mapping[str, Any]) -> ParameterFact:
    """A fact from JSON, whose lists become tuples again."""
    frozen: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    if fields["rows"] is not None:
        rows: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields["rows"].items()}
        frozen["rows"] = RowFacts(**{**rows, "hottest": tuple((row, share) for row, share in rows["hottest"])})
    return ParameterFact(**frozen)


WIDEST_NOTE = 60
ALPHA_LEGEND = "per worker and step; alpha is distinct rows / rows, merged over a node and over all workers"
LOAD_LEGEND = "load is the busiest owner's / mean, rows dealt modulo the workers, hashed, or in contiguous blocks"
DENSE_SHOWN = 20  # the other dense parameters, smaller ones, are summed up in one line


def _parameters(facts: Sequence[ParameterFact]) -> Page:
    plain = [fact for fact in facts if fact.reads == "dense" and not _note(fact) and not fact.refusals]
    folded = plain[DENSE_SHOWN:]
    hidden = {fact.name for fact in folded}
    rows = [
        (
            fact.name,
            " x ".join(map(str, fact.shape)) or "scalar",
            fact.dtype,
            bytes_text(fact.bytes),
            fact.reads,
            "-" if fact.arrival is None else str(fact.arrival),
            fact.stage or "(model)",
            _note(fact),
        )
        for fact in facts
        if fact.name not in hidden
    ]
    header = ("parameter", "shape", "dtype", "bytes", "read", "arrival", "stage", "note")
    more = f"and {len(folded)} smaller dense ones, {bytes_text(sum(fact.bytes for fact in folded))}"
    below = [more] if folded else []
    below += [f"{fact.name} not shardable: {reason}" for fact in facts for reason in fact.refusals]
    return Table(header, rows, (0, 2, 4, 6, 7)), *(["\n".join(below)] if below else [])


def _note(fact: ParameterFact) -> str:
    parts = [] if fact.requires_grad else ["frozen"]
    parts += [f"also {', '.join(fact.aliases)}"] if fact.aliases else []
    parts += [f"whole in {', '.join(fact.dense_readers)}"] if fact.reads == "both" else []
    parts += [f"padding row {fact.rows.padding_idx}"] if fact.rows and fact.rows.padding_idx is not None else []
    note = "; ".join(parts)
    return note if len(note) <= WIDEST_NOTE else note[: WIDEST_NOTE - 3] + "..."


def _rows(facts: Sequence[ParameterFact]) -> Table:
    rows = []
    for fact in facts:
        row = fact.rows
        assert row is not None, fact.name
        alphas = (
            f"{alpha:.4f}" if alpha >= 1e-3 else f"{alpha:.2g}"
            for alpha in (row.alpha_worker, row.alpha_node, row.alpha_union)
        )
        counts = (f"{row.rows:,}", bytes_text(row.row_bytes), f"{row.lookups:g}", f"{row.ids:,.0f}")
        rows.append((fact.name, *counts, *alphas))
    return Table(("read by row", "rows", "row", "lookups", "ids", "alpha worker", "node", "union"), rows)


def _loads(facts: Sequence[ParameterFact]) -> Table:
    rows = []
    for fact in facts:
        row = fact.rows
        assert row is not None, fact.name
        hottest = f"{row.hottest[0][0]} ({row.hottest[0][1]:.1%})" if row.hottest else "-"
        loads = (f"{load:.2f}" for load in (row.imbalance_modulo, row.imbalance_hashed, row.imbalance_blocks))
        rows.append((fact.name, *loads, hottest))
    return Table(("read by row", "load modulo", "hashed", "blocks", "hottest row"), rows)


def _stages(stages: Sequence[StageFact]) -> Table:
    rows = [
        (
            stage.name or "(model)",
            count_text(stage.forward_flops),
            bytes_text(stage.parameter_bytes),
            bytes_text(stage.activation_bytes),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
        )
        for stage in stages
    ]
    header = ("stage", "forward FLOP", "parameters", "activations", "forward", "backward")
    return Table(header, rows)
