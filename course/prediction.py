"""The tables of prediction.md, made from a stored comparison.

    python course/prediction.py COMPARED.json

The page has marked places, `<!-- NAME -->` to `<!-- end -->`; what stands between them
is made here and nowhere else, and a test holds the page to the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlaplab.bench.predict.compare import Row, claim, errors_table, quantile
from overlaplab.files import write_whole
from overlaplab.view import Table

PAGE = Path(__file__).with_name("prediction.md")
_PLACE = re.compile(r"(<!-- (?P<name>[a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CALIBRATED = (
    ("latency of a collective, us", "latency_ns", 1e3),
    ("link, GB/s", "link_bytes_per_s", 1e9),
    ("launch, forward, us", "launch_ns", 1e3),
    ("launch, backward, us", "backward_launch_ns", 1e3),
    ("launch of a collective, hook included, us", "collective_launch_ns", 1e3),
    ("each further tensor of it, us", "collective_part_launch_ns", 1e3),
)
_CALLS = (
    ("an addition to one tensor", "kernel"),
    ("the same to 64 tensors in one call", "foreach of 64"),
    ("an event, recorded and waited for", "event"),
    ("an all-reduce of one tensor, its wait included", "all_reduce of 1"),
    ("of 64 tensors in one call", "all_reduce of 64"),
    ("in a step: a hook that does nothing, each", "hook"),
    ("in a step: a message per parameter, each", "message"),
    ("in a step: a further bucket", "bucket"),
    ("in a step: all in one bucket, each tensor", "tensor"),
)


def fill(page: str, compared: Mapping[str, Any]) -> str:
    """`page` with every marked place made anew.

    Raises:
        KeyError: a place of which nothing is known.
    """
    made = places(compared)
    return _PLACE.sub(lambda m: f"{m[1]}{made[m['name']]}\n{m[3]}", page)


def places(compared: Mapping[str, Any]) -> dict[str, str]:
    """Text by the name of its place."""
    rows = [Row(**row) for row in compared["rows"]]
    apart = [Row(**row) for row in compared["launch_bound"]["rows"]]
    return {
        "claim": claim(compared),
        "errors": errors_table(compared).markdown(),
        "by variant": variants_table(rows).markdown(),
        "steps": steps_table(rows).markdown(),
        "launch bound": steps_table(apart).markdown(),
        "calibrated": calibrated_table(compared["calibrated"]).markdown(),
        "calls": calls_table(compared["calls_ns"]).markdown(),
        "cards": cards_table(compared["cards"]).markdown(),
        "machine": "\n".join(
            f"- {link}: {m['num_cards']} x {m['card']}, driver {m['driver']}, torch "
            f"{m['torch']}, NCCL {m['nccl']}, {m['date'][:10]}: `{m['command']}`"
            for link, m in compared["machines"].items()
        ),
    }


def variants_table(rows: Sequence[Row]) -> Table:
    errors: dict[str, list[float]] = {}
    for key in ("variant", "model"):
        for row in rows:
            errors.setdefault(getattr(row, key), []).append(row.error)
    return Table(
        ("", "median error", "least", "most"),
        tuple(
            (name, *map(_signed, (quantile(found, 0.5), min(found), max(found))))
            for name, found in errors.items()
        ),
    )


def steps_table(rows: Sequence[Row]) -> Table:
    """Every configuration: measured, its spread, predicted, error."""
    header = (
        "link;model, batch;variant;measured ms;p10 to p90;predicted ms;error;"
        "exposed ms;predicted"
    )
    cells = [
        (
            row.link,
            f"{row.model}, {row.batch}",
            row.variant,
            _ms(row.step_ms),
            f"{_ms(row.p10_ms)} to {_ms(row.p90_ms)}",
            _ms(row.predicted_step_ms),
            _signed(row.error),
            _ms(row.exposed_ms),
            _ms(row.predicted_exposed_ms),
        )
        for row in rows
    ]
    return Table(tuple(header.split(";")), tuple(cells), left=3)


def calibrated_table(links: Mapping[str, Mapping[str, Any]]) -> Table:
    """The numbers of the two profiles that differ, and those that decide."""
    rows = [
        (name, *(f"{found[key] / unit:.1f}" for found in links.values()))
        for name, key, unit in _CALIBRATED
    ]
    several = [found["contention"] for found in links.values()]
    for kind in several[0] if several else ():
        pairs = (" / ".join(f"{n / 10:.0f}" for n in found[kind]) for found in several)
        rows.append((f"{kind}: its speed / the wire's, %", *pairs))
    return Table(("", *links), tuple(rows))


def calls_table(calls_ns: Mapping[str, Mapping[str, int]]) -> Table:
    """What launches of each kind cost the CPU, before and after the steps."""
    several = calls_ns.values()
    rows = [
        (name, *(f"{of[key] / 1e3:.1f}" if key in of else "-" for of in several))
        for name, key in _CALLS
    ]
    return Table(("us", *calls_ns), tuple(rows))


def cards_table(cards: Sequence[Mapping[str, Any]]) -> Table:
    """What clock and power were in the middle of serial steps."""
    rows = []
    for row in cards:
        watts = row["power_mw"] and round(row["power_mw"] / 1000)
        state = (row["sm_clock_mhz"], watts, row["temperature_c"])
        cells = ("-" if value is None else str(value) for value in state)
        rows.append((row["link"], f"{row['model']}, {row['batch']}", *cells))
    header = ("link", "model, batch", "SM clock, MHz", "power, W", "temperature, C")
    return Table(header, tuple(rows), left=2)


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    stored = json.loads(Path(sys.argv[1]).read_text())
    write_whole(PAGE, fill(PAGE.read_text(), stored).encode())
