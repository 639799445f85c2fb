"""The tables of course/prediction.md, made from the stored comparison.

The page has marked places, `<!-- NAME -->` to `<!-- end -->`; what stands between them
is made here and nowhere else, and a test holds the page to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from overlaplab.bench.predict.errors import Row, by, quantile

_PLACE = re.compile(r"(<!-- (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(page: str, compared: Mapping[str, Any]) -> str:
    """`page` with every marked place made anew.

    Raises:
        KeyError: a place of which nothing is known.
    """
    made = places(compared)
    return _PLACE.sub(lambda m: m[1] + made[m["name"]] + "\n" + m[3], page)


def places(compared: Mapping[str, Any]) -> dict[str, str]:
    """Text by the name of its place."""
    rows = rows_of(compared["rows"])
    apart = rows_of(compared["launch_bound"]["rows"])
    return {
        "claim": claim(compared),
        "errors": errors_table(compared),
        "by variant": variants_table(rows),
        "steps": steps_table(rows),
        "launch bound": steps_table(apart),
        "calibrated": calibrated_table(compared),
        "cards": cards_table(compared),
        "machine": machine(compared),
    }


def rows_of(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [Row(**row) for row in rows]


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


def errors_table(compared: Mapping[str, Any]) -> str:
    parts = {"all": compared["summary"], **compared["by_link"]}
    lines = [
        "| | configurations | step, median | step, p90 | exposed, median "
        "| exposed, p90 | exposed, of the step: median | p90 | pairs | in order |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in parts.items():
        cells = [name, str(found["configurations"])]
        cells += [
            _percent(found[key]) if key in found else "-"
            for key in (
                "step_median",
                "step_p90",
                "exposed_median",
                "exposed_p90",
                "exposed_of_step_median",
                "exposed_of_step_p90",
            )
        ]
        cells += [str(found["pairs"]), _percent(found["ranking"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def variants_table(rows: Sequence[Row]) -> str:
    lines = [
        "| | median error | least | most |",
        "|---|---|---|---|",
    ]
    for key in ("variant", "model"):
        for name, group in by(rows, key).items():
            errors = [row.error for row in group]
            lines.append(
                f"| {name} | {_signed(quantile(errors, 0.5))} | "
                f"{_signed(min(errors))} | {_signed(max(errors))} |"
            )
    return "\n".join(lines)


def steps_table(rows: Sequence[Row]) -> str:
    """Every configuration: measured, its spread, predicted, error."""
    lines = [
        "| link | model, batch | variant | measured ms | p10 to p90 | predicted ms | "
        "error | exposed ms | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.link} | {row.model}, {row.batch} | {row.variant} "
            f"| {row.step_ms:.1f} | {row.p10_ms:.1f} to {row.p90_ms:.1f} "
            f"| {row.predicted_step_ms:.1f} | {_signed(row.error)} "
            f"| {_ms(row.exposed_ms)} | {_ms(row.predicted_exposed_ms)} |"
        )
    return "\n".join(lines)


def calibrated_table(compared: Mapping[str, Any]) -> str:
    """The numbers of the two profiles that differ, and those that decide."""
    links = compared["calibrated"]
    rows = [
        ("latency of a collective, us", "latency_ns", 1e3),
        ("and where a kernel runs, us more", "busy_latency_ns", 1e3),
        ("link, GB/s", "link_bytes_per_s", 1e9),
        ("speed of kernels beside it, %", "compute_rate_permille", 10),
        ("its speed beside kernels, %", "wire_rate_permille", 10),
        ("launch, forward, us", "launch_ns", 1e3),
        ("launch, backward, us", "backward_launch_ns", 1e3),
        ("launch of a collective, hook included, us", "collective_launch_ns", 1e3),
        ("each further tensor of it, us", "collective_part_launch_ns", 1e3),
    ]
    lines = ["| | " + " | ".join(links) + " |", "|---|" + "---|" * len(links)]
    for name, key, unit in rows:
        values = (f"{found[key] / unit:.1f}" for found in links.values())
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def cards_table(compared: Mapping[str, Any]) -> str:
    """What clock and power were in the middle of serial steps."""
    lines = [
        "| link | model, batch | SM clock, MHz | power, W | temperature, C |",
        "|---|---|---|---|---|",
    ]
    for row in compared["cards"]:
        watts = row["power_mw"] and round(row["power_mw"] / 1000)
        state = (row["sm_clock_mhz"], watts, row["temperature_c"])
        cells = " | ".join("-" if value is None else str(value) for value in state)
        lines.append(f"| {row['link']} | {row['model']}, {row['batch']} | {cells} |")
    return "\n".join(lines)


def machine(compared: Mapping[str, Any]) -> str:
    """Card, versions, date and command of each link's run."""
    return "\n".join(
        f"- {link}: {m['num_cards']} x {m['card']}, driver {m['driver']}, torch "
        f"{m['torch']}, NCCL {m['nccl']}, {m['date'][:10]}: `{m['command']}`"
        for link, m in compared["machines"].items()
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
