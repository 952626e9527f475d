"""Use private APIs of upstream libraries; a function names the versions whose source was read.

Each file uses one library, or one feature of it, so that an upstream change breaks only one file.
`inductor` also owns the user's cache folder (upstream would use a folder that others can write),
`lazy` loads a package's names on first use, and `patching` replaces and restores attributes. Of
this package, these files import only the errors and each other; every layer above calls them.
"""
