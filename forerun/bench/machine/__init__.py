"""What this machine allows: kernels, the roofline of a pass, and how long one waits for the first
word."""
