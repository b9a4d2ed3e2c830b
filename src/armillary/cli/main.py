"""The command `armillary`, and what each of its commands can be asked: advise, measure, plan, train and others.

Nothing here imports torch: help and refusals must not wait for it.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from armillary.cli.names import built_in, refusing
from armillary.cli.options import (
    BANDS,
    OUTPUT,
    PLAN,
    RUN,
    AsJson,
    Imports,
    Seed,
    Verbose,
    Workers,
    at_least_one,
    but,
    bytes_of,
    option,
    takes,
    workload_argument,
)
from armillary.cli.request import (
    AskedAdvice,
    AskedMachines,
    AskedPlan,
    AskedRun,
    AskedWorkload,
    WorkloadOptions,
    read_plan,
)
from armillary.plans.group import Band
from armillary.session.run_folder import refuse_not_ended, refuse_unwritable

__all__ = ["advise", "app", "compare", "main", "measure", "plan", "residency", "simulate", "train", "twin", "verify"]


def _simulated(default: str) -> object:
    text = f"Simulate this many workers. (default: {default})"
    return option(RUN, "--workers -w", text, "N", callback=at_least_one, show_default=False)


def _steps(text: str) -> object:
    return option(RUN, "--steps -n", text, callback=at_least_one)


def _folder(text: str) -> object:
    return option(OUTPUT, "--out", text, "FOLDER")


def _share(name: str, text: str) -> object:
    return option(BANDS, f"--{name}", text)


@takes
def advise(
    workload: AskedWorkload,
    machines: Annotated[
        AskedMachines,
        but(
            workers=Annotated[
                int | None,
                option(
                    RUN, "--workers -w", "Advise for this many workers. (default: 8; those of --topology)", "N",
                    callback=at_least_one, show_default=False,
                ),
            ]
        ),
    ],
    asked: AskedAdvice,
    seed: Seed = 0,
    imports: Imports = [],  # noqa: B006  typer copies it
    json: AsJson = False,
) -> None:  # fmt: skip
    """Say what each method would do for WORKLOAD on these machines: seconds, bytes, memory, exact or not, what to type.

    Nothing is trained, and no worker is started: the model is profiled here, and every forecast is made from that. The
    links are those of --topology (from armillary measure), else they are assumed.
    """
    from armillary.cli.advise import advise_asked

    advise_asked(workload, machines, asked, imports, seed, json)


@takes
def train(
    workload: AskedWorkload,
    wanted: Annotated[AskedPlan, but("profile_file")],
    run: AskedRun,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:
    """Train WORKLOAD: print a plan, carry it out, and show the forecast beside what happened.

    The folder RUNS/NAME gets plan.json, profile.json, trace.json, metrics.jsonl, plot.png and checkpoints.
    """
    with refusing():
        refuse_unwritable(run.folder(workload.stem))
    from armillary.cli.train import train_asked

    train_asked(workload, wanted, run, json, verbose)


@takes
def plan(
    workload: AskedWorkload,
    wanted: Annotated[AskedPlan, but("plan_file", "autotune")],
    seed: Seed = 0,
    workers: Workers = None,
    out: Annotated[
        Path | None,
        option(
            OUTPUT, "--out",
            "Write the plan to this file, for train --plan and simulate; what it was made from goes beside it.", "FILE",
        ),
    ] = None,
    verbose: Verbose = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Print a plan for WORKLOAD: what its training would send, hold and take, and what else was considered.

    The model is profiled and the links between the workers are measured, unless --profile and --topology say what they
    are. With --topology no worker is started; --workers then says how many of its machines to plan for.
    """
    with refusing():
        if out is not None:
            if out.is_dir():
                raise ValueError(f"--out: {out} is a folder; pass the path of a file, as in {out / 'plan.json'}")
            refuse_unwritable(out.parent)
    from armillary.cli.plan import AskedPrint, plan_asked

    plan_asked(workload, wanted, workers, seed, AskedPrint(out, json, verbose))


@takes
def verify(
    workload: Annotated[AskedWorkload, but(is_small=True)],
    wanted: Annotated[AskedPlan, but("profile_file", "autotune")],
    seed: Seed = 0,
    workers: Workers = None,
    steps: Annotated[int, _steps("Compare after this many optimizer steps.")] = 5,
    one_batch: Annotated[
        bool,
        option(
            RUN, "--one-batch",
            "Claim more: equality with one process that takes the batches of all workers as one.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train WORKLOAD in one process and on the workers, in float64, and compare every tensor.

    This is done under the plan, and under every exchange in turn. Tensors may differ by 1e-10 of their norm. With
    --schedule both follow that schedule, and every bit must be equal, except where gloo sums three or more workers in
    its own order.

    What the plan's exchanges do is counted, over all ranks. The exit code is 3 where something differs, and 1 where
    something never happened.
    """
    from armillary.cli.verify import AskedVerification, verify_asked

    verify_asked(workload, wanted, AskedVerification(seed, workers, steps, one_batch), json)


@takes
def twin(
    workload: AskedWorkload,
    way: Annotated[
        AskedPlan, but("plan_file", "topology_file", "profile_file", "lazy", "replicate", "rule", "autotune")
    ],
    machines: Annotated[
        AskedMachines,
        but("profile_file", workers=Annotated[int | None, _simulated("those of --topology; 4")]),
    ],
    steps: Annotated[int, _steps("Train both for this many optimizer steps.")] = 300,
    seeds: Annotated[
        int,
        option(
            RUN, "--seeds", "Train both under N seeds: initial values, data order, dropout.", "N",
            callback=at_least_one,
        ),
    ] = 3,
    out: Annotated[Path, _folder("Folder for twin.json and the picture twin.png.")] = Path(),
    resume: Annotated[bool, option(RUN, "--resume", "Go on after the seeds that twin.json in --out holds.")] = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train WORKLOAD exactly and by --exchange or --edge side by side, in this one process; show the gap in the loss.

    Both take the same batches. The gap is shown at equal steps, beside the forecast seconds of a step on these links.
    The links are those of --topology, or assumed. Workers are simulated.
    """
    with refusing():
        refuse_unwritable(out)
    from armillary.cli.twin import AskedTwin, twin_asked

    twin_asked(workload, AskedTwin(way, machines, steps, seeds), out, resume, json)


@takes
def simulate(
    typed: WorkloadOptions,
    way: Annotated[
        AskedPlan, but("plan_file", "topology_file", "profile_file", "lazy", "replicate", "rule", "autotune", "allow")
    ],
    machines: Annotated[AskedMachines, but(workers=Annotated[int | None, _simulated("the plan's; 8")])],
    subject: Annotated[
        str | None,
        workload_argument(
            f"A plan.json as plan --out or a run leaves it; or a workload: {', '.join(built_in())}, or a .py file.",
            "PLAN|WORKLOAD",
        ),
    ] = None,
    scaling: Annotated[
        bool,
        option(RUN, "--scaling", "Draw curves up to --workers (default: 1024), of WORKLOAD or of all workloads."),
    ] = False,
    out: Annotated[Path, _folder("Folder for the trace and the picture.")] = Path(),
    json: AsJson = False,
) -> None:  # fmt: skip
    """Play one step of a plan, or of the plan made for WORKLOAD, on any number of workers, in this one process.

    It writes timeline.json, which Perfetto and chrome://tracing open; with --scaling it writes
    scaling.json and scaling.png. The links are those of --topology, else those that stand beside the plan; of
    a WORKLOAD they are assumed. Beside a plan its profile stands, too, else pass --profile.
    """
    with refusing():
        if subject is None and not scaling:
            raise ValueError("simulate: want a plan.json or a WORKLOAD; or --scaling, which takes all workloads")
        names_methods = way != AskedPlan()
        if scaling and (names_methods or machines.profile_file is not None):
            raise ValueError(
                "--scaling: profiles every workload, and compares the chosen plan with all-reduce; drop --profile, "
                "--exchange, --schedule, --edge, --edge-back"
            )
        if subject is None and typed.settings:
            raise ValueError("--set, --corpus, --data: are for one workload; name it, or drop them")
        is_plan = subject is not None and subject.endswith(".json") and not scaling
        if is_plan:
            _refuse_beside_plan(names_methods, typed != WorkloadOptions(), machines.assumes_links)
            read_plan(Path(str(subject)))
        task = None if subject is None or is_plan else AskedWorkload(subject, typed)
        refuse_unwritable(out)
    from armillary.cli.simulate import scaling_asked, simulate_asked

    if scaling:
        scaling_asked(task, typed.is_small, machines, out, json)
    simulate_asked(task if task is not None else Path(str(subject)), machines, way, out, json)


def _refuse_beside_plan(names_methods: bool, names_data: bool, assumes_links: bool) -> None:
    """
    Raises:
        ValueError: something is asked that a plan in a file, and what stands beside it, say themselves.
    """
    if names_methods:
        raise ValueError("--exchange, --schedule, --edge, --edge-back: the plan in the file says its own; edit it")
    if names_data:
        raise ValueError("--set, --small, --corpus, --data: the plan in the file is of its own workload; drop them")
    if assumes_links:
        raise ValueError(
            "--gbit, --latency-us: the links are those that stand beside the plan; pass --topology for others"
        )


@takes
def measure(
    typed: WorkloadOptions,
    workload: Annotated[
        str | None,
        workload_argument(
            f"Also profile this model: {', '.join(built_in())}, or the path of a .py file.", "[WORKLOAD]"
        ),
    ] = None,
    seed: Seed = 0,
    workers: Workers = None,
    out: Annotated[Path, _folder("Folder for topology.json and profile.json.")] = Path(),
    json: AsJson = False,
) -> None:  # fmt: skip
    """Measure the links between the workers, their processors and memory, and the model of WORKLOAD.

    The files topology.json (topology_nccl.json too where the job has NCCL) and profile.json, if WORKLOAD is given, are
    what plan and simulate read. It takes some ten seconds, longer on slow links.
    """
    with refusing():
        task = None if workload is None else AskedWorkload(workload, typed)
        refuse_unwritable(out)
    from armillary.cli.measure import measure_asked

    measure_asked(task, workers, seed, out, json)


@takes
def residency(
    workload: AskedWorkload,
    memory: Annotated[
        str,
        option(
            PLAN, "--memory",
            "For all tensors together, such as 40MiB or 2GiB: weights, gradients, optimizer state, activations.",
            "SIZE",
        ),
    ],
    tier: Annotated[Path | None, option(PLAN, "--tier", "Swap to a file in this folder, on a disk.", "FOLDER")] = None,
    stages: Annotated[
        list[str],
        option(
            PLAN, "--stage",
            "Modules to decide for, such as 'blocks.*'. Repeatable; the model's children if none are given.", "PATTERN",
        ),
    ] = [],  # noqa: B006  typer copies it
    seed: Seed = 0,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Train ten steps of WORKLOAD in one process within --memory, and print the plan beside what was measured.

    Each stage keeps its activations, recomputes them, or swaps them to --tier. A last table says what six budgets,
    from the least that fits to keeping all, would take.
    """
    with refusing():
        memory_bytes = bytes_of(memory)
    from armillary.cli.residency import residency_asked

    residency_asked(workload, memory_bytes, tier, stages, seed, json)


@takes
def compare(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run that has ended, for example runs/language_model.")
    ],
    sent: Annotated[
        float | None, _share("sent", "Largest difference in bytes sent, as a share. (default: 0.02)")
    ] = None,
    memory: Annotated[
        float | None, _share("memory", "Largest difference in memory, as a share. (default: 0.1)")
    ] = None,
    seconds: Annotated[
        float | None, _share("seconds", "Largest difference in seconds, as a share. (default: 0.15)")
    ] = None,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Show the forecast of a run's plan beside what the run measured, for every group: bytes, memory and seconds.

    The exit code is 3 if a figure is outside its band, 2 if RUN holds no run that has ended.
    """
    shares = {"sent_bytes": sent, "memory_bytes": memory, "seconds": seconds}
    with refusing():
        band = Band(**{name: share for name, share in shares.items() if share is not None})
        refuse_not_ended(run)
    from armillary.cli.compare import compare_asked

    compare_asked(run, band, json)


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
    advise,
    train,
    plan,
    compare,
    measure,
    residency,
    simulate,
    twin,
    verify,
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
