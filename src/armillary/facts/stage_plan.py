"""What a plan decides for one stage of the model: one row of its stage table.

A plan without stages has one, with every default. Which parameters a stage holds stands in the groups, by its number.
"""

from dataclasses import dataclass

from armillary.facts.choice import Choice
from armillary.facts.forecast import Forecast

__all__ = ["StagePlan"]


@dataclass(frozen=True)
class StagePlan:
    """
    Args of note:
        begins: path of its first module.
        residency: where its activations stay between forward and backward: "keep" or "recompute" today.
        objective: what it learns from: "whole_model", the loss of the whole model, or "own_loss", which its schedule
            names.
        edge, edge_back: codecs of what it hands to the next stage and gets back; None: as it is.
        split: over which axes its tensors lie; reserved, "whole" today.
        forecast: its own seconds of forward and backward, and peak_bytes of activations, on one worker.
    """

    begins: str
    residency: Choice = Choice("keep")
    objective: Choice = Choice("whole_model")
    edge: Choice | None = None
    edge_back: Choice | None = None
    split: Choice = Choice("whole")
    forecast: Forecast = Forecast()
    reason: str = ""
