"""What the commands print: words first, then tables; no line is wider than a page, on narrow models and wide ones."""

import html
import json
import re

import pytest
from typer.testing import CliRunner

import armillary
import face
from armillary.cli.main import app
from armillary.cli.terminal import ProgressLine
from armillary.session.events import Evaluated, Progress

PAGE, TERMINAL = 100, 80
DRAWN = {"COLUMNS": str(TERMINAL), "FORCE_COLOR": "1", "TERM": "xterm"}

WIDE = '''
"""A model with long names and many tables."""
import torch
from torch import nn
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate_projection_of_the_attention = nn.Linear(4, 4)
        self.output_projection_of_the_attention = nn.Linear(4, 4)
    def forward(self, x):
        return self.output_projection_of_the_attention(self.intermediate_projection_of_the_attention(x))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.categorical_feature_embeddings = nn.ModuleList(nn.Embedding(100000 if n else 50, 4) for n in range(3))
        self.transformer_encoder_layers = nn.ModuleList(Part() for _ in range(4))
        self.head = nn.Linear(4, 1)
    def forward(self, ids):
        x = sum(table(ids) for table in self.categorical_feature_embeddings)
        for part in self.transformer_encoder_layers:
            x = torch.tanh(part(x))
        return self.head(x).squeeze(1)
class Workload:
    name, unit, steps, batch_size = "wide", "samples", 4, 4
    def model(self): return Model()
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def batches(self, split, worker, workers, seed):
        made = torch.Generator().manual_seed(seed + worker)
        while True:
            yield torch.randint(0, 50, (4,), generator=made)
            if split != "train": return
    def loss(self, model, batch): return model(batch).square().mean()
    def samples(self, batch): return len(batch)
    def evaluate(self, model, batch): return {"squared_error_of_all_predictions": float(model(batch).square().sum())}
    def report(self, totals): return totals
def workload(**options): return Workload()
'''
NARROW = ("recommender", "--small")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with both workloads' machines, in which `told` runs a command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide.py").write_text(WIDE)
    face.machines(4, 2).save(tmp_path / "four.json")
    face.machines(1).save(tmp_path / "one.json")
    return tmp_path


def told(*arguments, env=None, codes=(0,)):
    done = CliRunner().invoke(app, list(map(str, arguments)), env=env)
    assert done.exit_code in codes, (done.stdout, done.stderr)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.stdout)


def keeps_to(width, text, *besides):
    """Besides: how lines begin that may be wider."""
    wide = [line for line in re.split(r"[\r\n]", text) if len(line.rstrip()) > width and not line.startswith(besides)]
    assert not wide, "\n".join(wide)


def begins_in_words(text):
    """A sentence, no table and no code."""
    first = next(line for line in text.splitlines() if line.strip())
    assert len(first.split()) >= 4 and not re.search(r"---|━|  |[{}]", first.strip()), first


TRAIN = ("--workers", "1", "--topology", "one.json")
BY_ROW = ("--exchange", "owned_rows(order=hashed)=*embedding*", "--lazy", "*embedding*")
PAGES = {
    "narrow": (
        ("plan", *NARROW, "--topology", "four.json"),
        ("train", *NARROW, *TRAIN, "--steps", "2", "--name", "one"),
    ),
    "wide": (
        ("plan", "wide.py", "--topology", "four.json", "--verbose"),
        ("plan", "wide.py", "--topology", "four.json", *BY_ROW),
        ("simulate", "wide.py", "--workers", "4", "--out", "drawn"),
        ("simulate", "wide.py", "--scaling", "--workers", "4", "--out", "drawn"),
        ("train", "wide.py", *TRAIN, "--steps", "2", "--name", "one"),
        ("verify", "wide.py", *TRAIN, "--steps", "1"),
        ("measure", "wide.py", "--workers", "1", "--out", "seen"),
    ),
}


@pytest.mark.parametrize("task", PAGES)
def test_every_page_begins_in_words_and_keeps_to_its_width(here, task):
    for arguments in PAGES[task]:
        text = told(*arguments, env={"COLUMNS": str(TERMINAL)})
        keeps_to(PAGE, text, "step ")  # progress is one line in a file
        begins_in_words(text)
    text = told("compare", "runs/one", codes=(0, 3))  # whatever came of it
    keeps_to(PAGE, text)
    begins_in_words(text)


def test_a_terminal_is_kept_to_and_progress_is_one_line_of_it(here):
    plan = told("plan", "wide.py", "--topology", "four.json", env=DRAWN)
    keeps_to(TERMINAL, plan)
    assert "━" in plan or "─" in plan, "nothing is drawn"
    run = told("train", "wide.py", *TRAIN, "--steps", "30", env=DRAWN)
    keeps_to(TERMINAL, run)
    assert "step 30/30" in run


def test_in_a_file_progress_is_one_line_each_time_and_the_last_comes_once(here, monkeypatch):
    monkeypatch.setattr("armillary.cli.terminal.LINE_SECONDS", 0.0)  # always due
    run = told("train", "wide.py", *TRAIN, "--steps", "30", "--name", "of_a_long_name_" * 8, env={"COLUMNS": "40"})
    lines = [line for line in run.splitlines() if re.match(r"step \d+/", line)]
    assert [line for line in lines if line.startswith("step 30/30 | ")] == lines[-1:] and len(lines) >= 3
    assert all(line.endswith(" MB sent/step") for line in lines)
    assert max(map(len, lines)) > PAGE and "\r" not in run
    (saved,) = [line for line in run.splitlines() if line.startswith("saved step 30: ")]
    assert saved.endswith("/checkpoints/step-00000030")


def test_the_time_left_is_of_steps_and_evaluations_to_come_each_at_its_own_pace():
    """100 steps of a second, a look at held-out data of 30 after every 10; planning took 500."""
    now = [0.0]
    line = ProgressLine(100, "samples", lambda: now[0])
    now[0] += 500.0
    line.passed()
    now[0] += 10.0
    line.take(Progress(10, 1.0, 1.0, 1.0))
    assert "| 1:30 left |" in line.text()  # nobody knows yet how long a look takes
    now[0] += 30.0
    line.take(Evaluated(10, {"loss": 1.0}, is_whole=False))
    assert "| 6:00 left |" in line.text()
    now[0] += 10.0
    line.take(Progress(20, 1.0, 1.0, 1.0))
    assert "| 5:50 left |" in line.text()


def test_the_first_lines_say_what_will_be_done_and_what_it_takes_beside_plain_all_reduce(here):
    tables = ("--exchange", "owned_rows(order=hashed)=*embedding*")
    text = told("plan", "wide.py", "--topology", "four.json", *tables, "--out", "plan.json")
    plan = armillary.Plan.load(here / "plan.json")
    words = " ".join(text.split("\n\n")[0].split())
    assert (
        words.startswith("4 workers: ") and "3 tables sharded by row" in words and "18 parameters kept whole" in words
    )
    assert 0 < plan.step_seconds < plan.all_reduce_seconds  # a million rows whole, or those that were read
    assert "a step (all-reduce of everything: " in words
    whole = told("plan", "wide.py", "--topology", "four.json", "--exchange", "all_reduce=*", "--json")
    assert json.loads(whole)["plan"]["step_seconds"] == pytest.approx(plan.all_reduce_seconds, rel=0.2)


def test_the_profile_and_long_reasons_stay_out_of_the_way(here):
    short, long = (told("plan", *NARROW, "--topology", "four.json", *more) for more in ((), ("--verbose",)))
    assert "model alpha" in long and "model alpha" not in short and "reason" not in short
    assert "why bucket 0" in " ".join(short.split())


def test_a_plan_prints_alike_in_a_script_and_in_a_notebook(here):
    told("plan", "wide.py", "--topology", "four.json", "--out", "plan.json")
    plan = armillary.Plan.load(here / "plan.json")
    begins_in_words(str(plan))
    keeps_to(PAGE, str(plan))
    keeps_to(PAGE, html.unescape(re.sub("<[^>]*>", "", plan._repr_html_())))
