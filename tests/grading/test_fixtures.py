"""Reducers on the fixtures: the right one holds every law, a fault breaks its own."""

from __future__ import annotations

import functools

import pytest

from overlaplab.grading import fixtures, laws
from overlaplab.grading.fixtures import Trained
from tests.grading import reducers

ADVERSARIAL = fixtures.adversarial_fixtures()
BUCKETS = fixtures.layer_buckets(layers_a_bucket=2)


@functools.cache
def clean(name: str) -> Trained:
    make_reducer = getattr(reducers, name)
    return fixtures.train(fixtures.clean_fixture(), make_reducer, steps=3)


def broken_laws(trained: Trained) -> set[str]:
    """The laws that a run on the clean fixture breaks."""
    gradients, _ = fixtures.oracle(fixtures.clean_fixture(), steps=3)
    evidence = trained.evidence
    found = [
        *laws.overlap_law(evidence, BUCKETS, clean("Right").evidence.step_ns),
        *laws.once_law(evidence),
        *laws.bytes_law(evidence, extra_bytes=64),
        *laws.same_order_law(evidence),
        *laws.no_findings_law(trained.run.warnings),
        *laws.leak_law(evidence.live_bytes),
    ]
    for step, right in enumerate(gradients, start=1):
        found += laws.values_law(trained.gradients[step - 1], right, step=step)
    return {violation.law for violation in found}


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("Right", set()),
        ("MeanInPlace", set()),
        ("MeanInPlaceOfBuffer", set()),
        ("SumInPlace", {"values"}),
        ("MeanInPlaceNotWaitedFor", {"values", "unwaited", "hazard"}),
        ("SumsOnly", {"values"}),
        ("NoBroadcast", {"values"}),
        ("Late", {"prompt"}),
        ("WaitsInTheHook", {"blocked"}),
        ("SendsParameters", {"once", "values"}),
        ("NeverWritesBack", {"values"}),
        ("KeepsEverything", {"leak"}),
        ("FillsOnASideStream", {"early", "hazard"}),
    ],
)
def test_each_fault_breaks_the_law_that_is_meant_for_it(name, broken):
    seen = broken_laws(clean(name))
    assert broken <= seen if name == "SendsParameters" else seen == broken


def test_reading_before_the_wait_is_a_hazard():
    assert "hazard" in broken_laws(clean("ReadsBeforeTheWait"))


def test_sending_twice_is_counted_in_bytes():
    (first, *_) = laws.once_law(clean("SendsTwice").evidence)
    assert first.message == (
        "rank 0 sent 32768 bytes of the gradient of layers.7.weight, which has 16384, "
        "in step 1 (2 collectives)"
    )


def test_a_serial_reducer_is_told_when_it_could_have_started():
    first, *_ = laws.prompt_law(clean("Late").evidence, BUCKETS)
    assert first.message.startswith("right gradients, no overlap: bucket 0 was full at")
    assert "the wire was free, it started at" in first.message


@pytest.mark.parametrize("name", ["SumsOnly", "SumInPlace"])
def test_a_sum_that_is_no_mean_is_named_by_its_ratio(name):
    gradients, _ = fixtures.oracle(fixtures.clean_fixture(), steps=1)
    first, *_ = laws.values_law(clean(name).gradients[0], gradients[0], step=1)
    assert "the median ratio to the right value is 2" in first.message


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("fixture", ADVERSARIAL, ids=lambda f: f.name)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_right_reducer_equals_one_process_on_every_adversarial_fixture(
    fixture, world_size
):
    trained = fixtures.train(fixture, reducers.Right, world_size=world_size)
    gradients, parameters = fixtures.oracle(fixture, world_size=world_size)
    for step, right in enumerate(gradients, start=1):
        assert laws.values_law(trained.gradients[step - 1], right, step=step) == []
    assert laws.values_law(trained.parameters, parameters, what="parameter") == []
    assert laws.no_findings_law(trained.run.warnings) == []
    assert laws.leak_law(trained.evidence.live_bytes) == []
    assert laws.same_order_law(trained.evidence) == []
    assert laws.once_law(trained.evidence) == []


def test_the_same_run_gives_the_same_evidence():
    again = fixtures.train(fixtures.clean_fixture(), reducers.Right, steps=3)
    assert again.evidence == clean("Right").evidence
