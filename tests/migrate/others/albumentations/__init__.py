"""Pictures left as they are, but for their size and their range."""

import cv2

__all__ = ["Compose", "Flip", "HorizontalFlip", "Normalize", "Resize", "ShiftScaleRotate", "VerticalFlip"]


class Same:
    """Leaves a picture as it is."""

    def __init__(self, *args, **_):
        self.args = args

    def of(self, image):
        """Return the picture."""
        return image

    def __call__(self, image, **others):
        return {"image": self.of(image), **others}


class Normalize(Same):
    """Takes (H, W, 3) uint8."""

    def of(self, image):
        """Return it in [-1, 1]."""
        return image.astype("float32") / 127.5 - 1


class Resize(Same):
    """Takes its height and its width."""

    def of(self, image):
        """Return it so."""
        return cv2.resize(image, self.args[::-1])


class Compose:
    """One after the other."""

    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, **sample):
        for one in self.transforms:
            sample = one(**sample)
        return sample


Flip = HorizontalFlip = ShiftScaleRotate = VerticalFlip = Same
