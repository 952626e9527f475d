"""C++ kernels and the loader that compiles them once per machine."""
