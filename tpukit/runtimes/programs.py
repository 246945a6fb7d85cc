"""Compile a captured step as one program, and run that program again with other inputs.

torch_xla's bridge to torch.compile does so with a model's forward and backward pass. Here it gets a whole step. It
cannot run a program that `sync` has compiled: the hash by which torch_xla keeps a program says which of the two asked
for it, and only for the bridge does torch_xla note the shapes of the results (`CollectSyncTensors` and `GetGraphHash`
in torch_xla's xla_graph_executor.cpp). With the outputs in the order of a sync, that of the tensors' ids, the program
has the same operations, so the same bits come out. Captured steps run through here as well, so nothing is compiled
twice.

No input is donated to a program. torch_xla lets a weight and its copies share one buffer, and nothing tells which
buffers are shared, so a donated weight could take its copies with it. The price is room for a second set of the state.
"""

import gc


class Programs:
    """The programs of this core's steps, compiled and kept by torch_xla.

    Attributes:
        seed_id: the id of the input that a program's random numbers start from.
    """

    def __init__(self, device):
        import torch_xla

        self._api, self._device = torch_xla._XLAC, str(device)
        self.seed_id = self._api._get_seed_info_id()
        self._compiled: set[bytes] = set()

    def compile(self, outputs: list) -> tuple[bytes, list[tuple[int, object]]]:
        """Compile the program of these tensors, in the order of their ids; return its key, and its inputs with ids."""
        ids, values = self._api._get_tensors_xla_device_data_node(outputs)
        key = self._api._get_graph_hash(outputs)
        if key not in self._compiled:
            self._api._xla_warm_up_cache(outputs, [])
            self._compiled.add(key)
        return key, list(zip(ids, values, strict=True))

    def run(self, key: bytes, inputs: list) -> list:
        """Run a program and return its results, before they are there."""
        return self._api._run_cached_graph(key, inputs)

    def ids(self, tensors: list) -> list[int]:
        """Return torch_xla's numbers of tensors; what is changed in place gets another."""
        return [self._api._xla_get_tensor_id(one) for one in tensors]

    def waiting(self, tensors: list) -> list[bool]:
        """Say of each tensor whether it is recorded and not computed yet."""
        return self._api._check_tensor_need_materialization(tensors)

    def held_twice(self, tensors: list) -> bool:
        """Say whether another tensor has the memory of one of these, as `detach` makes: `run` gives it to one alone."""
        import torch

        storages = [one.untyped_storage() for one in tensors]
        # Two hold each: the tensor, and the list above. The other tensor has the same id, so nothing else shows it.
        return any(torch._C._storage_Use_Count(one._cdata) > 2 for one in storages)

    def all_waiting(self) -> int:
        """Return how many tensors that anybody holds are recorded and not computed yet."""
        return sum(self._api._check_device_tensor_need_materialization(self._device))

    def run_all(self) -> None:
        """Compute all that is recorded and not computed yet; random numbers go on as if nothing had been."""
        if self.all_waiting():
            gc.collect()  # what nobody holds any more, as of a run that was interrupted
        if self.all_waiting():
            self._api._xla_sync_live_tensors(self._device, [], True)

    def interruptions(self) -> int:
        """Return how often so far this process ran a graph, or copied a tensor to the host."""
        graphs = sum(self._api._xla_counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))
        return graphs + (self._api._xla_metric_data("TransferFromDeviceTime") or (0,))[0]

    def executions(self) -> tuple[int, float]:
        """Return how many programs have ended so far, and their seconds from the hand-over to the end."""
        count, nanoseconds, *_ = self._api._xla_metric_data("ExecuteTime") or (0, 0)
        return count, nanoseconds / 1e9

    def next_seed(self):
        """Return what the random numbers of a step start from, a tensor, and move on as a sync does."""
        start = self._api._get_base_seed_as_tensor(self._device)
        now = self._api._xla_get_rng_seed(self._device)
        self._api._xla_set_rng_seed((1012031 + now * 7012063) % 2**64, self._device)  # as MarkStep of torch's lazy core
        return start


def programs_of(backend) -> Programs | None:
    """Return what runs a recorded step's program again on this core; None where nothing can."""
    if not backend.traced:
        return None
    import torch_xla.runtime as xr

    # Where collectives run beside the graph, or cores are threads, a step is more than its program.
    is_one = backend.in_graph or backend.world_size == 1
    if not is_one or backend.shares_process or backend.is_recording or xr.is_spmd():
        return None
    return Programs(backend.device)
