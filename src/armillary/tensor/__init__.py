"""Tensor and sequence parallelism as a transform of the model (Colossal-AI, Li et al., 2023): what is left are ordinary
local parameters, so optimizers and whatever trains on the data axis work as they are.

plan = tensor.plan(model, batch, loss, region="blocks", topology=armillary.measure())
part = tensor.cut(model, plan)  # or tensor.cut(model, region="blocks", way="2d", mesh={"row": 2, "column": 2})
optimizer = torch.optim.AdamW(part.model.parameters())
"""

from armillary.tensor.cut import cut
from armillary.tensor.mesh_plan import MeshPlan, MeshPrice
from armillary.tensor.part import Part
from armillary.tensor.plan import plan
from armillary.tensor.verify import CutVerdict, verify

__all__ = ["CutVerdict", "MeshPlan", "MeshPrice", "Part", "cut", "plan", "verify"]
