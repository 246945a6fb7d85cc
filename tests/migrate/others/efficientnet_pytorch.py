"""One convolution in place of the EfficientNets."""

import torch


class EfficientNet(torch.nn.Module):
    """Takes (N, 3, H, W); its last layer is called _fc, and others put their own there."""

    def __init__(self, num_classes=1000):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 16, stride=16), torch.nn.BatchNorm2d(8))
        self.head = torch.nn.Linear(8, 1280)
        self._fc = torch.nn.Linear(1280, num_classes)

    from_pretrained = classmethod(lambda cls, _, num_classes=1000: cls(num_classes))

    def forward(self, images):
        """Return (N, classes)."""
        return self._fc(self.head(self.stem(images).relu().mean((2, 3))))
