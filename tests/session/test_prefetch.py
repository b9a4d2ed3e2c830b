"""Prefetch changes nothing: trained with it and without, every number is the same bit for bit, whatever loops do."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import cycle, islice

import pytest
import torch
from torch import nn

from armillary.exchanges.look_up import HEADER_BYTES, announcement_bytes
from armillary.plans import Choice
from armillary.session.attach import attach
from beside import plan_of
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for

STEPS = 9
UNPREDICTED = 5  # three batches are watched and learned from; the next two were looked at before that was over
V = 500
ROWS = {
    "owned_rows": (Choice("owned_rows"), 1),
    "hashed": (Choice("owned_rows", {"order": "hashed"}), 1),
    "one_owner": (Choice("owned_rows", {"owners": 1}), 1),
    "by_node": (Choice("owned_rows_by_node"), 2),
}


def started(rows, optimizer_name, prefetch, workers, check_order=False, **fields):
    torch.manual_seed(7)
    model = Mixed()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    choice, per_node = ROWS[rows]
    plan = plan_for(model, workers, choice, Choice("all_reduce"), workers_per_node=per_node, **fields)
    run = attach(ahead_of(plan, prefetch), model, optimizer, check_order=check_order)
    return run, model, optimizer


def ahead_of(plan, prefetch):
    groups = [replace(g, prefetch=prefetch) if g.layout == "row_sharded" else g for g in plan.groups]
    return replace(plan, groups=tuple(groups))


def count_rounds(run):
    """Look-ups that this rank made by a round of their own."""
    made, pull = [], run._engine.executor.look_ups._pull

    def counted(table, keys, needs_gradient):
        made.append((table.name, needs_gradient))
        return pull(table, keys, needs_gradient)

    run._engine.executor.look_ups._pull = counted
    return made


def waiting_of(run):
    """How many tables' gradients wait now."""
    return len(getattr(run._engine.executor.prefetch.delay, "waiting", ()))


def plain_step(run, model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()


def clip(run, model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def accumulate(run, model, optimizer, batch, step):
    if step % 2 == 0:
        optimizer.zero_grad()
        with run.no_sync():
            loss(model, batch).backward()
    else:
        loss(model, batch).backward()
        optimizer.step()


def accumulate_in_turns(run, model, optimizer, batch, step):
    loss(model, batch).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


def step_before_forward(run, model, optimizer, batch, step):
    """What was sent for this batch is older than the rows by the time it is read."""
    optimizer.step()
    optimizer.zero_grad()
    loss(model, batch).backward()


def wrong_on_one_rank(run, model, optimizer, batch, step):
    """Rank 1 masks ids in place between two batches: now and then, and in the end always."""
    if run.rank == 1 and (step in (4, 5) or step > 6):
        batch["ids"][::2] = step
    plain_step(run, model, optimizer, batch, step)


def transposed(run, model, optimizer, batch, step):
    """The same rows in another order and shape."""
    batch = {**batch, "other": batch["other"].flip(0), "sampled": batch["sampled"].flip(0)}
    plain_step(run, model, optimizer, batch, step)


def drawn_inside(run, model, optimizer, batch, step):
    """What is sampled in the loop cannot be predicted."""
    torch.manual_seed(100 * step + run.rank)
    plain_step(run, model, optimizer, {**batch, "sampled": torch.randint(0, 23, (5,)).unique()}, step)


def two_look_ups_swapped(run, model, optimizer, batch, step):
    """On the rank whose gradients are added to those of another, so that their order shows."""
    if step in (5, 7) and run.rank == 1:
        batch = {**batch, "ids": batch["other"], "other": batch["ids"]}
    plain_step(run, model, optimizer, batch, step)


def two_passes_of_a_batch(run, model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch).backward()
    (2 * loss(model, batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    (loss(model, batch) + loss(model, batch)).backward()
    optimizer.step()


def evaluate_between(run, model, optimizer, batch, step):
    with torch.no_grad():
        for extra in range((step + run.rank) % 3):
            loss(model, batch_of(90 + extra, step))
    plain_step(run, model, optimizer, batch, step)
    with torch.no_grad():
        for extra in range((step + run.rank) % 2):
            loss(model, batch_of(80 + extra, step))


def evaluate_all(run, model, optimizer, batch, step):
    """Ends in `finish`, before the forward and after the step."""
    for _ in range(2):
        with torch.no_grad():
            loss(model, batch_of(90 + run.rank, step))
        run._engine.finish()
        if _ == 0:
            plain_step(run, model, optimizer, batch, step)


def weights_are_set(run, model, optimizer, batch, step):
    """A load between the moment the rows were sent and the forward."""
    if step in (5, 7):
        model.load_state_dict({"emb.weight": torch.full((23, 4), 0.25)}, strict=False)
    plain_step(run, model, optimizer, batch, step)


def clip_at_last(run, model, optimizer, batch, step):
    """Gradients are looked at, and scaled, only when some have waited; as a list that was made before."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    if step >= 6:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        total = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(0.05 / total)
    optimizer.step()


def scale_at_last(run, model, optimizer, batch, step):
    """What the optimizer holds, without a norm."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    if step >= 6:
        for gradient in [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]:
            gradient.mul_(0.5)
    optimizer.step()


def schedule(run, model, optimizer, batch, step):
    """Another rate at each step, set between the step and the next batch."""
    plain_step(run, model, optimizer, batch, step)
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (2 + step)


def drop_some(run, model, optimizer, batch, step):
    """A loss that is no number: every rank lets go of the gradients."""
    optimizer.zero_grad()
    loss(model, batch).backward()
    if step not in (6, 7):
        optimizer.step()


def drop_at_once(run, model, optimizer, batch, step):
    loss(model, batch).backward()
    if step in (6, 7):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def export_between(run, model, optimizer, batch, step):
    """Before the forward, and after the step."""
    before = run.export()
    plain_step(run, model, optimizer, batch, step)
    run.exported = [*getattr(run, "exported", []), before, run.export()]


def two_steps_of_a_batch(run, model, optimizer, batch, step):
    plain_step(run, model, optimizer, batch, step)
    plain_step(run, model, optimizer, batch, step)


def pass_over(run, model, optimizer, batch, step):
    """No round between two turns."""
    if step != 6:
        plain_step(run, model, optimizer, batch, step)


def only_look(run, model, optimizer, batch, step):
    if step == 6:
        loss(model, batch)
    else:
        plain_step(run, model, optimizer, batch, step)


def hold_back_now_and_then(run, model, optimizer, batch, step):
    if step == 6:
        with run.no_sync():
            loss(model, batch).backward()
        return
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def watch(run, model, optimizer, batch, step):
    """A hook of the user's, which runs with the step and clamps what the optimizer is about to read."""

    def clamp(held, args, kwargs):
        for gradient in [p.grad for group in held.param_groups for p in group["params"] if p.grad is not None]:
            gradient.clamp_(-1e-3, 1e-3)

    if step == 7:
        optimizer.register_step_pre_hook(clamp)
    plain_step(run, model, optimizer, batch, step)


def drop_on_one_rank(run, model, optimizer, batch, step):
    optimizer.zero_grad()
    loss(model, batch).backward()
    if step in (6, 7) and run.rank == 1:
        optimizer.zero_grad()
    optimizer.step()


def evaluate_on_one_rank_and_load(run, model, optimizer, batch, step):
    plain_step(run, model, optimizer, batch, step)
    if step == 6:
        if run.rank == 0:
            with torch.no_grad():
                loss(model, batch_of(90, step))
        model.load_state_dict({"emb.weight": torch.full((23, 4), 0.25)}, strict=False)


LOOPS = [
    plain_step, clip, accumulate, accumulate_in_turns, step_before_forward, wrong_on_one_rank, transposed, drawn_inside,
    two_look_ups_swapped, two_passes_of_a_batch, evaluate_between, evaluate_all, weights_are_set,
]  # fmt: skip
WHILE_GRADIENTS_WAIT = [
    pass_over, only_look, hold_back_now_and_then, watch, drop_on_one_rank, evaluate_on_one_rank_and_load, clip_at_last,
    scale_at_last, schedule, drop_some, drop_at_once, two_steps_of_a_batch, export_between,
]  # fmt: skip
RANKS_COME_APART = [drop_on_one_rank]  # by what the loop does, with prefetch and without; close says so
# Each loop meets the richest kind, which enters all files of the others, and by turns one of the others.
ALL_LOOPS = [
    *zip(LOOPS, cycle(("ids", "rows"))),
    *((loop, "gradients") for loop in [*LOOPS, *WHILE_GRADIENTS_WAIT]),
]


def batches_of(rank, kind):
    count = STEPS - (rank if kind == "uneven_counts" else 0)
    size = 6 - (rank if kind == "uneven_sizes" else 0)
    return [
        batch_of(rank, step, size, reads_bag=kind != "bag_unread_by_some" or bool((rank + step) % 3))
        for step in range(count)
    ]


def train(rank, workers, loop, rows, optimizer, kind, prefetch):
    fields = {"departures": ("lazy",)} if kind == "lazy" else {"mean": "weights"} if kind == "weights" else {}
    is_checked = loop is plain_step and prefetch != "none"
    run, model, optimizer = started(rows, optimizer, prefetch, workers, is_checked, **fields)
    rounds = count_rounds(run)
    for step, batch in enumerate(run.batches(batches_of(rank, kind))):
        if kind == "weights":
            run.weigh(1.0 + rank + step)
        loop(run, model, optimizer, batch, step)
    found = state_of(run, model, optimizer)
    with seen_apart() if loop in RANKS_COME_APART else nullcontext():
        run.close()
    return found, len([name for name, is_pushed in rounds if is_pushed])


def seen_apart():
    return pytest.raises(
        RuntimeError, match=rf"run\.close: after step {STEPS} the ranks no longer hold lin\.(weight|bias) "
    )


def state_of(run, model, optimizer):
    """Every number that training leaves behind."""
    found = {name: p.detach().clone() for name, p in model.named_parameters() if name not in run._engine.tables}
    found |= {name: table.shard.clone() for name, table in run._engine.tables.items()}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter, {})
        found |= {f"{number} {name}": torch.as_tensor(value).clone() for name, value in state.items()}
    for name, held in run._engine.held.items():
        found |= {f"{name} {key}": value.clone() for key, value in held.items()}
    for number, whole in enumerate(getattr(run, "exported", [])):  # on rank 0
        found |= {f"{number} {name}": value for name, value in (whole or {"model": {}})["model"].items()}
    return found


@cache
def without(rank, workers, *case):
    """Kept in the rank: several kinds of prefetch are held to it. All ranks of a crew have had the same cases."""
    return train(rank, workers, *case, "none")


def with_and_without(rank, workers, *case):
    """(names that differ, look-ups with gradient by a round of their own without and with prefetch)."""
    *case, prefetch = case
    torch.set_default_dtype(torch.float64)  # tells more orders of addition apart than it hides
    try:
        plain, before = without(rank, workers, *case)
        ahead, after = train(rank, workers, *case, prefetch)
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain.keys() == ahead.keys()
    return [name for name in plain if not torch.equal(plain[name], ahead[name])], before, after


@pytest.mark.parametrize(
    ("loop", "prefetch"), ALL_LOOPS, ids=[f"{loop.__name__}-{prefetch}" for loop, prefetch in ALL_LOOPS]
)
def test_every_loop_leaves_the_same_numbers(crew, loop, prefetch):
    for differing, before, after in crew(2).run(with_and_without, loop, "owned_rows", "adagrad", "", prefetch):
        assert differing == []
        assert after <= before
        if loop is not step_before_forward:
            assert after < before


KINDS = ["uneven_counts", "uneven_sizes", "bag_unread_by_some", "weights", "lazy"]


@pytest.mark.parametrize(("optimizer", "prefetch"), [("adam", "ids"), ("sgd", "rows"), ("sgd", "gradients")])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_batches_are(crew, kind, optimizer, prefetch):
    optimizer = "adam" if kind == "lazy" else optimizer
    for differing, before, after in crew(2).run(with_and_without, plain_step, "hashed", optimizer, kind, prefetch):
        assert differing == []
        assert after < before


CASES = [
    *[("owned_rows", name, 2, "ids") for name in ("sgd", "momentum_decay", "adamw_groups")],
    *[("owned_rows", name, 2, kind) for name in ("sgd", "sgd_fused", "adagrad") for kind in ("rows", "gradients")],
    ("hashed", "sgd", 3, "rows"), ("one_owner", "momentum_decay", 2, "ids"), ("one_owner", "adagrad", 3, "rows"),
    ("hashed", "sgd", 3, "gradients"), ("one_owner", "adagrad", 3, "gradients"), ("owned_rows", "sgd", 1, "gradients"),
    ("by_node", "adam", 4, "ids"), ("owned_rows", "adam", 1, "ids"), ("owned_rows", "sgd", 1, "rows"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "optimizer", "workers", "prefetch"), CASES)
def test_whatever_the_optimizer_and_the_owners(crew, rows, optimizer, workers, prefetch):
    for differing, before, after in crew(workers).run(with_and_without, plain_step, rows, optimizer, "", prefetch):
        assert differing == []
        assert after == before * UNPREDICTED // STEPS


class Dropping(Mixed):
    """Draws from the global random stream in its forward."""

    def forward(self, batch):
        return super().forward(batch) * torch.rand(())


def random_loader(rank, sources):
    """Augments from the same stream: the order in which the two draw is part of the result."""
    for batch in batches_of(rank, ""):
        noise = {"torch": lambda: float(torch.rand(())), "none": lambda: 0.0}[sources]()
        yield {**batch, "bag_weights": batch["bag_weights"] * (1 + noise)}


def train_randomly(rank, workers, sources, prefetch):
    run, model, optimizer = started("owned_rows", "sgd", prefetch, workers)
    model.__class__ = Dropping
    rounds = count_rounds(run)
    torch.manual_seed(rank)
    for step, batch in enumerate(run.batches(random_loader(rank, sources))):
        plain_step(run, model, optimizer, batch, step)
    found = state_of(run, model, optimizer)
    run.close()
    return found, len(rounds)


def randomly_with_and_without(rank, workers, sources):
    (plain, before), (ahead, after) = (train_randomly(rank, workers, sources, way) for way in ("none", "gradients"))
    return all(torch.equal(plain[name], ahead[name]) for name in plain), after < before


@pytest.mark.parametrize(("sources", "is_ahead"), [("torch", False), ("none", True)])
def test_random_numbers_fall_as_they_would(crew, sources, is_ahead):
    assert crew(2).run(randomly_with_and_without, sources) == [(True, is_ahead)] * 2


def leave_loops(rank, workers, prefetch):
    """Loops left at every moment, others begun, a plain loop in between."""
    run, model, optimizer = started("owned_rows", "adagrad", prefetch, workers)
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        if step == 5:
            break  # before the forward
        plain_step(run, model, optimizer, batch, step)
    for step, batch in enumerate(batches_of(rank, "")[:2]):
        plain_step(run, model, optimizer, batch, step)
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        if step == 4:
            loss(model, batch)
            break  # after the forward
        plain_step(run, model, optimizer, batch, step)
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        plain_step(run, model, optimizer, batch, step)
        if step == 4:
            break  # after the step
    kept = run.batches(batches_of(rank, ""))
    for _ in range(6):
        plain_step(run, model, optimizer, next(kept), 0)
    for step, batch in enumerate(batches_of(rank, "")[:3]):  # while `kept` still lives
        plain_step(run, model, optimizer, batch, step)
    found = state_of(run, model, optimizer)
    run.close()
    return found


def leave_a_stream(rank, workers, prefetch):
    """Of one stream some batches in each epoch."""
    run, model, optimizer = started("owned_rows", "adagrad", prefetch, workers)
    stream = (batch for _ in range(2) for batch in batches_of(rank, ""))
    for _ in range(2):
        for step, batch in enumerate(islice(run.batches(stream), STEPS // 2 + 1)):
            plain_step(run, model, optimizer, batch, step)
    found = state_of(run, model, optimizer)
    run.close()
    return found


def leave_a_stream_with_and_without(rank, workers, prefetch):
    plain, ahead = leave_a_stream(rank, workers, "none"), leave_a_stream(rank, workers, prefetch)
    return [name for name in plain if not torch.equal(plain[name], ahead[name])]


def test_what_was_drawn_early_of_a_stream_is_not_lost_where_its_loop_is_left(crew):
    assert crew(2).run(leave_a_stream_with_and_without, "ids") == [[], []]


def leave_with_and_without(rank, workers, prefetch):
    plain, ahead = leave_loops(rank, workers, "none"), leave_loops(rank, workers, prefetch)
    return [name for name in plain if not torch.equal(plain[name], ahead[name])]


@pytest.mark.parametrize("prefetch", ["ids", "rows", "gradients"])
def test_a_loop_may_be_left_at_any_moment_and_others_begun(crew, prefetch):
    assert crew(2).run(leave_with_and_without, prefetch) == [[], []]


def save_half_way(rank, workers, folder, optimizer_name, prefetch):
    """Saves in the middle of a loop that is one batch ahead; another run goes on from there."""

    def pairs(first):
        return [(batch, step + 1) for step, batch in enumerate(batches_of(rank, ""))][first:]

    run, model, optimizer = started("owned_rows", optimizer_name, prefetch, workers)
    for step, (batch, place) in enumerate(run.batches(pairs(0))):
        plain_step(run, model, optimizer, batch, step)
        if place == 7:
            path = run.save(folder, loop={"place": place})
    unbroken = state_of(run, model, optimizer)
    run.close()
    run, model, optimizer = started("owned_rows", optimizer_name, prefetch, workers)
    first = run.load(path)["place"]
    for step, (batch, _) in enumerate(run.batches(pairs(first))):
        plain_step(run, model, optimizer, batch, first + step)
    resumed = state_of(run, model, optimizer)
    run.close()
    return first, [name for name in unbroken if not torch.equal(unbroken[name], resumed[name])]


@pytest.mark.parametrize(("optimizer", "prefetch"), [("adam", "ids"), ("adagrad", "gradients")])
def test_a_checkpoint_saved_in_the_loop_goes_on_bit_for_bit(crew, tmp_path, optimizer, prefetch):
    assert crew(2).run(save_half_way, str(tmp_path), optimizer, prefetch) == [(7, [])] * 2


class Sliced(nn.Module):
    """Each word predicts the next; targets and negatives in one look-up, columns in others, some ids drawn inside."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(V, 4), nn.Embedding(V, 4)
        self.column, self.drawn = nn.Embedding(V, 4), nn.Embedding(V, 4)

    def forward(self, sentences, negatives, features):
        states = self.words(sentences[:, :-1].t()).flatten(0, 1)
        rows = self.out(torch.cat([sentences[:, 1:].reshape(-1), negatives]))
        inside = self.drawn(torch.randint(0, V, (9,)))
        return (states @ rows.T).square().mean() + self.column(features[:, 2]).sum() + inside.sum()


def predict(rank, workers):
    torch.manual_seed(3)
    model = Sliced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, workers, {f"{name}.weight": "owned_rows" for name in ("words", "out", "column", "drawn")})
    run = attach(ahead_of(plan, "rows"), model, optimizer, check_order=True)
    rounds = count_rounds(run)
    stream = torch.Generator().manual_seed(rank)
    loader = [[torch.randint(0, V, size, generator=stream) for size in ((6, 8), (20,), (6, 5))] for _ in range(STEPS)]
    by_step = []
    for batch in run.batches(loader):
        rounds.clear()
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        by_step.append(sorted(name.split(".")[0] for name, _ in rounds))
    run.close()
    return by_step


def test_slices_columns_and_concatenations_are_foreseen_and_ids_drawn_inside_are_not(crew):
    everything = ["column", "drawn", "out", "words"]
    assert crew(2).run(predict) == [[everything] * UNPREDICTED + [["drawn"]] * (STEPS - UNPREDICTED)] * 2


def count_bytes(rank, workers, prefetch):
    run, model, optimizer = started("owned_rows", "sgd", prefetch, workers)
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        plain_step(run, model, optimizer, batch, step)
    run._engine.count()
    sent = run._engine.traffic_meter.sent_bytes
    away = []
    for batch in batches_of(rank, "")[UNPREDICTED:]:
        keys = [run._engine.tables[table].ownership.keys(batch[ids]).unique() for ids, table in READS]
        counts = [
            run._engine.tables[table].ownership.counts(of)[rank] for of, (_, table) in zip(keys, READS, strict=True)
        ]
        away.append(sum(map(len, keys)) - sum(counts))
    run.close()
    return sent, away


READS = [
    ("ids", "emb.weight"), ("bag", "bag.weight"), ("ids", "shared.weight"), ("other", "shared.weight"),
    ("sampled", "soft"), ("sampled", "bias"),
]  # fmt: skip


@pytest.mark.parametrize("prefetch", ["ids", "rows", "gradients"])
def test_counted_bytes_are_those_of_the_formula(crew, prefetch):
    """A header less per predicted look-up, an announcement in all others; where rows go early, a byte per row, sent by
    whoever serves it; and where gradients wait, one more in all batches that are not the last."""
    workers = 3
    plain, ahead = crew(workers).run(count_bytes, "none"), crew(workers).run(count_bytes, prefetch)
    headers = len(READS) * (STEPS - UNPREDICTED) * HEADER_BYTES * (workers - 1)
    rounds = STEPS + 1 + STEPS + len(READS) * UNPREDICTED  # of the loop and its end, of backwards, of look-ups
    announcements = rounds * announcement_bytes(5) * (workers - 1)
    staying = sum(sum(away) for _, away in ahead) if prefetch != "ids" else 0
    resting = sum(sum(away[:-1]) for _, away in ahead) if prefetch == "gradients" else 0
    before, after = (sum(sent for sent, _ in way) for way in (plain, ahead))
    assert after == pytest.approx(before + workers * (announcements - headers) + staying + resting, rel=1e-12)


def refused(rank, workers):
    errors = []
    for rows, optimizer in (("owned_rows", "adam"), ("by_node", "sgd")):
        with pytest.raises(ValueError, match="set prefetch='ids'") as caught:
            started(rows, optimizer, "rows", workers)
        errors.append(str(caught.value))
    return errors


def test_rows_that_would_move_are_refused_before_the_first_step(crew):
    for moving, other in crew(2).run(refused):
        assert "group 'soft': Adam with these options moves rows that get no gradient" in moving
        assert "owned_rows_by_node cannot send rows before the step; set prefetch='ids'" in other


def send_early(rank, workers, loop):
    """(rows sent before a step, rows sent again since they had moved), by table."""
    run, model, optimizer = started("owned_rows", "sgd", "rows", workers)
    ahead, early, again = run._engine.executor.prefetch, {}, {}
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        for one in ahead.now.look_ups:
            counted = again if one.is_void else early
            counted[one.table.name] = counted.get(one.table.name, 0) + len(one.sent)
        loop(run, model, optimizer, batch, step)
    run.close()
    return early, again


def test_rows_that_stay_put_go_early_and_only_those(crew):
    tables = {"emb.weight", "bag.weight", "shared.weight", "soft", "bias"}
    for early, again in crew(2).run(send_early, plain_step):
        assert set(early) == tables and all(early.values())
        assert not again


def test_rows_that_moved_after_all_are_sent_again(crew):
    """A step of two batches moves rows of both, and only the later was thought of."""
    assert any(any(again.values()) for _, again in crew(2).run(send_early, accumulate))


def wait(rank, workers):
    """(rows of which gradients waited, rows that no rank reads in the next batch), by step and table."""
    run, model, optimizer = started("owned_rows", "sgd", "gradients", workers)
    delay, waited, rests = run._engine.executor.prefetch.delay, {}, {}
    split = delay._split

    def counted(table, gradients, routes, unused):
        now, others = split(table, gradients, routes, unused)
        assert [len(one) for one in now] == [sum(route.asked) for route in others]
        waited[step, table.name] = sum(map(len, gradients)) - sum(map(len, now))
        return now, others

    delay._split = counted
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        plain_step(run, model, optimizer, batch, step)
        if UNPREDICTED <= step < STEPS - 1:
            later = [batch_of(other, step + 1, 6) for other in range(workers)]
            for ids, table in READS:
                read = torch.cat([one[of] for one in later for of, whose in READS if whose == table])
                mine = int(torch.isin(batch[ids].unique(), read, invert=True).sum())
                rests[step, table] = rests.get((step, table), 0) + mine
    run.close()
    return waited, rests


def test_gradients_wait_of_rows_that_nobody_reads_next_and_of_those_alone(crew):
    found = crew(2).run(wait)
    for waited, rests in found:
        assert waited == rests and len(rests) == 5 * (STEPS - 1 - UNPREDICTED)
    assert all(any(rests[key] for _, rests in found) for key in found[0][1] if key[1] != "bag.weight")


def leave_while_gradients_wait(rank, workers, way, folder, prefetch):
    """A loop left after a step. Then the others are waited for, or what was saved two steps before is loaded."""
    run, model, optimizer = started("owned_rows", "adagrad", prefetch, workers)
    for step, batch in enumerate(run.batches(batches_of(rank, ""))):
        plain_step(run, model, optimizer, batch, step)
        if step == 5:
            path = run.save(f"{folder}/{prefetch}")
        if step == 7:
            break
    waiting = waiting_of(run)
    if way == "load":
        run.load(path)
    run._engine.finish()
    found = state_of(run, model, optimizer)
    run.close()
    return found, waiting


def leave_with_and_without_waiting(rank, workers, way, folder):
    (plain, _), (ahead, waiting) = (
        leave_while_gradients_wait(rank, workers, way, folder, kind) for kind in ("none", "gradients")
    )
    return [name for name in plain if not torch.equal(plain[name], ahead[name])], waiting


@pytest.mark.parametrize("way", ["finish", "load"])
def test_gradients_that_wait_when_a_loop_is_left_are_not_forgotten(crew, tmp_path, way):
    assert crew(2).run(leave_with_and_without_waiting, way, str(tmp_path)) == [([], 5)] * 2
