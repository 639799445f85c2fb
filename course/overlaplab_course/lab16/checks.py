"""The graders of lab 16: importing this registers its exercises."""

from overlaplab_course.lab16 import chain_checks as chain_checks
from overlaplab_course.lab16 import compare_checks as compare_checks
from overlaplab_course.lab16 import mask_checks as mask_checks
from overlaplab_course.lab16 import overlap_checks as overlap_checks
from overlaplab_course.lab16 import policy_checks as policy_checks
from overlaplab_course.lab16 import segment_checks as segment_checks
