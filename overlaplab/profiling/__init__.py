"""torch.profiler -> Timeline, and the captured step."""
