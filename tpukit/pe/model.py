"""The network of the walkthrough: a ResNet with one output per label, its normalisation and its augmentation."""

import pickle
from pathlib import Path

from tpukit.essentials.show import NoSuchFile, WrongValue
from tpukit.pe.labels import LABELS

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, red, green and blue in [0, 1], as torchvision's weights expect them
STD = (0.229, 0.224, 0.225)
FILE = "resnet34-b627a593.pth"  # torchvision's ResNet34_Weights.IMAGENET1K_V1


def resnet34(weights: str | Path | None = None, *, outputs: int = 10):
    """Build a ResNet-34 with one logit per label, pretrained on ImageNet if the weights are available.

    In training on XLA its stem pools before it normalises: the same function at less cost, see `tpukit.pe.stem`.

    Never downloads. Without `weights` it uses torchvision's file in torch's cache, if there is one; otherwise the
    network starts from random weights, and one printed line says so.

    Args:
        weights: a file with a ResNet-34's state dict; its last layer is used only if it has `outputs` rows.
        outputs: the number of logits, one per label in the order of `LABELS`.

    Returns:
        A torch.nn.Module from (N, 3, H, W) float32, as `normalize` returns them, to (N, outputs) logits.

    Raises:
        FileNotFoundError: the file `weights` does not exist.
        ValueError: the file does not hold a ResNet-34's state dict.
    """
    import torch
    from torchvision.models.resnet import BasicBlock

    from tpukit.pe.stem import PoolingFirst

    model = PoolingFirst(BasicBlock, [3, 4, 6, 3])  # the layers of torchvision's resnet34
    model.fc = torch.nn.Linear(model.fc.in_features, outputs)
    cached = Path(torch.hub.get_dir()) / "checkpoints" / FILE
    if weights is None and not cached.is_file():
        print(
            f"resnet34 starts from random weights: no ImageNet weights at {cached}; "
            f"put torchvision's {FILE} there, or pass its path as resnet34(weights=...)"
        )
        return model
    file = cached if weights is None else Path(weights)
    if not file.is_file():
        raise NoSuchFile(f"there is no file of weights at {file}", fix=f"pass the path of {FILE}, or leave weights out")
    _load(model, file)
    return model


def normalize(images):
    """Normalise uint8 images for a network trained on ImageNet, on the device they are on.

    Call it inside the step, so that the images travel to the device as uint8: a quarter of the bytes of float32.

    Args:
        images: (N, 3, H, W) uint8 in [0, 255].

    Returns:
        (N, 3, H, W) float32, minus ImageNet's mean and divided by its standard deviation.

    Raises:
        ValueError: the images are not (N, 3, H, W) uint8.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise WrongValue(
            f"normalize takes (N, 3, H, W) uint8, got {tuple(images.shape)} {images.dtype}",
            fix="pass the batch as core.batches yields it, neither scaled nor permuted",
        )

    # Constants of the graph: a tensor made on the host would be copied to the device in every step. One array for all
    # three channels: taken apart and stacked again, the compiler counts 132,000 cycles for 128 images of 128 x 128 on a
    # v5e, and so 77,000.
    def of_channels(values: tuple):
        numbers = [torch.full((), 255 * value, device=images.device) for value in values]
        return torch.stack(numbers).view(1, 3, 1, 1)

    return (images.float() - of_channels(MEAN)) / of_channels(STD)


def augment(**changes):
    """Return the walkthrough's `Augment`; call it on (images, labels) of a batch, on the device, before `normalize`.

    A flip exchanges the labels of the left and the right side. The heart is then on the other side as well, which is
    rare in patients but does no harm here. Sizes vary by a quarter, since scanners differ as much in their field of
    view. `changes` override the arguments of `Augment`.
    """
    from tpukit.train import Augment

    sides = {"flip": 0.5, "swap": (("leftsided_pe", "rightsided_pe"),), "names": LABELS}
    return Augment(**{"scale": 0.25, **sides, **changes})


def _load(model, file: Path) -> None:
    """Copy a state dict from a file into the model; a last layer of another size is ignored."""
    import torch

    try:
        # weights_only: a pickle from elsewhere may contain code, which this does not run.
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise WrongValue(
            f"{file} cannot be read as weights",
            found=f"{reason} ({file.stat().st_size} bytes)",
            fix=f"pass a file saved with torch.save(model.state_dict(), file), such as torchvision's {FILE}",
        ) from error
    own = model.state_dict()
    tensors = isinstance(state, dict) and all(isinstance(value, torch.Tensor) for value in state.values())
    given = {name: value.shape for name, value in state.items()} if tensors else {}
    head = {name: own[name] for name in ("fc.weight", "fc.bias") if given.get(name) != own[name].shape}
    wrong = [name for name in own if name not in head and given.get(name) != own[name].shape]
    more = [name for name in given if name not in own]
    if wrong or more:
        counts = f"{len(wrong)} missing or of another shape ({', '.join(wrong[:2])})"
        counts += f", {len(more)} too many ({', '.join(more[:2])})"
        raise WrongValue(
            f"{file} does not hold the state dict of a ResNet-34",
            found=f"{type(state).__name__} of {len(given)} tensors; {counts}",
            fix=f"pass a ResNet-34's state_dict() itself, such as torchvision's {FILE}; without anything around it",
        )
    model.load_state_dict(state | head)
