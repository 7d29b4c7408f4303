"""Kernels for GPUs in Triton. Import them only where the package `triton` is, which comes with
torch's CUDA builds."""
