"""The page of all tables, from whatever records are there."""

from pathlib import Path

from benchmarks.measuring.bars import Bar, table
from benchmarks.measuring.record import Record, load, machines
from benchmarks.parallax import race, standings, tables

__all__ = ["page", "write"]

TASKS = ("language_model", "translation")
CURVES = "curves.png"


def write(results: Path) -> None:
    """figures.md, beside the folder of records."""
    (results.parent / "figures.md").write_text(page(results))


def page(results: Path) -> str:
    records = {path.stem: load(path) for name in ("sweep", "ablation", "scaling") for path in _paths(results, name)}
    races = {path.stem: race.load(path) for path in sorted(results.glob("curves_*.json"))}
    ran = [record.conditions for record in records.values()] + [one.conditions for one in races.values()]
    lines = [machines(str(conditions["machine"]) for conditions in ran), ""]
    for title, name, told in (
        ("Sparsity", "sweep", tables.sweep),
        ("Ablation: samples per second", "ablation", tables.ablation),
        ("Scaling: samples per second", "scaling", tables.scaling),
    ):
        mine = {stem: record for stem, record in records.items() if stem.startswith(name)}
        if mine:
            lines += [f"## {title}", "", _said(next(iter(mine.values()))), "", told(mine)]
    lines += ["## Curves", "", *map(standings.table, races.values())]
    if (results / CURVES).exists():
        lines += [f"![Held-out metrics against steps and against time]({results.name}/{CURVES})", ""]
    judged = tables.bars(records)
    for task in TASKS:
        if f"curves_{task}" not in races:
            judged.append(Bar(f"{task}: all sides reach the target and learn alike", "yes", [], bool))
    judged += [bar for one in races.values() for bar in standings.bars(one)]
    return "\n".join([*lines, "## Bars", "", *table(judged)]) + "\n"


def _paths(results: Path, name: str) -> list[Path]:
    """The longest sequences and the fewest workers first."""
    paths = sorted(results.glob(f"{name}_*.json"))
    if name == "ablation":
        return paths
    return sorted(paths, key=lambda path: int(path.stem.rpartition("_")[2]), reverse=name == "sweep")


def _said(record: Record) -> str:
    told = record.conditions
    return f"Links of {told['Mbit/s']:g} Mbit/s; {told['rounds']} rounds, a turn of {told['timed steps']} steps."
