"""The network of the walkthrough, a ResNet with one output per label; its input on the device."""

import pickle
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError, check_flag
from tpukit.pe.labels import LABELS

# Of ImageNet, red, green and blue in [0, 1], as torchvision's weights expect them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
FILE = "resnet34-b627a593.pth"  # torchvision's ResNet34_Weights.IMAGENET1K_V1
# The last layer, whose size depends on the number of labels.
_HEAD = ("fc.weight", "fc.bias")


def resnet34(weights: str | Path | None = None, *, outputs: int = 10, pool_first: bool = False):
    """Build a ResNet-34 with a logit per label, pretrained on ImageNet if weights are available.

    It never downloads. Without `weights` it uses torchvision's file in torch's cache, if there is
    one. Otherwise the network starts from random weights, and tpukit prints that.

    Args:
        weights: file with the state dict of a ResNet-34. Its last layer is used only if it has
            `outputs` rows.
        outputs: number of logits, one per label in the order of `LABELS`.
        pool_first: in training on XLA the stem pools before its BatchNorm. It is the same function
            with other rounding, and by the estimates of the TPU's compiler a step takes a twelfth
            fewer cycles; see `tpukit.pe.stem`. False: torchvision's order.

    Returns:
        A torch.nn.Module from (N, 3, H, W) float32, as `normalize` returns them, to (N, outputs)
        logits.

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
        (N, 3, H, W) float32, minus ImageNet's mean, divided by its standard deviation.

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
    """Return values of the three channels as (1, 3, 1, 1), a constant of the graph.

    A tensor made on the host would be copied to the device in every step. All channels are one
    array: for 128 images of 128 x 128 on a v5e the compiler counts 77,000 cycles, and 132,000 if
    the channels are separated and stacked again.
    """
    import torch

    numbers = [torch.full((), 255 * value, device=device) for value in values]
    return torch.stack(numbers).view(1, 3, 1, 1)


def augment(**changes):
    """Return the walkthrough's `Augment`, to call on (images, labels) before `normalize`.

    A flip exchanges the labels of the left and the right side. It also moves the heart to the other
    side, which is rare in patients but does no harm here. Sizes vary by a quarter, because scanners
    have different fields of view.

    Args:
        changes: arguments of `Augment` that replace these.

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
    """Copy a state dict from a file into the model, except a last layer of another size."""
    state = _read_state(file)
    given = _shapes(state)
    own = model.state_dict()
    differing = [name for name in own if given.get(name) != own[name].shape]
    wrong = [name for name in differing if name not in _HEAD]
    extra = [name for name in given if name not in own]
    if wrong or extra:
        counts = f"{len(wrong)} missing or of another shape ({', '.join(wrong[:2])})"
        counts += f", {len(extra)} too many ({', '.join(extra[:2])})"
        whole = f"a ResNet-34's state_dict() itself, such as torchvision's {FILE}"
        raise InvalidValueError(
            f"{file} does not hold the state dict of a ResNet-34",
            found=f"{type(state).__name__} of {len(given)} tensors; {counts}",
            fix=f"pass {whole}, not a dict that contains it",
        )
    random_head = {name: own[name] for name in differing}
    model.load_state_dict(state | random_head)


def _shapes(state: object) -> dict[str, tuple]:
    """Return the shape of each tensor of a state dict; empty for any other object."""
    import torch

    if not isinstance(state, dict):
        return {}
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        return {}
    return {name: value.shape for name, value in state.items()}


def _read_state(file: Path):
    """Return the contents of a file of weights; code in it is not run."""
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
