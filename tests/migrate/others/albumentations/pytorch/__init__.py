"""Pictures as tensors."""

import torch

from albumentations import Same


class ToTensor(Same):
    """Takes (H, W, 3)."""

    def of(self, image):
        """Return (3, H, W)."""
        return torch.from_numpy(image.transpose(2, 0, 1).copy())
