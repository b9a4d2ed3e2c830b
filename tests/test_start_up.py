"""What a start leaves unimported. Modules are counted, not seconds, which hang on the machine."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import armillary

# torch._dynamo comes with the pipeline tracer, and takes as long as torch itself.
NOT_BY_THE_LIBRARY = ("torch._dynamo", "torch.distributed.pipelining", "sympy", "matplotlib", "typer", "rich", "scipy")
NOT_BY_HELP = ("torch", "numpy", "matplotlib", "scipy", "armillary.face", "armillary.runtime", "armillary.session.run")
MINE = Path(__file__).parents[1] / "examples" / "my_workload.py"

pytestmark = pytest.mark.timeout(100)


def imported_by(program):
    """What a Python program of its own printed, and the modules there are at its end."""
    more = "\nimport sys\nprint()\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program + more], capture_output=True, text=True, check=True)
    said, _, modules = done.stdout.rstrip().rpartition("\n")
    return said + done.stderr, set(modules.split())


def test_the_library_brings_neither_the_tracer_nor_a_drawing_library_nor_a_command_line():
    _, found = imported_by("import armillary\narmillary.parallelize, armillary.simulate, armillary.verify")
    assert "torch" in found and "armillary.session.run" in found  # the whole library is there
    assert not found & set(NOT_BY_THE_LIBRARY)


COMMANDS = ("train", "plan", "compare", "measure", "simulate", "twin", "verify", "residency")
ANSWERED_AT_ONCE = {
    ("--help",): "Workloads: language_model",
    ("--version",): "armillary 0.",
    ("trian",): "Did you mean 'train'",
    **dict.fromkeys(zip(COMMANDS, ("--help", "-h") * 4), "Exit codes"),
    (): "Plan, run and check the training of an ordinary PyTorch model",
    ("train", "--stepz", "3"): "--steps",
    ("train", "--step", "3"): "Possible options:",
    ("train", "language_model", "--workers", "two"): "Input should be a valid integer",
    ("plan", "langauge_model"): "did you mean 'language_model'?",
    ("verify", "nowhere.py"): "no file nowhere.py",
    ("measure", "vision", "--set", "widht=3"): "vision has no option 'widht'; did you mean 'width'?",
    ("simulate", str(MINE), "--set", "widht=3"): "did you mean 'width'?",
    ("train", "vision", "--schedule", "pipline"): "no schedule 'pipline'; there are accumulation, asynchronous",
    ("twin", "vision", "--schedule", "ring(slack"): "'ring(slack' is no NAME or NAME(OPTION=VALUE, ...): at its end",
    ("plan", "vision", "--exchange", "quantise(bits=8)=*"): "to be 'quantise', which is no layout and no exchange",
    ("verify", "vision", "--exchange", "owned_rows"): "--exchange: want CHOICE=PATTERN",
    ("simulate", "vision", "--edge", "hadamerd=0"): "no codec 'hadamerd'; there are hadamard, lower_precision, one_bit",
    ("twin", "vision", "--edge-back", "hadamard(quantise(bits=4))"): "no codec 'quantise'; there are hadamard",
    ("plan", "vision", "--rule", "paralax"): "no rule 'paralax'; there are price, parallax",
    ("train", "vision", "--allow", "stale"): "want some of ('lossy',)",
    ("verify", "vision", "--workers", "0"): "--workers: want at least 1, got 0",
    ("twin", "vision", "-w", "0"): "--workers: want at least 1, got 0",
    ("verify", "vision", "-n", "0"): "--steps: want at least 1, got 0",
    ("train", "vision", "--schedule", "1f2b"): "no schedule '1f2b'; there are accumulation, asynchronous",
    ("train", "vision", "--steps", "0"): "--steps: want at least 1, got 0",
    ("train", "vision", "--every-seconds", "-1"): "--every-seconds: want 0 or more, got -1.0",
    ("twin", "vision", "--seeds", "0"): "--seeds: want at least 1, got 0",
    ("train", "vision", "--plan", "none.json"): "plan: none.json is no plan file: there is none of that name",
    ("plan", "vision", "--profile", "none.json"): "profile: none.json is no profile file",
    ("twin", "vision", "--topology", "none.json"): "topology: none.json is no topology file",
    ("simulate", "nowhere/plan.json"): "plan: nowhere/plan.json is no plan file",
    ("simulate", "vision", "--gbit", "0"): "bytes_per_second",
    ("train", "vision", "--resume", "--runs", "nowhere"): "nothing to resume: no folder vision under nowhere",
    ("train", "vision", "--runs", __file__): "test_start_up.py is no folder; pass another --runs",
    ("measure", "--out", __file__): "test_start_up.py is no folder",
    ("plan", "vision", "--out", f"{__file__}/plan.json"): "test_start_up.py is no folder",
    ("residency", "vision", "--memory", "40 pounds"): "want a size such as 40MiB or 2GiB, got '40 pounds'",
    ("compare", "nowhere"): "compare: nowhere has no plan.json; give the folder of a run that ended",
    ("compare", "nowhere", "--seconds", "15"): "a band is a share between 0 and 1, got {'seconds': 15.0}",
}


def test_help_and_refusals_of_names_and_options_are_told_without_importing_torch():
    program = f"""
import sys
from armillary.cli.main import main
for arguments in {list(ANSWERED_AT_ONCE)!r}:
    sys.argv = ["armillary", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code)
"""
    said, found = imported_by(program)
    text = " ".join(said.replace("\u2502", " ").split())
    for arguments, expected in ANSWERED_AT_ONCE.items():
        assert expected in text, arguments
    fine = 2 + len(COMMANDS)
    assert said.count("ended with 0") == fine and said.count("ended with 2") == len(ANSWERED_AT_ONCE) - fine
    assert not found & set(NOT_BY_HELP)


def test_names_read_off_the_source_are_those_on_the_shelves():
    program = """
from armillary.cli import names as shelves
from armillary.codecs import CODECS
from armillary.exchanges import dense_exchanges, row_exchanges
from armillary.schedules.edges import EDGES, SAME
from armillary.schedules import SCHEDULES
print(shelves.schedules() == tuple(SCHEDULES.all()), shelves.codecs() == tuple(CODECS.all()))
print(shelves.exchanges() == tuple(sorted({*dense_exchanges(), *row_exchanges()})))
print(shelves.edges_only() == (*EDGES.all(), SAME.name))
print(shelves.aliases() == tuple(sorted({**SCHEDULES._aliases, **CODECS._aliases})))
"""
    said, _ = imported_by(program)
    assert said.split() == ["True"] * 5


def test_a_name_of_the_library_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'armillary' has no attribute 'paralellize'"):
        _ = armillary.paralellize


BASE = {"torch", "numpy", "safetensors", "scipy"}  # what `pip install armillary` brings
EXTRAS = {
    "typer": {"cli/"},
    "rich": {"cli/"},
    "matplotlib": {"session/plots", "session/simulate", "session/advice_page", "session/twin_page", "repurpose/shards"},
    "redis": {"feeds/redis_"},
}
BY_WISH = {"sklearn": {"workloads/"}}  # data of some workloads, which say what to install


def test_only_the_command_and_pictures_need_more_than_the_library_brings():
    root = Path(armillary.__file__).parent
    for path in root.rglob("*.py"):
        me = path.relative_to(root).as_posix()
        may = {name for name, where in (EXTRAS | BY_WISH).items() if me.startswith(tuple(where))}
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"armillary"}
        assert others <= BASE | may, f"{me} imports {others - BASE - may}"


def test_without_its_extra_the_command_says_in_one_sentence_what_to_install():
    program = """
import sys
sys.modules["typer"] = None  # as where it is not installed
from armillary.cli.entry import main
try:
    main()
except SystemExit as ended:
    print(ended)
"""
    said, found = imported_by(program)
    assert said.strip() == (
        "armillary: the command needs typer, which is not installed: pip install 'armillary[cli,plot]' "
        "(scripts that import armillary do without)"
    )
    assert not found & set(NOT_BY_HELP)
