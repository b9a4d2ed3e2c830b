"""DeepSpeed: ZeRO stages 0, 2 and 3, and stage 0 with sparse gradients of tables, the user's optimizer in each."""

import deepspeed

from benchmarks.peers.case import Case, Step

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,  # of names only: no loader of DeepSpeed's is used
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,  # its default clips at norm 1, which is another training
}


def train(case: Case, stage: int) -> Step:
    model = case.model()
    optimizer = case.optimizer(model.parameters())
    zero = {"stage": stage, "overlap_comm": stage > 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG | {"zero_optimization": zero})
    batches = case.batches()

    def step() -> float:
        loss = case.loss(engine, next(batches))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def train_sparse(case: Case) -> Step:
    model = case.sparse_model()
    optimizer = case.unfused_optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    batches = case.batches()

    def step() -> float:
        loss = case.loss(engine, next(batches))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step
