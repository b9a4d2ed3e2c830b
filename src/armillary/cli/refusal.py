"""A command line that cannot be carried out: said in one line, with exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["FAILED", "UNEQUAL", "USAGE", "Refused", "refusing"]

FAILED = 1  # something went wrong on the way
USAGE = 2  # what was typed cannot be done, or what it names is not there; click's own code for it
UNEQUAL = 3  # everything was done, and the answer is no: outside its band, not equal


class Refused(Exception):
    """Found before anything was done; the text is for the user."""


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError inside ends the process as a refusal."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE) from None
