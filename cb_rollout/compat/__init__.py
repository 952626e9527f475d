"""Reach past public APIs, one file for each upstream; a function names the versions it was read in.

A change upstream breaks one of these files, and no other; `cache` owns the user's folder for what
upstream would keep in a folder that others can write, `lazy` the names that a package loads on
first use, and `patching` what is replaced and restored. They import nothing of the package but its
errors, and are called from every room above.
"""
