"""The graders of lab 08: importing this registers its exercises."""

from overlaplab_course.lab08 import bill_checks as bill_checks
from overlaplab_course.lab08 import feed_checks as feed_checks
from overlaplab_course.lab08 import late_checks as late_checks
from overlaplab_course.lab08 import serving_checks as serving_checks
from overlaplab_course.lab08 import weights_checks as weights_checks
