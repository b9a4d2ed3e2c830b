"""How many lines of a one-process program its user must write or change for a framework.

Counted on the programs that run here: the lines of a contender's program, and of what it uses of its own file, that the
one-process program does not have. Python's own parser writes both anew first, a statement a line, so layout, comments
and docstrings do not count; imports do. What the benchmark needs for itself (one start for all, our plan kept between
turns, Horovod's start inside a process that others use too) is in other files and counts for nobody, nor do
`sparse=True` models (`sparse.py`) and functions named in BENCHMARK.
"""

import ast
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent / "contenders"
BENCHMARK = frozenset({"copy_rows"})
PLAIN = ("alone", "train")
PROGRAMS = {
    "ddp": ("ddp", "train"),
    "ddp_sparse": ("ddp", "train_sparse"),
    "fsdp2": ("fsdp2", "train"),
    "zero_redundancy": ("zero_redundancy", "train"),
    "deepspeed_0": ("with_deepspeed", "train"),
    "deepspeed_2": ("with_deepspeed", "train"),
    "deepspeed_3": ("with_deepspeed", "train"),
    "deepspeed_0_sparse": ("with_deepspeed", "train_sparse"),
    "horovod": ("with_horovod", "train"),
    "horovod_sparse": ("with_horovod", "train_sparse"),
    "horovod_merged": ("with_horovod", "train_merged"),
    "torchrec_by_hand": ("with_torchrec", "train"),
    "torchrec": ("with_torchrec", "train"),
    "torchrec_scrambled": ("with_torchrec", "train"),
    "torchrec_bags": ("with_torchrec_bags", "train"),
    "ours": ("ours", "train"),
    "ours_ahead": ("ours", "train_ahead"),
}


def changed_lines(contender: str) -> int:
    file, function = PROGRAMS[contender]
    return counted(program((FOLDER / f"{file}.py").read_text(), function), plain())


def plain() -> list[str]:
    file, function = PLAIN
    loop = (FOLDER.parent / "case.py").read_text()
    return program((FOLDER / f"{file}.py").read_text(), function) + program(loop, "plain_loop")


def counted(theirs: list[str], one_process: list[str]) -> int:
    """Lines of one program that the other does not have, as often as they stand there."""
    return (Counter(theirs) - Counter(one_process)).total()


def program(source: str, function: str) -> list[str]:
    """The lines of a function, of what it uses of its file, and of the imports these use.

    Raises:
        ValueError: there is no such function.
    """
    tree = ast.parse(source)
    defined = {name: node for node in tree.body for name in _names(node)}
    if function not in defined:
        raise ValueError(f"lines: no {function!r} in this file; there are {', '.join(defined)}")
    wanted, seen = [function], {function}
    for name in wanted:
        used = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)} - seen - BENCHMARK
        wanted += [other for other in defined if other in used]
        seen |= used
    kept = {id(defined[name]): defined[name] for name in wanted}
    lines = [line.strip() for node in kept.values() for line in _lines(node)]
    return [line for line in lines if not any(line.startswith(f"{name}(") for name in BENCHMARK)]


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _lines(node: ast.stmt) -> list[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node).splitlines()
