"""The half that needs no GPU: predict each measured configuration, and compare."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlaplab.bench.predict.errors import Row, summary
from overlaplab.bench.predict.measure import PROFILED_STEPS
from overlaplab.bench.predict.predict import predict, record_variant
from overlaplab.calibrate.profile import build_profile
from overlaplab.hardware import Hardware
from overlaplab.program import Op

_STATE = ("model", "batch", "sm_clock_mhz", "power_mw", "temperature_c")
_MACHINE = ("card", "num_cards", "driver", "torch", "nccl", "date", "command")
_MAIN = (
    "launch_ns",
    "backward_launch_ns",
    "collective_launch_ns",
    "collective_part_launch_ns",
    "busy_latency_ns",
    "compute_rate_permille",
    "wire_rate_permille",
)
Tell = Callable[[str], None]
Steps = dict[tuple[str, int, str], tuple[Op, ...]]


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
            found["calibration"]["launches"],
            found["calibration"],
            where,
        )
        for link, found in measured["links"].items()
    }


def compare(
    files: Sequence[Mapping[str, Any]], tell: Tell, programs: Path | None = None
) -> dict[str, Any]:
    """Predict everything that was measured.

    Args:
        files: what `predict measure` wrote, once or more; a link of a later file, with
            its calibration, stands instead of the same link of an earlier one.
        tell: progress.
        programs: keeps the recorded programs from one call to the next.

    Returns:
        "rows" and "summary" of the grid, and the same of steps bound by launches.
    """
    steps: Steps = {}
    if programs is not None and programs.exists():
        steps = pickle.loads(programs.read_bytes())
    of_link = {link: measured for measured in files for link in measured["links"]}
    hardware: dict[str, Hardware] = {}
    rows: dict[bool, list[Row]] = {False: [], True: []}
    for link, measured in of_link.items():
        hardware[link] = profiles(measured)[link]
        for case in measured["links"][link]["cases"]:
            tell(f"{link}: {case['model']}, batch {case['batch']}")
            rows[case["launch_bound"]] += _rows(
                link, case, measured, hardware[link], steps
            )
            if programs is not None:
                programs.write_bytes(pickle.dumps(steps))
    return {
        "benchmark": "predict compare",
        "machines": {
            link: {key: measured.get(key, "") for key in _MACHINE}
            for link, measured in of_link.items()
        },
        "calibrated": {link: _main_numbers(hw) for link, hw in hardware.items()},
        "cards": [
            {"link": link, **{key: case.get(key) for key in _STATE}}
            for link, measured in of_link.items()
            for case in measured["links"][link]["cases"]
        ],
        "summary": summary(rows[False]),
        "by_link": {
            link: summary([row for row in rows[False] if row.link == link])
            for link in of_link
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
                *key[:2], case["tokens"], case["dtype"], caps.get(variant), variant
            )
        guess = predict(
            steps[key],
            hardware,
            steps_a_round=grid["steps_a_round"],
            profiled_steps=PROFILED_STEPS,
            num_ranks=measured["world_size"],
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


def _main_numbers(hw: Hardware) -> dict[str, int]:
    return {key: getattr(hw, key) for key in _MAIN} | {
        "latency_ns": hw.link.latency_ns,
        "link_bytes_per_s": hw.link.bytes_per_s,
    }


def _exposed(times: Mapping[str, Any]) -> float | None:
    exposed = times.get("kernels", {}).get("exposed_ms")
    return None if exposed is None else round(exposed / PROFILED_STEPS, 4)
