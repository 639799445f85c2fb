"""Predicted beside measured: errors, and whether the order of variants is right."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

DIFFER = 0.03  # pairs of variants that are closer have no order to get right


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Args:
        link, model, batch, variant: which.
        step_ms, predicted_step_ms: measured and predicted.
        exposed_ms, predicted_exposed_ms: the same of exposed time, None: not measured.
        p10_ms, p90_ms: of the measured steps.
    """

    link: str
    model: str
    batch: int
    variant: str
    step_ms: float
    predicted_step_ms: float
    p10_ms: float
    p90_ms: float
    exposed_ms: float | None = None
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


def by(rows: Iterable[Row], key: str) -> Mapping[str, list[Row]]:
    """Rows in groups by one of their fields."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str(getattr(row, key)), []).append(row)
    return groups
