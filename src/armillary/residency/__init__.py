"""Training beyond memory: each stage keeps its activations, recomputes them, or swaps them to a disk.

A room beside the step: it works in a plain loop, under DDP and under `armillary.parallelize`.
"""

from armillary.residency.held import Held, for_budgets, hold
from armillary.residency.plan import ResidencyPlan

__all__ = ["Held", "ResidencyPlan", "for_budgets", "hold"]
