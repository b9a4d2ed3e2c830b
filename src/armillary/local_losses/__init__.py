"""Parts of a model that learn from losses of their own: `split`.

A room beside the step: it works in a plain loop and under `armillary.parallelize`, and needs nothing of the runtime.

local = local_losses.split(model, loss, example, at=["layer2"])  # with heads
for batch in loader:
    optimizer.zero_grad(); local.loss(batch).backward(); optimizer.step()
local.plain()  # the model, without heads
"""

from armillary.local_losses.heads import InfoProWeights
from armillary.local_losses.split import HeadedPart, LocalLosses, split

__all__ = ["HeadedPart", "InfoProWeights", "LocalLosses", "split"]
