"""Words that several findings share. Times and sizes are `overlaplab.view.units`'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from overlaplab.diagnosis.collectives import Collective
from overlaplab.timeline import Span
from overlaplab.view.units import format_bytes, format_ns


def of_whole(part_ns: int, whole_ns: int) -> str:
    """'60 of 120 ms', each with its unit where they differ.

    >>> of_whole(60_000_000, 120_000_000), of_whole(400_000, 2_000_000)
    ('60 of 120 ms', '400 us of 2 ms')
    """
    part, whole = format_ns(part_ns), format_ns(whole_ns)
    if part_ns == 0 or part.split()[1] == whole.split()[1]:
        part = part.split()[0]
    return f"{part} of {whole}"


def named(span: Span) -> str:
    """'all_reduce "bucket 3" of 25 MiB'."""
    label = str(span.attributes.get("label", ""))
    name = short(span.name)
    name = f'{name} "{short(label)}"' if label else name
    return f"{name} of {format_bytes(span.bytes)}" if span.bytes else name


def count_of(collectives: Sequence[Collective]) -> str:
    """'14 all_reduces', 'all_reduce', '3 all_gathers and 2 reduce_scatters'."""
    counts = Counter(c.span.name for c in collectives)
    parts = [
        f"{number} {short(name)}s" if number > 1 else f"1 {short(name)}"
        for name, number in counts.most_common(2)
    ]
    rest = len(collectives) - sum(n for _, n in counts.most_common(2))
    if rest:
        parts.append(f"{rest} more")
    return " and ".join(parts)


def is_16_bit(collectives: Sequence[Collective]) -> bool:
    """Whether most bytes travel as bfloat16 or float16 already."""
    words = ("bfloat16", "float16", "half", "bf16", "f16")

    def is_half(span: Span) -> bool:
        dtype = (
            str(span.attributes.get("dtype", ""))
            .lower()
            .removeprefix("torch.")
            .removeprefix("c10::")
        )
        kernel = str(span.attributes.get("kernel", ""))
        return dtype in words if dtype else "_bf16" in kernel or "_f16" in kernel

    whole = sum(c.span.bytes for c in collectives)
    half = sum(c.span.bytes for c in collectives if is_half(c.span))
    return whole > 0 and 2 * half > whole


def short(text: str, most: int = 40) -> str:
    """At most so many characters, on one line and printable.

    >>> short("void gemm<float, (int)4>(...)", 12), short("a\\nb")
    ('void gemm...', 'a b')
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def gb_per_s(bytes_per_s: int) -> str:
    """Bandwidth as its makers give it: 10**9 bytes a second.

    >>> gb_per_s(275_400_000_000), gb_per_s(1_234_000_000)
    ('275.4 GB/s', '1.234 GB/s')
    """
    return f"{bytes_per_s / 1e9:.4g} GB/s"
