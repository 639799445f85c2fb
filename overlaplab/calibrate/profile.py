"""From measurements to a hardware profile. No device, no clock: arithmetic.

Every number's note says how it was measured. Operators of the measured models are
joined with what the virtual cluster records of the same models, one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overlaplab.calibrate.operators import operators_of_step
from overlaplab.calibrate.plan import ModelCase
from overlaplab.hardware import Hardware, Link, contention_key
from overlaplab.hardware.collectives import collective_ns

Points = tuple[tuple[int, int], ...]
_SIMILAR_PERMILLE = 1150  # work within 15 % is averaged to one point
# From this payload on several tensors in one collective have times of their own.
_COALESCED_BYTES = 8 * 2**20
_NOT_MEASURED = "not measured: this machine has one process, or no link"


def build_profile(
    name: str,
    device: Mapping[str, Any],
    launches: Mapping[str, Any],
    link: Mapping[str, Any] | None,
    where: str,
) -> Hardware:
    """The profile of a machine, of what `measure_device`, `measure_launches` and
    `measure_link` (None: it has no link) gave. `where`: card, versions and date, for
    the notes."""
    notes: dict[str, str] = {}
    points = _operator_points(device, notes)
    points["bytes"] = curve_through(
        (row["bytes"], row["ns"]) for row in device["memory"]
    )
    notes["points['bytes']"] = "copies of one tensor in device memory, read and write"
    best = _best(device["matmuls"], "dtype", "flops")
    rates = {"default": best.get("float32") or min(best.values()), **best}
    notes["flops_per_s"] = "the best of square products of " + ", ".join(
        sorted({str(row["size"]) for row in device["matmuls"]}, key=int)
    )
    largest = max(device["memory"], key=lambda row: row["bytes"])
    notes["memory_bytes_per_s"] = f"a copy of {largest['bytes'] >> 21} MiB, both ways"
    notes["kernel_floor_ns"] = "an addition to one number, a hundred in a row"
    wire, rates_beside = _link(link, notes)
    others: dict[str, Any] = {
        **_host_rates(device["host_copies"], notes),
        **_allocator(device.get("allocator", {}), notes),
        **_launch_costs(launches, notes),
        **rates_beside,
    }
    return Hardware(
        name=name,
        flops_per_s=rates,
        memory_bytes_per_s=_rate(largest["bytes"], largest["ns"]),
        kernel_floor_ns=device["small_kernel"]["device_ns"],
        link=wire,
        points=points,
        source=f"overlaplab calibrate, {where}",
        notes=notes,
        **others,
    )


def _operator_points(
    device: Mapping[str, Any], notes: dict[str, str]
) -> dict[str, Points]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, work, ns in joined_operators(device):
        found[key].append((work, ns))
    points = {key: curve_through(pairs) for key, pairs in sorted(found.items())}
    cases = ", ".join(
        f"{m['case']['d_model']}x{m['case']['batch']}" for m in device["models"]
    )
    notes["points"] = (
        "operators in forward and backward passes of transformers of "
        f"(width x sequences) {cases}: median of marks before and after each, on a hot "
        "device; work within 15 % averaged"
    )
    return points


def joined_operators(device: Mapping[str, Any]) -> Iterable[tuple[str, int, int]]:
    """(key of `Hardware.points`, work, ns) of every operator of the measured models.

    Raises:
        ValueError: the device ran other operators than the virtual cluster records.
    """
    for model in device["models"]:
        case, measured = ModelCase(**model["case"]), model["operators"]
        ops = operators_of_step(case, model["dtype"])
        if len(ops) != len(measured) or any(
            not _same(op.name, row[0]) for op, row in zip(ops, measured, strict=True)
        ):
            raise ValueError(
                f"the device ran {len(measured)} operators in a step of "
                f"{case.config()}, the virtual cluster records {len(ops)}: "
                f"{[row[0] for row in measured]} and {[op.name for op in ops]}"
            )
        for op, (_, _, ns) in zip(ops, measured, strict=True):
            alone = max(1, ns - model["mark_ns"])
            if op.flops:
                yield f"flops:{op.name}:{op.dtype}", op.flops, alone
            else:
                yield f"bytes:{op.name}", op.read_bytes + op.write_bytes, alone


def _same(recorded: str, measured: str) -> bool:
    """Whether two names are one operator: devices have attentions of their own."""
    return recorded == measured or (
        "attention" in recorded
        and "attention" in measured
        and ("backward" in recorded) == ("backward" in measured)
    )


def curve_through(pairs: Iterable[tuple[int, int]]) -> Points:
    """Points that ascend: similar work averaged, and no more work in less time."""
    groups: list[list[tuple[int, int]]] = []
    for work, ns in sorted(pair for pair in pairs if pair[0] > 0):
        if groups and work * 1000 <= groups[-1][0][0] * _SIMILAR_PERMILLE:
            groups[-1].append((work, ns))
        else:
            groups.append([(work, ns)])
    # Pool adjacent violators (Ayer et al. 1955): the nearest times that do not fall.
    pooled: list[tuple[list[int], float]] = []  # works, and the time of each
    for group in groups:
        work = sum(w for w, _ in group) // len(group)
        # Each of a group counts alike by its rate, so that their sum comes out right.
        works, mean = [work], sum(ns * work / w for w, ns in group) / len(group)
        while pooled and pooled[-1][1] > mean:
            before, longer = pooled.pop()
            total = len(before) + len(works)
            mean = (longer * len(before) + mean * len(works)) / total
            works = [*before, *works]
        pooled.append((works, mean))
    return tuple((work, max(1, round(ns))) for works, ns in pooled for work in works)


def _best(rows: Iterable[Mapping[str, Any]], key: str, work: str) -> dict[str, int]:
    """The best rate of the rows of each `key`, `work` per second."""
    best: dict[str, int] = defaultdict(int)
    for row in rows:
        best[row[key]] = max(best[row[key]], _rate(row[work], row["ns"]))
    return best


def _host_rates(
    rows: Sequence[Mapping[str, Any]], notes: dict[str, str]
) -> dict[str, int]:
    rates = {}
    for pinned, key in ((True, "host_bytes_per_s"), (False, "pageable_bytes_per_s")):
        best = _best((r for r in rows if r["pinned"] == pinned), "direction", "bytes")
        if best:
            rates[key] = min(best.values())
            notes[key] = "the slower direction: " + ", ".join(
                f"{way} {rate / 1e9:.1f} GB/s" for way, rate in best.items()
            )
        else:
            notes[key] = "not measured: the device is the host"
    return rates


def _allocator(found: Mapping[str, int], notes: dict[str, str]) -> dict[str, int]:
    if found:
        notes["allocation_bytes"] = "what the allocator gave for one byte"
        notes["workspace_bytes"] = "what the first matmul of a new stream kept"
    return dict(found)


def _launch_costs(launches: Mapping[str, Any], notes: dict[str, str]) -> dict[str, int]:
    variants = launches["variants"]
    compute = variants["compute"]
    case = launches["case"]
    where = f"a transformer of {case['num_layers']} layers, width {case['d_model']}"
    forward, backward = launches["forward_ops"], launches["backward_ops"]
    num = launches["parameters"]
    costs = {
        "launch_ns": compute["forward_ns"] // forward,
        "backward_launch_ns": compute["backward_ns"] // backward,
        "collective_launch_ns": 0,
    }
    notes |= {
        "launch_ns": f"{where}: the CPU's time of the forward pass over its {forward} "
        "operators, Python included",
        "backward_launch_ns": f"{where}: of the backward pass over its {backward} "
        "operators",
    }
    if "per parameter" not in variants:
        notes["collective_launch_ns"] = _NOT_MEASURED
        return costs
    one = max(0, variants["per parameter"]["step_ns"] - compute["step_ns"]) // num
    several = variants["one bucket"]["step_ns"] - compute["step_ns"] - one
    costs["collective_launch_ns"] = one
    costs["collective_part_launch_ns"] = max(0, several) // num
    notes["collective_launch_ns"] = (
        f"{where}: a step with one all-reduce from a hook of each of {num} parameters, "
        "less one without, hook and wait included"
    )
    notes["collective_part_launch_ns"] = (
        f"{where}: the same with one all-reduce of all {num}, less one launch"
    )
    return costs


def _link(
    link: Mapping[str, Any] | None, notes: dict[str, str]
) -> tuple[Link, dict[str, Any]]:
    if link is None:
        notes["link"] = _NOT_MEASURED
        return Link(latency_ns=0, bytes_per_s=10**12, source=_NOT_MEASURED), {}
    num = link["num_ranks"]
    unit = Hardware(
        name="bytes",
        flops_per_s={"default": 1},
        memory_bytes_per_s=1,
        kernel_floor_ns=0,
        launch_ns=0,
        collective_launch_ns=0,
        link=Link(latency_ns=0, bytes_per_s=10**9),  # a nanosecond a byte
    )
    curve = curve_through(
        (collective_ns(unit, "all_reduce", num, row["bytes"])[1], row["ns"])
        for row in link["collectives"]
        if row["operation"] == "all_reduce"
        and (row["tensors"] > 1) == (row["bytes"] >= _COALESCED_BYTES)
    )
    latency = curve[0][1]
    times = tuple((work, max(0, ns - latency)) for work, ns in curve)
    beside = link["contention"]["step"]
    contention, waits = _by_kind(link["contention"]["kinds"])
    notes |= {
        "link": f"all_reduce alone on {num} ranks, of one tensor, from "
        f"{_COALESCED_BYTES >> 20} MiB on of several as reducers send them; latency is "
        f"the time of {curve[0][0]} bytes",
        "compute_rate_permille": "a transformer's steps with and without all-reduces "
        f"of {beside['bytes'] >> 20} MiB beside them all the time",
        "wire_rate_permille": "those all-reduces without the steps and, the median, "
        "with them",
        "contention": "kernels of one kind over and over, and all-reduces without end "
        "beside them, on a stream of default and of high priority: how much longer "
        "each takes than alone, without the time that an all-reduce waits for room",
        "waits_for_room": "small all-reduces beside matmuls take as long as what is "
        "left of a matmul" + ("" if waits else ": no, they do not"),
    }
    last = times[-1]
    wire = Link(
        latency_ns=latency,
        bytes_per_s=_rate(last[0], max(1, last[1])),
        times=times if last[1] else (),  # a wire of which nothing was seen
        source=notes["link"],
    )
    return wire, {
        "compute_rate_permille": _permille(
            beside["compute_alone_ns"], beside["compute_beside_ns"]
        ),
        "wire_rate_permille": _permille(
            beside["wire_alone_ns"], beside["wire_beside_median_ns"]
        ),
        "contention": contention,
        "waits_for_room": waits,
    }


def _by_kind(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, tuple[int, int]], bool]:
    """`Hardware.contention` and `Hardware.waits_for_room`, from rows of two sizes.

    A small all-reduce that comes again as soon as it can finds the next kernel begun,
    and waits for its end: so much longer does it take. A large one comes at any moment
    of a kernel and waits for half of one, while which that kernel is not slowed.
    """
    found, waits = {}, False
    for small, large in zip(rows[::2], rows[1::2], strict=True):
        wait = max(0, small["wire_beside_median_ns"] - small["wire_alone_ns"])
        if small["kind"] == "matmul":
            kernel_ns = small["compute_alone_ns"] // small["kernels"]
            waits |= 2 * wait > kernel_ns
        took, half = large["wire_beside_median_ns"], wait // 2
        done = took * large["compute_alone_ns"] // max(1, large["compute_beside_ns"])
        key = contention_key(large["kind"], high_priority=large["high_priority"])
        found[key] = (
            _permille(done - half, took - half),
            _permille(large["wire_alone_ns"], took - half),
        )
    return found, waits


def _permille(alone_ns: int, beside_ns: int) -> int:
    return max(1, min(1000, 1000 * alone_ns // max(beside_ns, 1)))


def _rate(work: int, ns: int) -> int:
    return max(1, work * 10**9 // max(ns, 1))
