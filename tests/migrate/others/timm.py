"""One convolution in place of the models of timm."""

import torch


class Net(torch.nn.Module):
    """Takes (N, 3, H, W); its last layer is called fc, and others put their own there."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 16, stride=16)
        self.bn = torch.nn.BatchNorm2d(16)
        self.fc = torch.nn.Linear(16, 1000)

    def forward(self, images):
        """Return (N, classes)."""
        return self.fc(self.bn(self.conv(images)).relu().mean((2, 3)))


def create_model(_, **__):
    """Return one."""
    return Net()
