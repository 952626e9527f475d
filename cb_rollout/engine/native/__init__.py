"""C++ kernels, and the loader that compiles them once for a machine."""
