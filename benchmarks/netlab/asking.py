"""A program in a lab asks for another speed of its links, and goes on when they have it.

Ranks see their own host alone, and links are laid outside. So rank 0 says a line, and who runs the lab does it and
answers with a file.
"""

import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["ask", "granting"]

LINE = "netlab: links, please: "
POLL_SECONDS = 0.01


def ask(mbit_per_second: float, answer: Path) -> None:
    """Called by one rank, while none sends; `lab.run` must be watched by `granting`.

    Args:
        mbit_per_second: of every link; 0 takes the limit away.
        answer: a path that both sides see, another one at each call.

    Raises:
        FileExistsError: the path has answered an earlier call.
    """
    if answer.exists():
        raise FileExistsError(f"netlab: {answer} has answered before; ask with another path")
    print(f"{LINE}{mbit_per_second:g} {answer}", flush=True)
    while not answer.exists():
        time.sleep(POLL_SECONDS)


def granting(shape: Callable[[float], object], show: Callable[[str], object]) -> Callable[[str], None]:
    """What watches a run whose rank 0 asks: `lab.run(..., watch=granting(lab.shape, print))`.

    `show` gets every other line that rank 0 says, whole and without its end.
    """
    begun = ""  # a line of which the rest has not come yet

    def watch(text: str) -> None:
        nonlocal begun
        *lines, begun = (begun + text).split("\n")
        for line in lines:
            if line.startswith(LINE):
                speed, answer = line.removeprefix(LINE).split(" ", 1)
                shape(float(speed))
                Path(answer).touch()
            else:
                show(line)

    return watch
