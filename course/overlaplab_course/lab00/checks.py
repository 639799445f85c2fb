"""The graders of lab 00."""

import overlaplab_course.lab00  # noqa: F401 (it registers the exercises)
