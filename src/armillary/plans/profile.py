"""What a model is to those who spread its training over workers: its parameters, its stages, how sparse it is.

The planner needs nothing else of a model. The profile is frozen, goes to JSON and back, prints as tables, and
says with its fingerprints whether a plan was made for it.

Source: Kim et al., Parallax (EuroSys 2019), for alpha over the model. Departure: parameters that are frozen
or never read stay out of the mean, since they never travel.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from armillary.plans.parameter import Numbers, ParameterFact, Reads, RowFacts, StageFact
from armillary.plans.plan import Trainable, model_fingerprint
from armillary.plans.units import Page, bytes_text, page_text, profile_page

__all__ = ["ParameterFact", "Profile", "Reads", "RowFacts", "StageFact"]


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
        """Parallax's model-level alpha: the mean over trained parameters, weighted by elements (1 if
        none)."""
        trained = [fact for fact in self.parameters if fact.requires_grad and fact.reads != "never"]
        elements = sum(fact.elements for fact in trained)
        return sum(fact.alpha * fact.elements for fact in trained) / elements if elements else 1.0

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits of names, shapes, dtypes, gradients wanted and reads: what a plan is made
        for."""
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
        """What it prints, its tables apart: parameters, those read by row, stages."""
        size = f"{len(self.parameters)} parameters, {bytes_text(self.parameter_bytes)}"
        split = f"{bytes_text(self.row_bytes)} read by row, {bytes_text(self.dense_bytes)} whole"
        seen = f"{self.batches} batches; workers: {self.workers}, per node: {self.workers_per_node}"
        title = f"profile {self.fingerprint}: {size} ({split})\nmodel alpha {self.alpha:.4f} over {seen}"
        if self.step_bytes:
            title += f"\na step adds {bytes_text(self.step_bytes)} in its fullest moment"
        return profile_page(title, self.parameters, self.stages)

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
