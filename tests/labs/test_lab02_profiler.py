"""2.2 to 2.4: the parts of a profiler, and the whole on real given."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab02 import checks, given, reference
from overlaplab_course.lab02.checks import unseen_rows
from overlaplab_course.lab02.given import Row
from overlaplab_course.lab02.reference import is_communication


def kernel(name, stream, start_us, end_us, **args):
    return Row(name, "kernel", stream, 1000 * start_us, 1000 * end_us, args)


# --- 2.2 -------------------------------------------------------------------------


def merge(
    intervals,
    *,
    order=sorted,
    larger_end=True,
    touching=True,
    drop_empty=True,
    number=int,
):
    union = []
    for start, end in order(intervals):
        start, end = number(start), number(end)
        if drop_empty and start == end:
            continue
        meets = union and (start <= union[-1][1] if touching else start < union[-1][1])
        if meets:
            last = union[-1][1]
            union[-1] = (union[-1][0], max(last, end) if larger_end else end)
        else:
            union.append((start, end))
    return union


def sweep(intervals):
    """Unusual: counts how many are open."""
    marks = sorted(
        mark
        for start, end in intervals
        if start < end
        for mark in ((start, -1), (end, 1))  # at one time, openings first
    )
    union, open_now, begin = [], 0, 0
    for at, change in marks:
        if open_now == 0:
            begin = at
        open_now -= change
        if open_now == 0:
            union.append((begin, at))
    return union


def with_numpy(intervals):
    """Unusual: arrays; returns numpy's integers, in lists."""
    pairs = np.array([p for p in sorted(intervals) if p[0] < p[1]], dtype=np.int64)
    if not len(pairs):
        return []
    ends = np.maximum.accumulate(pairs[:, 1])
    first = np.flatnonzero(np.r_[True, pairs[1:, 0] > ends[:-1]])
    last = np.r_[first[1:] - 1, len(pairs) - 1]
    return [list(pair) for pair in zip(pairs[first, 0], ends[last], strict=True)]


def folded(intervals):
    """Unusual: a fold over tuples."""

    def take(done, new):
        if new[0] == new[1]:
            return done
        if done and new[0] <= done[-1][1]:
            return (*done[:-1], (done[-1][0], max(done[-1][1], new[1])))
        return (*done, new)

    return reduce(take, sorted(intervals), ())


def sorts_in_place(intervals):
    intervals.sort()
    return merge(intervals)


@pytest.mark.parametrize("right", [merge, sweep, with_numpy, folded])
def test_any_union_passes(right):
    verdict = judge(find_exercise("2.2"), lambda intervals: right(intervals))
    assert verdict.passed, str(verdict)


WRONG_UNIONS = {
    "takes the last end": ({"larger_end": False}, checks.UNION),
    "leaves touching ones apart": ({"touching": False}, checks.APART),
    "keeps empty ones": ({"drop_empty": False}, checks.EMPTY),
    "floats": ({"number": float}, checks.EXACT),
}


@pytest.mark.parametrize("name", WRONG_UNIONS)
def test_a_broken_law_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG_UNIONS[name]
    verdict = judge(find_exercise("2.2"), lambda x: merge(x, **slips))
    assert list(faults(verdict)) == [sentence]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda x: merge(x, order=list), checks.UNION),  # not sorted
        (lambda x: sorted(x), checks.APART),  # not merged
        (sorts_in_place, checks.PURE),
        (lambda x: merge(x)[:1], checks.UNION),
    ],
)
def test_other_slips_are_among_the_faults(wrong, sentence, faults):
    assert sentence in faults(judge(find_exercise("2.2"), wrong))


@pytest.mark.parametrize("said", [None, 3, [1, 2], [("a", "b")]])
def test_what_is_no_list_of_pairs_is_described(said):
    assert "list of pairs" in str(judge(find_exercise("2.2"), lambda x: said))


# --- 2.3 -------------------------------------------------------------------------


def overlap(
    rows,
    *,
    kernels_only=True,
    union=True,
    talks=is_communication,
    over="communication_ns",
    nothing=None,
):
    rows = [r for r in rows if r.category == "kernel" or not kernels_only]
    kinds = {"communication_ns": [], "compute_ns": []}
    for row in rows:
        kind = "communication_ns" if talks(row) else "compute_ns"
        kinds[kind].append((row.start_ns, row.end_ns))
    length = {k: sum(b - a for a, b in merge(v)) for k, v in kinds.items()}
    every = [pair for pairs in kinds.values() for pair in pairs]
    hidden = sum(length.values()) - sum(b - a for a, b in merge(every))
    if not union:
        length = {k: sum(b - a for a, b in v) for k, v in kinds.items()}
        hidden = sum(
            max(0, min(b, d) - max(a, c))
            for a, b in kinds["communication_ns"]
            for c, d in kinds["compute_ns"]
        )
    return {
        **length,
        "hidden_ns": hidden,
        "exposed_ns": length["communication_ns"] - hidden,
        "fraction": hidden / length[over] if length["communication_ns"] else nothing,
    }


def by_events(rows):
    """Unusual: walks over all boundaries, counting what is open."""
    marks = []
    for row in rows:
        if row.category == "kernel":
            kind = is_communication(row)
            marks += [(row.start_ns, 1, kind), (row.end_ns, -1, kind)]
    open_now, at_ns = {True: 0, False: 0}, 0
    sums = dict.fromkeys(("compute_ns", "communication_ns", "hidden_ns"), 0)
    for time_ns, change, kind in sorted(marks):
        length_ns = time_ns - at_ns
        if open_now[False] > 0:
            sums["compute_ns"] += length_ns
        if open_now[True] > 0:
            sums["communication_ns"] += length_ns
            sums["hidden_ns"] += length_ns * (open_now[False] > 0)
        open_now[kind] += change
        at_ns = time_ns
    sent = sums["communication_ns"]
    sums["exposed_ns"] = sent - sums["hidden_ns"]
    sums["fraction"] = sums["hidden_ns"] / sent if sent else None
    return sums | {"note": "more keys are fine"}


@pytest.mark.parametrize("right", [overlap, by_events, reference.overlap])
def test_any_profiler_with_the_right_numbers_passes(right):
    verdict = judge(find_exercise("2.3"), lambda rows: right(rows))
    assert verdict.passed, str(verdict)


def active(rows):
    """Compute + communication - active, active with copies in it (G12)."""
    numbers = overlap(rows)
    gpu = [r for r in rows if r.category in ("kernel", "gpu_memcpy")]
    busy = sum(b - a for a, b in merge((r.start_ns, r.end_ns) for r in gpu))
    hidden = numbers["compute_ns"] + numbers["communication_ns"] - busy
    sent = numbers["communication_ns"]
    return numbers | {
        "hidden_ns": hidden,
        "exposed_ns": sent - hidden,
        "fraction": hidden / sent if sent else None,
    }


WRONG_PROFILERS = {
    "all rows": (lambda r: overlap(r, kernels_only=False), checks.KERNELS),
    "active with copies": (active, checks.KERNELS),
    "sums, no unions": (lambda r: overlap(r, union=False), checks.ONCE),
    "another stream communicates": (
        lambda r: overlap(r, talks=lambda row: row.stream != 7),
        checks.ANY_STREAM,
    ),
    "the largest name computes": (
        lambda r: overlap(r, talks=lambda row: "gemm" not in row.name),
        checks.ANY_STREAM,
    ),
    "over compute": (lambda r: overlap(r, over="compute_ns"), checks.PARTS),
    "hidden is None without": (lambda r: overlap(r, nothing=0.0), checks.NONE),
    "hidden in full without": (lambda r: overlap(r, nothing=1.0), checks.NONE),
    "not a number without": (
        lambda r: overlap(r, nothing=float("nan")),
        checks.NONE,
    ),
}


@pytest.mark.parametrize("name", WRONG_PROFILERS)
def test_a_wrong_definition_is_refused_by_its_sentence(name, faults):
    wrong, sentence = WRONG_PROFILERS[name]
    found = faults(judge(find_exercise("2.3"), wrong))
    assert list(found) == [sentence]  # one trap at a time
    assert "us" in found[sentence]  # the rows are described


def test_floats_of_microseconds_fail_on_large_clocks(faults):
    def rounded(rows):
        rows = [
            r._replace(
                start_ns=int(r.start_ns / 1e3) * 1000, end_ns=int(r.end_ns / 1e3) * 1000
            )
            for r in rows
        ]
        return overlap(rows)

    assert list(faults(judge(find_exercise("2.3"), rounded))) == [checks.UNSEEN]


@pytest.mark.parametrize("said", [None, {}, {"compute_ns": 1}, 3])
def test_what_is_no_dict_of_five_is_described(said):
    verdict = judge(find_exercise("2.3"), lambda rows: said)
    assert "dict" in str(verdict)


def test_unseen_rows_have_everything_at_once():
    every = [row for seed in range(checks.NUM_UNSEEN) for row in unseen_rows(seed)]
    assert {r.category for r in every} >= {"kernel", "gpu_memcpy", "cpu_op"}
    assert any(is_communication(r) and r.stream == 7 for r in every)
    fractions = {reference.overlap(unseen_rows(s))["fraction"] for s in range(20)}
    assert len(fractions) > 15


# --- 2.4 -------------------------------------------------------------------------


def by_words(row):
    return is_communication(row)


def by_pattern(row):
    """Unusual: one regular expression."""
    import re

    pattern = r"(?i)n?ccl.*kernel|multimem_|(one|two)_shot_|cross_device_reduce"
    named = re.search(pattern, row.name) is not None
    return row.category == "kernel" and (named or bool(row.args.get("Collective name")))


def by_operation(row):
    """Unusual: the name without underscores, families of operations as numbers."""
    flat = row.name.lower().replace("_", "")
    hits = sum(
        word in flat
        for word in ("ccl", "shotallreduce", "multimem", "crossdevicereduce")
    )
    return (hits + ("Collective name" in row.args)) * (row.category == "kernel")


@pytest.mark.parametrize("right", [by_words, by_pattern, by_operation])
def test_any_rule_that_knows_the_families_passes(right):
    verdict = judge(find_exercise("2.4"), lambda row: right(row))
    assert verdict.passed, str(verdict)


def by(test):
    return lambda row: (
        row.category == "kernel"
        and ("Collective name" in row.args or test(row.name.lower()))
    )


RIGHT_WORDS = ("nccl", "rccl", "multimem", "shot_all_reduce", "cross_device_reduce")
WRONG_RULES = {
    "the old prefix": (by(lambda n: n.startswith("ncclkernel")), checks.NCCL),
    "nccl only": (
        by(lambda n: "rccl" not in n and any(w in n for w in RIGHT_WORDS)),
        checks.RCCL,
    ),
    "no nccl, no collective": (by(lambda n: "ccl" in n), checks.OTHERS),
    "names only": (
        lambda row: (
            row.category == "kernel" and any(w in row.name.lower() for w in RIGHT_WORDS)
        ),
        checks.ARGS,
    ),
    "whatever reduces": (
        by(lambda n: "reduce" in n or any(w in n for w in RIGHT_WORDS)),
        checks.COMPUTE,
    ),
    "whatever does not compute by a list (G12)": (
        by(lambda n: not any(w in n for w in ("gemm", "elementwise", "reduce_kernel"))),
        checks.COMPUTE,
    ),
    "annotations too": (
        lambda row: any(w in row.name.lower() for w in RIGHT_WORDS) or bool(row.args),
        checks.NO_KERNELS,
    ),
    "another stream": (lambda row: row.stream != 7, checks.NCCL),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_refused_by_its_family(name, faults):
    rule, sentence = WRONG_RULES[name]
    found = faults(judge(find_exercise("2.4"), rule))
    assert sentence in found


def test_only_the_family_that_is_forgotten_is_refused(faults):
    for name in ("nccl only", "no nccl, no collective", "names only"):
        rule, sentence = WRONG_RULES[name]
        assert list(faults(judge(find_exercise("2.4"), rule))) == [sentence]


# --- together ----------------------------------------------------------------------


@pytest.mark.parametrize("which", given.TRACES)
def test_the_learners_profiler_and_the_package_agree_to_the_nanosecond(which):
    mine = reference.overlap(given.raw_rows(which))
    theirs = given.whole_trace(which).report()
    for key in ("compute_ns", "communication_ns", "hidden_ns", "exposed_ns"):
        assert mine[key] == getattr(theirs, key)
    assert mine["fraction"] == theirs.overlap_fraction


def test_the_names_of_the_field_give_three_quarters():
    """G01 of the cases: four names on stream 20 beside one gemm."""
    rows = [
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float(...)", 20, 0, 10),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", 20, 20, 30),
        kernel("ncclSymkDevKernel_AllGather_LL(...)", 20, 40, 50),
        kernel("void rcclGenericKernel<1>(...)", 20, 60, 70),
        kernel("gemm", 7, 5, 65),
    ]
    assert reference.overlap(rows)["fraction"] == 0.75


def test_kernels_under_a_microsecond_count_exactly():
    """G04 of the cases."""
    rows = [kernel("nccl", 20, 0, 1000)]
    rows += [
        Row("tiny", "kernel", 7, 1000 * i + 300, 1000 * i + 700) for i in range(1000)
    ]
    assert reference.overlap(rows)["fraction"] == 0.4
