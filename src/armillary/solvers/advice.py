"""What solvers say of themselves for `advise`: is there a recurrence, and is it solved faster than looped over?

Which way wins is found by a trial of some seconds, on a cell like the model's own.
"""

import contextlib
import io
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from armillary.plans.advice import Advice, Recurrent, Situation, advises, not_for
from armillary.solvers.auto import seconds_of
from armillary.solvers.recur import recur
from armillary.solvers.recurrence import looped
from armillary.solvers.system import Solved

__all__: list[str] = []

TRIALS = 30  # about as many passes over all steps as a trial makes
FEW = 16  # steps, below which a loop is as good
TRY = "the script"
CELLS = {"GRU": "GRUCell", "LSTM": "LSTMCell", "RNN": "RNNCell"}


@advises("parallel equations", "all steps of a recurrence at once", "methods/solvers.md", is_inference=True)
def _advice(situation: Situation) -> Advice:
    found = max(situation.facts.recurrents, key=lambda one: one.steps, default=None)
    if found is None:
        if situation.facts.is_causal:
            python = situation.script(
                "from armillary import solvers",
                "net = model.eval()  # (n, T) tokens -> (n, T, levels) logits",
                "print(solvers.sample(net, (4, 16), levels=16, report=print))",
            )
            return Advice(True, "samples of a causal model", python=python, tells=TRY)
        return not_for("not a recurrence, and no causal attention")
    if found.steps < FEW:
        return not_for(f"{found.path} takes {found.steps} steps, too few to gain")
    if not found.is_cell and situation.model.get_submodule(found.path).proj_size:
        return not_for(f"{found.path} projects its state (proj_size), and no cell of torch does")
    script = _script(situation, found)
    if found.is_cell:
        return Advice(True, f"{found.path}: {found.steps} steps in a loop", python=script, tells=TRY)
    said = f"{found.path}: {found.steps} steps"
    if not situation.affords(TRIALS * situation.facts.seconds):
        return Advice(True, said, python=script, tells=f"--measure, or {TRY}")
    return _tried(situation, found, said, script)


def _tried(situation: Situation, found: Recurrent, said: str, script: str) -> Advice:
    """A trial on one sample's length with the module's own weights."""
    module = situation.model.get_submodule(found.path)
    cell, width, size = _cell_of(module)
    xs, start = torch.randn(found.steps, width), torch.zeros(size)
    told = list[Solved]()
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        recur(cell, xs, start, report=told.append)
        loop = seconds_of(partial(looped, cell, xs, start))
        mine = seconds_of(partial(recur, cell, xs, start, report=told.append))
        whole = seconds_of(partial(module, xs.to(next(module.parameters())).unsqueeze(0 if module.batch_first else 1)))
    won = told[-1].method
    return Advice(
        True,
        f"{said}: {won}, {loop / mine:.2g} times as fast as the loop",
        python=script,
        latency_seconds=max(0.0, situation.facts.seconds - whole + min(mine, whole)),
        source=told[-1],
    )


def _cell_of(module: nn.RNNBase) -> tuple[Callable[[Tensor, Tensor], Tensor], int, int]:
    """A cell with the weights of its first layer, the width of its inputs and of its state."""
    kind = CELLS[module.mode.partition("_")[0]]
    more = {"nonlinearity": module.nonlinearity} if kind == "RNNCell" else {}
    cell = getattr(nn, kind)(module.input_size, module.hidden_size, bias=module.bias, **more)
    own = {name.removesuffix("_l0"): one for name, one in module.state_dict().items() if name.endswith("_l0")}
    cell.load_state_dict(own)
    cell = cell.eval()
    if kind != "LSTMCell":
        return cell, module.input_size, module.hidden_size
    half = module.hidden_size

    def joined(x: Tensor, state: Tensor) -> Tensor:
        h, c = cell(x, (state[..., :half].contiguous(), state[..., half:].contiguous()))
        return torch.cat([h, c], -1)

    return joined, module.input_size, 2 * half


def _script(situation: Situation, found: Recurrent) -> str:
    if found.is_cell:
        return situation.script(
            "from armillary import solvers",
            f"cell = model.get_submodule({found.path!r})",
            "# in place of: for x in xs: state = cell(x, state)",
            "states = solvers.recur(cell, xs, start, report=print)",
        )
    kind = CELLS[found.kind.partition("_")[0]]
    made = f"own = model.get_submodule({found.path!r})"
    cell = f"cell = torch.nn.{kind}(own.input_size, own.hidden_size)"
    call, size = "cell", "own.hidden_size"
    if kind == "LSTMCell":
        call, size = "lambda x, s: torch.cat(cell(x, s.chunk(2, -1)), -1)", "2 * own.hidden_size"
    return situation.script(
        "from armillary import solvers",
        made,
        cell,
        f"xs, start = torch.randn({found.steps}, own.input_size), torch.zeros({size})",
        f"print(solvers.recur({call}, xs, start, report=print).shape)",
    )
