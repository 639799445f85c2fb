"""Two of everything: one fills while the other empties.

`BatchPrefetcher` has two batches: one on its way to the device while the other is
computed on.
"""

from overlaplab.techniques.double_buffer.prefetcher import BatchPrefetcher

__all__ = ["BatchPrefetcher"]
