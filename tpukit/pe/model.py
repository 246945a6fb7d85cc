"""Build the network of the walkthrough, a ResNet-34, and prepare its input on the device."""

import pickle
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError, check_flag
from tpukit.pe.labels import LABELS

# Mean and standard deviation of ImageNet's red, green and blue in [0, 1], which torchvision's
# weights expect.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
FILE = "resnet34-b627a593.pth"  # torchvision's ResNet34_Weights.IMAGENET1K_V1
# The last layer, whose size depends on the number of labels.
_HEAD = ("fc.weight", "fc.bias")


def resnet34(weights: str | Path | None = None, *, outputs: int = 10, pool_first: bool = False):
    """Build a ResNet-34 with one logit per label, pretrained on ImageNet if a file has the weights.

    `resnet34` never downloads. Without `weights` it uses torchvision's file in torch's cache, if it
    exists. Otherwise the network starts from random weights, and tpukit prints that.

    Args:
        weights: the path of a file with the state dict of a ResNet-34; None for torchvision's file
            in torch's cache. The last layer of the file is used only if it has `outputs` rows.
        outputs: the number of logits, one per label in the order of `LABELS`.
        pool_first: True to pool before the BatchNorm of the stem, in training with torch_xla. The
            result is the same except for rounding. By the estimates of the TPU's compiler, a step
            takes a twelfth fewer cycles; see `tpukit.pe.stem`. False for torchvision's order.

    Returns:
        A torch.nn.Module. Its input is (N, 3, H, W) float32, as `normalize` returns it; its output
        is (N, outputs) float32 logits.

    Raises:
        FileNotFoundError: the file `weights` does not exist.
        ValueError: the file does not contain the state dict of a ResNet-34.
    """
    import torch
    from torchvision.models.resnet import BasicBlock, ResNet

    from tpukit.pe.stem import PoolingFirst

    check_flag("pool_first", pool_first)
    kind = PoolingFirst if pool_first else ResNet
    model = kind(BasicBlock, [3, 4, 6, 3])  # the layers of torchvision's resnet34
    model.fc = torch.nn.Linear(model.fc.in_features, outputs)
    if weights is None:
        file = Path(torch.hub.get_dir()) / "checkpoints" / FILE
        if not file.is_file():
            print(
                f"resnet34 starts from random weights: no ImageNet weights at {file}; "
                f"put torchvision's {FILE} there, or pass its path as resnet34(weights=...)"
            )
            return model
    else:
        file = Path(weights)
        if not file.is_file():
            raise PathNotFoundError(
                f"there is no file of weights at {file}",
                fix=f"pass the path of {FILE}, or leave weights out",
            )
    _load(model, file)
    return model


def normalize(images):
    """Normalise uint8 images for a network trained on ImageNet, on the device of the images.

    Call it inside the step, so that the images are sent to the device as uint8, a quarter of the
    bytes of float32.

    Args:
        images: (N, 3, H, W) uint8 in [0, 255].

    Returns:
        (N, 3, H, W) float32: the images minus ImageNet's mean, divided by its standard deviation.

    Raises:
        ValueError: the images are not (N, 3, H, W) uint8.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise InvalidValueError(
            f"normalize takes (N, 3, H, W) uint8, got {tuple(images.shape)} {images.dtype}",
            fix="pass the batch as core.batches yields it, neither scaled nor permuted",
        )
    return (images.float() - _constant(MEAN, images.device)) / _constant(STD, images.device)


def _constant(values: tuple[float, ...], device):
    """Return one value per channel as (1, 3, 1, 1), times 255, as a constant of the graph.

    The constant is made on the device, because a tensor from the host would be copied in every
    step. It is one array for all channels: for 128 images of 128 x 128 pixels on a v5e, the
    compiler estimates 77,000 cycles, and 132,000 if the channels are normalised one by one.
    """
    import torch

    numbers = [torch.full((), 255 * value, device=device) for value in values]
    return torch.stack(numbers).view(1, 3, 1, 1)


def augment(**changes):
    """Return an `Augment` for CT slices, to call on (images, labels) before `normalize`.

    It flips half of the images left to right, and swaps the labels leftsided_pe and rightsided_pe
    of these images. A flip also moves the heart to the other side, which is rare in patients but
    does no harm here. Sizes vary by a quarter, because scanners have different fields of view. All
    other arguments have the defaults of `Augment`.

    Args:
        changes: arguments of `Augment` that replace the values above.

    Returns:
        The `Augment`; call it on the device.
    """
    from tpukit.training import Augment

    options = {
        "scale": (0.75, 1.25),
        "flip": 0.5,
        "swap_labels": (("leftsided_pe", "rightsided_pe"),),
        "names": LABELS,
    }
    return Augment(**(options | changes))


def _load(model, file: Path) -> None:
    """Copy a state dict from a file into the model, except for a last layer of another size.

    Raises:
        ValueError: the file does not contain the state dict of a ResNet-34.
    """
    state = _read_state(file)
    given = _shapes(state)
    own = model.state_dict()
    differing = [name for name in own if given.get(name) != own[name].shape]
    # Files of torch before 0.4.1 do not count batches.
    wrong = [name for name in differing if name not in _HEAD and "num_batches" not in name]
    extra = [name for name in given if name not in own]
    if wrong or extra:
        counts = f"{len(wrong)} missing or of another shape ({', '.join(wrong[:2])})"
        counts += f", {len(extra)} too many ({', '.join(extra[:2])})"
        whole = f"the state_dict() of a ResNet-34, such as torchvision's {FILE}"
        raise InvalidValueError(
            f"{file} does not hold the state dict of a ResNet-34",
            found=f"{type(state).__name__} of {len(given)} tensors; {counts}",
            fix=f"pass a file that holds only {whole}",
        )
    # A last layer of another size has other classes, so it keeps its random values.
    model.load_state_dict(state | {name: own[name] for name in differing})


def _shapes(state: object) -> dict[str, tuple]:
    """Return the shape of each tensor of a state dict; empty for any other object."""
    import torch

    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        return {}
    return {name: value.shape for name, value in state.items()}


def _read_state(file: Path):
    """Load a file of weights on the CPU without running code in it; ValueError if it fails."""
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        saved = "torch.save(model.state_dict(), file)"
        raise InvalidValueError(
            f"{file} cannot be read as weights",
            found=f"{reason} ({file.stat().st_size} bytes)",
            fix=f"pass a file saved with {saved}, such as torchvision's {FILE}",
        ) from error
