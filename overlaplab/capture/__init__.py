"""A training step as one CUDA graph, with its collectives inside: `ol.capture_step`."""
