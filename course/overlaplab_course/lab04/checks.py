"""The graders of lab 04."""

import overlaplab_course.lab04  # noqa: F401 (it registers the exercises)
