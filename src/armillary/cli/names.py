"""Names that are typed on a command line, found or refused without torch: workloads, methods, files of your own.

Help and refusals must not wait for torch, so names are read off the source as text: a file registers a method of its
name. A refusal is one line, with exit code 2.

A workload is built in, or a file with a function `workload(**options)` (see `session/workload.py`). For `--small` and
`verify` it has a dictionary SMALL of options. Files of the user's own that register codecs, exchanges and schedules are
imported while the command line is read. Workers get the same command line, so each imports the same files.
"""

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import typer

if TYPE_CHECKING:
    from armillary.session.workload import Workload

__all__ = [
    "FAILED",
    "UNEQUAL",
    "USAGE",
    "Refused",
    "aliases",
    "aliases_in",
    "built_in",
    "codecs",
    "edges_only",
    "exchanges",
    "find",
    "import_own",
    "look_in",
    "modules_with",
    "options_in",
    "refuse_unknown",
    "refusing",
    "schedules",
    "small",
]


def modules_with(package: str, line: str) -> tuple[str, ...]:
    """Names of the modules in a package that have a line of this form, in order."""
    return tuple(sorted(name for name, source in _modules(package) if re.search(line, source, re.MULTILINE)))


def aliases_in(package: str) -> tuple[str, ...]:
    """Aliases under which modules of a package register their methods, in order."""
    written = [text for _, source in _modules(package) for text in re.findall(r"aliases=\{(.*?)\},\n", source)]
    return tuple(sorted(name for text in written for name in re.findall(r'"(\w+)": \{', text)))


def _modules(package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package, each with its source. They are not imported, nor is the package, which brings torch."""
    found = importlib.util.find_spec(package)
    for folder in [] if found is None else list(found.submodule_search_locations or []):
        for path in Path(folder).glob("*.py"):
            yield path.stem, path.read_text()


def options_in(path: Path) -> tuple[str, ...] | None:
    """The options of the function `workload` in a file: its parameters and, where it passes **options on to a
    dataclass of the file, the fields of that. None where the text does not tell."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "workload"]
    if len(made) != 1:
        return None
    takes = made[0].args
    named = tuple(one.arg for one in (*takes.posonlyargs, *takes.args, *takes.kwonlyargs))
    if takes.kwarg is None:
        return named
    passed = [
        classes.get(node.func.id)
        for node in ast.walk(made[0])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and any(word.arg is None for word in node.keywords)
    ]
    if len(passed) != 1 or passed[0] is None or not _is_dataclass(passed[0]):
        return None
    fields = [
        node.target.id
        for node in passed[0].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_of_class(node)
    ]
    return (*named, *fields)


def _is_of_class(node: ast.AnnAssign) -> bool:
    """Whether it is the class's own and no field."""
    return bool(re.match(r"(typing\.)?ClassVar\b", ast.unparse(node.annotation)))


def _is_dataclass(node: ast.ClassDef) -> bool:
    """One that inherits nothing, whose fields all stand in its body."""
    names = [ast.unparse(one) for one in node.decorator_list]
    return not node.bases and any(re.match(r"(dataclasses\.)?dataclass\b", name) for name in names)


PACKAGES = ("armillary.schedules", "armillary.codecs", "armillary.exchanges")


def edges_only() -> tuple[str, ...]:
    """What an edge may be besides a codec; "same" is its way back by its own."""
    return (*modules_with("armillary.schedules", r"^EDGES\.register\("), "same")


def schedules() -> tuple[str, ...]:
    return modules_with("armillary.schedules", r"^SCHEDULES\.register\(")


def codecs() -> tuple[str, ...]:
    return modules_with("armillary.codecs", r"^@codec\(")


def exchanges() -> tuple[str, ...]:
    """Dense ones and those of rows; a codec is a dense exchange too."""
    own = modules_with("armillary.exchanges", r"^@(dense|row)_exchange\(")
    return tuple(sorted({*own, *codecs()}))


def aliases() -> tuple[str, ...]:
    """Other names of all of these."""
    return tuple(sorted(name for package in PACKAGES for name in aliases_in(package)))


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


def import_own(named: Sequence[str]) -> list[str]:
    """Imports files by their paths, and modules by their names; a refusal ends the process.

    A file is imported under its own name, so whoever else writes `import my_codecs` gets the same one.
    """
    for name in named:
        with refusing():
            (_import_file if name.endswith(".py") else _import_module)(name)
    return list(named)


def look_in(folder: Path) -> None:
    """Lets Python find what lies in this folder, as beside a script that it runs; that hides nothing else."""
    if (found := str(folder.resolve())) not in sys.path:
        sys.path.append(found)


def _import_file(name: str) -> None:
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"--import: no file {name}; pass the path of a .py file, or a module's name")
    look_in(path.parent)
    found = importlib.import_module(path.stem).__file__
    if found is None or not path.samefile(found):
        raise ValueError(f"--import: Python has another module {path.stem}, {found}; give {name} another name")


def _import_module(name: str) -> None:
    look_in(Path())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        wanted = "pass the path of a .py file, or a module's name"
        raise ValueError(f"--import: no module {name!r}; {wanted}") from None


PACKAGE = "armillary.workloads"
METHODS = ("model", "optimizer", "batches", "loss", "samples", "evaluate", "report")
FIELDS = ("name", "unit", "steps", "batch_size")


def built_in() -> tuple[str, ...]:
    """The workloads that come with the package, by name."""
    return modules_with(PACKAGE, r"^def workload\(")


def refuse_unknown(name_or_path: str, options: Iterable[str]) -> None:
    """Says what is wrong with the names, as far as the source files tell it; imports nothing.

    Raises:
        ValueError: no such workload or file, or the workload has no such option.
    """
    known = options_in(_source(name_or_path))
    for option in options:
        if known is not None and option not in known:
            wanted = _instead(option, known, "it has")
            raise ValueError(f"workload: {name_or_path} has no option {option!r}; {wanted}")


def find(name_or_path: str, options: Mapping[str, Any]) -> "Workload":
    """The built-in workload of that name, or that of the user's file, with its options.

    Raises:
        ValueError: no such workload or file; the file has no `workload`; what it returns lacks a method; the
            workload has no such option, or refuses its value.
    """
    refuse_unknown(name_or_path, options)
    module = _module(name_or_path)
    make = getattr(module, "workload", None)
    if not callable(make):
        raise ValueError(
            f"workload: {name_or_path} has no function workload(**options); "
            f"it must return an object with {', '.join(f'{name}()' for name in METHODS)}, {', '.join(FIELDS)}. "
            "For a model in a script, call armillary.advise or armillary.parallelize there"
        )
    made = _make(make, name_or_path, options)
    missing = [f"{name}()" for name in METHODS if not callable(getattr(made, name, None))]
    missing += [name for name in FIELDS if not hasattr(made, name)]
    if missing:
        raise ValueError(f"workload: what workload() in {name_or_path} returns lacks {', '.join(missing)}; add them")
    return cast("Workload", made)


def small(name_or_path: str) -> dict[str, Any]:
    """The options that make the workload small: its module's SMALL, empty if it has none."""
    return dict(getattr(_module(name_or_path), "SMALL", {}))


def _instead(name: str, known: Sequence[str], there_are: str) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {near[0]!r}? {there_are.capitalize()}" if near else there_are
    return f"{guess} {', '.join(known)}"


def _source(name_or_path: str) -> Path:
    """The file that holds a workload.

    Raises:
        ValueError: there is none.
    """
    known, path = built_in(), Path(name_or_path)
    if name_or_path in known:
        spec = importlib.util.find_spec(f"{PACKAGE}.{name_or_path}")
        assert spec is not None and spec.origin is not None, f"{name_or_path=}"
        return Path(spec.origin)
    if path.suffix != ".py":
        raise ValueError(
            f"workload: no workload {name_or_path!r}; {_instead(name_or_path, known, 'there are')}, "
            "or pass the path of a .py file"
        )
    if not path.is_file():
        raise ValueError(f"workload: no file {path}; pass the path of a .py file, or one of {', '.join(known)}")
    return path


def _module(name_or_path: str) -> ModuleType:
    path = _source(name_or_path)
    if name_or_path in built_in():
        return importlib.import_module(f"{PACKAGE}.{name_or_path}")
    spec = importlib.util.spec_from_file_location(f"workload of {path}", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    look_in(path.parent)
    spec.loader.exec_module(module)
    return module


def _make(make: Callable[..., Any], name_or_path: str, options: Mapping[str, Any]) -> Any:
    try:
        return make(**options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        unknown = str(error).split("argument ")[-1].partition(". Did you")[0]
        raise ValueError(f"workload: {name_or_path} has no option {unknown}; its source says which it has") from error
