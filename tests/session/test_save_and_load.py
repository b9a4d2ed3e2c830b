"""Save, load and export: onto any number of workers, under any plan, and what happens when a rank cannot write."""

import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.checkpoint.folder import latest_checkpoint
from armillary.plans import Choice
from armillary.reference.serial import train_step
from armillary.session.attach import attach
from armillary.session.save import CheckpointEvery, save
from armillary.tables import reshard as row_blocks
from scenes import OPTIMIZERS, Mixed, batch_of, loss, plan_for

EXACT, LAZY = (), ("lazy",)

OWNED, HASHED, GATHERED, DENSE = (
    Choice("owned_rows"),
    Choice("owned_rows", {"order": "hashed", "owners": 2}),
    Choice("gather_rows"),
    Choice("all_reduce"),
)


def new_model(seed=0):
    torch.manual_seed(seed)
    return Mixed()


def new_optimizer(model, name):
    return OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)


def begin(world, optimizer_name, rows=OWNED, departures=EXACT, seed=0, model=None):
    model = new_model(seed) if model is None else model
    optimizer = new_optimizer(model, optimizer_name)
    return attach(plan_for(model, world, rows, DENSE, departures=departures), model, optimizer)


def train(run, steps):
    for step in steps:
        run._optimizer.zero_grad()
        loss(run._model, batch_of(run.rank, step)).backward()
        run._optimizer.step()


def flat(thing, prefix=""):
    """Every leaf of nested dicts and lists, by path."""
    if isinstance(thing, dict):
        return {k: v for key, value in thing.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(thing, list | tuple):
        return {k: v for key, value in enumerate(thing) for k, v in flat(value, f"{prefix}/{key}").items()}
    return {prefix: thing}


def unlike(one, other):
    """Paths where two exports differ in a single bit, or in what they hold."""
    one, other = flat(one), flat(other)
    far = [path for path in one.keys() & other.keys() if not alike(one[path], other[path])]
    return sorted([*far, *(one.keys() ^ other.keys())])


def alike(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def closed(run, answer):
    run.close()
    return answer


def train_and_save(rank, world, folder, optimizer, rows, departures, steps):
    run = begin(world, optimizer, rows, departures)
    train(run, steps)
    path = run.save(folder, loop={"rank": rank})
    return closed(run, (str(path), run.export()))


def load_and_save(rank, world, path, folder, optimizer, rows, departures):
    run = begin(world, optimizer, rows, departures, seed=7)
    loop = run.load(path)
    again = run.save(folder, loop=loop)
    return closed(run, (str(again), run.export(), loop, run._transport.step))


@pytest.mark.parametrize(
    ("optimizer", "departures"),
    [
        ("momentum_decay", EXACT),
        ("adagrad", EXACT),
        ("adam", EXACT),
        ("adam", LAZY),
        ("momentum_decay", LAZY),
    ],
)
def test_one_to_four_to_two_to_one_is_bitwise(crew, tmp_path, optimizer, departures):
    path, first = crew(1).run(train_and_save, tmp_path / "0", optimizer, OWNED, departures, range(2))[0]
    for hop, world in enumerate((4, 2, 1)):
        answers = crew(world).run(load_and_save, path, tmp_path / f"{hop + 1}", optimizer, OWNED, departures)
        path, exported, _, step = answers[0]
        assert step == 2
        assert unlike(first, exported) == []
        assert all(other[1] is None for other in answers[1:])


@pytest.mark.parametrize("optimizer", ["adagrad", "adamw_groups"])
def test_any_plan_opens_what_any_plan_saved(crew, tmp_path, optimizer):
    path, first = crew(2).run(train_and_save, tmp_path / "0", optimizer, OWNED, EXACT, range(2))[0]
    hops = [
        (GATHERED, EXACT),
        (OWNED, LAZY),
        (DENSE, EXACT),
        (HASHED, EXACT),
        (GATHERED, LAZY),
        (OWNED, EXACT),
    ]
    for hop, (rows, departures) in enumerate(hops):
        path, exported, _, _ = crew(2).run(load_and_save, path, tmp_path / f"{hop + 1}", optimizer, rows, departures)[0]
        assert unlike(first, exported) == [], (rows, departures)


def in_small_blocks(rank, world, folder):
    row_blocks.BLOCK_BYTES = 40  # two rows and a half
    run = begin(world, "adam")
    train(run, range(2))
    path, first = run.save(folder), run.export()
    train(run, range(2, 3))
    run.load(path)
    again = run.export()
    row_blocks.BLOCK_BYTES = 16 << 20
    return closed(run, unlike(first, again) if rank == 0 else [])


def test_tables_of_many_blocks_come_back_whole(crew, tmp_path):
    assert crew(4).run(in_small_blocks, tmp_path) == [[]] * 4


def test_a_state_that_is_not_there_yet_is_not_there_after_loading(crew, tmp_path):
    path, first = crew(2).run(train_and_save, tmp_path, "adam", OWNED, LAZY, range(0))[0]
    assert first["optimizer"]["state"] == {}
    _, exported, _, _ = crew(4).run(load_and_save, path, tmp_path, "adam", OWNED, EXACT)[0]
    assert exported["optimizer"]["state"] == {}


def test_each_rank_gets_its_own_loop_back_and_a_new_one_gets_rank_zeros(crew, tmp_path):
    path, _ = crew(2).run(train_and_save, tmp_path, "sgd", OWNED, EXACT, range(1))[0]
    answers = crew(4).run(load_and_save, path, tmp_path, "sgd", OWNED, EXACT)
    assert [loop["rank"] for _, _, loop, _ in answers] == [0, 1, 0, 0]


def loads_over_a_started_step(rank, world, folder, departures):
    """A checkpoint without state is loaded while gradients, windows and state of later steps are there."""
    run = begin(world, "adam", departures=departures)
    path, first = run.save(folder), run.export()
    train(run, range(2))
    loss(run._model, batch_of(rank, 2)).backward()
    run.load(path)
    run._optimizer.step()
    again = run.export()
    train(run, range(1))
    resumed = run.export()
    run._engine.hooks.close()
    fresh = begin(world, "adam", departures=departures)
    train(fresh, range(1))
    far = unlike(first, again), unlike(fresh.export(), resumed)
    run.close()
    return closed(fresh, far)


@pytest.mark.parametrize("departures", [EXACT, LAZY])
def test_loading_forgets_gradients_and_state_of_what_came_after(crew, tmp_path, departures):
    for untouched, resumed in crew(2).run(loads_over_a_started_step, tmp_path, departures):
        assert untouched == []
        assert resumed == []


def reference(optimizer_name, workers, steps, model=None, optimizer=None):
    model = new_model() if model is None else model
    optimizer = new_optimizer(model, optimizer_name) if optimizer is None else optimizer
    for step in steps:
        work = [[batch_of(worker, step)] for worker in range(workers)]
        train_step(model, optimizer, work, lambda m, pieces: sum(loss(m, piece) for piece in pieces), [1.0] * workers)
    return model, optimizer


@pytest.mark.parametrize("optimizer", ["momentum_decay", "adagrad", "adamw_groups"])
def test_an_export_goes_on_in_plain_pytorch_as_if_it_had_begun_there(crew, tmp_path, optimizer):
    _, exported = crew(2).run(train_and_save, tmp_path, optimizer, OWNED, EXACT, range(3))[0]
    model = new_model(seed=5)
    plain = new_optimizer(model, optimizer)
    model.load_state_dict(exported["model"])
    plain.load_state_dict(exported["optimizer"])
    reference(optimizer, 2, range(3, 5), model, plain)
    truth, truth_optimizer = reference(optimizer, 2, range(5))
    for (name, want), (_, got) in zip(truth.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(got, want, msg=name)
    want, got = truth_optimizer.state_dict(), plain.state_dict()
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for number, state in want["state"].items():
        for entry, value in state.items():
            torch.testing.assert_close(got["state"][number][entry], value)


def load_plain(rank, world, path, optimizer, rows):
    run = begin(world, optimizer, rows, seed=9)
    loop = run.load(path)
    return closed(run, (run.export(), loop))


@pytest.mark.parametrize("rows", [OWNED, GATHERED, DENSE])
def test_a_file_of_plain_pytorch_loads_with_or_without_its_optimizer(crew, tmp_path, rows):
    model, optimizer = reference("adamw_groups", 1, range(2))
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, tmp_path / "both.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    both, loop = crew(2).run(load_plain, tmp_path / "both.pt", "adamw_groups", rows)[0]
    assert unlike(whole, both) == []
    assert loop == {}
    alone, _ = crew(2).run(load_plain, tmp_path / "model.pt", "adamw_groups", rows)[0]
    assert unlike(whole["model"], alone["model"]) == []
    assert alone["optimizer"]["state"] == {}


def test_plain_pytorch_opens_a_checkpoints_files(crew, tmp_path):
    path, exported = crew(2).run(train_and_save, tmp_path, "adam", OWNED, EXACT, range(2))[0]
    rest = torch.load(Path(path) / "rest.pt", weights_only=True)
    assert torch.equal(rest["model"]["lin.weight"], exported["model"]["lin.weight"])
    assert rest["optimizer"]["param_groups"][0]["params"][:2] == ["soft", "bias"]
    safetensors = pytest.importorskip("safetensors.torch")
    halves = [safetensors.load_file(file) for file in sorted(Path(path).glob("*.safetensors"))]
    assert len(halves) == 2
    assert torch.equal(torch.cat([half["model/emb.weight"] for half in halves]), exported["model"]["emb.weight"])


class Dropped(nn.Module):
    """Dropout and tied tables: a loop whose random stream matters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(31, 8)
        self.tied = nn.Embedding(31, 8)
        self.tied.weight = self.words.weight
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, ids):
        hidden = nn.functional.dropout(self.words(ids) + self.tied(ids.flip(0)), 0.3)
        return self.head(self.norm(hidden)).square().mean()


def looped(rank, world, folder, stop, resume):
    """A loop as users write them: scheduler, scaler, random stream, place in the data; `stop` steps, then save."""
    torch.manual_seed(0)
    model = Dropped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    names = [name for name, _ in model.named_parameters()]
    run = attach(dropped_plan(model, world, names), model, optimizer, scaler=scaler)
    torch.manual_seed(100 + rank)
    position = 0
    if resume:
        loop = run.load(latest_checkpoint(folder))
        scheduler.load_state_dict(loop["scheduler"])
        scaler.load_state_dict(loop["scaler"])
        torch.set_rng_state(loop["random"])
        position = loop["position"]
    data = torch.randint(31, (12, 5), generator=torch.Generator().manual_seed(rank))
    while position < stop:
        optimizer.zero_grad()
        scaler.scale(model(data[position])).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        position += 1
    loop = {"scheduler": scheduler.state_dict(), "scaler": scaler.state_dict(), "position": position}
    run.save(folder, loop={**loop, "random": torch.get_rng_state()})
    return closed(run, run.export())


def dropped_plan(model, world, names):
    from armillary.plans import Group, Mesh, Plan, model_fingerprint

    groups = (
        Group("words", ("words.weight",), "row_sharded", OWNED),
        Group("rest", tuple(name for name in names if name != "words.weight"), "replicated", DENSE),
    )
    listing = [(name, tuple(p.shape), "float32") for name, p in model.named_parameters()]
    return Plan(Mesh.of(data=world), groups, model_fingerprint(listing))


def test_a_resumed_loop_is_the_uninterrupted_one_bit_for_bit(crew, tmp_path):
    whole = crew(2).run(looped, tmp_path / "whole", 8, False)[0]
    crew(2).run(looped, tmp_path / "cut", 5, False)
    resumed = crew(2).run(looped, tmp_path / "cut", 8, True)[0]
    assert unlike(whole, resumed) == []
    assert torch.equal(whole["model"]["tied.weight"], whole["model"]["words.weight"])


def loads_whole_state_dict(rank, world):
    run = begin(world, "sgd")
    other = new_model(seed=3)
    handles = run._model.state_dict()
    before = run._transport.counts.total()
    kinds = sorted({type(value).__name__ for value in handles.values()})
    run._model.load_state_dict(other.state_dict())
    quiet = run._transport.counts.total() == before
    refused = ""
    try:
        torch.save(handles, "/dev/null")
    except NotImplementedError as error:
        refused = str(error)
    exported = run.export()
    return closed(run, (kinds, quiet, refused, unlike(exported["model"], other.state_dict()) if rank == 0 else []))


def test_state_dicts_of_an_attached_model_ask_nobody(crew):
    for kinds, quiet, refused, far in crew(2).run(loads_whole_state_dict):
        assert kinds == ["TableHandle", "Tensor"]
        assert quiet
        assert "run.export()" in refused
        assert far == []


# What goes wrong.


def raised(work):
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def save_on_a_full_disk(rank, world, folder):
    """The second save dies on rank 1: its file may not grow beyond 300 bytes (a real refusal by the system)."""
    run = begin(world, "adam")
    train(run, range(1))
    good = run.save(folder)
    first = run.export()
    train(run, range(1, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        text = raised(lambda: run.save(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    run.load(good)
    far = unlike(first, run.export())
    last = run.save(folder)
    return closed(run, (text, str(good), str(last), far))


def test_a_rank_that_cannot_write_is_named_on_every_rank_and_the_last_checkpoint_stays_good(crew, tmp_path):
    for text, good, last, far in crew(2).run(save_on_a_full_disk, tmp_path):
        assert "rank 1" in text
        assert "File too large" in text
        assert far == []
        assert good != last
    assert str(latest_checkpoint(tmp_path)) == last
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(good).name, Path(last).name]


def save_apart(rank, world, folder):
    run = begin(world, "sgd", DENSE)  # owned rows would notice at the next look-up
    train(run, range(1))
    texts = [raised(lambda: run.save(folder / str(rank)))]
    run._transport.step += rank
    texts.append(raised(lambda: run.save(folder)))
    run._transport.step -= rank
    texts.append(raised(lambda: run.save(folder, loop={"bad": object()} if rank == 1 else {})))
    return closed(run, texts)


def test_ranks_that_disagree_on_what_to_save_are_told_and_nothing_is_written(crew, tmp_path):
    for folders, steps, loops in crew(2).run(save_apart, tmp_path / "new"):
        assert "ranks disagree on the folder" in folders
        assert "ranks disagree on the step (rank 0: 1, rank 1: 2)" in steps
        assert "rank 1" in loops
        assert "weights_only" in loops
    assert not (tmp_path / "new").exists()


def load_bad(rank, world, path, optimizer):
    run = begin(world, optimizer, seed=4)
    before = run.export()
    text = raised(lambda: run.load(path))
    far = unlike(before, run.export())
    return closed(run, (text, far))


def truncated(path):
    file = path / "rows-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flipped(path):
    file = path / "rows-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def unmarked(path):
    (path / "complete.json").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [(truncated, "bytes"), (flipped, "checksum"), (unmarked, "not a whole checkpoint")],
)
def test_a_harmed_checkpoint_is_refused_by_every_rank_and_the_run_stays_as_it_was(crew, tmp_path, harm, words):
    path, _ = crew(2).run(train_and_save, tmp_path, "adam", OWNED, EXACT, range(1))[0]
    harm(Path(path))
    for text, far in crew(2).run(load_bad, path, "adam"):
        assert words in text
        assert far == []


def test_what_does_not_fit_is_refused_before_anything_is_overwritten(crew, tmp_path):
    model = new_model()
    cut = {key: value for key, value in model.state_dict().items() if key != "bias"}
    torch.save(cut, tmp_path / "cut.pt")
    torch.save({**model.state_dict(), "bias": torch.zeros(99)}, tmp_path / "wide.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "pickled.pt")
    path, _ = crew(2).run(train_and_save, tmp_path / "c", "adam", OWNED, EXACT, range(1))[0]
    cases = {
        (tmp_path / "cut.pt", "adam"): "misses ['bias']",
        (tmp_path / "wide.pt", "adam"): "'bias' was saved with shape (99,), the model has (23,)",
        (tmp_path / "list.pt", "adam"): "holds list",
        (tmp_path / "pickled.pt", "adam"): "could run code",
        (tmp_path / "absent", "adam"): "does not exist",
        (path, "sgd"): "saved from Adam, this run has SGD",
        (path, "adamw_groups"): "saved from Adam, this run has AdamW",
    }
    for (file, optimizer), words in cases.items():
        for text, far in crew(2).run(load_bad, file, optimizer):
            assert words in text
            assert far == []


def stray_parameter(rank, world, folder):
    model = new_model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = attach(plan_for(model, world, OWNED, DENSE), model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return closed(run, raised(lambda: run.save(folder)))


def test_an_optimizer_that_came_to_hold_more_than_the_model_is_refused(crew, tmp_path):
    for text in crew(2).run(stray_parameter, tmp_path):
        assert "none of the model's" in text


def test_fewer_than_one_checkpoint_cannot_be_kept():
    with pytest.raises(ValueError, match="at least 1"):
        save(None, "nowhere", keep=0)


# When a checkpoint is due.


def test_every_counts_steps_or_seconds_whichever_is_first():
    every = CheckpointEvery(steps=3, last_seconds=100.0)
    assert [step for step in range(10) if every.is_due(step, 1e9)] == [3, 6, 9]
    every = CheckpointEvery(seconds=60.0, last_seconds=100.0)
    assert [now for now in (100.0, 159.0, 160.0, 200.0) if every.is_due(1, now)] == [160.0, 200.0]
    assert not CheckpointEvery().is_due(1000, 1e9)
    with pytest.raises(ValueError, match="negative"):
        CheckpointEvery(steps=-1)


def other_clocks(rank, world):
    run = begin(world, "sgd")
    late = CheckpointEvery(seconds=1e6)
    if rank == 1:
        late.last_seconds = -1e9
    early = CheckpointEvery(seconds=1e6)
    if rank == 0:
        early.last_seconds = -1e9
    return closed(run, (late.due(run, 1), early.due(run, 1), early.due(run, 2)))


def test_rank_zeros_clock_decides_for_all(crew):
    assert crew(2).run(other_clocks) == [(False, True, False)] * 2
