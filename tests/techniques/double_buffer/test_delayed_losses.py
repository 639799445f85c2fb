"""What one step of delay does to a loss, by learning rate, with both reducers."""

from __future__ import annotations

import pytest

from overlaplab.bench import late_losses
from tests.ranks import values_of


def test_late_gradients_want_a_smaller_learning_rate() -> None:
    found, same = values_of(late_losses.curves, cluster="gloo")
    assert found == same
    print(late_losses.table(found))
    ends = {
        rate: [sum(losses[-2:]) / 2 for losses in pair] for rate, pair in found.items()
    }
    begin = found[0.01][0][0]
    # A small step: the delay hardly shows.
    (in_time, late), (faster, stalls), (fastest, diverges) = (
        ends[rate] for rate in late_losses.RATES
    )
    assert 0 < late - in_time < 0.2 * (begin - in_time)
    # Where training in time is faster, late training stalls; where it is fastest, the
    # late loss ends above where it began.
    assert fastest < faster < in_time
    assert stalls > begin - 0.5 * (begin - faster)
    assert diverges > begin


@pytest.mark.parametrize(("asked", "code"), [("--help", 0), ("--rates", 2)])
def test_what_it_prints_is_told_and_not_trained_for(monkeypatch, asked, code) -> None:
    monkeypatch.setattr("sys.argv", ["late_losses", asked])
    with pytest.raises(SystemExit) as caught:
        late_losses.main()
    assert caught.value.code == code
