"""The operations that dominate the time: `reference` in plain torch, `native` in C++ for CPUs."""
