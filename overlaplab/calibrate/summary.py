"""A profile in a few lines, for people."""

from __future__ import annotations

from overlaplab.hardware import Hardware


def table(hardware: Hardware) -> str:
    """The main numbers, in the units that people use."""
    rows = [
        (f"{dtype} products", _rate(rate))
        for dtype, rate in hardware.flops_per_s.items()
        if dtype != "default"
    ]
    backward = hardware.backward_launch_ns
    link = hardware.link
    rows += [
        ("device memory", f"{hardware.memory_bytes_per_s / 1e9:.0f} GB/s"),
        ("shortest kernel", f"{hardware.kernel_floor_ns / 1e3:.1f} us"),
        ("launch, forward", f"{hardware.launch_ns / 1e3:.1f} us"),
        ("launch, backward", f"{(backward or 0) / 1e3:.1f} us"),
    ]
    if "compute_rate_permille" in hardware.notes:
        rows += [
            ("collective launch", f"{hardware.collective_launch_ns / 1e3:.1f} us"),
            ("link latency", f"{link.latency_ns / 1e3:.1f} us"),
            ("link", f"{link.bytes_per_s / 1e9:.1f} GB/s"),
            ("compute beside it", f"{hardware.compute_rate_permille / 10:.0f} %"),
            ("link beside compute", f"{hardware.wire_rate_permille / 10:.0f} %"),
        ]
    else:
        rows.append(("link", hardware.notes["link"]))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rate(flops_per_s: int) -> str:
    if flops_per_s >= 10**12:
        return f"{flops_per_s / 1e12:.1f} TFLOP/s"
    return f"{flops_per_s / 1e9:.1f} GFLOP/s"
