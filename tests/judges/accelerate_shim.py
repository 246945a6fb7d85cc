"""The parts of accelerate's interface that tpukit's `Core` and `launch` can answer.

Each method is one or two calls of tpukit. A part that is missing here is not offered by tpukit;
test_accelerate.py has the reasons.
"""

import contextlib
from collections.abc import Mapping

import torch
from accelerate.utils.dataclasses import DistributedType
from helpers.launching import quietly
from torch.utils import _pytree as tree
from torch.utils.data import DataLoader, RandomSampler

from tpukit import current_core
from tpukit.essentials.launcher import gather_objects


class PartialState:
    """The place of this process in the run."""

    distributed_type = DistributedType.MULTI_CPU

    def __init__(self):
        self.core = current_core()
        self.num_processes = self.core.world_size
        self.process_index = self.local_process_index = self.core.rank
        self.is_main_process = self.is_local_main_process = self.core.is_main
        self.is_last_process = self.process_index == self.num_processes - 1
        self.device = self.core.device
        self.wait_for_everyone = self.core.barrier
        self.print = self.core.print


class Loader:
    """The batches of a DataLoader's dataset, of which this core gets its share."""

    def __init__(self, loader: DataLoader, accelerator: "Accelerator"):
        self.accelerator = accelerator
        self.batches = accelerator.core.batches(
            loader.dataset,
            batch_size=loader.batch_size,
            shuffle=isinstance(loader.sampler, RandomSampler),
            drop_last=loader.drop_last,
            mask=True,
        )

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            if isinstance(batch, Mapping):
                self.accelerator.mask = batch.pop("mask")
                yield batch
            else:
                *parts, self.accelerator.mask = batch
                yield parts if isinstance(self.batches.dataset[0], tuple) else parts[0]


class Accelerator(PartialState):
    """Models, batches, gradients and collectives of a run."""

    def __init__(self, **options):
        super().__init__()
        if options.keys() - {"dataloader_config"}:
            raise NotImplementedError(f"options {options}")
        self.state = self
        self.mask = None  # of the newest batch: False for padding
        self.is_paused = False
        self.needs_average = False
        self.optimizer = None

    def prepare(self, *things):
        prepared = [self.prepare_one(thing) for thing in things]
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_one(self, thing):
        if isinstance(thing, DataLoader):
            return Loader(thing, self)
        model = self.core.model(thing, in_place=True)
        self.optimizer = torch.optim.SGD(model.parameters())  # average_gradients takes its weights
        model.register_forward_hook(self.note_forward)
        return model

    def note_forward(self, *_):
        """Note as DistributedDataParallel does whether the next backward averages gradients."""
        self.needs_average = not self.is_paused

    def backward(self, loss):
        loss.backward()
        if self.needs_average:
            self.core.average_gradients(self.optimizer)
        self.needs_average = False

    @contextlib.contextmanager
    def no_sync(self, model):
        self.is_paused = True
        yield
        self.is_paused = False

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model):
        self.needs_average = True
        yield

    def gather(self, tensors):
        return tree.tree_map(self.core.gather, tensors)

    def gather_for_metrics(self, tensors):
        """Return the rows of all cores, without padding."""
        is_sample = self.core.gather(self.mask)
        return tree.tree_map(lambda tensor: self.core.gather(tensor)[is_sample], tensors)


def gather(tensors):
    return tree.tree_map(current_core().gather, tensors)


def gather_object(values):
    joined = []
    for part in gather_objects(current_core(), values):
        joined += part
    return joined


def broadcast(tensor):
    return current_core().gather(tensor)[: len(tensor)]


def reduce(tensor, op):
    return current_core().all_reduce(tensor, op)


def notebook_launcher(function, args=(), num_processes=2, monitor_interval=None):
    """Launch a function that takes no core."""
    return quietly(lambda core: function(*args), cores=num_processes, backend="cpu")
