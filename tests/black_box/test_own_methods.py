"""Methods in files of the user's own, outside the package: imported by a script, or named on the command line."""

import json

import pytest
import torch
from torch import nn

import armillary
import face
from armillary.codecs import CODECS, Codec, codec
from armillary.exchanges import dense_exchange, dense_exchanges, row_exchange
from contracts.journey import registered

CODEC = '''
"""Halves between -63.5 and 63.5, a byte each."""
import torch
from armillary.codecs import Codec, codec
from scale import LARGEST


@codec(costs="numbers are rounded to halves")
def halves():
    def meaning(values, draw):
        return (values * 2).round().clamp(-LARGEST, LARGEST) / 2

    return Codec(
        encode=lambda values, draw: (meaning(values, draw) * 2).to(torch.int8).view(torch.uint8),
        decode=lambda code, n, like: code.clone().view(torch.int8).to(like.dtype) / 2,
        meaning=meaning,
        coded_bytes=lambda n, item_bytes: n,
        bound=lambda values: 0.25 + (values.abs() - 63.5).clamp(min=0),
    )
'''
SCHEDULE = '''
"""GPipe by another name."""
from armillary.schedules.gpipe import gpipe
from armillary.schedules import pipeline_method
from armillary.schedules import SCHEDULES

SCHEDULES.register(
    "all_then_all",
    pipeline_method(
        table=lambda options: gpipe(options.stages, options.micro_batches),
        notes=lambda planned: [],
    ),
)
'''
FUSSY = CODEC.replace("from scale import LARGEST", "LARGEST = 127").replace(
    "def halves():", """def halves(bits=8):
    if bits != 8:
        raise ValueError(f"bits: want 8, got {bits}")""")  # fmt: skip
RAISING = FUSSY.replace("        encode=lambda values, draw: (", "        encode=lambda values, draw: (1 / 0) * (")
STRICT = SCHEDULE.replace("gpipe(options.stages,", "twos(options.stages,").replace("SCHEDULES.register", """
def twos(stages, micro_batches):
    if micro_batches % 2:
        raise ValueError("want micro-batches by twos")
    return gpipe(stages, micro_batches)


SCHEDULES.register""")  # fmt: skip
ROUNDED = '''
"""The exact sum, of which one owner at least is wanted."""
from armillary.exchanges.all_reduce import all_reduce
from armillary.exchanges import dense_exchange


@dense_exchange()
def summed(owners=1):
    if owners < 1:
        raise RuntimeError(f"owners: want 1 or more, got {owners}")
    return all_reduce()
'''
WORKLOAD = '''
"""A line, and the codec that it wants."""
import torch
from torch import nn

import my_codecs


class Line:
    name, unit, steps, batch_size = "line", "samples", 4, 8
    def model(self): return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def loss(self, model, batch): return (model(batch) - batch[:, :1]).square().mean()
    def samples(self, batch): return len(batch)
    def evaluate(self, model, batch): return {"loss": float(self.loss(model, batch)), "count": 1.0}
    def report(self, totals): return {"loss": totals["loss"] / totals["count"]}
    def batches(self, split, worker, workers, seed):
        draw = torch.Generator().manual_seed(1000 * seed + worker + 77 * (split != "train"))
        for _ in range(8):
            yield torch.randn(8, 16, generator=draw)


def workload():
    return Line()
'''
NOT_THERE = "if it is your own, import its file first (--import FILE)"


@pytest.fixture
def own(tmp_path):
    """A folder of the user's files, and an empty one beside it to work in."""
    files, here = tmp_path / "files", tmp_path / "here"
    files.mkdir()
    here.mkdir()
    for name, text in (("my_codecs", CODEC), ("my_schedule", SCHEDULE), ("line", WORKLOAD)):
        (files / f"{name}.py").write_text(text)
    (files / "scale.py").write_text("LARGEST = 127\n")
    (files / "plain.py").write_text(WORKLOAD.replace("import my_codecs\n", ""))
    face.machines(2).save(here / "two.json")
    return files, here


def asked(own, workload, *names):
    files, _ = own
    return [files / workload, *(word for name in names for word in ("--import", files / name))]


def done(ended):
    assert (ended.code, ended.err) == (0, ""), ended
    return ended.out


def test_files_that_a_command_names_are_there_before_anything_is_planned(own):
    both, links = asked(own, "plain.py", "my_codecs.py", "my_schedule.py"), ("--topology", "two.json")
    out = done(face.command("plan", *both, *links, "--exchange", "halves=*", folder=own[1]))
    assert "NOT exact" in out and "numbers are rounded to halves" in out
    out = done(face.command("simulate", *both, "--exchange", "halves=*", "--workers", "4", folder=own[1]))
    assert out.startswith("step of 4 workers")
    way = ("--schedule", "all_then_all(micro_batches=2)", "--edge", "halves")
    out = done(face.command("simulate", *both, *way, "--workers", "2", folder=own[1]))
    assert out.startswith("step of 2 workers")
    out = done(face.command("twin", *both, "--exchange", "halves=*", "--steps", "3", "--seeds", "1", folder=own[1]))
    assert "halves sent" in out


def test_every_worker_imports_them_and_a_run_that_goes_on_asks_for_them(own):
    both = asked(own, "plain.py", "my_codecs.py")
    train = ("train", *both, "--exchange", "halves=*", "--steps", "2", "--json")
    first, second = face.command_in_job(2, *train, folder=own[1])
    assert (first.code, second.code, first.err, second.err) == (0, 0, "", ""), (first, second)
    plan = own[1] / json.loads(first.out)["folder"] / "plan.json"
    assert {group.exchange.name for group in armillary.Plan.load(plan).groups} == {"halves"}
    again = ("--plan", plan, "--steps", "2", "--json")
    assert [one.code for one in face.command_in_job(2, "train", *both, *again, folder=own[1])] == [0, 0]
    first, second = face.command_in_job(2, "train", both[0], *again, folder=own[1])
    said = first.reason + second.reason
    assert first.code and second.code and "no dense exchange 'halves'" in said and NOT_THERE in said, (first, second)
    told = face.command("compare", plan.parent, folder=own[1])
    assert told.code == 2 and NOT_THERE in told.err
    assert face.command("compare", plan.parent, *both[1:], folder=own[1]).code in (0, 3)
    resumed = ("train", both[0], "--resume", "--name", plan.parent.name, "--steps", "4", "--json")
    said = "".join(one.reason for one in face.command_in_job(2, *resumed, folder=own[1]))
    assert "no dense exchange 'halves'" in said and NOT_THERE in said
    ended = face.command_in_job(2, *resumed, *both[1:], folder=own[1])
    assert [one.code for one in ended] == [0, 0], ended


def test_a_workload_that_imports_what_lies_beside_it_needs_no_more(own):
    plan = ("--exchange", "halves=*", "--topology", "two.json")
    assert "NOT exact" in done(face.command("plan", own[0] / "line.py", *plan, folder=own[1]))
    assert "NOT exact" in done(face.command("plan", *asked(own, "line.py", "my_codecs.py"), *plan, folder=own[1]))


def test_a_module_is_named_as_python_names_it(own):
    (own[1] / "of_my_own").mkdir()
    (own[1] / "of_my_own" / "halving.py").write_text(CODEC.replace("from scale import LARGEST", "LARGEST = 127"))
    more = ("--import", "of_my_own.halving", "--exchange", "halves=*", "--topology", "two.json")
    assert "NOT exact" in done(face.command("plan", own[0] / "plain.py", *more, folder=own[1]))


BAD = {
    "none.py": (None, "no file"),
    "no.such_module": (None, "no module 'no.such_module'"),
    "codecs.py": ("", "Python has another module codecs"),
    "taken.py": (
        CODEC.replace("halves", "one_bit").replace("from scale import LARGEST", ""),
        "'one_bit' is regis",
    ),
    "bare.py": (
        FUSSY.replace('(costs="numbers are rounded to halves")', ""),
        "it lacks its parentheses; write @codec()",
    ),
    "carried.py": (CODEC.replace("halves", "all_reduce").replace("from scale import LARGEST", ""), "registered twice"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["train", "plan", "simulate", "twin", "verify"])
def test_what_cannot_be_imported_is_refused_in_one_line(own, name, command):
    if command != "plan" and name not in ("none.py", "taken.py"):
        return
    text, said = BAD[name]
    if text is not None:
        (own[1] / name).write_text(text)
    ended = face.command(command, own[0] / "plain.py", "--import", name, folder=own[1])
    assert (ended.code, ended.out) == (2, "") and ended.err.startswith("error: ") and said in ended.err, ended
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("way", ["--exchange=halves=*", "--schedule=all_then_all", "--schedule=gpipe --edge=halves"])
def test_a_name_that_is_not_there_is_answered_with_the_remedy(own, way):
    ended = face.command("plan", own[0] / "plain.py", *way.split(), "--topology", "two.json", folder=own[1])
    assert ended.code in (1, 2) and ended.err.startswith("error: ") and NOT_THERE in ended.err, ended


REFUSED = {
    "--exchange=halves(bits=3)=*": (FUSSY, "codec halves(bits=3) cannot be made: halves raises ValueError: bits: want"),
    "--exchange=hadamard(halves(bits=3))=*": (FUSSY, "codec halves(bits=3) cannot be made"),
    "--exchange=summed(owners=0)=*": (ROUNDED, "exchange summed(owners=0) cannot be made: summed raises RuntimeError"),
    "--schedule=all_then_all(micro_batches=3)": (STRICT, "schedule all_then_all: twos raises ValueError: want micro-"),
}


@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_options_that_a_factory_of_the_users_own_refuses_are_refused_in_one_line(own, way, command):
    text, said = REFUSED[way]
    (own[1] / "of_users_own.py").write_text(text)
    ended = face.command(command, own[0] / "plain.py", "--import", "of_users_own.py", way, folder=own[1])
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended
    assert ended.err.startswith(f"error: {said}") and "of_users_own.py, line " in ended.err


def test_a_codec_that_raises_as_it_is_used_is_named_in_one_line(own):
    (own[1] / "of_users_own.py").write_text(RAISING)
    way = ("verify", own[0] / "plain.py", "--import", "of_users_own.py", "--exchange", "halves=*")
    reasons = [one.reason for one in face.command_in_job(2, *way, folder=own[1]) if one.reason]
    said = "codec halves: <lambda> raises ZeroDivisionError: division by zero ("
    assert reasons and all(json.loads(one)["message"]["message"].startswith(said) for one in reasons), reasons
    assert all("Traceback" in json.loads(one)["message"]["extraInfo"]["py_callstack"] for one in reasons)


# In a script, in whatever order its imports come.


def thirds():
    return Codec(
        encode=lambda values, draw: values.contiguous().view(torch.uint8),
        decode=lambda code, n, like: code.clone().view(like.dtype),
        meaning=lambda values, draw: values,
        coded_bytes=lambda n, item_bytes: n * item_bytes - (n > 100),
        bound=torch.zeros_like,
    )


def planned(constraint):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batches = [torch.randn(2, 4) for _ in range(2)]
    seen = armillary.profile(model, batches, lambda model, batch: model(batch).mean(), workers=2)
    return armillary.plan(seen, face.machines(2), constraints={"*": constraint})


def test_a_codec_that_is_imported_after_the_shelves_were_read_is_an_exchange_too():
    with pytest.raises(ValueError, match=r"'thirds', which is no layout and no exchange.*import its file first"):
        planned("thirds")
    with registered(codec(), thirds):
        assert {group.exchange.name for group in planned("thirds").groups} == {"thirds"}
        assert len(dense_exchanges()["thirds"].examples) == len(dense_exchanges()["one_bit"].examples)
    assert "thirds" not in dense_exchanges()


@pytest.mark.parametrize("decorator", [codec, dense_exchange, row_exchange])
def test_a_decorator_without_parentheses_or_with_no_options_is_refused(decorator):
    with pytest.raises(ValueError, match=rf"@{decorator.__name__} above thirds: .*write @{decorator.__name__}\(\)"):
        decorator(thirds)
    with pytest.raises(ValueError, match=rf"@{decorator.__name__}: want sets of options, .*got 8"):
        decorator(8)


def test_a_codec_whose_name_an_exchange_has_is_refused_and_leaves_nothing():
    before = dict(CODECS.all()), dict(dense_exchanges())

    def all_reduce():
        return thirds()

    def quantize():
        return None

    for decorate, make in ((codec(), all_reduce), (dense_exchange(), quantize)):
        with pytest.raises(ValueError, match=f"'{make.__name__}' is registered twice"):
            decorate(make)
    with registered(codec(carries=False), all_reduce):  # whose exchange has a file of its own
        assert CODECS["all_reduce"].make is all_reduce
    assert (dict(CODECS.all()), dict(dense_exchanges())) == before
