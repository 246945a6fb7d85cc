"""One convolution in place of the models of timm and of torchvision."""

import torch


class Net(torch.nn.Module):
    """Takes (N, 3, H, W); its last layer is called fc, and others put their own there."""

    def __init__(self, width):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, width, 16, stride=16)
        self.bn = torch.nn.BatchNorm2d(width)
        self.fc = torch.nn.Linear(width, 1000)

    def forward(self, images):
        """Return (N, classes)."""
        return self.fc(self.bn(self.conv(images)).relu().mean((2, 3)))


def create_model(_, width=16, **__):
    """Return one."""
    return Net(width)
