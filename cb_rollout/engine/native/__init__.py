"""C++ for what torch has no operator for on a CPU; compiled for this machine when first needed."""
