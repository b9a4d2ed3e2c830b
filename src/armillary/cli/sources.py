"""What source files say when read as text: names of workloads and schedules, options of a workload.

To import them takes torch and seconds; help and refusals must not wait for it.
"""

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["aliases_in", "modules_with", "options_in"]


def modules_with(package: str, line: str) -> tuple[str, ...]:
    """Names of the modules in a package that have a line of this form, in order."""
    return tuple(sorted(name for name, source in _modules(package) if re.search(line, source, re.MULTILINE)))


def aliases_in(package: str) -> tuple[str, ...]:
    """Aliases under which modules of a package register their methods, in order."""
    written = [text for _, source in _modules(package) for text in re.findall(r"aliases=\{(.*?)\},\n", source)]
    return tuple(sorted(name for text in written for name in re.findall(r'"(\w+)": \{', text)))


def _modules(package: str) -> Iterator[tuple[str, str]]:
    """The modules of a package, each with its source."""
    found = importlib.util.find_spec(package)
    folders = [] if found is None else list(found.submodule_search_locations or [])
    for module in pkgutil.iter_modules(folders, f"{package}."):
        spec = importlib.util.find_spec(module.name)
        if spec is not None and spec.origin:
            yield module.name.rpartition(".")[2], Path(spec.origin).read_text()


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
