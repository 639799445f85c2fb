"""Forms of exercises that recur from lab to lab: a lab declares them as data."""

from overlaplab.grading.answered import as_number as as_number
from overlaplab.grading.forms.answers import find_slip as find_slip
from overlaplab.grading.forms.answers import is_close as is_close
from overlaplab.grading.forms.answers import judge_numbers as judge_numbers
from overlaplab.grading.forms.answers import not_filled_in as not_filled_in
from overlaplab.grading.forms.answers import read_numbers as read_numbers
from overlaplab.grading.forms.answers import read_pairs as read_pairs
from overlaplab.grading.forms.answers import said_timeline as said_timeline
from overlaplab.grading.forms.answers import write_number as write_number
from overlaplab.grading.forms.knobs import KnobProgram as KnobProgram
from overlaplab.grading.forms.knobs import KnobTasks as KnobTasks
from overlaplab.grading.forms.knobs import Settings as Settings
from overlaplab.grading.forms.repair import Repair as Repair
from overlaplab.grading.forms.repair import check_diagnosis as check_diagnosis
from overlaplab.grading.forms.results import Examined as Examined
from overlaplab.grading.forms.results import judge_step as judge_step
from overlaplab.grading.forms.results import need_dict as need_dict
