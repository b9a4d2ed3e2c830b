"""What in situ training says of itself for `advise`: it is for batches that a running program makes."""

from armillary.plans.advice import Advice, Situation, advises, not_for

__all__: list[str] = []


@advises("in situ", "a running simulation feeds training", "methods/feeds.md")
def _advice(situation: Situation) -> Advice:
    if not situation.facts.is_stream:
        return not_for("batches come from data that are there, not from a program that runs")
    python = situation.script(
        "from torch.utils.data import DataLoader",
        "from armillary import feeds",
        "stream = feeds.Stream('/dev/shm/flow', window=feeds.AllOnce(), batch=32)  # a feeds.Writer fills it",
        "for batch in DataLoader(stream, batch_size=None):",
        "    loss(model, batch).backward()",
    )
    return Advice(
        True, "if a program of yours makes the batches", python=python, tells="the script, beside your program"
    )
