"""The house as a test: who may import whom, and who may touch the network."""

import ast
import re
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import armillary
from armillary import face
from armillary.codecs import CODECS
from armillary.exchanges import dense_exchanges, row_exchanges
from armillary.plans import SIMULTANEOUS, advisers
from armillary.schedules import CORRECTIONS, EDGES, SCHEDULES

ROOT = Path(armillary.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MAY_IMPORT = {
    "models": set(),
    "plans": set(),
    "workloads": set(),
    "codecs": {"plans"},
    "feeds": {"plans"},
    "local_losses": {"models", "plans"},
    "repurpose": {"plans"},
    "residency": {"models", "plans"},
    "solvers": {"plans"},
    "tensor": {"models", "plans"},
    "exchanges": {"plans", "codecs"},
    "schedules": {"plans", "codecs", "local_losses"},
    "planning": {"models", "plans", "codecs", "exchanges", "schedules"},
    "reference": {"models", "plans", "exchanges", "schedules"},
    "transport": {"plans", "exchanges", "schedules"},
    "contracts": {"plans", "codecs", "exchanges", "schedules", "reference"},
    "measuring": {"plans", "exchanges", "transport"},
    "tables": {"models", "plans", "exchanges", "transport"},
    "checkpoint": {"tables"},
    "prefetch": {"plans", "exchanges", "transport", "tables"},
    "owners": {"plans", "exchanges", "transport", "tables", "prefetch"},
    "profiler": {"models", "plans", "exchanges", "schedules", "transport", "tables"},
    "runtime": {"models", "plans", "codecs", "exchanges", "transport", "tables"},
    "stages": {"models", "plans", "codecs", "exchanges", "schedules", "transport", "tables", "profiler", "runtime"},
    "session": {
        "models",
        "plans",
        "codecs",
        "exchanges",
        "schedules",
        "planning",
        "reference",
        "transport",
        "measuring",
        "tables",
        "checkpoint",
        "prefetch",
        "owners",
        "profiler",
        "runtime",
        "stages",
    },
    "armillary": {"face", "plans", "planning", "contracts", "checkpoint", "profiler", "session"},
    "cli": {
        "plans",
        "residency",
        "schedules",
        "planning",
        "transport",
        "measuring",
        "checkpoint",
        "profiler",
        "stages",
        "session",
    },
}

# The files that may import each part of torch.distributed.
NETWORK = {
    "torch.distributed": {
        "transport/transport.py",
        "transport/groups.py",
        "repurpose/groups.py",
        "tensor/groups.py",
        "local_losses/groups.py",
    },
    "torch.distributed.launcher": {"cli/launch.py"},
    "torch.distributed.elastic": {"cli/launch.py"},
    "torch.distributed.run": {"cli/launch.py"},
    "torch.distributed.pipelining": {"stages/tracer.py"},
    "torch.distributed.checkpoint": set(),
}


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "armillary"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def imported(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at module level) of every import; relative imports are resolved."""
    tree = tree_of(path)
    typing = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    top = {id(node) for node in (*tree.body, *(one for block in typing for one in block.body))}
    names = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["armillary", *path.relative_to(ROOT).parts[:-1]]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.append((module, id(node) in top))
            names += [(f"{module}.{alias.name}", id(node) in top) for alias in node.names if module == "torch"]
    return names


def test_imports_go_one_way():
    for path in FILES:
        me = room_of(path)
        for name, _ in imported(path):
            if name.startswith("armillary."):
                room = name.split(".")[1]
                assert room == me or room in MAY_IMPORT[me], f"{path.relative_to(ROOT)} must not import {name}"


# Inside a room: its inner rooms, "" for the files that stand in none, and which of them each may import.
INSIDE = {
    "schedules": {"": {"corrections"}, "corrections": {""}},
}


def inner_room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[1] if len(parts) > 2 else ""


def test_imports_go_one_way_between_rooms_inside_rooms():
    files = {".".join(["armillary", *path.relative_to(ROOT).with_suffix("").parts]): path for path in FILES}
    for path in FILES:
        for name, _ in imported(path):
            if name not in files or room_of(files[name]) != room_of(path) or room_of(path) == "armillary":
                continue
            me, other = inner_room_of(path), inner_room_of(files[name])
            allowed = INSIDE.get(room_of(path), {"": set()})[me]
            assert other == me or other in allowed, f"{path.relative_to(ROOT)} must not import {name}"


def mixed_tuples(path: Path) -> set[str]:
    """Parameters of functions that are typed as tuples of several types."""
    found = set()
    for function in nodes_of(path):
        if not isinstance(function, ast.FunctionDef):
            continue
        for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            for node in ast.walk(one.annotation) if one.annotation else ():
                if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple":
                    parts = {ast.unparse(part) for part in getattr(node.slice, "elts", ())}
                    if len(parts) > 1 and "..." not in parts:
                        found.add(f"{path.relative_to(ROOT).as_posix()}: {function.name}({one.arg})")
    return found


def test_an_argument_of_several_things_has_a_named_type():
    assert not set().union(*map(mixed_tuples, FILES))


def test_a_public_class_name_means_one_thing():
    found = Counter(
        node.name for path in FILES for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )  # fmt: skip
    twice = {name for name, count in found.items() if count > 1}
    assert not twice, f"one word, one thing: {twice}"


def test_the_package_gives_the_names_of_its_face():
    assert armillary.__all__ == face.__all__ and set(face.__all__) < set(dir(armillary))
    assert all(getattr(armillary, name) is getattr(face, name) for name in face.__all__)


def test_every_room_is_on_the_map():
    assert {room_of(path) for path in FILES} <= MAY_IMPORT.keys()


def test_no_module_hides_a_public_name():
    """A module that is imported becomes an attribute of its room, and would stand in place of a function so called."""
    rooms = [path for path in FILES if path.name == "__init__.py"]
    modules = {".".join(["armillary", *path.relative_to(ROOT).with_suffix("").parts]) for path in FILES}
    for name in modules - {"armillary.cli.__main__"}:
        import_module(name.removesuffix(".__init__"))
    for path in rooms:  # the package itself is one
        room = import_module(".".join(["armillary", *path.relative_to(ROOT).parts[:-1]]))
        for name in getattr(room, "__all__", ()):
            assert not isinstance(getattr(room, name), ModuleType), f"{room.__name__}.{name} is a module"


def test_only_named_files_touch_the_network():
    for path in FILES:
        me = path.relative_to(ROOT).as_posix()
        for name, _ in imported(path):
            if not name.startswith("torch.distributed"):
                continue
            part = max((key for key in NETWORK if name == key or name.startswith(key + ".")), key=len)
            assert me in NETWORK[part], f"{me} must not import {name}"


COMMANDS = ("advise", "train", "plan", "compare", "measure", "simulate", "twin", "verify", "residency")

# Imports that wait until they are needed, since the start of every rank would pay for them, by file.
LAZY = {
    "residency/planner.py": {"scipy.optimize", "scipy.sparse"},  # a fifth of a second, for who plans
    "stages/tracer.py": {"torch.distributed.pipelining"},  # brings torch._dynamo: as long again as torch itself
    "session/run_folder.py": {"armillary.session.plots"},  # brings matplotlib
    "session/advice_page.py": {"matplotlib.figure"},
    "session/simulate.py": {"matplotlib.figure"},
    "session/twin_page.py": {"matplotlib.figure"},
    "repurpose/restructuring.py": {"scipy.optimize"},
    "repurpose/shards.py": {"matplotlib.figure"},
    "feeds/redis_writer.py": {"redis", "redis.backoff", "redis.retry"},  # an extra
    "feeds/writer.py": {"armillary.feeds.redis_writer"},
    "feeds/stream.py": {"armillary.feeds.redis_lists"},
    "feeds/server.py": {"armillary.feeds.redis_lists"},
    "cli/entry.py": {"armillary.cli.main"},  # brings typer and rich, an extra
    # A command is imported, and torch with it, when it is called: not to print help or to refuse a name.
    "cli/main.py": {f"armillary.cli.{name}" for name in COMMANDS},
}
# The face, rooms that are read without torch, what stands on a shelf, the user's workload, and files of the user's own.
BY_NAME = {
    "__init__.py",
    "feeds/__init__.py",
    "plans/__init__.py",
    "plans/advice.py",
    "plans/registry.py",
    "cli/names.py",
}


def test_no_import_is_lazy_but_those_that_are_named():
    found = {}
    for path in FILES:
        late = {name for name, at_top in imported(path) if not at_top}
        if late:
            found[path.relative_to(ROOT).as_posix()] = late
    assert found == LAZY
    assert {path.relative_to(ROOT).as_posix() for path in FILES if "import_module(" in path.read_text()} == BY_NAME


def test_there_is_no_import_cycle_between_files():
    module = {".".join(["armillary", *path.relative_to(ROOT).with_suffix("").parts]): path for path in FILES}
    edges = {me: {name for name, _ in imported(path) if name in module and name != me} for me, path in module.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join([*trail, name])}"
        if name not in done:
            for other in edges[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in module:
        visit(name, ())


LONGEST = {"feeds/writer.py": 475}  # lines; users copy it, so it stands alone


def test_files_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        most = LONGEST.get(path.relative_to(ROOT).as_posix(), 430)
        assert text.count("\n") <= most, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines; split it"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 80, f"{path.relative_to(ROOT)}: {node.name} has {lines} lines"


# Signatures that are not ours to shorten: torch's, and the face, whose parameters are its options.
LONG = {
    "advise",
    "apart",
    "attach",
    "auto_plan",
    "hold",
    "parallelize",
    "_embedding_bag",
    "_traced_embedding_bag",
    "plan",
    "sample",
    "split",
    "twin",
    "verify",
}


def test_no_function_takes_more_than_seven_arguments():
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef) and node.name not in LONG:
                found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [one.arg for one in found if one.arg not in ("self", "cls")]
                assert len(names) <= 7, f"{path.relative_to(ROOT)}: {node.name} takes {names}"


def faces_of_rooms() -> set[str]:
    """What rooms beside the step give to users, and the public methods of it."""
    found = set()
    for room in MAY_IMPORT.keys() - {"armillary"} - PUBLIC_ROOMS:
        module = import_module(f"armillary.{room}")
        for name in getattr(module, "__all__", ()):
            given = getattr(module, name)
            found |= {name, *(vars(given) if isinstance(given, type) else ())}
    return found


# Called from outside, or the truth of a departure, which tests hold runs to.
CALLED_ELSEWHERE = {
    "_repr_html_", "carry_apart", "commands", "ema", "in_a_row", "keep_untouched_rows", "register_operation",
}  # fmt: skip


def test_nothing_is_there_that_only_tests_call():
    defined: dict[str, str] = {}
    used: set[str] = set()
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not (node.decorator_list or "__" in node.name):
                defined[node.name] = path.relative_to(ROOT).as_posix()
            elif isinstance(node, ast.Attribute | ast.Name):
                used.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    used |= CALLED_ELSEWHERE | set(face.__all__) | faces_of_rooms()
    dead = {name: path for name, path in defined.items() if name not in used}
    assert not dead, f"nobody in the source calls these: {dead}"


def test_every_file_says_what_it_is():
    for path in FILES:
        assert ast.get_docstring(tree_of(path)), f"{path.relative_to(ROOT)} has no docstring"


@cache
def said(path: Path) -> list[str]:
    """Every text in the code that is no docstring."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    docs = {
        id(node.body[0].value) for node in nodes_of(path) if isinstance(node, documented) and ast.get_docstring(node)
    }
    texts = [node for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node.value for node in texts if id(node) not in docs]


# Who may name an exchange, a codec or a correction: the paper's rule, and examples in texts of the command line.
NAMES_METHODS = {"planning/constraints.py", "cli/request.py", "cli/options.py", "cli/simulate.py"}


def test_no_exchange_codec_or_correction_is_known_by_name():
    """One more of them is one more file."""
    names = {*dense_exchanges(), *row_exchanges(), *CODECS.all(), *CORRECTIONS.all()}
    for path in FILES:
        me = path.relative_to(ROOT).as_posix()
        if room_of(path) not in ("exchanges", "codecs", "schedules", "workloads") and me not in NAMES_METHODS:
            words = {word for text in said(path) for word in re.findall(r"\w+", text)}
            assert not words & names, f"{path.relative_to(ROOT)} names {words & names}"
            modules = {f"armillary.exchanges.{name}" for name in names}
            if room_of(path) == "planning":
                assert not modules & {name for name, _ in imported(path)}, path


WORDS = {"accumulation", "pipeline", "ring", "simultaneous"}  # schedules whose names English has too


def test_no_schedule_is_known_by_name():
    """One more schedule is one more file: what others must know of it stands in its registry entry. Its own file names
    it alone, and a room that is called as it is."""
    names = set(SCHEDULES.all())
    assert names > WORDS
    own = {(f"schedules/{name}.py", name) for name in names} | {("plans/plan.py", SIMULTANEOUS.name)}  # the default
    own.add(("tensor/ways.py", "ring"))  # ring self-attention, which no plan knows
    for path in FILES:
        me, texts = path.relative_to(ROOT).as_posix(), said(path)
        words = {word for text in texts for word in re.findall(r"\w+", text)} - WORDS
        found = {name for name in names & {*texts, *words} if (me, name) not in own} - {room_of(path)}
        assert not found, f"{me} names {found}; ask the registry entry instead"


def test_a_schedules_file_names_only_itself():
    names = set(SCHEDULES.all())
    for path in FILES:
        if room_of(path) == "schedules":
            found = names.intersection(said(path)) - {path.stem}
            assert not found, f"{path.relative_to(ROOT)} names {found}"
    assert names <= {path.stem for path in FILES if room_of(path) == "schedules"}  # a file each, of its name


def test_no_edge_method_is_known_outside_its_file():
    assert EDGES.all()
    for name, made in EDGES.all().items():
        for path in FILES:
            if path.stem != name:
                words = {word for text in said(path) for word in re.findall(r"\w+", text)}
                assert name not in words, f"{path.relative_to(ROOT)} names {name}"
                imports = {module for module, _ in imported(path)}
                assert made.__module__ not in imports, f"{path.relative_to(ROOT)} imports {made.__module__}"


def test_no_placement_is_known_but_to_its_schedules_files():
    """What crosses because of it, it says itself; so nobody asks which it is."""
    own = {entry.placement.of.__module__ for entry in SCHEDULES.all().values() if entry.placement.of is not None}
    assert own
    for path in FILES:
        for module in own.intersection(name for name, _ in imported(path)):
            assert path.stem.startswith(module.rpartition(".")[2]), f"{path.relative_to(ROOT)} imports {module}"


ADVISE = ("session/advise.py", "session/asked_methods.py", "session/advice_page.py")


def test_who_asks_all_methods_for_advice_names_none():
    rooms = {room_of(path) for path in FILES if path.name == "advice.py"} - {"plans"}
    methods = {*dense_exchanges(), *row_exchanges(), *CODECS.all(), *SCHEDULES.all(), *rooms} - WORDS
    rows = set(advisers())
    assert len(rooms) > 5 and "KARMA" in rows
    for me in (*ADVISE, "cli/advise.py", "plans/advice.py"):
        text = (ROOT / me).read_text()
        found = methods.intersection(re.findall(r"\w+", text))
        found |= {row for row in rows if re.search(rf"\b{re.escape(row)}\b", text)}
        assert not found, f"{me} names {found}; each says itself what it is"


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

# What a benchmark imports beside the face, by folder; its page says why. All others speak through the face.
REACHES_INSIDE = {
    "apart": {
        "schedules.one_f_one_b",
        "stages.interpreter",
        "stages.partition",
        "stages.train_spec",
        "transport.point_to_point",
        "transport.transport",
    },
    "breakdown": {"transport.transport"},
    "cyclic_accuracy": {
        "models.structure",
        "reference.versions",
        "runtime.dense_unit",
        "schedules.cyclic",
        "schedules.delayed_all_reduce",
        "schedules.simultaneous",
        "session.delayed_loop",
        "stages.interpreter",
        "stages.partition",
        "stages.reducer",
        "stages.train_spec",
        "transport.transport",
    },
    "cyclic_memory": {
        "schedules.accumulation",
        "schedules.cyclic",
        "schedules.simultaneous",
        "stages.interpreter",
        "stages.partition",
        "stages.train_spec",
        "transport.transport",
    },
    "cyclic_pipeline": {
        "schedules.cyclic",
        "schedules.gpipe",
        "schedules.one_f_one_b",
        "stages.interpreter",
        "stages.partition",
        "stages.train_spec",
        "transport.requests",
        "transport.transport",
    },
    "cyclic_ring": {
        "runtime.dense_unit",
        "schedules.cyclic",
        "session.delayed_loop",
        "stages.interpreter",
        "stages.partition",
        "stages.reducer",
        "stages.train_spec",
        "transport.transport",
    },
    "cyclic_shared": {
        "schedules.cyclic",
        "schedules.gpipe",
        "schedules.shared_stages",
        "stages.interpreter",
        "stages.partition",
        "stages.train_spec",
        "transport.transport",
    },
    "edges": {"reference.edges", "reference.versions"},
    "gossip": {"reference.replicas", "session.truth", "session.twin"},
    "in_situ": {"feeds.folder"},
    "local_losses": {
        "models.preserved_state",
        "schedules.cyclic",
        "schedules.local_losses",
        "schedules.one_f_one_b",
        "stages.interpreter",
        "stages.partition",
        "stages.train_spec",
        "transport.point_to_point",
        "transport.transport",
    },
    "local_steps": {"reference.replicas"},
    "lossy": {"reference.replicas", "session.truth", "session.twin"},
    "mesh": {"models.preserved_state"},
    "netlab": {"transport.transport"},
    "out_of_core": {
        "models.preserved_state",
        "residency.lanes",
        "residency.planner",
        "residency.stage_costs",
        "residency.tier",
    },
    "parallax": {"planning.prefetch", "transport.transport"},
    "planner": {
        "session.autotune",
        "planning.pricing",
        "planning.request",
        "planning.simulator",
        "session.attach",
        "session.job",
        "transport.transport",
    },
    "repurpose": {"repurpose.cut_chain", "repurpose.layer_chain", "repurpose.restructuring", "repurpose.search"},
    "start_up": {"planning.memory", "planning.pricing"},
    "transfer": {"exchanges.look_up", "transport.groups", "transport.transport"},
    "turns": {"transport.pairwise", "transport.transport"},
}
OF_A_USERS_FILE = "session.workload"  # the type of what a workload is


PUBLIC_ROOMS = {"codecs", "exchanges", "schedules", "plans"}  # whose names a method's author imports


def inner_modules(path: Path) -> set[str]:
    """What a file imports of the package that is neither its face, nor a public room, nor a workload."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            room = node.module.removeprefix("armillary.")
            is_room = node.module.count(".") < 2 and node.module != "armillary" and room not in PUBLIC_ROOMS
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if is_room else {node.module}
    inner = {name.removeprefix("armillary.") for name in names if name.startswith("armillary.")} - PUBLIC_ROOMS
    return {name for name in inner if not name.startswith("workloads") and name != OF_A_USERS_FILE}


def test_benchmarks_speak_through_the_face_but_for_those_that_say_why_not():
    for folder in {path.parent for path in BENCHMARKS.rglob("*.py")}:
        name = folder.relative_to(BENCHMARKS).parts[0] if folder != BENCHMARKS else ""
        inside = set().union(*map(inner_modules, folder.glob("*.py"))) - REACHES_INSIDE.get(name, set())
        assert not inside, f"benchmarks/{name} imports {inside}; armillary's own names are its face"
    for name in REACHES_INSIDE:
        assert "eaches inside the library: " in (BENCHMARKS / name / "README.md").read_text(), name


def test_there_are_no_environment_variables_of_our_own():
    for path in FILES:
        assert "ARMILLARY_" not in path.read_text(), path


# The truths, and what they must not share with what they judge.
TRUTHS = ("session/truth.py",)
JUDGED = ("transport/transport.py", "stages/", "runtime/executor.py")


def reached(path: Path) -> set[Path]:
    """The files that an import of this one brings."""
    files = {".".join(["armillary", *one.relative_to(ROOT).with_suffix("").parts]): one for one in FILES}
    found, waiting = set[Path](), [path]
    while waiting:
        for name, _ in imported(waiting.pop()):
            if name in files and files[name] not in found:
                found.add(files[name])
                waiting.append(files[name])
    return found


def test_a_truth_shares_nothing_with_what_cuts_carries_out_or_sends():
    for path in FILES:
        me = path.relative_to(ROOT).as_posix()
        if me in TRUTHS or room_of(path) == "reference":
            brought = {one.relative_to(ROOT).as_posix() for one in reached(path)}
            assert not [one for one in brought if one.startswith(JUDGED)], me
    assert all((ROOT / one).exists() for one in TRUTHS)
    judge = {one.relative_to(ROOT).as_posix() for one in reached(ROOT / "session/verifiers.py")}
    assert any(one.startswith(JUDGED) for one in judge)  # so that the look above can fail
