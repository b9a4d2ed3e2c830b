"""Chooses for each stage of a chain to keep, recompute or swap: the fastest choice that fits, by integer programming.

One binary a stage and residency; the moments at which transfers and passes end are continuous. Of the choices within
1 % of the fastest, that of the least peak is taken, so that a smaller budget never ends in a larger peak.

Source: KARMA (Wahib et al., SC20), whose source is closed: a reconstruction, with the model of memory and lanes of POFO
(Beaumont et al., NeurIPS 2021). Departures: x always stays; a stage is the unit; slots bound what is in flight.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from armillary.residency.lanes import Played, play
from armillary.residency.stage_costs import KEEP, RECOMPUTE, SWAP, StageChain, StageCost, TierSpeed

__all__ = ["Solution", "least_bytes", "search"]

SLOTS = (1, 2, 3)
INFEASIBLE = 2  # a status of scipy's milp
NEAR = 1.01  # what counts as equally fast: measured seconds scatter by more


@dataclass(frozen=True)
class Solution:
    """residencies: a word a stage. gap: how far below the true least may lie, as a share; 0 is proven."""

    residencies: tuple[str, ...]
    slots: int
    played: Played
    gap: float
    memory_bytes: int = 0


def search(
    chain: StageChain,
    memory_bytes: float,
    speed: TierSpeed | None,
    fixed: Mapping[int, str],
    candidates: Sequence[Solution] = (),
    limit_seconds: float = 10.0,
) -> Solution:
    """The fastest choice whose peak stays within the memory.

    Args:
        speed: None without a tier: nothing is swapped.
        fixed: residencies of stages, by number, that are not to be chosen.
        candidates: choices made for a larger memory; one that fits and is as fast is taken.

    Raises:
        ValueError: no choice fits; names the stage that needs most and how much.
    """
    lane = speed or TierSpeed(1.0, 1.0)
    deadline = time.monotonic() + limit_seconds
    found: list[Solution] = []
    bounds: list[float] = []
    for slots in SLOTS if speed is not None else SLOTS[:1]:
        share = (deadline - time.monotonic()) / (len(SLOTS) - slots + 1) * 0.6
        model = _Program(chain, memory_bytes, lane, slots, fixed, may_swap=speed is not None)
        most_seconds = NEAR * min(one.played.seconds for one in found) if found else None
        if (one := model.fastest(max(share, 0.2), most_seconds)) is not None:
            found.append(one)
        bounds.append(model.least_seconds)
    found += [one for one in candidates if one.played.bound_bytes <= memory_bytes]
    if not found:
        raise ValueError(_too_small(chain, memory_bytes, lane, fixed, speed is not None))
    least_seconds = min(one.played.seconds for one in found)
    near = [one for one in found if one.played.seconds <= NEAR * least_seconds]
    for slots in sorted({one.slots for one in near}):
        model = _Program(chain, memory_bytes, lane, slots, fixed, may_swap=speed is not None)
        one = model.smallest(NEAR * least_seconds, max(deadline - time.monotonic(), 0.2) / (len(SLOTS) - slots + 1))
        near += [] if one is None else [one]
    best = min(near, key=lambda one: (one.played.bound_bytes, one.played.seconds))
    gap = max(0.0, 1 - min(bounds) / least_seconds)
    return Solution(best.residencies, best.slots, best.played, gap)


def least_bytes(chain: StageChain, speed: TierSpeed | None, fixed: Mapping[int, str]) -> int:
    """The smallest memory for which there is a choice."""
    lane = speed or TierSpeed(1.0, 1.0)
    peaks = []
    for slots in SLOTS if speed is not None else SLOTS[:1]:
        one = _Program(chain, float("inf"), lane, slots, fixed, may_swap=speed is not None).smallest(None, 3.0)
        peaks += [] if one is None else [one.played.bound_bytes]
    return min(peaks)


def _too_small(
    chain: StageChain, memory_bytes: float, lane: TierSpeed, fixed: Mapping[int, str], may_swap: bool
) -> str:
    least = least_bytes(chain, lane if may_swap else None, fixed)
    most = max(chain.stages, key=_need_bytes)
    return (
        f"residency: {_mib(memory_bytes)} of memory do not hold a step; {_mib(least)} are needed. Stage {most.path!r} "
        f"needs most, {_mib(_need_bytes(most))} for its own pass; cut it finer by stages=, or give more memory_bytes"
        + ("" if may_swap else ", or a tier= to swap to")
    )


def _need_bytes(stage: StageCost) -> int:
    return stage.input_bytes + stage.saved_bytes + max(stage.forward_extra_bytes, stage.backward_extra_bytes)


def _mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes >= 1 << 20 else f"{nbytes / 1024:,.1f} KiB"


class _Program:
    """The mixed-integer program of one number of slots. Times are in steps of compute, bytes in shares of all, so that
    the solver's absolute tolerances mean the same for every model."""

    def __init__(
        self,
        chain: StageChain,
        memory_bytes: float,
        speed: TierSpeed,
        slots: int,
        fixed: Mapping[int, str],
        may_swap: bool,
    ) -> None:
        self.chain, self.memory_bytes, self.speed, self.slots = chain, memory_bytes, speed, slots
        self.fixed, self.may_swap = fixed, may_swap
        self.count = len(chain.stages)
        self.unit_seconds = max(chain.compute_seconds, 1e-9)
        self.unit_bytes = max(sum(_all_bytes(one) for one in (*chain.stages, chain.outside)), 1)
        # Columns: ends of forward passes, of writes, of backward passes, of reads; whether swapped, whether run again;
        # the end of the pass outside the stages; the peak.
        n = self.count
        self.f, self.o, self.b, self.i, self.s, self.r = (range(k * n, (k + 1) * n) for k in range(6))
        self.turn, self.peak = 6 * n, 6 * n + 1
        self.least_seconds = float("inf")
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []
        self._times()
        self._bytes()

    def _at_least(self, terms: Mapping[int, float], least: float) -> None:
        self.rows.append(dict(terms))
        self.least.append(least)

    def _times(self) -> None:
        """Every pass and transfer ends after what it waits for, and its own seconds.

        A stage that is not swapped hands on the end of the transfer before, which others wait for anyway. So no row is
        switched off by a large constant, which would leave the solver no bound to speak of, but for the last stages:
        their writes may go on beside backward, and only their own reads wait for them.
        """
        stages, n, slots, unit = self.chain.stages, self.count, self.slots, self.unit_seconds
        write = [one.moved_bytes / self.speed.write_bytes_per_second / unit for one in stages]
        read = [one.moved_bytes / self.speed.read_bytes_per_second / unit for one in stages]
        copy = [one.moved_bytes * self.speed.processor_seconds_per_byte / unit for one in stages]
        ahead = [one.forward_seconds / unit for one in stages]
        back = [one.backward_seconds / unit for one in stages]
        outside = (self.chain.outside.forward_seconds + self.chain.outside.backward_seconds) / unit
        longest = sum(ahead) + sum(write) + sum(copy)  # until the last write has ended
        f, o, b, i_, s, r = self.f, self.o, self.b, self.i, self.s, self.r
        for i in range(n):
            before = {f[i - 1]: -1.0} if i else {}
            self._at_least({f[i]: 1.0, s[i]: -copy[i], **before}, ahead[i])
            if i > slots:
                self._at_least({f[i]: 1.0, o[i - slots - 1]: -1.0, s[i]: -copy[i]}, ahead[i])
            self._at_least({o[i]: 1.0, f[i]: -1.0, s[i]: -write[i]}, 0.0)
            if i:
                self._at_least({o[i]: 1.0, o[i - 1]: -1.0, s[i]: -write[i]}, 0.0)
            after = b[i + 1] if i + 1 < n else self.turn
            self._at_least({b[i]: 1.0, after: -1.0, r[i]: -ahead[i], s[i]: -copy[i]}, back[i])
            self._at_least({b[i]: 1.0, i_[i]: -1.0, s[i]: -copy[i]}, back[i])
            if i + 1 < n:
                self._at_least({i_[i]: 1.0, i_[i + 1]: -1.0, s[i]: -read[i]}, 0.0)
            if i + slots <= n:
                behind = b[i + slots] if i + slots < n else self.turn
                self._at_least({i_[i]: 1.0, behind: -1.0, s[i]: -read[i]}, 0.0)
            if i >= n - slots:
                self._at_least({i_[i]: 1.0, o[i]: -1.0, s[i]: -read[i] - longest}, -longest)
            self._at_least({s[i]: -1.0, r[i]: -1.0}, -1.0)
            self._spans(i, ahead, back, copy, write[i], read[i])
        self._at_least({self.turn: 1.0, f[n - 1]: -1.0}, outside)
        if n > slots:
            self._at_least({self.turn: 1.0, o[n - slots - 1]: -1.0}, outside)

    def _spans(
        self, i: int, ahead: Sequence[float], back: Sequence[float], copy: Sequence[float], write: float, read: float
    ) -> None:
        """What follows for whole stages, but not for shares of them: a transfer that is longer than the passes that it
        may lie beside makes compute wait for the rest. It spares the solver most of its search on a slow tier."""
        n, slots, f, b, s, r = self.count, self.slots, self.f, self.b, self.s, self.r
        if i + slots + 1 < n:
            beside = range(i + 1, i + slots + 1)
            lack = max(0.0, write - sum(ahead[k] + copy[k] for k in beside))
            terms = {f[i + slots + 1]: 1.0, f[i]: -1.0, s[i]: -lack}
            terms |= {s[k]: -copy[k] for k in (*beside, i + slots + 1)}
            self._at_least(terms, sum(ahead[i + 1 : i + slots + 2]))
        if i + slots <= n:
            beside = range(i + 1, i + slots)
            lack = max(0.0, read - sum(ahead[k] + back[k] + copy[k] for k in beside))
            behind = b[i + slots] if i + slots < n else self.turn
            terms = {b[i]: 1.0, behind: -1.0, s[i]: -lack - copy[i], r[i]: -ahead[i]}
            terms |= {s[k]: -copy[k] for k in beside} | {r[k]: -ahead[k] for k in beside}
            self._at_least(terms, sum(back[i : i + slots]))

    def _bytes(self) -> None:
        """The peak is at least what each pass holds: kept stages before it, those in flight, and its own."""
        chain, n = self.chain, self.count
        # A pass holds its input and those before it, and its output; in backward the output's gradient, as large.
        inputs = [one.input_bytes for one in (*chain.stages, chain.outside)]
        grads = [one.gradient_bytes for one in chain.stages]
        for i, stage in enumerate((*chain.stages, chain.outside)):
            always = chain.fixed_bytes + sum(inputs[: i + 2]) + (sum(grads) if chain.keeps_gradients else 0)
            own = stage.forward_extra_bytes + (chain.outside.saved_bytes if i == n else 0)
            terms, constant = self._held(i, i - self.slots)
            if i < n:
                _add(terms, self.r[i], stage.unsaved_forward_bytes - stage.forward_extra_bytes)
            self._peak_above(terms, always + constant + own)
            terms, constant = self._held(i, i - self.slots + 1)
            later = 0 if chain.keeps_gradients else sum(grads[i:])
            own = stage.backward_extra_bytes + (chain.outside.saved_bytes if i == n else 0)
            if i < n:
                second = max(stage.forward_extra_bytes - stage.backward_extra_bytes, 0)
                _add(terms, self.r[i], stage.saved_bytes + second)
            self._peak_above(terms, always + constant + later + own)

    def _held(self, i: int, first: int) -> tuple[dict[int, float], float]:
        """What stages up to i keep: of swapped ones all from `first` on, of those before it only what is small."""
        terms: dict[int, float] = {}
        constant = 0.0
        for j in range(min(i, self.count - 1) + 1):
            one = self.chain.stages[j]
            constant += one.saved_bytes
            _add(terms, self.r[j], -one.saved_bytes)
            if j < first:
                _add(terms, self.s[j], -one.moved_bytes)
        return terms, constant

    def _peak_above(self, terms: Mapping[int, float], constant: float) -> None:
        unit = self.unit_bytes
        scaled = {column: -value / unit for column, value in terms.items()}
        self._at_least({self.peak: 1.0, **scaled}, (constant - self.chain.fixed_bytes) / unit)

    def fastest(self, limit_seconds: float, most_seconds: float | None) -> Solution | None:
        """None if there is none that is this fast, or none was found in time. Notes the least there can be."""
        return self._solve({self.b[0]: 1.0, self.peak: 1e-6}, most_seconds, limit_seconds)

    def smallest(self, most_seconds: float | None, limit_seconds: float) -> Solution | None:
        return self._solve({self.peak: 1.0, self.b[0]: 1e-4}, most_seconds, limit_seconds)

    def _solve(self, cost: Mapping[int, float], most_seconds: float | None, limit_seconds: float) -> Solution | None:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        n, columns = self.count, 6 * self.count + 2
        upper = numpy.full(columns, numpy.inf)
        lower = numpy.zeros(columns)
        upper[self.s.start : self.r.stop] = 1.0
        upper[self.peak] = (self.memory_bytes - self.chain.fixed_bytes) / self.unit_bytes
        if upper[self.peak] < 0:
            return None
        if most_seconds is not None:
            upper[self.b[0]] = most_seconds / self.unit_seconds
        for i, stage in enumerate(self.chain.stages):
            if not self.may_swap or not stage.moved_bytes or stage.only_keep:
                upper[self.s[i]] = 0.0
            if stage.no_recompute or stage.only_keep or not stage.saved_bytes:
                upper[self.r[i]] = 0.0
            if i in self.fixed:
                for word, column in ((SWAP, self.s[i]), (RECOMPUTE, self.r[i])):
                    lower[column] = upper[column] = float(self.fixed[i] == word)
        entries = [(row, column, value) for row, terms in enumerate(self.rows) for column, value in terms.items()]
        where, which, values = zip(*entries, strict=True)
        matrix = csr_array((values, (where, which)), shape=(len(self.rows), columns))
        objective, whole = numpy.zeros(columns), numpy.zeros(columns)
        for column, value in cost.items():
            objective[column] = value
        whole[self.s.start : self.r.stop] = 1
        answer = milp(
            objective,
            constraints=LinearConstraint(matrix, numpy.array(self.least), numpy.inf),
            integrality=whole,
            bounds=Bounds(lower, upper),
            options={"time_limit": limit_seconds, "mip_rel_gap": 1e-4},
        )
        if answer.status != INFEASIBLE:
            self.least_seconds = max(self.chain.compute_seconds, (answer.mip_dual_bound or 0.0) * self.unit_seconds)
        if answer.x is None:
            return None
        residencies = tuple(
            SWAP if answer.x[self.s[i]] > 0.5 else RECOMPUTE if answer.x[self.r[i]] > 0.5 else KEEP for i in range(n)
        )
        played = play(self.chain, residencies, self.slots, self.speed)
        return Solution(residencies, self.slots, played, float(answer.mip_gap or 0.0))


def _add(terms: dict[int, float], column: int, value: float) -> None:
    terms[column] = terms.get(column, 0.0) + value


def _all_bytes(stage: StageCost) -> int:
    return stage.input_bytes + stage.saved_bytes + stage.forward_extra_bytes + stage.backward_extra_bytes
