"""Races of hooks: what CUDA's autograd waits for, and what it does not."""

import torch

from overlaplab import streams
from overlaplab.streams import current_stream, name_tensor, stream
from tests.hazards.wrong_programs import WRONG, ones, wrong

__all__ = ["WRONG"]  # with those of this file


def behind_current(side):
    side.wait_stream(current_stream())
    return stream(side)


@wrong("buffer", ("fill_", "stream 1"), ("mul", "default"), 1)
def a_buffer_that_a_hook_fills_on_its_stream_is_read_behind_the_backward(right):
    side, buffer, weight = streams.Stream(), ones("buffer", 4), torch.ones(4)
    weight.requires_grad_()

    def hook(param):
        with behind_current(side):
            buffer.fill_(1)

    weight.register_post_accumulate_grad_hook(hook)
    (weight * 2).sum().backward()
    if right:
        current_stream().wait_stream(side)
    return (buffer * 1).sum()


@wrong("grad", ("div_", "stream 1"), ("add_", "default"), 1)
def the_next_backward_accumulates_into_what_a_hook_still_scales(right):
    side, weight = streams.Stream(), torch.ones(4, requires_grad=True)

    def hook(param):
        name_tensor(param.grad, "grad")
        with behind_current(side):
            param.grad.div_(2)

    weight.register_post_accumulate_grad_hook(hook)
    for _ in range(2):
        (weight * torch.ones(4)).sum().backward()
        if right:
            current_stream().wait_stream(side)
    current_stream().wait_stream(side)


@wrong("scaled", ("copy_", "stream 1"), ("zeros", "default"), 1)
def a_hook_drops_what_it_made_while_its_stream_still_reads_it(right):
    side, buffer = streams.Stream(), torch.zeros(64)
    weight = torch.ones(64, requires_grad=True)

    def hook(param):
        scaled = param.grad * 2
        name_tensor(scaled, "scaled")
        with behind_current(side):
            buffer.copy_(scaled)
        if right:
            scaled.record_stream(side)
        del scaled
        torch.zeros(64).add_(1)

    weight.register_post_accumulate_grad_hook(hook)
    (weight * torch.ones(64)).sum().backward()
    current_stream().wait_stream(side)
