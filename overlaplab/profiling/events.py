"""Names of ranges by which a measured run marks itself in its trace."""

RUN_RANGE = "overlaplab::run"
WAIT_RANGE = "overlaplab::wait "
LAUNCH_RANGE = "overlaplab::launch "

# Events of the CPU that are no operators, and ranges that are no labels.
NOT_OPERATORS = (
    "autograd::",
    "torch::autograd::",
    "c10d::",
    "_c10d_functional::",
    "record_param_comms",
    "gloo:",
    "nccl:",
    "profiler::",
    "overlaplab::",
)
