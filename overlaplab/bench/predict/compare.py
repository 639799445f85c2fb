"""The half that needs no GPU: predict what was measured, and judge the predictions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from overlaplab.bench.predict.measure import PROFILED_STEPS
from overlaplab.bench.predict.predict import predict, record_variant
from overlaplab.calibrate.profile import build_profile
from overlaplab.hardware import Hardware
from overlaplab.program import Program

if TYPE_CHECKING:
    from overlaplab.view import Table

DIFFER = 0.03  # pairs of variants that are closer have no order to get right
_STATE = ("model", "batch", "sm_clock_mhz", "power_mw", "temperature_c")
_MACHINE = ("card", "num_cards", "driver", "torch", "nccl", "date", "command")
_MAIN = (
    "launch_ns",
    "backward_launch_ns",
    "collective_launch_ns",
    "collective_part_launch_ns",
)
Say = Callable[[str], None]
Steps = dict[tuple[str, int, str], Program]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: what was measured, and what had been predicted."""

    link: str
    model: str
    batch: int
    variant: str
    step_ms: float
    predicted_step_ms: float
    p10_ms: float  # of the measured steps
    p90_ms: float
    exposed_ms: float | None = None  # communication; None: not measured
    predicted_exposed_ms: float | None = None

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_step_ms / self.step_ms - 1

    @property
    def exposed_error_of_step(self) -> float | None:
        """Error of the exposed time as a share of the measured step."""
        if self.exposed_ms is None or self.predicted_exposed_ms is None:
            return None
        return (self.predicted_exposed_ms - self.exposed_ms) / self.step_ms

    @property
    def exposed_error(self) -> float | None:
        """Predicted over measured exposed time, less one; None where it is nothing."""
        if not self.exposed_ms or self.predicted_exposed_ms is None:
            return None
        return self.predicted_exposed_ms / self.exposed_ms - 1


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that at least `share` of `values` do not exceed.

    >>> quantile([4, 1, 3, 2], 0.5), quantile(range(1, 11), 0.9), quantile([5], 0.9)
    (2, 9, 5)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def summary(rows: Sequence[Row]) -> dict[str, float | int]:
    """The numbers by which the virtual cluster is judged.

    Returns:
        Of |predicted / measured - 1| the median and the 90th percentile, for step time
        and for exposed time, the latter also as a share of the step; and of pairs of
        variants of one model, batch and link whose measured steps differ by more than
        3 %, how many there are and how many are predicted in the right order.
    """
    steps = [abs(row.error) for row in rows]
    exposed = [abs(e) for row in rows if (e := row.exposed_error) is not None]
    shares = [abs(e) for row in rows if (e := row.exposed_error_of_step) is not None]
    pairs, right = ranking(rows)
    found: dict[str, float | int] = {
        "configurations": len(rows),
        "step_median": quantile(steps, 0.5),
        "step_p90": quantile(steps, 0.9),
        "step_worst": max(steps),
        "pairs": pairs,
        "pairs_right": right,
        "ranking": right / pairs if pairs else 1.0,
    }
    for name, values in (("exposed", exposed), ("exposed_of_step", shares)):
        if values:
            found[f"{name}_median"] = quantile(values, 0.5)
            found[f"{name}_p90"] = quantile(values, 0.9)
    return {key: round(value, 4) for key, value in found.items()}


def ranking(rows: Iterable[Row]) -> tuple[int, int]:
    """Pairs that differ by more than 3 %, and how many of them are in order."""
    cases: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.link, row.model, row.batch), []).append(row)
    pairs = right = 0
    for variants in cases.values():
        for a, b in itertools.combinations(variants, 2):
            fast, slow = sorted((a, b), key=lambda row: row.step_ms)
            if slow.step_ms / fast.step_ms - 1 > DIFFER:
                pairs += 1
                right += fast.predicted_step_ms < slow.predicted_step_ms
    return pairs, right


def profiles(measured: Mapping[str, Any]) -> dict[str, Hardware]:
    """A profile for each link, from the calibration and nothing else of the file."""
    where = ", ".join(
        str(measured[key])
        for key in ("card", "torch", "nccl", "date")
        if key in measured
    )
    return {
        link: build_profile(
            f"calibrated-{link}",
            measured["device"],
            launches_of(found["calibration"]),
            found["calibration"],
            where,
        )
        for link, found in measured["links"].items()
    }


def launches_of(calibration: Mapping[str, Any]) -> Mapping[str, Any]:
    """What launches cost: the mean of before and after the steps that they bound."""
    before = calibration["launches"]
    after = calibration.get("launches_after", before)
    means = {
        name: {key: (ns + after["variants"][name][key]) // 2 for key, ns in of.items()}
        for name, of in before["variants"].items()
    }
    return {**before, "variants": means}


def calls_ns(launches: Mapping[str, Any]) -> dict[str, int]:
    """What the CPU pays for each kind of launch: alone, and by what a step grows."""
    steps = {name: of["step_ns"] for name, of in launches["variants"].items()}
    num, buckets = launches["parameters"], launches["variants"].get("buckets")
    found = dict(launches["calls"])
    found["hook"] = (steps["hooks"] - steps["compute"]) // num
    if buckets is not None:
        more = buckets["buckets"] - 1
        found["message"] = (steps["per parameter"] - steps["compute"]) // num
        found["bucket"] = (steps["buckets"] - steps["one bucket"]) // more
        found["tensor"] = (steps["one bucket"] - steps["compute"]) // num
    return found


def compare(measured: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Predict everything that was measured.

    Args:
        measured: what `predict measure` wrote.
        say: progress.

    Returns:
        "rows" and "summary" of the grid, and the same of steps bound by launches.
    """
    steps: Steps = {}
    hardware = profiles(measured)
    cases = [(ln, c) for ln, of in measured["links"].items() for c in of["cases"]]
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for link, case in cases:
        say(f"{link}: {case['model']}, batch {case['batch']}")
        rows[case["launch_bound"]] += _rows(link, case, measured, hardware[link], steps)
    machine = {key: measured.get(key, "") for key in _MACHINE}
    return {
        "benchmark": "predict compare",
        "machines": dict.fromkeys(hardware, machine),
        "calibrated": {link: _main_numbers(hw) for link, hw in hardware.items()},
        "calls_ns": {
            f"{link}, {when}": calls_ns(of["calibration"][key])
            for link, of in measured["links"].items()
            for when, key in (("before", "launches"), ("after", "launches_after"))
            if key in of["calibration"]
        },
        "cards": [
            {"link": link, **{key: case.get(key) for key in _STATE}}
            for link, case in cases
        ],
        "summary": summary(rows[False]),
        "by_link": {
            link: summary([row for row in rows[False] if row.link == link])
            for link in hardware
        },
        "rows": [asdict(row) for row in rows[False]],
        "launch_bound": {
            "summary": summary(rows[True]) if rows[True] else {},
            "rows": [asdict(row) for row in rows[True]],
        },
    }


def _rows(
    link: str,
    case: Mapping[str, Any],
    measured: Mapping[str, Any],
    hardware: Hardware,
    steps: Steps,
) -> list[Row]:
    """One model and batch: all variants, measured and predicted."""
    grid = measured["settings"]["grid"]
    caps = {f"bucketed {cap:g}": cap for cap in grid["buckets_mib"]}
    rows = []
    for variant, times in case["variants"].items():
        key = (case["model"], case["batch"], variant)
        if key not in steps:
            steps[key] = record_variant(
                *key[:2],
                case["tokens"],
                case["dtype"],
                caps.get(variant),
                variant,
                1 + grid["steps_a_round"] + PROFILED_STEPS,
            )
        guess = predict(
            steps[key],
            hardware,
            steps_a_round=grid["steps_a_round"],
            profiled_steps=PROFILED_STEPS,
        )
        rows.append(
            Row(
                link,
                *key,
                times["median_ms"],
                round(guess.step_ns / 1e6, 4),
                times["p10_ms"],
                times["p90_ms"],
                _exposed(times),
                round(guess.exposed_ns / 1e6, 4),
            )
        )
    return rows


def _main_numbers(hw: Hardware) -> dict[str, Any]:
    return {key: getattr(hw, key) for key in _MAIN} | {
        "latency_ns": hw.link.latency_ns,
        "link_bytes_per_s": hw.link.bytes_per_s,
        "contention": dict(hw.contention),
        "waits_for_room": hw.waits_for_room,
    }


def _exposed(times: Mapping[str, Any]) -> float | None:
    exposed = times.get("kernels", {}).get("exposed_ms")
    return None if exposed is None else round(exposed / PROFILED_STEPS, 4)


def claim(compared: Mapping[str, Any]) -> str:
    """The sentence."""
    found = compared["summary"]
    return (
        f"Step time of {found['configurations']} configurations on two GPUs: median "
        f"error {_percent(found['step_median'])}, 90th percentile "
        f"{_percent(found['step_p90'])}, worst {_percent(found['step_worst'])}. Of "
        f"{found['pairs']} pairs of variants that differ by more than 3 %, "
        f"{found['pairs_right']} ({_percent(found['ranking'])}) are predicted in the "
        "right order."
    )


def errors_table(compared: Mapping[str, Any]) -> Table:
    header = (
        ";configurations;step, median;step, p90;exposed, median;exposed, p90;"
        "exposed, of the step: median;p90;pairs;in order"
    )
    rows = []
    for name, found in {"all": compared["summary"], **compared["by_link"]}.items():
        shares = (
            _percent(found[f"{what}_{which}"]) if f"{what}_{which}" in found else "-"
            for what in ("step", "exposed", "exposed_of_step")
            for which in ("median", "p90")
        )
        ends = str(found["pairs"]), _percent(found["ranking"])
        rows.append((name, str(found["configurations"]), *shares, *ends))
    from overlaplab.view import Table  # it loads Matplotlib

    return Table(tuple(header.split(";")), tuple(rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
