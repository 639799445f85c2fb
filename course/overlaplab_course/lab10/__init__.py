"""What the notebook of lab 10 calls: `from overlaplab_course import lab10 as lab`."""

from overlaplab.grading.kept import Kept, side_by_side
from overlaplab.torch_versions import all_gather_single as all_gather
from overlaplab.torch_versions import reduce_scatter_single as reduce_scatter
from overlaplab_course.gpts import make_gpt, step_of
from overlaplab_course.lab10.extras import (
    LAYER_ELEMENTS,
    costs_table,
    deepspeed_ahead,
    shard_with_fsdp2,
    try_fsdp2,
    try_ours,
)
from overlaplab_course.lab10.given import EQUAL, SMALL, THREE, UNEVEN, new_slots
from overlaplab_course.lab10.measured import (
    gpu_machine,
    gpu_number,
    gpu_table,
)
from overlaplab_course.lab10.repairs import repair_case
from overlaplab_course.lab10.show import (
    all_but_activations,
    cut_text,
    draw_depths,
    drawn,
    held_mib,
    kinds_table,
    layers_table,
    play,
    play_ours,
    record,
    slots_alive,
    wire_mib,
)
from overlaplab_course.pictures import ring_of_slots

_kept = Kept(
    {"10.2": "on_demand", "10.3": "prefetched", "10.5": "backward"},
    __name__,
)
keep, mine_or_ours, whose = _kept.keep, _kept.mine_or_ours, _kept.whose
