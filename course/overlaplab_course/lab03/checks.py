"""The graders of lab 03."""

import overlaplab_course.lab03  # noqa: F401 (it registers the exercises)
