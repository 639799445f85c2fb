"""What tests of the threads of ranks share."""

import threading

from overlaplab.cluster.virtual import run_virtual


def recorded(step, world_size=1, **options):
    values, program = run_virtual(step, world_size=world_size, **options)
    return values[0], program


def brief(program, rank=0):
    return [(o.name, o.stream) for o in program.ranks[rank]]


def start(work, *args, **options):
    thread = threading.Thread(target=work, args=args, **options)
    thread.start()
    return thread
