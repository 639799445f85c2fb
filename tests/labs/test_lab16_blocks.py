"""The 24 blocks of lab 16: what is planned, and what the lane says of its step."""

from __future__ import annotations

from overlaplab_course.lab16 import blocks24, reference


def test_a_plan_of_24_blocks_is_trained_within_its_budget_and_close_to_it():
    blocks, always = blocks24.blocks_of_24()
    budget = 26 * blocks24.MIB
    again = reference.fastest(blocks, budget - always)
    run = blocks24.train_24(again)
    assert 0.9 * budget < max(size for _, size in run.curve) <= budget
    plain = blocks24.train_24([])
    assert reference.compare(plain, run)[2] is True
    longer = run.step_ns - plain.step_ns
    said = sum(blocks[number].ms for number in again)
    assert abs(longer - said) <= 0.01 * plain.step_ns
