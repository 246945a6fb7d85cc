"""Compile a captured step as a single program, and run that program again with other inputs.

    program.compile([weight, loss])    key, [(id, weight), (id, images), (id, labels)]
    program.run(key, [weight, images, labels])    the next weight and loss

torch_xla's bridge to torch.compile runs a model's forward and backward pass in this way. Here, the
bridge runs a whole step. It cannot run a program that `sync` has compiled. One reason is that
torch_xla stores programs under a hash, which differs between `sync` and the bridge. The other is
that torch_xla records the shapes of the results only for the bridge (`CollectSyncTensors` and
`GetGraphHash` in its xla_graph_executor.cpp). If the outputs are sorted by their tensors'
ids, as `sync` sorts them, the program has the same operations as with `sync`, and so the same
results, bit for bit. Captured steps also run through the bridge, so no step is compiled twice.

The memory of an input is not reused for results (no input is donated). torch_xla lets a weight and
its copies share one buffer, and does not report which buffers are shared. So donating a weight
could destroy its copies. Therefore the new state needs memory in addition to the old state.
"""

import gc


class Programs:
    """The programs of this core's steps, which torch_xla compiles and stores.

    Args:
        device: the XLA device of this core.

    Attributes:
        seed_id: the id by which torch_xla marks the random seed among a program's inputs.
    """

    def __init__(self, device):
        import torch_xla

        self._api = torch_xla._XLAC
        self._device = str(device)
        self.seed_id = self._api._get_seed_info_id()
        self._compiled: set[bytes] = set()

    def compile(self, outputs: list) -> tuple[bytes, list[tuple[int, object]]]:
        """Compile the program that computes tensors, unless this object has compiled it before.

        Args:
            outputs: tensors that are recorded but not computed yet, in the order of their ids.

        Returns:
            the key of the program, and (id, tensor) of each of its inputs.
        """
        ids, values = self._api._get_tensors_xla_device_data_node(outputs)
        key = self._api._get_graph_hash(outputs)
        if key not in self._compiled:
            self._api._xla_warm_up_cache(outputs, [])
            self._compiled.add(key)
        return key, list(zip(ids, values, strict=True))

    def run(self, key: bytes, inputs: list) -> list:
        """Start a program; return its results as tensors that are still being computed."""
        return self._api._run_cached_graph(key, inputs)

    def ids(self, tensors: list) -> list[int]:
        """Return torch_xla's ids of tensors; changing a tensor in place gives it a new id."""
        return [self._api._xla_get_tensor_id(one) for one in tensors]

    def waiting(self, tensors: list) -> list[bool]:
        """Return for each tensor whether it is recorded but not computed yet."""
        return self._api._check_tensor_need_materialization(tensors)

    def held_twice(self, tensors: list) -> bool:
        """Return whether other tensors, such as results of `detach`, share memory with these."""
        # A replayed step would update only one of the two tensors. Both have the same id, so only
        # the reference count of their storage shows that there are two.
        import torch

        storages = [one.untyped_storage() for one in tensors]
        # Two references are normal: from the tensor, and from the list above.
        return any(torch._C._storage_Use_Count(one._cdata) > 2 for one in storages)

    def all_waiting(self) -> int:
        """Return the number of tensors of this process that are recorded but not computed yet."""
        return sum(self._api._check_device_tensor_need_materialization(self._device))

    def run_all(self) -> None:
        """Compute all recorded tensors, without advancing the seed of random numbers."""
        if self.all_waiting():
            gc.collect()  # delete unused tensors first, such as those of an interrupted run
        if self.all_waiting():
            self._api._xla_sync_live_tensors(self._device, [], True)

    def interruptions(self) -> int:
        """Return how often this process has run a graph by `sync`, or copied a tensor to the host.

        If the number grows within a step, the step is not a single program.
        """
        count = 0
        for name in ("CachedCompile", "UncachedCompile"):
            count += self._api._xla_counter_value(name) or 0
        copies = self._api._xla_metric_data("TransferFromDeviceTime")  # (count, total, samples)
        if copies:
            count += copies[0]
        return count

    def executions(self) -> tuple[int, float]:
        """Return the number of programs that have ended, and their total seconds on the device.

        The time of a program begins when it is handed over, so it includes the wait for earlier
        programs.
        """
        count, nanoseconds, *_ = self._api._xla_metric_data("ExecuteTime") or (0, 0)
        return count, nanoseconds / 1e9

    def next_seed(self):
        """Return the tensor with the seed of the next step, and advance the seed as `sync` does."""
        start = self._api._get_base_seed_as_tensor(self._device)
        seed = self._api._xla_get_rng_seed(self._device)
        # The formula of MarkStep in torch's lazy tensor core.
        following = (1012031 + seed * 7012063) % 2**64
        self._api._xla_set_rng_seed(following, self._device)
        return start


def programs_of(backend) -> Programs | None:
    """Return the `Programs` of a backend's device; None if a step is not a single program there.

    The result is None without XLA, in preflight, if collectives run outside of the graph, if cores
    are threads of one process, or if the model is sharded.
    """
    if not backend.traced:
        return None
    import torch_xla.runtime as xr

    has_whole_steps = backend.in_graph or backend.world_size == 1
    if not has_whole_steps or backend.shares_process or backend.is_recording or xr.is_spmd():
        return None
    return Programs(backend.device)
