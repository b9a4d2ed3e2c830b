"""The command `armillary`: advise, measure, plan, simulate, twin, train, residency, compare and verify."""

from importlib.metadata import version
from typing import Annotated

import typer

from armillary.cli import signatures
from armillary.cli.names import built_in

__all__ = ["app", "main"]

EXIT_CODES = (
    "Exit codes: 0 fine; 1 it failed; 2 wrong usage, or what was named is not there; 3 outside its band, or not equal."
)
EPILOG = f"""
Workloads: {", ".join(built_in())}, or the path of a .py file with a function workload().

Example: armillary advise recommender --small --workers 8 --gbit 0.1

Example: armillary train language_model --workers 2, then armillary compare runs/language_model

Example: armillary plan mine.py --json > plan.json, then armillary train mine.py --plan plan.json

{EXIT_CODES}
"""

app = typer.Typer(
    name="armillary",
    help="Plan, run and check the training of an ordinary PyTorch model on many workers.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    signatures.advise,
    signatures.train,
    signatures.plan,
    signatures.compare,
    signatures.measure,
    signatures.residency,
    signatures.simulate,
    signatures.twin,
    signatures.verify,
):
    app.command(command.__name__, epilog=EXIT_CODES)(command)


def _tell_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"armillary {version('armillary')}")
        raise typer.Exit


@app.callback()
def commands(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Plan, run and check the training of an ordinary PyTorch model on many workers."""


def main() -> None:
    """Runs the command line in sys.argv."""
    app()
