"""A model built on the meta device begins, on every worker, with the values it would have in one process."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from armillary.plans import Choice, Group, Mesh, Plan, model_fingerprint
from armillary.reference.serial import train_step
from armillary.session.attach import attach
from armillary.tables import meta_init as blank_table
from crew import Crew

V, D = 37, 5


class Output(nn.Module):
    """Sampled output with a 1-D table beside the 2-D one."""

    def __init__(self, std=0.2):
        super().__init__()
        self.std = std
        self.soft = nn.Parameter(torch.empty(V, D))
        self.bias = nn.Parameter(torch.empty(V))
        self.reset_parameters()

    def reset_parameters(self):
        self.soft.data.normal_(0, self.std)
        nn.init.uniform_(self.bias, -0.1, 0.1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, D, padding_idx=3)
        self.norm = nn.BatchNorm1d(D)
        self.bag = nn.EmbeddingBag(V, D, mode="sum")
        self.tied = nn.Embedding(V, D)
        self.tied.weight = self.words.weight
        self.lin = nn.Linear(D, D)
        self.out = Output()

    def forward(self, ids):
        hidden = self.lin(self.norm(self.words(ids) + self.tied(ids.flip(0)) + self.bag(ids.view(-1, 1))))
        scores = hidden @ self.out.soft[ids].T + self.out.bias.index_select(0, ids)
        return nn.functional.cross_entropy(scores, torch.arange(len(ids)))


TABLES = ("words.weight", "bag.weight", "out.soft", "out.bias")


def in_one_process(seed):
    """What the values must be: memory, then every module's own initialisation; ties tied again."""
    with torch.device("meta"):
        model = Words()
    torch.manual_seed(seed)
    model.tied.weight = None
    model.to_empty(device="cpu")
    model.tied.weight = model.words.weight
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def plan_of(model, world, rows, departures=(), tables=TABLES):
    named = dict(model.named_parameters())
    rest = tuple(name for name in named if name not in tables)
    layout = "replicated" if rows.name == "gather_rows" else "row_sharded"
    groups = [Group(name, (name,), layout, rows, departures=departures) for name in tables]
    if rest:
        groups.append(Group("rest", rest, "replicated", Choice("all_reduce")))
    listing = [(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named.items()]
    return Plan(Mesh.of(data=world), tuple(groups), model_fingerprint(listing))


OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.3),
    "adagrad_decay": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.3, weight_decay=0.1),
}


def ids_of(worker, step):
    return torch.randperm(V, generator=torch.Generator().manual_seed(10 * step + worker))[:6]


def begin_on_meta(rank, world, rows, optimizer_name, seeds, steps):
    blank_table.BLOCK_BYTES = 200
    with torch.device("meta"):
        model = Words()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    torch.manual_seed(seeds[rank])
    before = torch.get_rng_state()
    run = attach(plan_of(model, world, rows), model, optimizer)
    drew = not torch.equal(torch.get_rng_state(), before)
    begun = run.export()
    for step in range(steps):
        optimizer.zero_grad()
        model(ids_of(rank, step)).backward()
        optimizer.step()
    trained = run.export()
    rows_held = sum(table.shard.shape[0] for table in run._engine.tables.values())
    run.close()
    blank_table.BLOCK_BYTES = 4 << 20
    return begun, trained, rows_held, drew


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "optimizer"),
    [
        (Choice("owned_rows"), "adam"),
        (Choice("owned_rows", {"order": "hashed"}), "adagrad"),
        (Choice("owned_rows"), "adagrad_decay"),
        (Choice("gather_rows"), "adagrad"),
    ],
)
def test_a_model_on_meta_begins_bit_for_bit_and_trains_as_one_process(crew, world, rows, optimizer):
    answers = crew(world).run(begin_on_meta, rows, optimizer, [4] * world, 2)
    begun, trained, _, _ = answers[0]
    truth = in_one_process(4)
    for name, want in truth.state_dict().items():
        assert torch.equal(begun["model"][name], want), name
    if rows.name == "owned_rows":
        assert sum(held for _, _, held, _ in answers) == 4 * V
    plain = OPTIMIZERS[optimizer](truth.parameters())
    if plain.state_dict()["state"]:
        for number, state in plain.state_dict()["state"].items():
            for entry, value in state.items():
                assert torch.equal(begun["optimizer"]["state"][number][entry], value)
    for step in range(2):
        work = [ids_of(worker, step) for worker in range(world)]
        train_step(truth, plain, work, lambda model, ids: model(ids), [1.0] * world)
    for name, want in truth.named_parameters():
        torch.testing.assert_close(trained["model"][name], want.detach(), msg=name)


def test_rank_zeros_stream_counts_and_the_others_keep_their_own(crew):
    (begun, _, _, drew), (_, _, _, other_drew) = crew(2).run(begin_on_meta, Choice("owned_rows"), "adam", [4, 5], 0)
    assert torch.equal(begun["model"]["out.soft"], in_one_process(4).out.soft)
    assert drew
    assert not other_drew
    same = crew(2).run(begin_on_meta, Choice("owned_rows"), "adam", [4, 4], 0)
    assert [drew for _, _, _, drew in same] == [True, True]


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(V, D))


class Forgetful(Bare):
    def reset_parameters(self):
        self.table.data[1:].normal_()


class Mixing(Bare):
    def reset_parameters(self):
        nn.init.orthogonal_(self.table)


class HalfReal(Bare):
    def __init__(self):
        super().__init__()
        self.real = nn.Parameter(torch.zeros(2, device="cpu"))


class Unwanted(Bare):
    """Nothing is wrong with it but the plan."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.reset_parameters()

    def reset_parameters(self):
        self.table.data.normal_()
        self.seen.zero_()


def refused(rank, world, kind):
    """What was said, and what of the model and the optimizer is another thing than before."""
    with torch.device("meta"):
        model = kind()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    before = pieces_of(model, optimizer)
    departures = ("lossy",) if kind is Unwanted else ()
    plan = plan_of(model, world, Choice("owned_rows"), departures, tables=("table",))
    stream = torch.get_rng_state()
    try:
        attach(plan, model, optimizer)
    except ValueError as error:
        after = pieces_of(model, optimizer)
        changed = [name for name in before if after[name] != before[name]]
        return str(error), changed + ["random state"] * (not torch.equal(stream, torch.get_rng_state()))
    return "nothing", []


def pieces_of(model, optimizer):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, parameter in enumerate(model.parameters()):
        tensors.update({f"{number}.{entry}": value for entry, value in optimizer.state[parameter].items()})
    return {name: (tensor.device, type(tensor), tensor.shape, tensor.stride()) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Bare, r"'the model itself' \(Bare\).*no reset_parameters\(\).*\['table'\]"),
        (Forgetful, r"'table'.*without a number"),
        (Mixing, r"table: aten.*cannot be done in blocks of rows"),
        (HalfReal, r"except for \['real'\]"),
        (Unwanted, r"says departures \('lossy',\)"),
    ],
)
def test_values_nobody_can_know_are_refused_and_nothing_has_begun(crew, kind, words):
    for text, changed in crew(2).run(refused, kind):
        assert re.search(words, text), text
        assert changed == [], changed


def status_bytes(field):
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10


class Wide(nn.Module):
    """A table of 256 bytes a row."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Embedding(rows, 64)


def peak_of_attach(rank, world):
    """Of a table of 128 MiB, after a small one: what a process needs once is not the table's."""
    attached(world, 1 << 10)
    return attached(world, 1 << 19)


def attached(world, rows):
    """Bytes that attach needed beyond what there was, by the kernel's own high-water mark; and the shard's."""
    with torch.device("meta"):
        model = Wide(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, world, Choice("owned_rows"), tables=("table.weight",))
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    run = attach(plan, model, optimizer)
    peak = status_bytes("VmHWM") - before
    shard = run._engine.tables["table.weight"].shard.nbytes
    run.close()
    return peak, shard


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel keeps no resettable peak here")
def test_a_table_is_never_whole_in_a_workers_memory():
    own = Crew(2)  # what earlier tests left would be freed meanwhile, and hide the shard
    try:
        for peak, shard in own.run(peak_of_attach):
            assert shard == 64 << 20
            assert shard * 0.9 < peak < shard + 8 * blank_table.BLOCK_BYTES  # the allocator may keep these; rest is 16
    finally:
        own.disband()
