"""Use private APIs, one file per upstream; a function names the versions whose source was read.

An upstream change breaks only one of these files. `cache` owns the user's cache folder (upstream
would use a folder that others can write), `lazy` loads a package's names on first use, and
`patching` replaces and restores attributes. They import only the package's errors, and every room
above calls them.
"""
