"""What torch, its process groups and CUDA do here, and what of the course runs.

Functions of the facts alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from overlaplab.checkup.facts import READ_AT_CUDA_START, Facts
from overlaplab.checkup.machine import describe_limits
from overlaplab.checkup.remarks import Remark, remark
from overlaplab.checkup.system import major_minor

OLDEST_TORCH = (2, 11)
PYTHONS = ((3, 11), (3, 13))
_ON_GPUS = ("pinned", "profiler", "nccl")  # what has to work: sections of the probe


@dataclass(frozen=True, slots=True)
class Part:
    """A cluster of the course, and whether it runs here."""

    cluster: str
    runs: bool
    says: str


def torch_works(facts: Facts) -> bool:
    torch = facts.section("torch").facts
    return bool(torch) and (major_minor(str(torch["torch"])) or (0, 0)) >= OLDEST_TORCH


def judge_versions(facts: Facts) -> Remark:
    """Python, torch and what it was built for."""
    section = facts.section("torch")
    torch = section.facts
    what = f"Python {_dotted(facts.python)}, "
    if not torch:
        why = section.error or "it did not load in time"
        what += f"overlaplab {facts.package}"
        return remark("no torch", why=why, versions=what)
    ccl = "RCCL" if torch.get("hip") else "NCCL"
    builds = (("hip", "ROCm"), ("cuda", "CUDA"), ("nccl", ccl))
    what += f"torch {torch['torch']}, "
    what += "".join(f"{of} {torch[key]}, " for key, of in builds if torch.get(key))
    what += f"overlaplab {facts.package}"
    if not torch_works(facts):
        return remark("old torch", versions=what, oldest=_dotted(OLDEST_TORCH))
    low, high = PYTHONS
    if not low <= facts.python[:2] <= high:
        wanted = f"{_dotted(low)} to {_dotted(high)}"
        return remark("untested python", versions=what, wanted=wanted)
    return Remark("ok", what)


def judge_torch(facts: Facts) -> Iterator[Remark]:
    """Gloo, GPUs, and what has to work on them."""
    if why := facts.section("gloo").failure:
        yield remark("gloo fails", why=why)
    else:
        yield Remark("ok", "gloo: two ranks added two numbers")
    yield _graphics(facts)
    limits = describe_limits(facts.system)
    for name in _ON_GPUS:
        section = facts.sections.get(name)
        if section is None or "skipped" in section.facts or not facts.gpus:
            continue
        more = f" ({limits})" if name == "pinned" and limits else ""
        if why := section.failure:
            yield remark(name, more=f"{more}: no ({why})")
        else:
            yield Remark("ok", remark(name, more=more).what)


def _graphics(facts: Facts) -> Remark:
    """GPUs, or why there are none."""
    section = facts.section("gpus")
    if section.failure:
        return remark("no cuda", why=section.failure)
    if facts.gpus:
        names = count_gpus(str(gpu["name"]) for gpu in facts.gpus)
        gib = min(int(gpu["bytes"]) for gpu in facts.gpus) / 2**30
        return Remark("ok", f"{names}, {gib:.0f} GiB each")
    if not facts.smi_gpus:
        do = "If there should be one: nvidia-smi is here and lists none; run it to see "
        do = "" if facts.smi_gpus is None else f"{do}why."
        return remark("no gpu", if_there_should_be_one=do)
    listed = f"nvidia-smi lists {count_gpus(facts.smi_gpus)}"
    hidden = facts.environ.get("CUDA_VISIBLE_DEVICES")
    if not facts.section("torch").facts.get("cuda"):
        return remark("torch for cpus", listed=listed)
    if hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"):
        return remark("hidden gpus", listed=listed, hidden=hidden)
    return remark("old driver", listed=listed, why=section.facts["why"])


def judge_late_changes(facts: Facts) -> Iterator[Remark]:
    """Variables that were changed after CUDA had read them."""
    if facts.seen_by_cuda is None:
        return
    for name in READ_AT_CUDA_START:
        values = facts.seen_by_cuda.get(name), facts.environ.get(name)
        then, now = ("unset" if v is None else repr(v) for v in values)
        late = "changed too late" if facts.seen_exactly else "changed perhaps too late"
        if now != then:
            yield remark(late, name=name, then=then, now=now)


def judge_parts(facts: Facts) -> tuple[Part, ...]:
    """Which of the clusters run here."""
    works = torch_works(facts)
    gloo = works and not facts.section("gloo").failure
    num_gpus = len(facts.gpus) if works else 0
    if num_gpus >= 2:
        nccl = not facts.section("nccl").failure
        says = "every result measured here" if nccl else "two GPUs do not meet"
    elif num_gpus == 1:
        nccl, says = True, "one rank: launches, streams, traces; no messages"
    else:
        nccl, says = False, "no GPU: lessons show what was measured on others"
    return (
        Part(
            "virtual",
            works,
            "every lesson and every mark" if works else "needs torch (see above)",
        ),
        Part(
            "gloo",
            gloo,
            "real processes and messages, at the speed of this CPU"
            if gloo
            else "see above",
        ),
        Part("nccl", nccl, says),
    )


def count_gpus(names: Iterable[str]) -> str:
    """ "2 x NVIDIA H100, 1 x NVIDIA L4"."""
    return ", ".join(f"{n} x {name}" for name, n in Counter(names).items())


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
