"""Parts of a model that learn from losses of their own: `split` (local losses), `apart` (each part on its own).

A room beside the step: it works in a plain loop and under `armillary.parallelize`, and needs nothing of the runtime.

local = local_losses.split(model, loss, example, at=["layer2"])  # with heads
for batch in loader:
    optimizer.zero_grad(); local.loss(batch).backward(); optimizer.step()
local.plain()  # the model, without heads
"""

from armillary.local_losses.apart import apart
from armillary.local_losses.apart_part import ApartPart
from armillary.local_losses.hand_over import HandOver, PartBatch
from armillary.local_losses.heads import InfoProWeights
from armillary.local_losses.joining import joined
from armillary.local_losses.split import AskedOfSplit, HeadedPart, LocalLosses, split

__all__ = [
    "ApartPart", "AskedOfSplit", "HandOver", "HeadedPart", "InfoProWeights", "LocalLosses", "PartBatch", "apart",
    "joined", "split",
]  # fmt: skip
