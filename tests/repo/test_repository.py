"""What the repository says of itself is so: README, versions, names, sizes, words."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import overlaplab
import overlaplab as ol
from overlaplab import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line
)
MAX_LINES = 450
CODE = ("overlaplab/*.py", "course/[a-z]*.py", "tests/*.py")
# In code marks or bare, such as overlaplab/streams.py; NN stands for any lesson.
OUR_FILE = re.compile(r"(?<![\w./])(?:overlaplab|tests|course)/(?!\S*NN)[-\w./]*\w")
# Paths of a machine, and tabs of a paste.
FORBIDDEN = re.compile("/" + r"(work|root|home)/|\t" + "|" + "TO" + "DO")


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, also new ones; not those that git ignores."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        [*command, "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.exists()]


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_examples_of_the_readme_print_what_it_says() -> None:
    names: dict[str, object] = {}
    printed = []
    for example in blocks("python"):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(example, "README.md", "exec"), names)
        printed.append(lines(out.getvalue()))

    assert printed == [lines(block) for block in blocks("text")]
    assert printed


def test_the_readmes_profile_of_ones_own_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = blocks("py")
    model = torch.nn.Linear(8, 8)

    def train_step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()

    monkeypatch.chdir(tmp_path)
    names = {"ol": ol, "train_step": train_step, "batches": torch.ones(5, 4, 8)}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(example, "README.md", "exec"), names)

    assert "no communication" in out.getvalue()
    assert (tmp_path / "step.html").stat().st_size > 10_000


@pytest.mark.skipif(
    not torch.__version__.startswith(PINS["torch"]),
    reason="another torch launches other operators; the README shows CI's",
)
def test_the_demo_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks("console") if "overlaplab demo" in block)
    out = tmp_path / "demo.png"

    result = CliRunner().invoke(cli.main, ["demo", "--out", str(out)])

    printed = result.stdout.replace(str(out), "demo.png")
    assert lines(printed) == lines(shown)[1:]


def test_the_report_prints_what_the_readme_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (shown,) = (block for block in blocks("console") if "overlaplab report" in block)
    command, *expected = lines(shown)
    monkeypatch.chdir(ROOT)

    result = CliRunner().invoke(cli.main, command.split()[2:])

    printed = lines(result.stdout)
    assert [line for line in expected if line not in printed] == []
    assert len(expected) > 10


def test_the_readme_names_every_technique() -> None:
    rooms = {path.parent.name for path in tracked("overlaplab/techniques/*/*.py")}

    assert [room for room in sorted(rooms) if f"`{room}/`" not in README] == []
    assert "zero" in rooms


def test_the_index_lists_every_lesson_and_no_other() -> None:
    index = (ROOT / "course/index.md").read_text()
    lessons = {path.stem for path in tracked("course/[0-9]*.py")}

    assert set(re.findall(r"\(\.\./labs/(\w+)\.ipynb\)", index)) == lessons
    (later,) = re.findall(r"^  class ([\d,]+) later$", index, re.MULTILINE)
    numbers = {f"{number:02}" for number in range(19)}
    assert set(later.split(",")) == numbers - {name[:2] for name in lessons}


def test_links_of_the_documents_lead_somewhere() -> None:
    dead = []
    for document in tracked("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target and not (document.parent / target).exists():
                dead.append(f"{document.relative_to(ROOT)}: {target}")
    assert dead == []


def test_files_of_ours_that_a_text_names_are_there() -> None:
    named = {
        f"{text.relative_to(ROOT)}: {name}"
        for text in tracked("*.md", "course/[0-9]*.py", "course/primers/*.py")
        for name in re.findall(OUR_FILE, text.read_text())
        if not (ROOT / name).exists()
    }
    assert named == set()


def test_the_changelogs_latest_version_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    latest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)

    assert latest is not None
    assert latest.group(1) == project["version"]


def test_every_line_of_the_changelog_says_whom_it_concerns() -> None:
    entries = re.findall(r"^- (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)

    assert entries
    assert [e for e in entries if not e.startswith(("package: ", "course: "))] == []


def test_constraints_pin_every_direct_dependency_within_its_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for text in (*project["dependencies"], *extras["course"], *extras["dev"]):
        requirement = Requirement(text)
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier


def public_names() -> Iterator[tuple[str, object]]:
    for name in overlaplab.__all__:
        yield name, getattr(overlaplab, name)


def test_every_public_name_has_a_docstring() -> None:
    # Constants (PROFILES) have no __doc__ of their own: their module says it.
    bare = [
        name
        for name, value in public_names()
        if callable(value) and not (value.__doc__ or "").strip()
    ]
    assert bare == []


def test_every_module_says_what_its_job_is() -> None:
    texts = {
        str(path.relative_to(ROOT)): path.read_text().lstrip()
        for path in tracked(*CODE, ":!course/primers/*")  # those are lessons' text
    }
    assert texts
    bare = [p for p, text in texts.items() if text and not text.startswith('"""')]
    assert bare == []


def test_no_file_of_code_is_too_long_to_read() -> None:
    counted = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in tracked(*CODE)
    }
    assert counted
    assert {path: n for path, n in counted.items() if n > MAX_LINES} == {}


def test_no_text_names_a_machine_or_leaves_work_undone() -> None:
    found = []
    for path in tracked("*.py", "*.md", "*.toml", "*.txt", "*.ipynb", ".ci/*"):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if '"image/png": "' in line:
                continue  # letters by chance
            if match := FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()!r}")
    assert found == []
