"""The command `armillary`: measure, plan, simulate, train, compare and verify."""

import typer

from armillary.cli.compare import compare_command
from armillary.cli.measure import measure_command
from armillary.cli.plan import plan_command
from armillary.cli.simulate import simulate_command
from armillary.cli.train import train_command
from armillary.cli.verify import verify_command

__all__ = ["app", "main"]

app = typer.Typer(
    name="armillary",
    help="Plans, runs and checks the training of an ordinary PyTorch model on many workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("compare")(compare_command)
app.command("plan")(plan_command)
app.command("measure")(measure_command)
app.command("simulate")(simulate_command)
app.command("verify")(verify_command)


@app.callback()
def commands() -> None:
    """Plans, runs and checks the training of an ordinary PyTorch model on many workers."""


def main() -> None:
    """Runs the command line in sys.argv."""
    app()
