"""The graders of lab 02."""

import overlaplab_course.lab02  # noqa: F401 (it registers the exercises)
