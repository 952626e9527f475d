"""Try code that could crash the process in a child process first, and store the verdict.

`qualifier` asks for a verdict, `verdicts` keeps them in the user's cache folder, `child` runs a
function in a separate process, and `native_kernels` is what the child runs for a C++ kernel.
"""
