"""Two of everything: one fills while the other empties.

`BatchPrefetcher` has two batches: one on its way to the device while the other is
computed on. `DoubleBufferedReducer` has two sets of gradients: one is averaged over the
ranks, under the whole next step, while that step's backward fills the other.
`DoubleBufferedWeights` has two sets of weights: one is updated while the other serves.
"""

from overlaplab.techniques.double_buffer.delayed import DoubleBufferedReducer
from overlaplab.techniques.double_buffer.prefetcher import BatchPrefetcher
from overlaplab.techniques.double_buffer.weights import DoubleBufferedWeights

__all__ = ["BatchPrefetcher", "DoubleBufferedReducer", "DoubleBufferedWeights"]
