"""What lab 05 gives and shows: its formulas are what runs do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import overlaplab as ol
from overlaplab_course import lab05 as lab
from overlaplab_course import stored
from overlaplab_course.lab05 import reference
from overlaplab_course.lab05.given import Model

RESULTS = Path(__file__).parents[2] / "overlaplab" / "bench" / "results"

MODELS = [
    lab.UNTIED,
    lab.TIED,
    Model(("embedding", "a", "b", "a", "head"), rows=70, width=40, tokens=30, ranks=2),
    Model(("embedding", "a", "head"), rows=20, width=64, tokens=200, ranks=3),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(m.layers))
def test_the_table_of_a_model_is_what_its_run_takes(model):
    seen = lab.play(reference.PromptReducer, model)
    report = seen.timeline.report()
    forward_ms = sum(model.backward_ms) / 2
    assert report.compute_ns / 1e6 == pytest.approx(forward_ms * 3, rel=5e-3)
    sent = [s for s in seen.timeline.spans if s.kind == "communication"]
    seen_ms = {span.name: span.duration_ns / 1e6 for span in sent}
    assert seen_ms == pytest.approx(model.message_ms, abs=1e-3)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: "-".join(m.layers))
def test_the_bound_of_the_lesson_is_what_prompt_messages_reach(model):
    seen = lab.play(reference.PromptReducer, model)
    exposed_ms = seen.timeline.report().exposed_ns / 1e6
    assert exposed_ms == pytest.approx(lab.must_be_exposed(model), abs=0.02)
    windows = reference.windows(model.backward_ms, model.layers)
    assert seen.windows_ms() == pytest.approx(windows, abs=0.02)


def test_the_numbers_that_the_text_says():
    assert sum(lab.UNTIED.message_ms.values()) == 20
    assert sum(lab.TIED.message_ms.values()) == 14
    seen = lab.play(reference.PromptReducer)
    assert seen.timeline.report().compute_ns == 21_000_000
    head = next(g for g in seen.evidence.gradients_of(0, 2) if g.name == "head")
    sent = seen.evidence.sends_of(0, 2)[0]
    assert (sent.start_ns - head.ready_ns) / 1e6 == pytest.approx(3, abs=0.01)
    assert lab.must_be_exposed(lab.UNTIED) == 12
    assert lab.must_be_exposed(lab.TIED) == 8


def test_kernels_and_messages_are_named_in_figures():
    spans = lab.play(reference.PromptReducer).timeline.spans
    compute = [s.name for s in spans if s.kind == "compute"]
    layers = ["w0", "w1", "w2", "w3", "head"]
    assert compute == [f"F {n}" for n in layers] + [f"B {n}" for n in layers[::-1]]
    assert all(s.start_ns % 1000 == s.end_ns % 1000 == 0 for s in spans)


OUTCOMES = {
    "two layers share a weight": "right",
    "no rank uses a layer": "right",
    "only rank 0 uses a layer": "stuck",
    "rank 0 uses two layers in the other order": "wrong",
}


def test_the_outcomes_that_section_5_predicts():
    for what, net in lab.SITUATIONS.items():
        assert lab.outcome(reference.PromptReducer, net) == OUTCOMES[what]
        assert lab.outcome(reference.OrderedReducer, net) == "right"


def test_who_is_stuck_reads_where():
    net = lab.SITUATIONS["only rank 0 uses a layer"]
    said = lab.how_it_ended(reference.PromptReducer, net)
    assert "rank 0 waits in all_reduce #3" in said
    assert "rank 1 has ended, after 3 collectives" in said


def test_stored_steps_are_the_medians_of_the_benchmark():
    found = stored.read("05")
    name = found["command"].split()[-1]
    cases = json.loads((RESULTS / name).read_text())["cases"]
    for batch in (1, 2, 8):
        case = next(c for c in cases if (c["model"], c["batch"]) == ("gpt-738m", batch))
        for way in found["ms"]:
            median = case["variants"][way]["median_ms"]
            assert lab.measured_ms(way, batch) == pytest.approx(median, abs=0.051)


def test_the_text_on_real_gpus_holds():
    """Twice the serial step at batch 1 and 2, a little less at batch 8."""
    for batch, low, high in ((1, 1.8, 2.2), (2, 1.8, 2.2), (8, 0.95, 1.0)):
        serial = lab.measured_ms("serial", batch)
        assert low < lab.measured_ms("per parameter", batch) / serial < high
    h200 = ol.PROFILES["h200-nvlink"]
    setup = lab.Setup("", 8, 15, 80, 44, 340)
    assert (h200.launch_ns, h200.collective_launch_ns) == (15_000, 80_000)
    for way, name in (("each", "per parameter"), ("one", "serial")):
        said = setup.on(h200, way).step_ns / 1e6
        assert said == pytest.approx(lab.measured_ms(name, 8), rel=0.09)
        early = replace(setup, sequences=1).on(h200, way).step_ns / 1e6
        assert early < 0.75 * lab.measured_ms(name, 1)


def test_what_a_repair_prints():
    case = lab.repair_cases(5)[0]
    seen = case.play(reference.PromptReducer)
    report = lab.repair_report(seen)
    assert report.startswith("0 findings\n")
    assert "rank 0  0: " in report
    assert report.endswith("is 1.00 times the right mean (median, step 1)")
