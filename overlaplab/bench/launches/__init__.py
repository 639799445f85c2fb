"""What CUDA launches for modules and optimizers: kernels, bytes, memory, time."""
