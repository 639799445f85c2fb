"""The graders of lab 01."""

import overlaplab_course.lab01  # noqa: F401 (it registers the exercises)
