"""What a timeline's step loses, in plain words, most expensive first. No torch.

account     where each nanosecond of a step goes; what CPU-bound time is
steps       one step of one rank; collectives, contention, makers, saved: its facts
rules_*     facts -> findings
text, page, record     a diagnosis for a terminal, a browser, a program
"""

from __future__ import annotations

from overlaplab.diagnosis.diagnosis import NO_COMMUNICATION as NO_COMMUNICATION
from overlaplab.diagnosis.diagnosis import Diagnosis as Diagnosis
from overlaplab.diagnosis.diagnosis import diagnose as diagnose
from overlaplab.diagnosis.findings import FINDING_KINDS as FINDING_KINDS
from overlaplab.diagnosis.findings import Finding as Finding
from overlaplab.diagnosis.findings import FindingKind as FindingKind
