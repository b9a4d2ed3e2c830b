"""A residency plan: what each stage does with its activations, why, and what a step of it is expected to take.

It goes to JSON and back with the costs that it was made from, so its forecast is played anew after an edit.
"""

import json
from dataclasses import asdict, dataclass

from armillary.plans.group import Forecast, StagePlan
from armillary.plans.registry import Choice
from armillary.plans.units import Page, Table, page_text
from armillary.residency.lanes import Played, play
from armillary.residency.stage_costs import KEEP, RECOMPUTE, SWAP, StageChain, StageCost, TierSpeed

__all__ = ["ResidencyPlan", "mib", "ms"]

MIB = 1 << 20


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f}" if nbytes >= MIB or not nbytes else f"{nbytes / MIB:.3f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


@dataclass(frozen=True)
class ResidencyPlan:
    """
    Args of note:
        residencies: "keep", "recompute" or "swap", a stage each.
        slots: how many stages may be on their way out, or read ahead, beside the one that computes.
        memory_bytes: the budget it was made for; None: whatever it takes.
        speed: of the tier; None without one.
        gap: by how much, as a share, a faster plan may have been missed when the search ran out of time.
    """

    chain: StageChain
    residencies: tuple[str, ...]
    slots: int
    memory_bytes: int | None = None
    speed: TierSpeed | None = None
    gap: float = 0.0

    def __post_init__(self) -> None:
        paths = [stage.path for stage in self.chain.stages]
        if len(paths) != len(self.residencies):
            raise ValueError(f"residency: {len(self.residencies)} residencies for {len(paths)} stages {paths}")
        if wrong := set(self.residencies) - {KEEP, RECOMPUTE, SWAP}:
            raise ValueError(f"residency: want keep, recompute or swap, got {sorted(wrong)}")
        if SWAP in self.residencies and self.speed is None:
            raise ValueError("residency: the plan swaps, but knows no tier; give tier=")

    @property
    def played(self) -> Played:
        return play(self.chain, self.residencies, self.slots, self.speed or TierSpeed(1.0, 1.0))

    @property
    def forecast(self) -> Forecast:
        """memory_bytes: weights, buffers and optimizer state. peak_bytes: what the fullest moment adds."""
        played = self.played
        fixed = self.chain.fixed_bytes
        return Forecast(
            memory_bytes=fixed,
            seconds=played.seconds,
            peak_bytes=played.peak_bytes - fixed,
            moved_bytes=played.moved_bytes,
        )

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """As rows of a stage table."""
        return tuple(
            StagePlan(
                begins=stage.path,
                residency=Choice(residency),
                forecast=Forecast(
                    seconds=stage.forward_seconds + stage.backward_seconds + _again(stage, residency),
                    peak_bytes=stage.saved_bytes,
                    moved_bytes=2 * stage.moved_bytes if residency == SWAP else 0,
                ),
                reason=self._why(stage, residency),
            )
            for stage, residency in zip(self.chain.stages, self.residencies, strict=True)
        )

    def page(self) -> Page:
        rows = [
            (
                row.begins,
                str(row.residency),
                mib(row.forecast.peak_bytes),
                ms(row.forecast.seconds),
                mib(row.forecast.moved_bytes),
                row.reason,
            )
            for row in self.stages
        ]
        head = ("stage", "residency", "saves MiB", "compute ms", "moved MiB", "why")
        return (Table(head, rows, left=(0, 1, 5)), self._summary())

    def _summary(self) -> str:
        played, keep_seconds = self.played, self.chain.compute_seconds
        budget = "no budget" if self.memory_bytes is None else f"budget {mib(self.memory_bytes)} MiB"
        lines = [
            f"a pass takes {ms(played.seconds)} ms, {played.seconds / keep_seconds:.2f} times one that keeps all "
            f"({ms(keep_seconds)} ms)",
            f"peak of tensors {mib(played.peak_bytes)} MiB, at most {mib(played.bound_bytes)} MiB; {budget}; "
            f"{mib(self.chain.fixed_bytes)} MiB of it are weights, buffers and optimizer state",
        ]
        if self.speed is not None:
            lines.append(
                f"tier: {self.speed.write_bytes_per_second / MIB:,.0f} MiB/s out, "
                f"{self.speed.read_bytes_per_second / MIB:,.0f} MiB/s back; {mib(played.moved_bytes)} MiB a pass, "
                f"at most {self.slots} stage{'s' * (self.slots != 1)} in flight"
                + ("" if self.speed.is_direct else "; it goes through the page cache, which takes memory of its own")
            )
        lines.append(
            "no faster plan fits" if self.gap < 1e-3 else f"a plan up to {self.gap:.1%} faster may have been missed"
        )
        return "\n".join(lines)

    def __str__(self) -> str:
        return page_text(self.page())

    def _why(self, stage: StageCost, residency: str) -> str:
        if stage.only_keep:
            return stage.only_keep
        transfer = ""
        if self.speed is not None and stage.moved_bytes:
            transfer = f"{ms(stage.moved_bytes / self.speed.write_bytes_per_second)} ms out"
        if residency == KEEP:
            return "fits" if stage.saved_bytes else "saves nothing"
        if residency == RECOMPUTE:
            return f"{ms(stage.forward_seconds)} ms again" + (f" against {transfer}" if transfer else "")
        if stage.no_recompute:
            return f"{transfer}; {stage.no_recompute}"
        return f"{transfer} against {ms(stage.forward_seconds)} ms again"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ResidencyPlan":
        """
        Raises:
            ValueError: it is no residency plan.
        """
        try:
            found = json.loads(text)
            speed = None if found["speed"] is None else TierSpeed(**found["speed"])
            chain = StageChain.from_dict(found["chain"])
            residencies = tuple(found["residencies"])
            return cls(chain, residencies, found["slots"], found["memory_bytes"], speed, found["gap"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"residency: this is no residency plan: {error}") from None


def _again(stage: StageCost, residency: str) -> float:
    return stage.forward_seconds if residency == RECOMPUTE else 0.0
