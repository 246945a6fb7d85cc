"""Compile a captured step as a single program, and run that program again with other inputs.

    program.compile([weight, loss])    key, [(id, weight), (id, images), (id, labels)]
    program.run(key, [weight, images, labels])    the next weight and loss

torch_xla's bridge to torch.compile does so with a model's forward and backward pass. Here it gets
a whole step. It cannot run a program that `sync` has compiled: torch_xla stores programs under a
hash that differs between `sync` and the bridge, and it records the shapes of the results only for
the bridge (`CollectSyncTensors` and `GetGraphHash` in torch_xla's xla_graph_executor.cpp). If the
outputs are in the order of a sync, which is that of the tensors' ids, the program has the same
operations, so the same bits come out. Captured steps run through here as well, so nothing is
compiled twice.

No input is donated to a program. torch_xla lets a weight and its copies share one buffer, and does
not report which buffers are shared, so donating a weight could destroy its copies. Therefore a
second set of the state needs memory.
"""

import gc


class Programs:
    """The programs of this core's steps, compiled and kept by torch_xla.

    Attributes:
        seed_id: the id of the input that a program's random numbers start from.
    """

    def __init__(self, device):
        import torch_xla

        self._api = torch_xla._XLAC
        self._device = str(device)
        self.seed_id = self._api._get_seed_info_id()
        self._compiled: set[bytes] = set()

    def compile(self, outputs: list) -> tuple[bytes, list[tuple[int, object]]]:
        """Compile the program of tensors; return its key, and its inputs with their ids.

        Args:
            outputs: tensors that are recorded but not computed yet, in the order of their ids.
        """
        ids, values = self._api._get_tensors_xla_device_data_node(outputs)
        key = self._api._get_graph_hash(outputs)
        if key not in self._compiled:
            self._api._xla_warm_up_cache(outputs, [])
            self._compiled.add(key)
        return key, list(zip(ids, values, strict=True))

    def run(self, key: bytes, inputs: list) -> list:
        """Start a program and return its results, which may not be computed yet."""
        return self._api._run_cached_graph(key, inputs)

    def ids(self, tensors: list) -> list[int]:
        """Return torch_xla's ids of tensors; a tensor that is changed in place gets another."""
        return [self._api._xla_get_tensor_id(one) for one in tensors]

    def waiting(self, tensors: list) -> list[bool]:
        """Return for each tensor whether it is recorded but not computed yet."""
        return self._api._check_tensor_need_materialization(tensors)

    def held_twice(self, tensors: list) -> bool:
        """Return whether another tensor shares the memory of one of these, as `detach` makes.

        `run` gives a result to only one of the tensors. The other tensor has the same id, so only
        the reference count of the storage shows it.
        """
        import torch

        storages = [one.untyped_storage() for one in tensors]
        # Two hold each storage: the tensor, and the list above.
        return any(torch._C._storage_Use_Count(one._cdata) > 2 for one in storages)

    def all_waiting(self) -> int:
        """Return the number of tensors of this process that are recorded but not computed yet."""
        return sum(self._api._check_device_tensor_need_materialization(self._device))

    def run_all(self) -> None:
        """Compute all recorded tensors; random numbers are not affected."""
        if self.all_waiting():
            gc.collect()  # tensors that are not used any more, as of a run that was interrupted
        if self.all_waiting():
            self._api._xla_sync_live_tensors(self._device, [], True)

    def interruptions(self) -> int:
        """Return how often so far this process ran a graph, or copied a tensor to the host."""
        count = 0
        for name in ("CachedCompile", "UncachedCompile"):
            count += self._api._xla_counter_value(name) or 0
        copies = self._api._xla_metric_data("TransferFromDeviceTime")
        if copies:
            count += copies[0]
        return count

    def executions(self) -> tuple[int, float]:
        """Return how many programs have ended, and their seconds from hand-over to end."""
        count, nanoseconds, *_ = self._api._xla_metric_data("ExecuteTime") or (0, 0)
        return count, nanoseconds / 1e9

    def next_seed(self):
        """Return the seed tensor of a step's random numbers; advance it as a sync does."""
        start = self._api._get_base_seed_as_tensor(self._device)
        seed = self._api._xla_get_rng_seed(self._device)
        following = (1012031 + seed * 7012063) % 2**64  # as MarkStep of torch's lazy core
        self._api._xla_set_rng_seed(following, self._device)
        return start


def programs_of(backend) -> Programs | None:
    """Return the programs of a backend's device; None if a step is not one program there.

    It returns None without XLA, if collectives run outside of the graph, or if cores are threads.
    """
    if not backend.traced:
        return None
    import torch_xla.runtime as xr

    has_whole_steps = backend.in_graph or backend.world_size == 1
    if not has_whole_steps or backend.shares_process or backend.is_recording or xr.is_spmd():
        return None
    return Programs(backend.device)
