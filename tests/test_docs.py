"""The pages of docs/: the code on them runs, what they show is printed, and every name and path they use exists."""

import ast
import io
import os
import re
import shlex
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import typer

import armillary
import face
from armillary.cli.main import app
from armillary.cli.names import built_in
from armillary.codecs import CODECS
from armillary.exchanges import DENSE, dense_exchanges, row_exchanges
from armillary.plans import ADVICE
from armillary.schedules import CORRECTIONS, SCHEDULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
GUIDE = "guide.md"  # is run, too; what it leaves is looked at
TUTORIAL = "tutorial.md"  # whose first block, model and data, is the beginning of pages that link to it
NOT_RUN = "not run here"  # what a block that needs a cluster says in its title


def blocks(text, language):
    """Blocks of one language, without those that have a title: their marks are ```language and no more."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def bare(text):
    """Words and signs of what was printed, whatever its numbers, units, lines and widths of columns are."""
    text = re.sub(r"\d[\d,.]*( (us|ms|s|B|kB|KiB|MiB|GiB)\b)?", "#", text)
    return " ".join(re.sub(r"-{3,}", "---", text).split())


def script(page):
    """The blocks of a page, one script."""
    own = blocks(PAGES[page], "python")
    return blocks(PAGES[TUTORIAL], "python")[:1] + own if f"{TUTORIAL}#1-the-script" in PAGES[page] else own


RUN = [page for page, text in PAGES.items() if page != GUIDE and blocks(text, "python")]


@contextmanager
def shelves_as_they_were():
    """What a page registers is off the shelves again at its end."""
    shelves = (SCHEDULES, DENSE, CODECS, ADVICE)
    before = [dict(shelf.all()) for shelf in shelves]
    try:
        yield
    finally:
        for shelf, entries in zip(shelves, before, strict=True):
            shelf._entries = entries


def run_page(rank, workers, page, folder):
    """One script of all blocks of the page; what it printed, and the runs that it left open."""
    before, printed = Path.cwd(), io.StringIO()
    os.chdir(folder)
    names = {"__name__": page}
    try:
        with redirect_stdout(printed), shelves_as_they_were():
            for number, block in enumerate(script(page)):
                exec(compile(block, f"{page}, block {number}", "exec"), names)
    finally:
        os.chdir(before)
    left = [name for name, value in names.items() if isinstance(value, armillary.Run) and not value._closed]
    return printed.getvalue(), left


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(crew, tmp_path, page):
    (said, left), (_, other) = crew(2).run(run_page, page, str(tmp_path))
    assert left == other == []
    for shown in re.findall(r'^```text title="printed"\n(.*?)^```$', PAGES[page], re.MULTILINE | re.DOTALL):
        for part in shown.split("\n\n"):
            assert bare(part) in bare(said), f"{page} shows what was not printed:\n{part}\nprinted was:\n{said}"


OWN = "extending.md"  # whose files are files, and whose commands are run on them
REGISTERS = {
    "@codec(": "my_codecs.py",
    "@dense_exchange()": "my_exchange.py",
    'carries="weights", due': "my_weights.py",
    "SCHEDULES.register(": "my_schedule.py",
}
COMMANDS_OF_OWN = [
    line for block in blocks(PAGES[OWN], "text") for line in block.splitlines() if line[:9] == "armillary"
]


@pytest.mark.parametrize("line", COMMANDS_OF_OWN)
def test_the_commands_for_files_of_ones_own_run_on_the_files_of_the_page(tmp_path, line):
    for block in blocks(PAGES[OWN], "python"):
        for sign, name in REGISTERS.items():
            if sign in block:
                (tmp_path / name).write_text(block)
    words = shlex.split(line)[1:]
    ends = (
        face.command_in_job(2, *words, folder=tmp_path)
        if words[0] in ("verify", "train")
        else [face.command(*words, folder=tmp_path)]
    )
    assert [one.code for one in ends] == [0] * len(ends) and ends[0].out, ends


def test_every_kind_of_method_has_commands_that_run():
    assert {word for line in COMMANDS_OF_OWN for word in line.split() if word.endswith(".py")} == {*REGISTERS.values()}


def run_guide(rank, workers, folder):
    """Its blocks as one script, and all the runs that it makes."""
    before = Path.cwd()
    os.chdir(folder)
    names, runs = {"__name__": "guide"}, []
    try:
        for number, block in enumerate(script(GUIDE)):
            exec(compile(block, f"guide, block {number}", "exec"), names)
            runs += [names["run"]] if "run" in names and names["run"] not in runs else []
    finally:
        os.chdir(before)
    return len(runs), names["loop"], names["plan"].workers, names["state"] is None


def test_the_guide_runs(crew, tmp_path):
    found = crew(2).run(run_guide, str(tmp_path))
    for rank, (runs, loop, planned, is_empty) in enumerate(found):
        assert (loop, planned, is_empty) == ({"step": 10}, 2, rank == 1)
        assert runs == sum(block.count("run = armillary.") for block in script(GUIDE))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def test_a_block_that_is_not_run_says_so():
    for page, text in PAGES.items():
        for language, title in re.findall(r"^```(python|bash|yaml) ?([^\n]*)$", text, re.MULTILINE):
            assert (language == "python" and not title) or NOT_RUN in title, f"{page}: a {language} block {title!r}"


@pytest.mark.parametrize("page", PAGES)
def test_names_and_paths_exist(page):
    text = PAGES[page]
    for name in re.findall(r"\barmillary\.([a-z_A-Z]+)\b(?!/)", text):
        assert name in armillary.__all__ or (Path(armillary.__file__).parent / name).is_dir(), f"armillary.{name}"
    for name in re.findall(r"\brun\.([a-z_]+)\b", text):
        assert hasattr(armillary.Run, name), f"run.{name}"
    for path in re.findall(r"\b(?:tests|benchmarks|examples|src)/[\w/.*]+\w", text):
        assert list(ROOT.glob(path)), path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert ((DOCS / page).parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_files_of_the_source_that_a_page_names_exist(page):
    source = Path(armillary.__file__).parent
    there = [path.relative_to(source).as_posix() for path in source.rglob("*.py")]
    for file in re.findall(r"`([\w/]+\.py)`", PAGES[page]):
        is_there = (ROOT / file).exists() or any(f"/{path}".endswith(f"/{file}") for path in there)
        assert is_there or (page == OWN and file in REGISTERS.values()), file


def test_the_design_names_every_room():
    source, house = Path(armillary.__file__).parent, PAGES["design.md"].split("```")[1]
    rooms = [path.parent for path in source.rglob("__init__.py") if path.parent != source]
    unnamed = {room.relative_to(source).as_posix() for room in rooms if f"{room.name}/" not in house}
    assert unnamed == set()


def told_by_the_library():
    """Every text of its source, with an empty place where a value goes in."""
    found = []
    for path in Path(armillary.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(one.value if isinstance(one, ast.Constant) else "\0" for one in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_errors_that_troubleshooting_quotes_are_told_by_the_library():
    page, told = PAGES["troubleshooting.md"], told_by_the_library()
    cells = re.findall(
        r"^\| (`[^|]*?) \|", page[page.index("## It refuses") : page.index("## The numbers")], re.MULTILINE
    )
    quoted = [text for cell in cells for text in re.findall("`([^`]+)`", cell)]
    assert len(quoted) > 10
    for text in quoted:
        pattern = re.sub(r"\d+", r"(\\d+|\0)", re.escape(text).replace(re.escape("..."), "\0"))
        assert re.search(pattern, told), text


def test_no_row_of_a_table_is_broken():
    for page, text in PAGES.items():
        for line in re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
            assert not line.startswith("|") or line.rstrip().endswith("|"), f"{page}: {line}"


COMMANDS = typer.main.get_command(app).commands


TELL = (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/*/README.md"))
TELL_COMMANDS = [path.relative_to(ROOT).as_posix() for path in TELL if path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", TELL_COMMANDS)
def test_commands_and_their_options_exist(page):
    text = (ROOT / page).read_text()
    for command, rest in re.findall(
        r"\barmillary (advise|train|plan|compare|measure|simulate|twin|verify)\b([^`\n]*)", text
    ):
        known = {
            option for parameter in COMMANDS[command].params for option in parameter.opts + parameter.secondary_opts
        }
        for option in re.findall(r"(--[a-z-]+)", rest):
            assert option in known, f"armillary {command} {option}"


def test_workloads_that_commands_name_are_built_in():
    found = set()
    for page, text in PAGES.items():
        for name in re.findall(
            r"(?:`|^)armillary (?:train|plan|measure|simulate|twin|verify) ([a-z_]+)(?![\w./])", text, re.M
        ):
            assert name in built_in(), f"{page}: no workload {name}"
            found.add(name)
    assert len(found) > 1


def test_every_name_in_the_table_of_methods_is_on_a_shelf():
    shelves = {*SCHEDULES.all(), *dense_exchanges(), *row_exchanges(), *CODECS.all(), *CORRECTIONS.all()}
    for page in (page for page in PAGES if page.startswith("methods/")):
        cells = re.findall(r"^\| (`[^|]*`) \|", PAGES[page], re.MULTILINE)
        named = {name for cell in cells for name in re.findall(r"`([a-z_]+)[`(]", cell)}
        assert named <= shelves, f"{page}: {named - shelves}"


def test_every_public_call_stands_in_the_table_of_collective_calls():
    text = PAGES["collective.md"]
    public = {f"run.{name}" for name in vars(armillary.Run) if not name.startswith("_")} - {"run.plan", "run.rank"}
    for name in public - {"run.workers"}:
        assert f"`{name}`" in text, name


SHORT = {"docs/design.md": 3000, "README.md": 900}  # at most so many words
LONGEST = 25  # words of a sentence


def sentences(text):
    """Of paragraphs, items and cells of tables; without code. A colon or semicolon ends none."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#.*|\|?[-| :]+\|?)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\n\s*(?:[*-]|\d+\.)\s|\n\s*\n|\s\|\s|^\||\|$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    parts = re.split(r"\n\n+|[.!?][*)\"]*(?=\s)", text)
    return [found for part in parts if (found := re.findall(r"[\w'%/-]*\w[\w'%/-]*", part))]


@pytest.mark.parametrize("page", SHORT)
def test_the_design_and_the_readme_stay_short(page):
    words = sum(bool(re.search(r"\w", word)) for word in (ROOT / page).read_text().split())
    assert words <= SHORT[page], f"{page} has {words} words; want at most {SHORT[page]}: move something to another page"


SHORT_SENTENCES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page}" for page in PAGES)]


@pytest.mark.parametrize("page", SHORT_SENTENCES)
def test_sentences_stay_short(page):
    long = [" ".join(found) for found in sentences((ROOT / page).read_text()) if len(found) > LONGEST]
    assert not long, f"{page}: sentences of more than {LONGEST} words:\n" + "\n".join(long)


def test_sentences_are_told_apart():
    text = "# A title\n\nOne, two: three. **Four five.**\n\n* six\n* six `x y`\n\n| 10 | 11 |\n| --- | --- |\n"
    assert [len(found) for found in sentences(text)] == [3, 2, 1, 2, 1, 1]


def test_every_method_has_its_page():
    """One more method is one more page, and a row in the table of methods."""
    table = PAGES["methods/index.md"]
    pages = "\n".join(text for page, text in PAGES.items() if page.startswith("methods/") and "index" not in page)
    shelves = {*SCHEDULES.all(), *dense_exchanges(), *row_exchanges(), *CODECS.all(), *CORRECTIONS.all()}
    missing = {name for name in shelves if f"`{name}`" not in table or not re.search(rf"`[^`]*\b{name}\b", pages)}
    assert not missing, f"no page under docs/methods, or no row in its index: {sorted(missing)}"
