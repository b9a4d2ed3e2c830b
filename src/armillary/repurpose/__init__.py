"""A trained model cut by neurons over workers, for inference over slow links (RePurpose, Abdi et al., 2020).

shards = repurpose.cut(model, workers=4, batches=batches, measure=accuracy)
shards.save("shards")
with repurpose.serve("shards") as run:  # on every rank
    y = run(x)
"""

from armillary.repurpose.search import cut
from armillary.repurpose.serving import Serving, serve
from armillary.repurpose.shards import CurvePoint, Shards

__all__ = ["CurvePoint", "Serving", "Shards", "cut", "serve"]
