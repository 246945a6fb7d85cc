#!/usr/bin/env python
# coding: utf-8

# In[1]:


get_ipython().system('pip install cloud-tpu-client==0.10 https://storage.googleapis.com/tpu-pytorch/wheels/torch_xla-1.6-cp36-cp36m-linux_x86_64.whl')


# In[2]:


import torch
from torch_xla.core.xla_model import get_ordinal, optimizer_step, xla_device, xrt_world_size
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.distributed.parallel_loader as pl

data = torch.utils.data.TensorDataset(torch.rand(32, 4))


# In[3]:


class Fitter:
    def __init__(self, model, device):
        self.model, self.device = model.to(device), device
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01 * xrt_world_size())

    def fit(self, loader):
        for (inputs,) in loader:
            self.optimizer.zero_grad()
            self.model(inputs).pow(2).sum().backward()
            optimizer_step(self.optimizer)


def _mp_fn(rank, flags):
    kept, _ = torch.utils.data.random_split(data, [16, 16])
    sampler = torch.utils.data.DistributedSampler(kept, num_replicas=8, rank=get_ordinal())
    loader = torch.utils.data.DataLoader(kept, batch_size=4, sampler=sampler)
    device = xla_device()
    fitter = Fitter(torch.nn.Linear(4, 1), device)
    fitter.fit(pl.ParallelLoader(loader, [device]).per_device_loader(device))


# In[4]:


get_ipython().run_cell_magic('time', '', "FLAGS = {}\nxmp.spawn(_mp_fn, args=(FLAGS,), nprocs=8, start_method='fork')")
