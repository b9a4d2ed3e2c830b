"""Finds a workload: one that comes with the package, by name, or one in a file of the user's, by path.

Such a file is a plain module with a function `workload(**options)` (see `session/workload.py` for what it returns) and,
for `--small` and `verify`, a dictionary SMALL of the options that make it small.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from armillary.cli.own_files import look_in
from armillary.cli.sources import modules_with, options_in

if TYPE_CHECKING:
    from armillary.session.workload import Workload

__all__ = ["built_in", "find", "refuse_unknown", "small"]

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
            "it must return an object with model(), optimizer(), batches(), loss() and so on"
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
