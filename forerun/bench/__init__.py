"""The verbs of `forerun bench`. They use the engine from outside; `forerun tune` shares `decode`.

Measurements of kernels, the roofline, energy and other engines are scripts in the folder
`benchmarks` of the repository.
"""
