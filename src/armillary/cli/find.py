"""Finds a workload: one that comes with the package, by name, or one in a file of the user's, by path.

Such a file is a plain module with a function `workload(**options)` (see `session/workload.py` for what it returns) and,
for `--small` and `verify`, a dictionary SMALL of the options that make it small.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import armillary.workloads
from armillary.session.workload import Workload

__all__ = ["built_in", "find", "small"]

METHODS = ("model", "optimizer", "batches", "loss", "samples", "evaluate", "report")
FIELDS = ("name", "unit", "steps", "batch_size")


def built_in() -> tuple[str, ...]:
    """The workloads that come with the package, by name."""
    names = []
    for found in pkgutil.iter_modules(armillary.workloads.__path__):
        spec = importlib.util.find_spec(f"armillary.workloads.{found.name}")
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        if re.search(r"^def workload\(", source, re.MULTILINE):
            names.append(found.name)
    return tuple(sorted(names))


def find(name_or_path: str, options: Mapping[str, Any]) -> Workload:
    """The built-in workload of that name, or that of the user's file, with its options.

    Raises:
        ValueError: no such workload or file; the file has no `workload`; what it returns lacks a method; the
            workload has no such option, or refuses its value.
    """
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
    return cast(Workload, made)


def small(name_or_path: str) -> dict[str, Any]:
    """The options that make the workload small: its module's SMALL, empty if it has none."""
    return dict(getattr(_module(name_or_path), "SMALL", {}))


def _module(name_or_path: str) -> ModuleType:
    if name_or_path in built_in():
        return importlib.import_module(f"armillary.workloads.{name_or_path}")
    path = Path(name_or_path)
    if path.suffix != ".py":
        raise ValueError(
            f"workload: no workload {name_or_path!r}; there are {', '.join(built_in())}, or pass the path of a .py file"
        )
    if not path.is_file():
        raise ValueError(f"workload: no file {path}; pass the path of a .py file, or one of {', '.join(built_in())}")
    spec = importlib.util.spec_from_file_location(f"workload of {path}", path)
    assert spec is not None and spec.loader is not None, f"{path=}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _make(make: Callable[..., Any], name_or_path: str, options: Mapping[str, Any]) -> Any:
    try:
        return make(**options)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        unknown = str(error).split("argument ")[-1]
        raise ValueError(f"workload: {name_or_path} has no option {unknown}; its source says which it has") from error
