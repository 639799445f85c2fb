"""Races of what there is two of: weights that are swapped, batches on their way."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import overlaplab as ol
from overlaplab import streams
from overlaplab.streams import current_stream, name_tensor, stream
from tests.hazards.wrong_hooks import WRONG, behind_current
from tests.hazards.wrong_programs import wrong

__all__ = ["WRONG"]  # with those of this file


class TwoSets:
    """A layer, its weights a second time, and a stream that copies into those."""

    def __init__(self, swap=None):
        self.layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.front, self.back = torch.ones(4, 4), torch.ones(4, 4)
        self.layer.weight.data = self.front
        name_tensor(self.front, "first set")
        name_tensor(self.back, "second set")
        self.source = torch.ones(4, 4)
        self.side = streams.Stream()
        self.side.wait_stream(current_stream())
        self.swap = self.swap_data if swap is None else swap

    def serve(self):
        return self.layer(torch.ones(2, 4))

    def update(self):
        with stream(self.side):
            self.back.copy_(self.source)

    def swap_data(self):
        self.layer.weight.data = self.back
        self.front, self.back = self.back, self.front

    def swap_parameter(self):
        self.layer.weight = nn.Parameter(self.back, requires_grad=False)
        self.front, self.back = self.back, self.front


def swapped_without_a_wait(right, swap):
    sets = TwoSets()
    sets.update()
    sets.serve()
    if right:
        current_stream().wait_stream(sets.side)
    getattr(sets, swap)()
    sets.serve()
    current_stream().wait_stream(sets.side)


@wrong("second set", ("copy_", "stream 1"), ("mm", "default"), 1)
def weights_are_swapped_in_while_they_are_copied(right):
    swapped_without_a_wait(right, "swap_data")


@wrong("second set", ("copy_", "stream 1"), ("mm", "default"), 1)
def a_new_parameter_of_weights_that_are_being_copied(right):
    swapped_without_a_wait(right, "swap_parameter")


@wrong("first set", ("mm", "default"), ("copy_", "stream 1"), 1)
def an_update_writes_the_weights_that_a_forward_still_reads(right):
    sets = TwoSets()
    sets.update()
    sets.serve()
    last_read = current_stream().record_event()
    current_stream().wait_stream(sets.side)
    sets.swap_data()
    sets.serve()
    if right:
        sets.side.wait_event(last_read)
    sets.update()
    current_stream().wait_stream(sets.side)


@wrong("the source", ("copy_", "stream 1"), ("add_", "default"), 1)
def the_source_of_an_update_is_trained_on_before_it_is_copied(right):
    sets = TwoSets()
    name_tensor(sets.source, "the source")
    sets.update()
    if right:
        current_stream().wait_stream(sets.side)
    sets.source.add_(1)
    current_stream().wait_stream(sets.side)


def batches(**options):
    return DataLoader([torch.ones(4, device="cpu")] * 4, 2, **options)


@wrong("slot", ("copy h2d", "stream 1"), ("copy_", "cpu"), 1)
def a_slot_is_filled_with_the_next_batch_while_it_is_copied(right):
    side, copied = streams.Stream(), streams.Event()
    slot = torch.empty(2, 4, device="cpu", pin_memory=True)
    name_tensor(slot, "slot")
    for number, batch in enumerate(batches()):
        if right and number:
            copied.synchronize()
        slot.copy_(batch)
        with behind_current(side):
            on_device = slot.to(ol.device(), non_blocking=True)
            copied.record()
        current_stream().wait_stream(side)
        on_device.record_stream(current_stream())
        on_device.sum()


@wrong("batch", ("copy h2d", "stream 1"), ("sum", "default"), 1)
def a_batch_is_used_before_its_copy_has_ended(right):
    side = streams.Stream()
    for batch in batches(pin_memory=True):
        with stream(side):
            on_device = batch.to(ol.device(), non_blocking=True)
            name_tensor(on_device, "batch")
        if right:
            current_stream().wait_stream(side)
        on_device.record_stream(current_stream())
        on_device.sum()


@wrong("batch", ("sum", "default"), ("copy h2d", "stream 1"), 1)
def the_next_batch_gets_the_memory_of_one_that_is_still_used(right):
    side = streams.Stream()
    for batch in batches(pin_memory=True):
        on_device = None
        with stream(side):
            on_device = batch.to(ol.device(), non_blocking=True)
            name_tensor(on_device, "batch")
        current_stream().wait_stream(side)
        if right:
            on_device.record_stream(current_stream())
        on_device.sum()
