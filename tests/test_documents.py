"""What the documents name exists: tests, files, functions, links."""

import re
from functools import cache

import pytest
import yaml
from conftest import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = [path for pattern in ("*.py", "*/*.py", "*/*/*.py") for path in ROOT.glob(pattern) if ".venv" not in path.parts]


@cache
def words_of_the_code() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in [*CODE, *ROOT.glob("config/**/*.yaml")]]
    return set(re.findall(r"\w+", "\n".join(texts)))


def in_backticks(document) -> list[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!http)([^)#\s]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(document):
    defined = set()
    for path in sorted((ROOT / "tests").glob("*.py")):
        defined |= {path.name, path.stem, *re.findall(r"^\s*def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)}
    named = set(re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", document.read_text(encoding="utf-8")))
    assert named <= defined, sorted(named - defined)


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_and_names_of_the_code_exist(name):
    names_of_files = {path.name for path in CODE}
    for word in in_backticks(ROOT / name):
        word = word.removeprefix("@").removesuffix("()")
        if re.fullmatch(r"[\w./]+\.(py|yaml|md)|\w[\w/]*/", word) and "NAME" not in word:
            assert (ROOT / word).exists() or word in names_of_files, f"{name}: {word}"
        elif re.fullmatch(r"[A-Za-z_]\w*", word) and ("_" in word or word[0].isupper()):
            assert word in words_of_the_code() or (ROOT / word).exists() or word == "LATEST", f"{name}: {word}"


def test_modules_of_the_changelog_exist():
    table = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("| before | now |")[1].split("\n\n")[0]
    for line in table.splitlines():
        for module in re.findall(r"`([\w.]+)`", line.split("|")[2] if line.count("|") == 3 else ""):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), module


def test_every_law_names_the_tests_that_keep_it():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## The laws")[1]
    laws = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    assert len(laws) == 6
    assert all(law.startswith("**") and law.count("`test_") >= 4 for law in laws)


def test_the_workflow_tries_the_ends_of_what_is_supported():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["tests"]["strategy"]["matrix"]
    ends = {entry["versions"]: entry for entry in matrix["include"]}
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    lowest, highest = re.search(r"^torch==.*# works with ([\d.]+) to ([\d.]+)", requirements, re.MULTILINE).groups()
    assert ends["oldest"]["torch"] == f"torch=={lowest}.*" and ends["newest"]["torch"] == f"torch=={highest}.*"
    transformers = re.search(r"^transformers(>=([\d.]+),<\d+)$", requirements, re.MULTILINE)
    assert ends["oldest"]["transformers"] == f"transformers=={transformers[2]}.*"
    assert ends["newest"]["transformers"] == f"transformers{transformers[1]}"
    environment = (ROOT / "scripts" / "_environment").read_text(encoding="utf-8")
    assert f"Python {matrix['python'][0]} to {matrix['python'][-1]} is needed" in environment
