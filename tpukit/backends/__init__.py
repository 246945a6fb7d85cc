"""One file a device: the only places that know torch_xla, NCCL or gloo.

Each holds a class with the same methods, one object a core, and `run`, which a worker process calls to start its
device and to run the body once on every core that belongs to the process.
"""
