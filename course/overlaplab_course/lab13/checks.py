"""The graders of lab 13: importing this registers its exercises."""

from overlaplab_course.lab13 import pass_checks as pass_checks
from overlaplab_course.lab13 import plan_checks as plan_checks
from overlaplab_course.lab13 import stream_checks as stream_checks
from overlaplab_course.lab13 import twin_checks as twin_checks
