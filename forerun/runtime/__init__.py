"""Forward passes of a model: on torch, on the native kernels, and in several processes."""
