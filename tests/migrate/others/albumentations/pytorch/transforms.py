"""The same, where a later version has it."""

from albumentations.pytorch import ToTensor as ToTensorV2

__all__ = ["ToTensorV2"]
