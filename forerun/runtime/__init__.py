"""Forward passes of a model: on torch, on the native kernels, or in several processes."""
