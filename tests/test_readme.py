"""Every figure of the README's table stands in the table that its benchmark made."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTENDERS = {
    "DDP `sparse=True`": "ddp_sparse",
    "Horovod, sparse": "horovod_sparse",
    "TorchRec, tuned by hand": "torchrec_by_hand",
    "Armillary": "ours",
    "Armillary, with prefetch": "ours_ahead",
}


def rows(text):
    """The cells of each row of Markdown tables, without emphasis."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return [[cell.strip().replace("**", "") for cell in line.strip("|").split("|")] for line in lines]


def measured():
    """Contender -> (ms a step, MiB a worker, lines), of the first table at 100 Mbit/s that has it."""
    page = (ROOT / "benchmarks" / "peers" / "README.md").read_text()
    found = {}
    for cells in rows(page.split("### lm8, 100 Mbit/s")[1].split("###")[0]):
        if cells[0] != "contender":
            found.setdefault(cells[0], (cells[2].split(" ")[0], cells[6], cells[7]))
    return found


def test_every_figure_of_the_table_was_measured():
    readme = (ROOT / "README.md").read_text()
    told = {cells[0]: tuple(cells[1:]) for cells in rows(readme) if cells[0] in CONTENDERS}
    assert told == {name: measured()[contender] for name, contender in CONTENDERS.items()}


def test_links_lead_somewhere():
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", readme)
    assert links and [link for link in links if not (ROOT / link).exists()] == []
