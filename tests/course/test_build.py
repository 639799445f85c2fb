"""course/build.py on tiny courses: what it writes, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import jupytext
import nbformat
import numpy as np
import pytest
from PIL import Image

import build
import notebook_runs as runs
from build import BuildError

LESSON = '''\
# %% [markdown]
# # How many?
#
# Count them.

# %% name="given"
sizes = [3, 5]

# %% kind="exercise" exercise="6.1"
def plan(sizes):
    """Add the sizes."""
    ### BEGIN SOLUTION
    total = sum(sizes) + len(sizes) - len(sizes)
    return total
    ### END SOLUTION

# %% kind="check" exercise="6.1" points=2
assert plan(sizes) == 8
### BEGIN HIDDEN TESTS
assert plan([1, 2, 3, 4, 5, 6]) == 21
### END HIDDEN TESTS

# %% [markdown] kind="solution-only"
# The sum of the sizes is the answer.

# %% [markdown] kind="lab-only"
# Your turn.
'''


def lesson(folder: Path, text: str = LESSON, name: str = "06_x.py") -> Path:
    """Write one lesson and return its path."""
    path = folder / "course" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def sources(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells]


def exercise(body: str) -> str:
    """A lesson whose exercise 6.1 is a function with this body."""
    indented = "\n".join("    " + line if line else "" for line in body.splitlines())
    return (
        f'# %% kind="exercise" exercise="6.1"\ndef f(x):\n{indented}\n\n'
        '# %% kind="check" exercise="6.1"\nassert f(1)\n'
    )


def test_the_lab_has_stubs_and_the_solution_has_solutions(tmp_path: Path) -> None:
    cells = build.read_lesson(lesson(tmp_path))

    assert sources(build.make_lab(cells)) == [
        "# How many?\n\nCount them.",
        "sizes = [3, 5]",
        'def plan(sizes):\n    """Add the sizes."""\n    # YOUR CODE HERE\n'
        '    raise NotImplementedError("6.1")',
        "assert plan(sizes) == 8",
        "Your turn.",
    ]
    assert sources(build.make_solution(cells))[2:] == [
        'def plan(sizes):\n    """Add the sizes."""\n    ### BEGIN SOLUTION\n'
        "    total = sum(sizes) + len(sizes) - len(sizes)\n    return total\n"
        "    ### END SOLUTION",
        "assert plan(sizes) == 8\n### BEGIN HIDDEN TESTS\n"
        "assert plan([1, 2, 3, 4, 5, 6]) == 21\n### END HIDDEN TESTS",
        "The sum of the sizes is the answer.",
    ]


@pytest.mark.parametrize("order", ["stub first", "solution first"])
def test_a_stub_takes_the_place_of_the_solution(tmp_path: Path, order: str) -> None:
    solution = "### BEGIN SOLUTION\nreturn x + 1\n### END SOLUTION"
    stub = "### BEGIN STUB\n# if x:\n#     return x  # too few\n#\n### END STUB"
    parts = [stub, solution] if order == "stub first" else [solution, stub]
    cells = build.read_lesson(lesson(tmp_path, exercise("\n".join(parts))))

    assert sources(build.make_lab(cells))[0] == (
        "def f(x):\n    if x:\n        return x  # too few"
    )
    assert "too few" not in sources(build.make_solution(cells))[0]


def test_the_lesson_as_it_stands_is_the_solved_program(tmp_path: Path) -> None:
    exec(compile(lesson(tmp_path).read_text(), "lesson", "exec"), {})


def test_ids_are_equal_in_two_conversions_and_in_both_notebooks(tmp_path: Path) -> None:
    path = lesson(tmp_path)
    first, second = build.read_lesson(path), build.read_lesson(path)
    lab = [cell.id for cell in build.make_lab(first).cells]
    solution = [cell.id for cell in build.make_solution(second).cells]

    assert lab[1:4] == ["given", "exercise-6-1", "check-6-1"]
    assert lab[:4] == solution[:4]
    assert re.fullmatch("[0-9a-f]{8}", lab[0])


def test_cells_of_the_same_text_get_ids_of_their_own(tmp_path: Path) -> None:
    cells = build.read_lesson(lesson(tmp_path, "# %%\n1\n\n# %%\n1\n\n" + LESSON))

    assert [cell.id for cell in cells[:2]] == [cells[0].id, cells[0].id + "-1"]


def test_checks_carry_the_metadata_that_nbgrader_reads(tmp_path: Path) -> None:
    lab = build.make_lab(build.read_lesson(lesson(tmp_path)))
    graded = [
        cell.metadata.nbgrader for cell in lab.cells if "nbgrader" in cell.metadata
    ]

    shared = {"cell_type": "code", "schema_version": 3, "task": False}
    assert graded == [
        {**shared, "grade": False, "grade_id": "exercise-6-1", "locked": False}
        | {"solution": True},
        {**shared, "grade": True, "grade_id": "check-6-1", "locked": True}
        | {"solution": False, "points": 2},
    ]


def test_a_notebook_goes_through_percent_format_and_comes_back(tmp_path: Path) -> None:
    lab = build.make_lab(build.read_lesson(lesson(tmp_path)))
    again = jupytext.reads(jupytext.writes(lab, fmt="py:percent"), fmt="py:percent")

    assert sources(again) == sources(lab)
    for cell, old in zip(again.cells, lab.cells, strict=True):
        assert cell.metadata.get("nbgrader") == old.metadata.get("nbgrader")
        assert cell.metadata.get("tags") == old.metadata.get("tags")


def test_a_build_is_checked_and_its_lab_fails_at_the_check_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson(
        tmp_path,
        LESSON + "\n# %%\nfrom overlaplab.view.stacking import Picture\n\n"
        "print(object())\nPicture(alt='nothing yet')\n",
    )

    assert build.main(["--root", str(tmp_path), "06"]) == 0
    assert build.main(["--root", str(tmp_path), "--check"]) == 0
    assert build.main(["--root", str(tmp_path), "--prove-unsolved"]) == 0
    assert "06_x.ipynb: its 1 check raises, and nothing else" in capsys.readouterr().out

    stored = json.loads((tmp_path / "solutions" / "06_x.ipynb").read_text())
    (printed, drawn) = stored["cells"][-1]["outputs"]
    assert printed["text"] == ["<object object at 0x...>\n"]
    assert drawn["data"].keys() == {"image/png", "text/plain"}
    assert drawn["metadata"] == {"image/png": {"alt": "nothing yet"}}
    assert stored["metadata"] == build.KERNEL
    lab = json.loads((tmp_path / "labs" / "06_x.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in lab["cells"])


def test_a_solution_that_raises_is_not_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson(tmp_path, LESSON.replace("== 8", "== 9"))

    assert build.main(["--root", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "06_x.py" in said and "check-6-1" in said and "AssertionError" in said
    assert not (tmp_path / "solutions" / "06_x.ipynb").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LESSON.replace("    ### END SOLUTION\n", ""), "has no '### END SOLUTION'"),
        (LESSON.replace("    ### BEGIN SOLUTION\n", ""), "unpaired '### END SOLUTION'"),
        (exercise("### BEGIN SOLUTION\n### BEGIN STUB\n# x"), "inside SOLUTION"),
        (LESSON.replace("### BEGIN SOL", "## BEGIN SOL"), "looks like a marker"),
        (LESSON.replace("### BEGIN SOL", "### Begin sol"), "looks like a marker"),
        (exercise("return x"), "without '### BEGIN SOLUTION'"),
        (exercise("### BEGIN SOLUTION\n\n### END SOLUTION"), "empty solution"),
        (
            exercise(
                "### BEGIN SOLUTION\nreturn x\n### END SOLUTION\ny = 1\n"
                "### BEGIN STUB\n# x\n### END STUB"
            ),
            "right beside its solution",
        ),
        (
            exercise(
                "### BEGIN STUB\nreturn 1\n### END STUB\n"
                "### BEGIN SOLUTION\nreturn x\n### END SOLUTION"
            ),
            "stub line '    return 1' is no comment",
        ),
        (
            LESSON + "\n# %%\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n",
            "belongs in a cell of kind 'exercise'",
        ),
        (LESSON.replace("points=2", "point=2"), "unknown keys ['point']"),
        (LESSON.replace('"check"', '"test"'), "unknown kind 'test'"),
        (LESSON.replace('"check" exercise="6.1"', '"check"'), "carry exercise"),
        (LESSON.replace('name="given"', 'exercise="6.1"'), "carry exercise"),
        (
            LESSON.replace('"check" exercise="6.1"', '"check" exercise="6.2"'),
            "no check",
        ),
        (
            LESSON.replace('# %% kind="exercise"', '# %% [markdown] kind="exercise"'),
            "code cell",
        ),
        (LESSON.replace('name="given"', 'name="check-6-1"'), "is taken"),
        (LESSON.replace('name="given"', 'name="a b"'), "an id cannot"),
        ("# %% [markdown]\n# Only prose.\n", "proves nothing"),
    ],
)
def test_a_lesson_that_would_be_misread_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(BuildError, match=re.escape(reason)) as caught:
        build.read_lesson(lesson(tmp_path, text))
    assert "06_x.py" in str(caught.value)


@pytest.mark.parametrize(
    "leak",
    [
        "# %%\nx = 0\ndef g():\n"
        "    total = sum(sizes) + len(sizes) - len(sizes)\n    return total\n",
        "# %% [markdown]\n# Like this:\n#\n#     total = sum(sizes)  +  len(sizes) - "
        "len(sizes)\n#     return total\n",
    ],
    ids=["code", "markdown"],
)
def test_a_solution_that_leaks_into_the_lab_is_refused(
    tmp_path: Path, leak: str
) -> None:
    cells = build.read_lesson(lesson(tmp_path, LESSON + "\n" + leak))

    with pytest.raises(BuildError, match="its solution stands in the lab"):
        build.make_lab(cells)


def test_a_hint_that_shares_a_word_with_the_solution_is_no_leak(tmp_path: Path) -> None:
    hint = "# %% [markdown]\n# You will want to `return total` from it.\n"
    build.make_lab(build.read_lesson(lesson(tmp_path, LESSON + "\n" + hint)))


def test_an_empty_course_is_refused_in_every_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in ([], ["--check"], ["--prove-unsolved"], ["07"]):
        assert build.main(["--root", str(tmp_path), *mode]) == 1
        assert "nothing to" in capsys.readouterr().err


PART = """\
# %% [markdown]
# Shared text.

# %% name="shared"
shared = 1
"""


def test_a_lesson_includes_cells_that_it_shares(tmp_path: Path) -> None:
    path = lesson(tmp_path, '# %% include="primers/part.py"\n\n' + LESSON)
    (path.parent / "primers").mkdir()
    (path.parent / "primers" / "part.py").write_text(PART)
    lab = build.make_lab(build.read_lesson(path))
    assert sources(lab)[:2] == ["Shared text.", "shared = 1"]
    assert lab.cells[1].id == "shared"


@pytest.mark.parametrize(
    "cell",
    [
        '# %% include="primers/none.py"\n\n',
        '# %% include="../x.py" name="a"\n\n',
        '# %% include="06_x.py"\nx = 1\n\n',
    ],
)
def test_an_include_that_would_be_ignored_is_refused(tmp_path: Path, cell: str) -> None:
    path = lesson(tmp_path, cell + LESSON)
    with pytest.raises(BuildError, match="cell 0: include="):
        build.read_lesson(path)


def test_banned_words_are_refused_with_their_line(tmp_path: Path) -> None:
    lesson(
        tmp_path,
        LESSON + "\n# %% [markdown]\n# A rank sends one message a\n# gradient.\n",
    )
    (tmp_path / "course" / "words.toml").write_text(
        "[[banned]]\npattern = 'message a gradient'\ninstead = 'per'\n"
    )
    with pytest.raises(
        BuildError, match="'message a gradient'; say instead: per"
    ) as raised:
        build.check(tmp_path)
    lines = (tmp_path / "course" / "06_x.py").read_text().splitlines()
    assert f"line {lines.index('# A rank sends one message a') + 1}:" in str(
        raised.value
    )


def test_what_code_prints_for_learners_is_read_too(tmp_path: Path) -> None:
    lesson(tmp_path, LESSON)
    (tmp_path / "course" / "words.toml").write_text(
        "[[banned]]\npattern = 'message a (layer|\\{\\})'\ninstead = 'per'\n"
    )
    lab = tmp_path / "course" / "overlaplab_course" / "lab06"
    lab.mkdir(parents=True)
    show = """
# one message a layer: a comment is not printed
def said(what):
    return (
        "one message "
        f"a {what}"
    )
"""
    (lab / "show.py").write_text(show)
    table = 'hint = """\\\n    one message a \\\n    layer"""\n'
    (lab / "exercises.toml").write_text(table)
    with pytest.raises(BuildError) as raised:
        build.check(tmp_path)
    where = [line.split("; ")[0] for line in str(raised.value).splitlines()]
    lab06 = "course/overlaplab_course/lab06"
    assert where == [
        f"{lab06}/exercises.toml, line 2: 'message a layer'",
        f"{lab06}/show.py, line 5: 'message a {{}}'",
    ]


def test_a_stored_picture_is_smaller_and_looks_the_same_on_any_paper() -> None:
    shades = np.arange(64, dtype=np.uint8) * 4
    pixels = np.zeros((64, 64, 4), dtype=np.uint8)
    pixels[..., 0], pixels[..., 1] = shades, shades[:, None]
    pixels[:, 8:, 3] = 255  # the left edge is transparent
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "png", compress_level=0)

    stored = runs._small_png(base64.b64encode(picture.getvalue()).decode())

    png = base64.b64decode(stored)
    seen = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(int)
    assert len(png) < len(picture.getvalue())
    assert (seen[:, :8, 3] == 0).all() and (seen[:, 8:, 3] == 255).all()
    assert np.abs(seen - pixels)[:, 8:].max() <= 16
