"""The documents: links, the site's table of contents, generated pages, examples, language."""

import ast
import pathlib
import posixpath
import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.documents import FENCE, tracked

_ROOT = pathlib.Path(__file__).parents[2]
_HOOKS = runpy.run_path(str(_ROOT / "tools" / "docs_hooks.py"))
_REFERENCE = runpy.run_path(str(_ROOT / "tools" / "reference.py"))
_SITE = yaml.safe_load((_ROOT / "mkdocs.yml").read_text())
_PAGES = tuple(_HOOKS["pages"](_SITE["nav"]))
_DOCUMENTS = ("README.md", *map(_HOOKS["in_repository"], _PAGES))
# Words that no description begins with: the noun is missing.
_BEGINS_BADLY = re.compile(r"(?:Of|Those|Its|That|As|What|Them)\b(?![^.;]*\?)")
# Such a description in Python: a docstring, a field in it, or a help text.
_BADLY_DESCRIBED = re.compile(
    r'(?:"""|help=\s*\(?\s*f?"|^ +\*{0,2}[a-z]\w*(?: \([^)]*\))?: )'
    r"(?i:Of|Those|Its|That|As|What|Them)\b(?![^.;]*\?).*",
    re.MULTILINE,
)


def _text(document: str) -> str:
    return (_ROOT / document).read_text()


def _prose(document: str) -> str:
    return FENCE.sub("", _text(document))


def _anchor(heading: str) -> str:
    """The id that GitHub and MkDocs give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _anchors(document: str) -> set[str]:
    return {_anchor(h) for h in re.findall(r"^#+ (.*)$", _prose(document), re.MULTILINE)}


def _problem_of(document: str, link: str) -> str | None:
    """The reason why a relative link leads nowhere."""
    path, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
    target = target if path else document
    if not (_ROOT / target).exists():
        return f"{document}: there is no {target}"
    if anchor and anchor not in _anchors(target):
        return f"{document}: {target} has no heading #{anchor}"
    return None


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_relative_links_of_a_document_resolve(document: str):
    links = re.findall(r"\]\((?!\w+:)([^)\s]+)\)", _prose(document))
    assert not [problem for link in links if (problem := _problem_of(document, link))]


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_no_target_of_a_link_is_broken_over_two_lines(document: str):
    """Markdown shows such a link as text."""
    assert re.findall(r"\]\([^()\s]*\s*\n[^()\s]*\)", _text(document)) == []


@pytest.mark.parametrize("page", _PAGES)
def test_links_of_a_page_lead_to_pages_of_the_site(page: str):
    markdown = _HOOKS["for_site"](_prose(_HOOKS["in_repository"](page)), page)
    folder = posixpath.dirname(page)
    targets = {posixpath.normpath(posixpath.join(folder, t)) for t in _HOOKS["links"](markdown)}
    assert not {t for t in targets if not t.endswith((".svg", ".png", ".json"))} - set(_PAGES)


def test_table_of_contents_has_every_page_once():
    in_folder = {str(p.relative_to(_ROOT / "docs")) for p in (_ROOT / "docs").rglob("*.md")}
    assert len(_PAGES) == len(set(_PAGES))
    assert in_folder <= set(_PAGES)
    assert not [page for page in _PAGES if not (_ROOT / _HOOKS["in_repository"](page)).is_file()]


def test_readme_has_at_most_700_words():
    assert len(_text("README.md").split()) <= 700


def test_generated_pages_are_up_to_date():
    """`python tools/reference.py` writes them anew."""
    for name, text in _REFERENCE["pages"]().items():
        assert _text(f"docs/reference/{name}") == text


def test_rows_of_the_table_of_features_name_tests():
    rows = re.findall(
        r"^\| (?!feature|---).*\| (.*) \|$", _text("docs/reference/jax-features.md"), re.M
    )
    assert len(rows) > 20
    for cell in rows:
        paths = re.findall(r"`(tests/[^`]*)`", cell)
        assert paths, cell
        assert not [path for path in paths if "def test_" not in _text(path)]


def test_reference_has_every_public_name():
    stub = ast.parse(_text("jaxhet/__init__.pyi"))
    public = {a.name for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    pages = _text("docs/reference/api.md") + _text("docs/reference/errors.md")
    assert set(re.findall(r"^::: jaxhet\.(\w+)$", pages, re.MULTILINE)) == public


@pytest.mark.parametrize("module", ["optim", "testing"])
def test_reference_has_every_public_name_of_a_module(module: str):
    tree = ast.parse(_text(f"jaxhet/{module}.py"))
    defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    page = _text(f"docs/reference/{module}.md")
    named = re.findall(rf"^::: jaxhet\.{module}\.(\w+)$", page, re.M)
    assert sorted(named) == sorted(name for name in defined if not name.startswith("_"))


def _blocks(language: str) -> Iterator[tuple[str, str]]:
    """The document and the text of each fenced block of a language; "" for commands."""
    for document in _DOCUMENTS:
        for info, text in FENCE.findall(_text(document)):
            if info.partition(" ")[0] == language:
                yield document, text


def test_python_in_documents_compiles_and_uses_public_names():
    public = set(re.findall(r" as (\w+)$", _text("jaxhet/__init__.pyi"), re.MULTILINE))
    for document, text in _blocks("python"):
        tree = ast.parse(text, document)
        names = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "jaxhet"
        }
        assert names <= public, document


def test_first_tutorial_is_the_example_of_the_readme():
    """tests/python/test_project.py runs the README's."""
    examples = dict(reversed([*_blocks("python")]))
    assert examples["docs/tutorials/01-two-islands.md"] == examples["README.md"]


def test_commands_in_documents_have_options_that_exist():
    options_of = {
        name: {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        for name, command in _REFERENCE["commands"]().items()
    }
    wrong = []
    for document, text in _blocks(""):
        commands = text.replace("\\\n", " ")
        for command, rest in re.findall(r"^(?:\$ )?jaxhet (\w+)(.*)$", commands, re.MULTILINE):
            own = re.split(r" -- | #", rest)[0]
            options = re.findall(r"(?<= )--[\w-]+", own)
            known = options_of.get(command, set())
            wrong += [(document, command, o) for o in options if o not in known | {"--help"}]
            wrong += [] if known else [(document, command)]
    assert not wrong


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def test_descriptions_in_code_begin_with_a_noun_phrase_or_a_verb():
    names = tracked("*.py", "*.pyi")
    assert not [f"{n}: {m[0]}" for n in names for m in _BADLY_DESCRIBED.finditer(_text(n))]


def _comments(source: str, mark: str) -> Iterator[tuple[int, str]]:
    """The first line of each block of comments, and each comment after code."""
    comment = re.compile(rf"(?P<code>.*?)(?:^|(?<=\s)){mark}:? (?P<text>.*)")
    is_inside = False
    for number, line in enumerate(source.splitlines(), 1):
        found = comment.fullmatch(line)
        is_alone = found is not None and not found["code"].strip()
        if found and not (is_alone and is_inside):
            yield number, found["text"]
        is_inside = is_alone


def _badly_begun_comments(source: str, mark: str) -> list[str]:
    found = _comments(source, mark)
    return [f"{n}: {text}" for n, text in found if _BEGINS_BADLY.match(_capitalized(text))]


@pytest.mark.parametrize(("mark", "patterns"), [("//", ("*.cc", "*.h")), ("#", ("*.py", "*.pyi"))])
def test_comments_begin_with_a_noun_phrase_or_a_verb(mark: str, patterns: tuple[str, ...]):
    names = tracked(*patterns)
    assert names
    assert not [f"{n}:{found}" for n in names for found in _badly_begun_comments(_text(n), mark)]


@pytest.mark.parametrize("document", [*_DOCUMENTS, "tools/bazel/README.md"])
def test_cells_of_tables_begin_with_a_noun_phrase_or_a_verb(document: str):
    rows = [line for line in _prose(document).splitlines() if line.startswith("|")]
    cells: list[Any] = [cell.strip() for row in rows for cell in row.split("|")]
    assert not [cell for cell in cells if _BEGINS_BADLY.match(_capitalized(cell))]


@pytest.mark.parametrize("document", [*_DOCUMENTS, "tools/bazel/README.md"])
def test_rows_of_tables_have_as_many_cells_as_their_heading(document: str):
    wrong, cells = [], 0
    for line in _prose(document).splitlines():
        if not line.startswith("|"):
            cells = 0
            continue
        found = len(re.findall(r"(?<!\\)\|", line)) - 1
        cells = cells or found
        wrong += [line] if found != cells else []
    assert not wrong


def test_terms_of_the_glossary_are_sorted_and_defined_once():
    rows = re.findall(r"^\| (.+?) \|", _text("docs/explanation/glossary.md"), re.MULTILINE)[1:]
    assert rows == sorted(set(rows), key=str.lower)


# Characters of a cell: a longer one is hard to read, and belongs into the text below its table.
_LONGEST_CELL = 200


@pytest.mark.parametrize("document", ["docs/support.md", "models/README.md"])
def test_cells_of_tables_are_short(document: str):
    rows = [line for line in _prose(document).splitlines() if line.startswith("|")]
    assert rows
    cells = [cell.strip() for row in rows for cell in row.split(" | ")]
    assert not [f"{len(cell)}: {cell}" for cell in cells if len(cell) > _LONGEST_CELL]
