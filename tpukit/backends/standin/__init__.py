"""A stand-in for libtpu: torch_xla's whole TPU path, executed on the CPU of a machine without a chip."""
