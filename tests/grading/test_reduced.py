"""Which collective covers which gradient, where a graph reduced it before `.grad`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from overlaplab.grading import fixtures, laws
from overlaplab.grading.gradients import wrong_gradients
from overlaplab.grading.reading import collect_evidence
from tests.grading.compiled_reducers import Compiled, InTensorHooks, Twins

RANKS, LAYERS = 2, 4
NAMES = [f"layers.{i}.weight" for i in range(LAYERS)]
SIZE = 4 * 64 * 64
FIXTURE = fixtures.clean_fixture(LAYERS)
IN_PLACE = replace(FIXTURE, set_to_none=False)
_trained = {}


def trained(how, fixture=FIXTURE):
    """Three steps; each kind of reducer is run once."""
    key = how, fixture.set_to_none
    if key not in _trained:
        make = InTensorHooks if how == "hooks" else partial(Compiled, how=how)
        _trained[key] = fixtures.train(fixture, make, world_size=RANKS)
    return _trained[key]


def broken(how, law, *args, **options):
    return law(trained(how).evidence, *args, **options)


RIGHT = ["each", "bucket", "flat", "at_the_end"]


@pytest.mark.parametrize("how", [*RIGHT, "hooks"])
def test_right_programs_have_right_values_and_every_byte_is_sent_once(how):
    assert wrong_gradients(trained(how), FIXTURE, RANKS) == []
    evidence = trained(how).evidence
    assert {g.name for g in evidence.gradients} == {*NAMES}
    assert len(evidence.gradients) == 3 * RANKS * LAYERS
    for law in (laws.once_law, laws.bytes_law, laws.same_order_law):
        assert law(evidence) == []
    assert trained(how).run.warnings == ()


def test_gradients_that_were_zeroed_in_place_are_followed_too():
    right = trained("each", IN_PLACE)
    assert wrong_gradients(right, IN_PLACE, RANKS) == []
    assert laws.once_law(right.evidence) == []


def test_two_parameters_with_one_gradient_are_both_sent_by_its_one_message():
    twins = fixtures.Fixture("twins", Twins, lambda rank, step: (torch.ones(4, 8),))
    right = fixtures.train(twins, partial(Compiled, how="each"), world_size=RANKS)
    assert wrong_gradients(right, twins, RANKS) == []
    assert laws.once_law(right.evidence) == laws.bytes_law(right.evidence) == []
    (send,) = right.evidence.sends_of(0, 2)
    assert dict(send.covers) == {"first": 32, "second": 32}
    assert (send.bytes, send.shared_bytes, send.other_bytes) == (32, 32, 0)


def test_what_each_message_covers_is_known():
    def covered(how):
        sends = trained(how).evidence.sends_of(1, 2)
        return [sorted(name for name, _ in send.covers) for send in sends]

    assert sorted(covered("each")) == [[name] for name in NAMES]
    assert sorted(map(len, covered("bucket"))) == [2, 2]
    assert covered("flat") == [NAMES]


def test_a_gradient_is_ready_when_it_was_computed_and_not_when_it_was_reduced():
    evidence = trained("each").evidence
    sends = {s.covers[0][0]: s for s in evidence.sends_of(0, 1) if s.covers}
    for gradient in evidence.gradients_of(0, 1):
        (op,) = gradient.sends
        assert evidence.program.ranks[0][gradient.writer].name == "mm"
        assert gradient.ready_ns <= sends[gradient.name].start_ns
        assert (gradient.bytes, gradient.since) == (SIZE, gradient.writer + 1)
        assert op > gradient.writer


def test_early_messages_are_prompt_and_those_behind_the_backward_are_not():
    buckets = [[name] for name in reversed(NAMES)]
    assert broken("each", laws.prompt_law, buckets) == []
    found = broken("at_the_end", laws.prompt_law, buckets)
    assert found and "no overlap" in found[0].message
    assert broken("flat", laws.prompt_law, buckets) != []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("all_but_one", "sent 0 bytes of the gradient of layers.0.weight"),
        ("twice", "sent 32768 bytes of the gradient of layers.0.weight"),
        ("zeros_instead", "sent 0 bytes of the gradient of layers.3.weight"),
    ],
)
def test_wrong_programs_are_refused_by_what_they_send(how, said):
    found = broken(how, laws.once_law)
    assert found, how
    assert any(said in violation.message for violation in found), found[0].message


def test_who_gets_anothers_average_has_wrong_values():
    found = wrong_gradients(trained("anothers"), FIXTURE, RANKS)
    assert found and found[0].law == "values"


def test_evidence_is_read_from_the_record_alone():
    """No name that a program gives its tensors decides."""
    run = trained("each").run
    named = [n for n in run.program.names if not n.name.startswith("overlaplab")]
    program = replace(run.program, names=tuple(named))
    again = collect_evidence(program, run.timeline)
    assert again.gradients == trained("each").evidence.gradients
