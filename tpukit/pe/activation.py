"""The places of an image that a network used, and the share of them inside the embolus.

The embolus is known for phantoms only.
"""

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.labels import LABELS

# Of a place, from its edge to its centre: the middle of the first of 8 pixels, which are the stride
# of layer2.
_CENTRE = 1 / 16


def class_activation(model, label: str = LABELS[0], *, layer: str = "layer2"):
    """Return a model that outputs class activation maps for one label, in place of logits.

    `tpukit.predict` runs it as it runs the network, on every core:
    `tpukit.predict(core, pe.class_activation(model), batches, preprocess=pe.normalize)`.

    A map shows the places that raised the output, which need not be the reason that a radiologist
    would give. Its resolution is that of the layer: at 128 pixels the four layers of a ResNet-34
    have 32, 16, 8 and 4 places per side. Measured with a network that was trained on phantoms
    (AUROC of the images 0.997; 38 slices): in 84 % of the maps of layer2 the highest place was
    within 15 of 256 pixels of the embolus, in 53 % for layer1, and in 21 % for layer3. With
    Grad-CAM it was 76 %, 45 % and 16 %, and 32 % for layer4. A network that judges by position
    alone has the same map for all images, so compare a map with the mean map; see
    `attention_in_mask`.

    In a network such as a ResNet, whose strided layers have odd kernels with padding of half their
    size, place i of a map is at pixel i times the stride. The functions that compare maps with
    images use that.

    Args:
        model: a network with `LABELS` as outputs, such as `resnet34()`, in the worker.
        label: a member of `LABELS`.
        layer: name of a module of the network.

    Returns:
        A torch.nn.Module from (N, 3, H, W), as `normalize` returns them, to (N, h, w) float32 maps,
        0 or more.

    Raises:
        ValueError: there is no such label, or no such layer.
    """
    from tpukit.pe.layer_cam import LayerCAM

    output = _output_of(label)
    try:
        module = model.get_submodule(layer)
    except AttributeError:
        layers = ", ".join(name for name, _ in model.named_children())
        raise InvalidValueError(
            f"the network has no layer {layer!r}",
            found=layers,
            fix="one of these",
        ) from None
    return LayerCAM(model, module, output)


def occlusion(model, label: str = LABELS[0], *, patches: int = 8):
    """Return a model that outputs the fall of a logit when a patch is hidden, in place of logits.

    It checks a few class activation maps by another method. Patch after patch is replaced by the
    mean grey. A network that judges by position loses little wherever the embolus is hidden: then
    the share inside the embolus is that of the mean map, see `attention_in_mask`.

    Args:
        model: as for `class_activation`.
        label: a member of `LABELS`.
        patches: patches per side. An image takes `patches ** 2` passes of the network at once, so
            the batches should be small.

    Returns:
        A torch.nn.Module from (N, 3, H, W), as `normalize` returns them, to (N, H, W) float32, 0 or
        more, the same at all pixels of a patch.

    Raises:
        ValueError: there is no such label.
    """
    from tpukit.pe.layer_cam import Occlusion

    return Occlusion(model, _output_of(label), patches)


def _output_of(label: str) -> int:
    """Return the number of a label's output."""
    if label not in LABELS:
        raise InvalidValueError(f"there is no label {label!r}", fix=f"one of {', '.join(LABELS)}")
    return LABELS.index(label)


def attention_in_mask(maps, masks, others=None):
    """Return the share of each map's mass inside its mask, and two baselines.

    A map that is the same everywhere has a share inside that equals the area of the mask. A network
    that judges by position alone reaches the share of the mean map. Therefore compare `in_mask`
    with both.

    Args:
        maps: (N, h, w), 0 or more, tensor or array; enlarged to the masks' size, bilinearly.
        masks: (N, H, W), true inside.
        others: (M, h, w) maps of all images, for the mean map; None for `maps`.

    Returns:
        A DataFrame with a row per image, `in_mask`, `mean_map` and `mask_area`, 0 to 1. A value is
        nan if the mask is empty, or if the map is 0 everywhere.

    Raises:
        ValueError: the shapes do not match, or a map has negative values, nan or infinity.
    """
    import numpy as np
    import pandas as pd

    masks = np.asarray(masks).astype(bool)
    large = enlarge(maps, masks.shape)
    # A network that answers by position alone has this map for every image.
    mean = enlarge(mean_map(maps if others is None else others)[None], (1, *masks.shape[1:]))
    area = masks.mean((1, 2))
    columns = {"in_mask": _share_inside(large, masks), "mean_map": _share_inside(mean, masks)}
    return pd.DataFrame({**columns, "mask_area": np.where(area > 0, area, np.nan)})


def mean_map(maps):
    """Return the (h, w) mean of (N, h, w) maps, after each is scaled to the sum 1."""
    import numpy as np

    array = _as_array(maps)
    mass = array.sum((1, 2), keepdims=True)
    return np.divide(array, mass, out=np.zeros_like(array), where=mass > 0).mean(0)


def _share_inside(large, masks):
    """Return (N,) the share of each map's mass inside its mask; nan if there is none."""
    import numpy as np

    mass = np.broadcast_to(large.sum((1, 2)), len(masks))
    unknown = np.full(len(masks), np.nan)
    is_known = (mass > 0) & masks.any((1, 2))
    return np.divide((large * masks).sum((1, 2)), mass, out=unknown, where=is_known)


def enlarge(maps, shape: tuple):
    """Return (N, h, w) maps as (N, H, W) float64, bilinearly; raises as `attention_in_mask`.

    A place of a map belongs to the centre of its receptive field. That is the first of the pixels
    that it covers and not their middle, which at 128 pixels would be 3.5 pixels too far to the
    right.
    """
    import numpy as np
    from PIL import Image

    array = _as_array(maps)
    if array.ndim != 3 or len(shape) != 3 or len(array) != shape[0]:
        given = f"got {array.shape} and {tuple(shape)}"
        raise InvalidValueError(
            f"maps are (N, h, w) and masks (N, H, W), of the same images, {given}",
            fix="index both with the same numbers: maps[chosen], masks[chosen]",
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValueError(
            f"a map has finite values of 0 or more, got {array.min():.4g} to {array.max():.4g}",
            fix="the outputs of class_activation(model), as they are",
        )
    _, height, width = shape
    _, rows, columns = array.shape
    shift = 0.5 - _CENTRE
    box = (shift, shift, columns + shift, rows + shift)
    large = []
    # The last column and row again: the box reaches beyond the last centre.
    for values in np.pad(array, ((0, 0), (0, 1), (0, 1)), mode="edge"):
        image = Image.fromarray(values)
        large.append(image.resize((width, height), Image.Resampling.BILINEAR, box=box))
    return np.array(large, np.float64)


def _as_array(maps):
    import numpy as np

    if hasattr(maps, "detach"):
        maps = maps.detach().cpu()
    return np.asarray(maps, np.float32)
