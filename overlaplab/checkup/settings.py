"""What environment variables mean for overlap: a table, and its reading.

Sources: NVIDIA's pages on the environment variables of CUDA and of NCCL, and PyTorch's
on those of ProcessGroupNCCL. Knows no machine: `doctor` says which of it matters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that the doctor says.

    Args:
        status: "ok"; "note" (know it); "warning" (works, and not as you may think);
            "broken" (something of the course or the package does not work).
        what: the fact.
        means: for overlap, or for the course; "" if the fact speaks for itself.
        do: how to change it; "" if there is nothing to do.
    """

    status: Status
    what: str
    means: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable and what its value means.

    Args:
        name: of the variable.
        means, do: as in `Remark`.
        when: values that the line is about, in lower case; () for any value.
        status: of the remark.
    """

    name: str
    means: str
    do: str = ""
    when: tuple[str, ...] = ()
    status: Status = "note"


_ON = ("1", "true", "t", "yes", "y", "on")

# The first line whose name and value fit speaks.
SETTINGS = (
    Setting(
        "CUDA_LAUNCH_BLOCKING",
        "Every launch waits until its kernel has ended. Nothing overlaps, on any "
        "stream, and what you time is a serial program.",
        "Unset it, except to find the kernel that fails.",
        ("1", "2", "3"),
        "warning",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "All streams share one queue into the GPU, so kernels start in the order of "
        "their launches. Tensor parallelism in Megatron asks for that, to get a "
        "collective in before a matmul. Gradients that should travel beside the "
        "backward pass (DDP, FSDP) may lose their overlap by it.",
        "Unset it for data parallelism; no one value is right for both. It is read "
        "when CUDA starts: set it in the shell, before Python.",
        ("1",),
        "warning",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "So many queues lead into the GPU (8 if unset). More streams than queues wait "
        "for one another without need.",
    ),
    *(
        Setting(name, "Only these GPUs exist for the program, numbered anew from 0.")
        for name in (
            "CUDA_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
        )
    ),
    Setting(
        "GPU_MAX_HW_QUEUES",
        "All streams of ROCm share one queue into the GPU: kernels start in the order "
        "of their launches, and streams do not run side by side.",
        "Unset it (4), and start again.",
        ("1",),
        "warning",
    ),
    Setting(
        "GPU_MAX_HW_QUEUES",
        "So many queues lead into an AMD GPU (4 if unset). More streams than queues "
        "wait for one another without need.",
    ),
    Setting(
        "TORCH_NCCL_BLOCKING_WAIT",
        "work.wait() holds the CPU until the collective has ended; meanwhile the CPU "
        "launches nothing, and the GPU runs dry behind it.",
        "Unset it, except to turn hangs into errors while debugging.",
        _ON,
        "warning",
    ),
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "Nobody watches the collectives: when one hangs, every rank waits for ever and "
        "no trace says where. It does not touch overlap.",
        "Unset it (3: end the process, and say which collective hung).",
        ("0",),
        "warning",
    ),
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "What becomes of a process whose collective failed or hung. A thread beside "
        "the program looks after that; it does not touch overlap.",
        "",
        ("1", "2"),
    ),
    *(
        Setting(
            name,
            "More events and looks at them for every collective: CPU time for each, "
            "which many small collectives feel.",
            "Unset it before you time anything.",
            _ON,
        )
        for name in ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
    ),
    Setting(
        "TORCH_NCCL_NAN_CHECK",
        "A kernel reads every tensor before it is sent.",
        "Unset it before you time anything.",
        _ON,
        "warning",
    ),
    Setting(
        "TORCH_DISTRIBUTED_DEBUG",
        "Ranks compare notes on the CPU before every collective, and wait for that.",
        "Unset it before you time anything.",
        ("detail",),
        "warning",
    ),
    Setting(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "Every tensor is allocated and freed by CUDA itself, and freeing waits for the "
        "whole GPU: host syncs everywhere.",
        "Unset it, except under a memory checker.",
        (),
        "warning",
    ),
    Setting(
        "TORCH_NCCL_HIGH_PRIORITY",
        "Collectives go before computation that is queued on other streams.",
        "",
        _ON,
    ),
    Setting(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "How the memory of a collective's tensors is held until it ends; times hardly "
        "change.",
    ),
    Setting(
        "NCCL_P2P_DISABLE",
        "GPUs of one machine exchange data through the host's memory, many times "
        "slower than over NVLink.",
        "Unset it, unless you want a slow link on purpose.",
        ("1",),
        "warning",
    ),
    Setting(
        "NCCL_P2P_LEVEL",
        "How far apart two GPUs may be and still read each other's memory directly.",
    ),
    Setting(
        "NCCL_SHM_DISABLE",
        "GPUs that cannot read each other's memory go through the network, even "
        "within one machine.",
        "Unset it, unless shared memory is broken here.",
        ("1",),
        "warning",
    ),
    Setting(
        "NCCL_IB_DISABLE",
        "Machines talk over TCP, not InfiniBand or RoCE: higher latency, less "
        "bandwidth, and the CPU takes part.",
        "Unset it where there is InfiniBand or RoCE.",
        ("1",),
        "warning",
    ),
    Setting(
        "NCCL_NET_GDR_LEVEL",
        "Network cards never read a GPU's memory: every message between machines is "
        "copied through the host's.",
        "Unset it, unless the copies are what you measure.",
        ("loc", "0"),
        "warning",
    ),
    Setting(
        "NCCL_NET_GDR_LEVEL",
        "How far a network card may be from a GPU and still read its memory directly. "
        "Too far is slower than a copy through the host.",
    ),
    Setting(
        "NCCL_DMABUF_ENABLE",
        "Without dma-buf network cards reach a GPU's memory by nvidia-peermem only.",
        "Unset it, unless dma-buf is broken here.",
        ("0",),
    ),
    *(
        Setting(
            name,
            "Only these network cards, or this way into the network, are used.",
        )
        for name in ("NCCL_IB_HCA", "NCCL_NET", "NCCL_NET_PLUGIN")
    ),
    *(
        Setting(
            name,
            "Bounds the processors that a collective may take. Fewer leave more to "
            "the computation beside it, and make the collective slower.",
        )
        for name in (
            "NCCL_MAX_CTAS",
            "NCCL_MIN_CTAS",
            "NCCL_MAX_NCHANNELS",
            "NCCL_MIN_NCHANNELS",
        )
    ),
    Setting("NCCL_NVLS_ENABLE", "Whether switches may add up and copy for the GPUs."),
    *(
        Setting(
            name,
            "Pins what NCCL would choose by the size of each message: right for some "
            "sizes, wrong for others.",
        )
        for name in ("NCCL_ALGO", "NCCL_PROTO")
    ),
    *(
        Setting(name, "NCCL prints what it does. Read it, and do not time meanwhile.")
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS")
    ),
    *(
        Setting(
            name,
            "Only these network interfaces are used; with a name that this machine "
            "does not have, process groups fail to start.",
        )
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    ),
)

# Other names of the same switch: older ones, and ROCm's.
_SAME_AS = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "HIP_LAUNCH_BLOCKING": "CUDA_LAUNCH_BLOCKING",
    "AMD_SERIALIZE_KERNEL": "CUDA_LAUNCH_BLOCKING",
}
# What a set-up says about itself, and no switch.
_SILENT = ("NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_LIB_DIR", "NCCL_INCLUDE_DIR")
_NEEDS_NO_GPU = ("GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG")


def judge_settings(environ: Mapping[str, str], *, has_gpus: bool) -> list[Remark]:
    """A remark for each variable that is set and touches overlap.

    Without GPUs those that only concern them share one remark.
    """
    remarks, idle = [], []
    for name in sorted(environ):
        remark = _remark(name, environ[name])
        if remark is None:
            continue
        if has_gpus or name in _NEEDS_NO_GPU:
            remarks.append(remark)
        else:
            idle.append(name)
    if idle:
        remarks.append(
            Remark(
                "note",
                f"set, and without effect where no GPU is: {', '.join(idle)}",
                "The virtual cluster does not read them.",
            )
        )
    return remarks


def judge_files(
    settings: Iterable[tuple[str, str, str]],
    environ: Mapping[str, str],
    *,
    has_gpus: bool,
) -> list[Remark]:
    """The same for what NCCL's own files set: (name, value, file).

    A variable of the environment goes before a line of a file.
    """
    remarks = []
    for name, value, path in settings:
        remark = _remark(name, value) if name not in environ and has_gpus else None
        if remark is not None:
            remarks.append(replace(remark, what=f"{remark.what} (in {path})"))
    return remarks


def _remark(name: str, value: str) -> Remark | None:
    known = _SAME_AS.get(name, name)
    lines = [setting for setting in SETTINGS if setting.name == known]
    for line in lines:
        if not line.when or value.strip().lower() in line.when:
            return Remark(line.status, f"{name}={value}", line.means, line.do)
    if lines or name in _SILENT:
        return None  # set to what it is anyway
    if name.startswith(("NCCL_", "TORCH_NCCL_")):
        return Remark(
            "note",
            f"{name}={value}",
            "Changes a default of NCCL or of torch's use of it; what it does to "
            "overlap is not known here.",
        )
    return None
