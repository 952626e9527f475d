"""Compute forwards in which a row's bits depend only on the row (`numerics="bitwise"`).

`kernels` compiles and calls the C++ kernels of `native/`, `operators` installs them in place of
torch's, `attention` in place of a model's own attention function, `bitwise` does both for a model.
Called by the thread that makes an engine, and by a user's own loop.
"""
