"""What the notebook of lab 04 calls: `from overlaplab_course import lab04 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.torch_versions import all_gather_single as all_gather
from overlaplab.torch_versions import reduce_scatter_single as reduce_scatter
from overlaplab_course.lab04.broken import blocks as broken_blocks
from overlaplab_course.lab04.extras import (
    CASES,
    luck_us,
    play_ring,
    repair_case,
    ring_inputs,
)
from overlaplab_course.lab04.given import (
    BOARD,
    backward,
    backward_us,
    bus_of_ours,
    crossings,
    experts_inputs,
    latencies,
    layer_inputs,
    message_ns,
    messages_alive,
    one_by_one,
    play,
    play_small,
    play_window,
)
from overlaplab_course.lab04.reference import average_gradients as _average_gradients
from overlaplab_course.lab04.reference import chunk_to_send as ring_of_ours
from overlaplab_course.lab04.reference import experts as _experts
from overlaplab_course.lab04.show import (
    after_each,
    by_size_table,
    collectives_table,
    compare_predictions,
    halves,
    machine,
    measure_it_here,
    measured_points,
    number,
    points_machine,
    predicted_ms,
    ring_text,
    small_table,
    ways_table,
    windows_table,
)

_kept = Kept({"4.3": _experts, "4.4": _average_gradients})
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
