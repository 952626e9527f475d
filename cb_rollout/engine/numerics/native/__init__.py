"""Own the C++ kernels, and compile them once per machine."""
