"""What an engine is built from: the model cut where the plan says, the loss taken apart."""

from torch import nn

from armillary.facts.plan import Plan
from armillary.facts.split_loss import SplitLoss
from armillary.runtime.cyclic.train_spec import TrainSpec
from armillary.runtime.partition.stages import Stage
from armillary.runtime.transport import Transport
from armillary.schedules.edge import codes_of
from armillary.schedules.random_stream import seed_from_step
from armillary.schedules.registry import options_of
from armillary.schedules.sample_keys import sample_keys
from armillary.session.cyclic.counted_channel import CountedChannel
from armillary.session.cyclic.stages import TracedInput, refuse_other_groups, refuse_ties, stages_of
from armillary.session.cyclic.whole import whole_stage
from armillary.session.edges_at_eval import coded_leaves
from armillary.session.engines.contract import Parts
from armillary.session.train_job import TrainJob

__all__ = ["parts_of"]


def parts_of(plan: Plan, job: TrainJob, transport: Transport, first_step: int) -> Parts:
    """
    Args:
        first_step: how many steps were taken before.

    Raises:
        ValueError: the model cannot be cut there, the loss cannot be taken apart, or an edge that remembers samples
            finds none in the example.
    """
    options, channel = options_of(plan), CountedChannel(transport)
    seed = seed_from_step(job.seed, first_step)
    if not options.method.is_cut:
        names = {name: name for name, _ in job.model.named_parameters()}
        whole = Stage(0, job.model, names) if job.loss is None else whole_stage(job.model, job.loss, job.example)
        spec = TrainSpec(options.schedule(), lambda output, batch: output, seed, clip=options.clip)
        return Parts(plan, options, job, transport, channel, [whole], spec, lambda batch: batch)
    assert job.loss is not None
    split = SplitLoss(job.loss, job.model, job.example)
    value = split.input_of(job.example)
    codes = codes_of(options.edges, first_step)
    if any(code.cache_bytes for code in codes.values()):
        sample_keys(value)  # or it is refused here, before the first step
    stages = stages_of(job.model, value, options.points)
    refuse_ties(plan, stages)
    refuse_other_groups(plan, stages)
    options.method.refuse_stages(options, [stage.module for stage in stages])
    coded = coded_leaves(job.model, plan, value)
    is_traced = len(stages) > 1 and not isinstance(job.model, nn.Sequential)
    input_of = TracedInput(split, value).input_of if is_traced else split.input_of
    spec = TrainSpec(
        options.schedule(), split.of_output, seed, frozenset(options.recompute), options.clip,
        corrections=options.built_corrections(), objectives=options.method.objectives(options),
        codes=codes, lends=options.method.lends,
    )  # fmt: skip
    return Parts(plan, options, job, transport, channel, stages, spec, input_of, coded, is_traced)
