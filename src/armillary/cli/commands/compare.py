"""`armillary compare`: says how near a run came to its forecast."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import refusing
from armillary.cli.options import AsJson, Imports
from armillary.session.band import Band
from armillary.session.run_folder import refuse_not_ended

__all__ = ["compare_command"]

BANDS = "Bands"

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run that has ended, for example runs/language_model.")
]
Sent = Annotated[
    float | None,
    typer.Option(help="Largest difference in bytes sent, as a share. (default: 0.02)", rich_help_panel=BANDS),
]
Memory = Annotated[
    float | None, typer.Option(help="Largest difference in memory, as a share. (default: 0.1)", rich_help_panel=BANDS)
]
Seconds = Annotated[
    float | None, typer.Option(help="Largest difference in seconds, as a share. (default: 0.15)", rich_help_panel=BANDS)
]


def compare_command(
    run: Run,
    imports: Imports = [],  # noqa: B006  typer copies it, and has imported them
    sent: Sent = None,
    memory: Memory = None,
    seconds: Seconds = None,
    json: AsJson = False,
) -> None:
    """Show the forecast of a run's plan beside what the run measured, for every group: bytes, memory and seconds.

    The exit code is 3 if a figure is outside its band, 2 if RUN holds no run that has ended.
    """
    shares = {"sent_bytes": sent, "memory_bytes": memory, "seconds": seconds}
    with refusing():
        band = Band(**{name: share for name, share in shares.items() if share is not None})
        refuse_not_ended(run)
    from armillary.cli.compare import compare_asked

    compare_asked(run, band, json)
