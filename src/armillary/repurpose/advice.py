"""What a cut by neurons says of itself for `advise`: what crosses and what a forward takes, with no input left out yet.

How much less a cut may send hangs on what the model may lose, which only a search on the user's own measure tells.
"""

from typing import Any

import torch
from torch import Tensor

from armillary.plans.advice import Advice, Situation, advises, not_for
from armillary.plans.group import Forecast
from armillary.repurpose.cut_chain import CutChain, NeuronPlacement
from armillary.repurpose.layer_chain import read
from armillary.repurpose.restructuring import Penalties, Steps, restructured

__all__: list[str] = []

NO_STEPS = Steps(assign=False, prune=False, adjust=False)


@advises("RePurpose", "a trained model cut by neurons, served", "methods/repurpose.md", is_inference=True)
def _advice(situation: Situation) -> Advice:
    if situation.workers == 1:
        return not_for("one worker: nothing to cut the neurons over")
    x = _input_of(situation.batches[0])
    if x is None:
        return not_for("a batch begins with no numbers (float32 or float64) for the neurons of a first layer")
    try:
        chain = read(situation.model, x)
    except (ValueError, RuntimeError) as error:
        return not_for(str(error))
    placement = NeuronPlacement((1 / situation.workers,) * situation.workers, is_spread=True)
    cut = restructured(chain, [x], placement, [Penalties(0.0, 0.0)] * len(chain.layers), NO_STEPS)
    sent = sum(row.sent for row in cut.traffic()) * x.element_size() * len(x) / situation.workers
    python = situation.script(
        "from armillary import repurpose",
        "less = lambda one, judged: -sum(float(loss(one, batch)) for batch in judged)",
        f"shards = repurpose.cut(model, {situation.workers}, batches, less, drop=0.01)",
        "print(shards)",
        "shards.save('shards')",
    )
    return Advice(
        True,
        "before any value is left out",
        Forecast(sent_bytes=sent, seconds=_seconds(cut, situation, len(x), x.element_size())),
        ("lossy",),
        python=python,
        latency_seconds=_seconds(cut, situation, len(x), x.element_size()),
        source=cut,
    )


def _seconds(cut: CutChain, situation: Situation, samples: int, item_bytes: int) -> float:
    """A rank's share of the forward, and one all-to-all before each layer, in which all ranks send alike."""
    link, ranks = situation.topology.link, situation.workers
    asked = [one.values * samples * item_bytes / ranks for one in cut.exchanges if one.values]
    return situation.facts.seconds / ranks + sum(link.seconds(nbytes, 1) for nbytes in asked)


def _input_of(batch: Any) -> Tensor | None:
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return x if isinstance(x, Tensor) and x.dim() and x.dtype in (torch.float32, torch.float64) else None
