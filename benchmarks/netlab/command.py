"""The command line of the lab: one run of a program on a network made for it.

python benchmarks/netlab HOSTS MBIT [--ranks-per-host R] [--timeout SECONDS] [--pin] -- program arguments...
python benchmarks/netlab --sweep
"""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.netlab.lab import Lab
from benchmarks.netlab.namespaces import LabUnavailable, sweep
from benchmarks.netlab.ranks import RankFailed

FAILED = 1
UNAVAILABLE = 3
INTERRUPTED = 130


def main(words: Sequence[str]) -> int:
    """Runs the command line and returns its exit code: 0, 1 a rank failed, 3 no lab possible here."""
    own, mark, program = _split(words)
    parser = _parser()
    choice = parser.parse_args(own)
    if choice.sweep == bool(mark) or (choice.hosts is None) != choice.sweep:
        parser.error("want either HOSTS MBIT -- program, or --sweep alone")
    if mark and (choice.mbit is None or not program):
        parser.error("want HOSTS, MBIT and, after --, a program to run")
    try:
        return _sweep() if choice.sweep else _run(choice, program)
    except LabUnavailable as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    except (RankFailed, TimeoutError, ValueError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="netlab", description="Runs a program on N hosts of one machine.")
    parser.add_argument("hosts", type=int, nargs="?", metavar="HOSTS", help="how many hosts")
    parser.add_argument("mbit", type=float, nargs="?", metavar="MBIT", help="Mbit/s of each link, 0: no limit")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="R", help="default 1")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="default 600")
    parser.add_argument("--pin", action="store_true", help="batch policy and a processor each, where ranks are more")
    parser.add_argument("--sweep", action="store_true", help="remove labs whose process is dead")
    return parser


def _split(words: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Own arguments, whether `--` came, and the program after it, whose own options are not ours to read."""
    if "--" not in words:
        return list(words), False, []
    mark = list(words).index("--")
    return list(words[:mark]), True, list(words[mark + 1 :])


def _sweep() -> int:
    gone = sweep()
    print(f"netlab: removed {len(gone)} namespaces of dead labs", *gone, sep="\n  ")
    return 0


def _run(choice: argparse.Namespace, program: Sequence[str]) -> int:
    with Lab(choice.hosts, choice.mbit) as lab:
        finished = lab.run(
            program,
            ranks_per_host=choice.ranks_per_host,
            timeout_seconds=choice.timeout,
            pin=choice.pin,
            watch=_show,
        )
        counted = lab.counters()
    sys.stderr.write(finished.errors[0])
    print(f"netlab: {finished.seconds:.1f} s\nhost       sent bytes   received bytes")
    for host, link in enumerate(counted):
        print(f"{host:4} {link.sent_bytes:16,} {link.received_bytes:16,}")
    return 0


def _show(text: str) -> None:
    print(text, end="", flush=True)
