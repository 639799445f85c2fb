"""The graders of lab 06."""

import overlaplab_course.lab06  # noqa: F401 (it registers the exercises)
