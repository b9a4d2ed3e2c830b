"""What parts trained apart say of themselves for `advise`: whether the model and its loss allow it.

How many epochs each part needs, only training tells, so nothing is forecast.
"""

from armillary.local_losses.slices import sliced
from armillary.plans.advice import Advice, Situation, advises, not_for

__all__: list[str] = []


@advises("PNN", "parts trained apart on synthetic labels", "methods/apart.md")
def _advice(situation: Situation) -> Advice:
    classes = situation.facts.classes
    if not classes:
        return not_for("the loss is no cross entropy of one label a sample, and each class has a code")
    try:
        sliced(situation.model, situation.loss, situation.batches[0], 2, None)
    except (ValueError, RuntimeError) as error:
        return not_for(str(error))
    kept = f"at=2, classes={classes}, labels=lambda batch: batch[1]"
    python = situation.script(
        "from armillary import local_losses",
        f"for part in local_losses.apart(model, loss, batches[0], {kept}):",
        "    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)",
        "    for given in part.batches(batches, epochs=1):",
        "        part.loss(given).backward(), optimizer.step(), optimizer.zero_grad()",
    )
    return Advice(True, "parts send nothing to one another", None, ("uncoupled",), python=python, tells="the script")
