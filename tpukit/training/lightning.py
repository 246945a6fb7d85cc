"""Run Lightning's Trainer on the cores of a launch.

Without tpukit, Lightning starts processes for a TPU from the kernel. In a process that a launcher
has started, it finds only a CPU. `trainer_options(core)` gives Lightning the device, the rank and
the collectives of the worker process: Lightning trains, and the core runs the collectives. This
module imports lightning, so no other module of tpukit imports it.
"""

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils import _pytree as tree

from tpukit.essentials.data import only_iterates
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.launcher import Core, checksum, gather_objects, move_module
from tpukit.training.batchnorm import sync_batchnorm, unsync_batchnorm, unsynced_layers


def trainer_options(core: Core) -> dict:
    """Return the options with which a Trainer runs on this core.

        import lightning
        trainer = lightning.Trainer(max_epochs=3, **trainer_options(core))

    Call it in the worker function, with `import lightning`; the package `pytorch_lightning` is not
    supported. The LightningModule needs no change. The numbers that it logs appear in the live
    curve and in `Run.log`. Lightning's progress bar is off, because a worker cannot show it.

    Leave out `devices`, `accelerator` and `num_nodes`, because `launch` decides them. Lightning
    divides a `DataLoader` among the cores as usual; `core.batches(...)` is divided already.
    Gradients are averaged before they are clipped. With accumulation, they are averaged once per
    optimizer step. Use `self.log(..., sync_dist=True)` for numbers that must be equal on all
    cores, such as those that decide early stopping and the best checkpoint. A torchmetrics metric
    that is an attribute of the module gathers its states from all cores.
    `Trainer(sync_batchnorm=True)` uses `tpukit.training.sync_batchnorm`.

    Lightning does not divide a `DataLoader` of an IterableDataset. If all cores get the same first
    batch from it, `trainer.fit` raises an error. Pass a stream as
    `core.batches(stream, batch_size=..., steps=...)` instead.

    Args:
        core: this core.

    Returns:
        keyword arguments of `lightning.Trainer`.

    Raises:
        ValueError: two cores share this process, as on TPU v2 and v3. Lightning supports only one.
    """
    if core.backend.shares_process:
        raise InvalidValueError(
            "Lightning cannot run here: it supports one rank per process",
            found=f"{core.world_size} cores, two in each process, as TPU v2 and v3 have them",
            fix="launch(..., cores=1), or tpukit.fit on all of them",
        )
    return {
        "strategy": CoreStrategy(core),
        "logger": CoreLogger(core),
        "enable_progress_bar": False,
        # torch_xla has no inference mode. In predict, 2.9.0 raises "Cannot set version_counter
        # for inference tensor".
        "inference_mode": False,
    }


_JOINING = ("dist_sync_fn", "distributed_available_fn")  # attributes of torchmetrics' metrics


class CoreAccelerator(CPUAccelerator):
    """An accelerator with one device per process; `CoreStrategy` decides which device."""

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the launcher has set the device up."""


class CoreStrategy(ParallelStrategy):
    """A strategy that trains on the cores of a launch, with their collectives instead of DDP's."""

    def __init__(self, core: Core):
        super().__init__(accelerator=CoreAccelerator())
        self.core = core
        # Changed metrics, with the attributes that `teardown` restores. The keys are ids, because
        # the hash of a metric changes with its state.
        self._joined: dict[int, tuple[torch.nn.Module, dict]] = {}
        self._synced: list[torch.nn.Module] = []  # BatchNorm layers that this call has changed
        self._has_compared_batches = False

    # If this is true, Lightning replaces the sampler of a DataLoader by a DistributedSampler.
    is_distributed = property(lambda self: self.core.world_size > 1)
    global_rank = property(lambda self: self.core.rank)
    local_rank = property(lambda self: self.core.rank)
    world_size = property(lambda self: self.core.world_size)
    root_device = property(lambda self: self.core.device)
    distributed_sampler_kwargs = property(
        lambda self: {"num_replicas": self.world_size, "rank": self.global_rank}
    )

    def setup_environment(self) -> None:
        """Set Lightning's rank; the launcher has started the processes."""
        super().setup_environment()
        rank_zero_only.rank = self.core.rank

    def setup(self, trainer) -> None:
        """Move the module to the device, with rank 0's weights on all cores; create optimizers."""
        if isinstance(self.precision_plugin, MixedPrecision):
            # The plugin assumes that every device but a CPU is a GPU.
            self.precision_plugin.device = self.root_device.type
        # Every strategy must handle `Trainer(sync_batchnorm=True)` itself. torch's SyncBatchNorm,
        # which Lightning's strategies use, runs on CUDA only.
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self._synced = unsynced_layers(self.model)
            sync_batchnorm(self.core, self.model)
        self._join_metrics()
        super().setup(trainer)

    def teardown(self) -> None:
        """Move the module to the host, and restore its tied weights, metrics and BatchNorm."""
        if self.lightning_module is not None:
            # On XLA, Lightning's `module.cpu()` would untie tied weights: one tensor per name.
            move_module(self.lightning_module, "cpu")
        unsync_batchnorm(self._synced)
        self._synced = []
        for metric, own in self._joined.values():
            vars(metric).update(own)
        self._joined = {}
        super().teardown()

    def _join_metrics(self) -> None:
        """Let the module's torchmetrics metrics gather their states through the core.

        Otherwise they would use torch.distributed, which does not connect the cores on a TPU.
        """
        for metric in self.lightning_module.modules():
            is_metric = all(name in vars(metric) for name in _JOINING)
            if not is_metric or id(metric) in self._joined or self.world_size == 1:
                continue
            own = {name: vars(metric)[name] for name in _JOINING}
            self._joined[id(metric)] = (metric, own)
            metric.dist_sync_fn = self._gather_all
            metric.distributed_available_fn = lambda: True

    def _gather_all(self, tensor: torch.Tensor, group: object = None) -> list[torch.Tensor]:
        """Return the tensors of all cores in order of rank; their first dimensions may differ."""
        parts = gather_objects(self.core, self.core.to_host(tensor.detach()))
        return [part.to(tensor.device) for part in parts]

    def on_train_start(self) -> None:
        """Let metrics gather their states from all cores, also metrics made after `setup`."""
        self._join_metrics()

    def on_validation_start(self) -> None:
        """Let metrics gather their states from all cores, also metrics made after `setup`."""
        self._join_metrics()

    def on_test_start(self) -> None:
        """Let metrics gather their states from all cores, also metrics made after `setup`."""
        self._join_metrics()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Raise if a stream gives every core the same first batch."""
        if self._has_compared_batches or self.world_size == 1:
            return
        self._has_compared_batches = True
        # Lightning accepts nested dicts and lists of loaders.
        loaders = tree.tree_leaves(self.lightning_module.trainer.train_dataloader)
        streams = [loader for loader in loaders if _is_stream(loader)]
        if not streams:
            return
        tensors = [leaf for leaf in tree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        mine = [checksum(tensor) for tensor in self.core.to_host(tensors)]
        everyone = gather_objects(self.core, mine)
        if mine and all(other == mine for other in everyone):
            size = getattr(streams[0], "batch_size", None) or 32
            raise InvalidValueError(
                "every core would train on the same batches: Lightning does not divide a stream",
                found=f"a DataLoader of a {type(streams[0].dataset).__name__}, whose first batch "
                f"is the same on all {self.world_size} cores",
                fix=f"in place of the DataLoader, core.batches(stream, batch_size={size}, "
                "steps=1000), which gives each core a share",
            )

    def model_to_device(self) -> None:
        """Move the module in place, so that the Trainer's own module is trained, and not a copy."""
        self.core.model(self.model, in_place=True)

    def optimizer_step(self, optimizer, closure, model=None, **options):
        """Run an optimizer step as one graph.

        Gradients and float buffers are averaged after the backward pass and before clipping.
        """

        def averaged():
            loss = closure()
            buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
            self.core.average_gradients(optimizer, average_also=buffers)
            return loss

        with self.core.step():
            return super().optimizer_step(optimizer, averaged, model, **options)

    def validation_step(self, *args, **options):
        """Evaluate a batch, as one graph."""
        with self.core.step():
            return super().validation_step(*args, **options)

    def test_step(self, *args, **options):
        """Test a batch, as one graph."""
        with self.core.step():
            return super().test_step(*args, **options)

    def predict_step(self, *args, **options):
        """Predict a batch, as one graph."""
        with self.core.step():
            return super().predict_step(*args, **options)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        """Return the sum, mean, minimum or maximum over the cores.

        A value that is not a tensor is returned unchanged.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()  # "ReduceOp.AVG" is "avg"
        if name == "avg":
            name = "mean"
        return self.core.all_reduce(tensor.to(self.root_device), name).to(tensor.device)

    def barrier(self, name=None) -> None:
        """Wait for all cores."""
        self.core.barrier()

    def broadcast(self, obj, src: int = 0):
        """Return the object of core `src` on all cores."""
        if self.world_size == 1:
            return obj
        return gather_objects(self.core, obj)[src]

    def all_gather(self, tensor, group=None, sync_grads: bool = False):
        """Return the tensors of all cores, stacked along a new first dimension, without gradients.

        Raises:
            ValueError: `sync_grads` is True.
        """
        if sync_grads:
            raise InvalidValueError(
                "all_gather gives no gradients here", fix="all_gather(..., sync_grads=False)"
            )
        return self.core.gather(tensor.to(self.root_device).unsqueeze(0)).to(tensor.device)

    def save_checkpoint(self, checkpoint: dict, filepath, storage_options=None) -> None:
        """Copy tensors to host memory, so that any machine can load the file; write from core 0."""
        checkpoint = self.core.to_host(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)


def _is_stream(loader: object) -> bool:
    """Return whether an object is a DataLoader whose dataset can only be read in order."""
    is_loader = isinstance(loader, torch.utils.data.DataLoader)
    return is_loader and only_iterates(loader.dataset)


class CoreLogger(Logger):
    """A logger that adds the module's numbers to the live curve and to `Run.log`."""

    name = "tpukit"
    version = ""

    def __init__(self, core: Core):
        super().__init__()
        self.core = core

    def log_metrics(self, metrics: dict, step: int | None = None) -> None:
        """Log the numbers of a step. Lightning calls this method on core 0 only."""
        numbers = {name: value for name, value in metrics.items() if name != "epoch"}
        if numbers:
            self.core.log(step, **numbers)

    def log_hyperparams(self, params, *args, **options) -> None:
        """Do nothing."""
