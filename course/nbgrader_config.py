"""nbgrader's settings for a class; copy this file into your course's folder.

See instructors.md, beside this file.
"""

from overlaplab.grading.nbgrader import configure

c = get_config()  # type: ignore[name-defined]  # noqa: F821
configure(c)
