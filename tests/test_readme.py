"""Every figure of the README's table stands on the page that its benchmark wrote."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"
FIGURES = (PEERS / "figures.md").read_text()
CONTENDERS = {
    "DDP `sparse=True`": "ddp_sparse",
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
    found = {}
    for cells in rows(FIGURES.split("## lm8, 100 Mbit/s")[1].split("##")[0]):
        if cells[0] != "contender":
            found.setdefault(cells[0], (cells[2].split(" ")[0], cells[6], cells[7]))
    return found


def test_every_figure_of_the_table_was_measured():
    readme = (ROOT / "README.md").read_text()
    told = {cells[0]: tuple(cells[1:]) for cells in rows(readme) if cells[0] in CONTENDERS}
    assert told == {name: measured()[contender] for name, contender in CONTENDERS.items()}


UNITS = "ms|s|MiB|GiB|kB|MB|GB|%|Mbit/s|Gbit/s|minutes|times|workers"
FIGURE = rf"\d[\d,]* x \d+|\d[\d.,]* ?(?:{UNITS})\b"


def test_every_other_figure_stands_on_the_page_of_its_benchmark():
    """Outside the table and the blocks of code, but for how many workers the library was tested with."""
    timed = " ".join(f"{ms} ms" for ms, _, _ in measured().values())
    page = f"{(PEERS / 'README.md').read_text()} {FIGURES} {timed}"
    readme = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^(?:\||    ).*$", "", readme, flags=re.MULTILINE).replace("\n", " ")
    spoken = prose[: prose.index("**Tested**")] + prose[prose.index("## Beside") :]
    told = re.findall(FIGURE, spoken)
    assert {"400,000 x 256", "100 Mbit/s", "1.43 GB"} <= set(told)
    turned = re.sub(r"workers (\d+)", r"\1 workers", page)
    assert [figure for figure in told if figure not in turned] == []


def test_the_page_of_advice_is_the_one_that_its_own_page_shows():
    shown = re.search(r"^```console\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    command, *lines = shown.splitlines()
    page = (ROOT / "docs" / "advise.md").read_text()
    assert len(lines) >= 10 and command.removeprefix("$ ") in page
    assert [line for line in lines if line not in page.splitlines()] == []
