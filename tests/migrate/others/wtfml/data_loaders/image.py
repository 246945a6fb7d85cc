"""Pictures of files, with their targets."""

import numpy
import torch
import torch_xla.runtime as xr
from PIL import Image


class ClassificationDataLoader(torch.utils.data.Dataset):
    """Gives a core's batches of them."""

    def __init__(self, image_paths, targets, resize, augmentations):
        self.image_paths, self.targets, self.augmentations = image_paths, targets, augmentations

    def __len__(self):
        return len(self.image_paths)

    def __getitem__(self, index):
        image = self.augmentations(image=numpy.array(Image.open(self.image_paths[index])))["image"]
        return {"image": torch.tensor(image).permute(2, 0, 1), "targets": torch.tensor(self.targets[index])}

    def fetch(self, batch_size, drop_last, num_workers, shuffle, tpu):
        """Return a loader."""
        sampler = torch.utils.data.DistributedSampler(self, xr.world_size(), xr.global_ordinal(), shuffle=shuffle)
        return torch.utils.data.DataLoader(self, batch_size, sampler=sampler, drop_last=drop_last)
