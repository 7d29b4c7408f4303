"""The few operations that take the time, one signature each. `reference` is plain torch and runs
anywhere."""
