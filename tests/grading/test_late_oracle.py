"""The oracle for gradients one step late, beside loops written by hand."""

import pytest
import torch
import torch.distributed as dist

from overlaplab.grading import fixtures, laws

WORLD_SIZE = 3


def line_fixture():
    """One weight, and a loss whose gradient is the weight times the batch's mean."""

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([2.0]))

        def forward(self, x):
            return (x * self.weight.square() / 2).mean()

    def batch(rank, step):
        return (torch.tensor([[float(step + rank)]]),)

    return fixtures.Fixture("line", Line, batch)


def test_each_update_has_the_gradient_of_the_step_before_at_its_weights():
    # Of two ranks the mean of step n is n + 1/2. With a learning rate of 0.1:
    # w1 = 2; step 1 applies nothing: w2 = 2; step 2 applies 1.5 * w1;
    # step 3 applies 2.5 * w2; the flush 3.5 * w3.
    gradients, parameters = fixtures.late_oracle(
        line_fixture(), steps=3, world_size=2, flush_after=(3,)
    )
    w3 = 2 - 0.1 * 1.5 * 2
    w4 = w3 - 0.1 * 2.5 * 2
    w5 = w4 - 0.1 * 3.5 * w3
    seen = [
        g["weight"] if g["weight"] is None else g["weight"].item() for g in gradients
    ]
    assert seen == [None, *map(pytest.approx, (3.0, 5.0, 3.5 * w3))]
    assert parameters["weight"].item() == pytest.approx(w5)


def test_without_a_flush_the_last_gradient_is_not_applied():
    gradients, parameters = fixtures.late_oracle(line_fixture(), steps=2, world_size=2)
    assert len(gradients) == 2
    assert parameters["weight"].item() == pytest.approx(2 - 0.1 * 1.5 * 2)


def test_after_a_flush_there_is_nothing_to_apply_for_a_step():
    gradients, _ = fixtures.late_oracle(
        line_fixture(), steps=3, world_size=2, flush_after=(1,)
    )
    seen = [g["weight"] for g in gradients]
    assert [value is None for value in seen] == [True, False, True, False]


def adam(model, _=None):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def momentum(model, _=None):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [fixtures.make_sgd, momentum, adam])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_it_is_a_loop_over_two_copies_of_the_weights(world_size, make_optimizer):
    fixture = fixtures.clean_fixture(num_layers=2, width=4, batch=3)
    torch.manual_seed(0)
    model, old = fixture.build(0), fixture.build(0)
    optimizer = make_optimizer(model)
    for step in range(1, 6):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        optimizer.zero_grad()
        if step > 1:  # at the weights that step - 1 started with
            parts = [fixture.make_batch(r, step - 1)[0] for r in range(world_size)]
            old.zero_grad()
            old(torch.cat(parts)).backward()
            for parameter, late in zip(
                model.parameters(), old.parameters(), strict=True
            ):
                parameter.grad = late.grad
        optimizer.step()
        old.load_state_dict(before)
    _, parameters = fixtures.late_oracle(
        fixture, make_optimizer=make_optimizer, steps=5, world_size=world_size
    )
    for name, right in model.named_parameters():
        torch.testing.assert_close(parameters[name], right.detach())


@pytest.mark.parametrize(
    "fixture", fixtures.adversarial_fixtures(), ids=lambda f: f.name
)
def test_of_one_step_and_a_flush_it_is_the_plain_oracle(fixture):
    (nothing, late), parameters = fixtures.late_oracle(
        fixture, steps=1, flush_after=(1,)
    )
    (plain,), right = fixtures.oracle(fixture, steps=1)
    assert set(nothing.values()) == {None}
    assert laws.values_law([late], plain, step=1) == []
    for name, value in right.items():
        torch.testing.assert_close(parameters[name], value, equal_nan=True)


class OneStepLate:
    """All gradients in one message each, kept for a step."""

    def __init__(self, model):
        self.model, self.pending = model, None
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)

    def wait(self):
        fresh = [p.grad for p in self.model.parameters()]
        works = [dist.all_reduce(g, async_op=True) for g in fresh if g is not None]
        self.flush()
        self.pending = fresh, works

    def flush(self):
        late, works = self.pending or ([None] * len(list(self.model.parameters())), [])
        for work in works:
            work.wait()
        for parameter, gradient in zip(self.model.parameters(), late, strict=True):
            parameter.grad = gradient
            if gradient is not None:
                gradient /= dist.get_world_size()
        there_was_one, self.pending = self.pending is not None, None
        return there_was_one


class LosesTheLast(OneStepLate):
    def flush(self):
        super().flush()
        return False


@pytest.mark.parametrize("flush_after", [(), (4,), (2, 4)])
def test_a_reducer_that_is_a_step_late_trains_as_the_oracle_says(flush_after):
    fixture = fixtures.clean_fixture(num_layers=2, width=4, batch=3)
    trained = fixtures.train(
        fixture, OneStepLate, steps=4, world_size=WORLD_SIZE, flush_after=flush_after
    )
    gradients, parameters = fixtures.late_oracle(
        fixture, steps=4, world_size=WORLD_SIZE, flush_after=flush_after
    )
    assert len(trained.gradients) == len(gradients) == 4 + len(flush_after)
    for step, right in enumerate(gradients, start=1):
        assert laws.values_law(trained.gradients[step - 1], right, step=step) == []
    for rank in trained.parameters:
        for name, value in parameters.items():
            torch.testing.assert_close(rank[name], value)


def test_a_flush_that_is_not_applied_leaves_other_weights():
    fixture = fixtures.clean_fixture(num_layers=2, width=4, batch=3)
    trained = fixtures.train(fixture, LosesTheLast, steps=2, flush_after=(2,))
    _, parameters = fixtures.late_oracle(fixture, steps=2, flush_after=(2,))
    assert any(
        not torch.allclose(trained.parameters[0][name], value)
        for name, value in parameters.items()
    )
