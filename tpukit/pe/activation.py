"""Compute class activation maps, and the share of their mass that is inside the embolus.

The embolus is known only for phantoms.
"""

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.labels import LABELS

# The centre of an entry of a map, as a share of the stride from the entry's edge: the middle of the
# first of 8 pixels, the stride of layer2. A ResNet's strided kernels are odd, and padded by half.
_CENTRE = 1 / 16


def class_activation(model, label: str = LABELS[0], *, layer: str = "layer2"):
    """Return a model that outputs class activation maps (LayerCAM) of one label instead of logits.

    Run the returned model on every core, as you run the network:
    `tpukit.predict(core, pe.class_activation(model), batches, preprocess=pe.normalize)`.

    A map shows the parts of an image that raised the output. These parts need not be what a
    radiologist would point to. The resolution of a map is that of the layer: at 128 pixels, the
    four layers of a ResNet-34 have maps of 32, 16, 8 and 4 entries per side.

    Measured with a network that was trained on phantoms (AUROC of the images 0.997; 38 slices): the
    maximum of the map was at most 15 pixels (of 256) from the embolus in 53 % of the maps of
    layer1, 84 % of layer2, and 21 % of layer3. With Grad-CAM, the shares were 45 % of the maps of
    layer1, 76 % of layer2, 16 % of layer3, and 32 % of layer4. A network that judges by position
    alone has the same map for all images, so compare a map with the mean map; see
    `attention_in_mask`.

    In a ResNet, the centre of entry i of a map is at pixel i times the total stride of the layer.
    `attention_in_mask` and `show_activation` place the entries of layer2 at exactly these pixels.
    Entries of other layers are at most 1.5 pixels off.

    Args:
        model: a network with one output per label of `LABELS`, such as `resnet34()`; call
            `class_activation` in the worker function.
        label: a member of `LABELS`.
        layer: the name of a module of the network whose output is (N, C, h, w).

    Returns:
        A torch.nn.Module. Its input is (N, 3, H, W) float32, as `normalize` returns it; its output
        is (N, h, w) float32 maps, 0 or more.

    Raises:
        ValueError: the label or the layer does not exist.
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
            fix="pass one of these names as layer",
        ) from None
    return LayerCAM(model, module, output)


def occlusion(model, label: str = LABELS[0], *, patches: int = 8):
    """Return a model that outputs, for each patch, how much a logit falls if the patch is hidden.

    Use it to check a few class activation maps by another method. The model replaces one patch
    after the other by the mean grey. If a network judges by position alone, its logit falls little
    when the embolus is hidden. In the result of `attention_in_mask` for the outputs, `in_mask` is
    then close to `mean_map`.

    Args:
        model: as for `class_activation`.
        label: a member of `LABELS`.
        patches: the number of patches per side. The network sees `patches ** 2` copies of each
            image at once, so use small batches.

    Returns:
        A torch.nn.Module. Its input is (N, 3, H, W) float32, as `normalize` returns it; its output
        is (N, H, W) float32, 0 or more, and equal at all pixels of a patch.

    Raises:
        ValueError: the label does not exist.
    """
    from tpukit.pe.layer_cam import Occlusion

    return Occlusion(model, _output_of(label), patches)


def _output_of(label: str) -> int:
    """Return the index of a label among the outputs; ValueError for an unknown label."""
    if label not in LABELS:
        raise InvalidValueError(f"there is no label {label!r}", fix=f"one of {', '.join(LABELS)}")
    return LABELS.index(label)


def attention_in_mask(maps, masks, others=None):
    """Return the share of each map's sum that is inside its mask, and two baselines.

    Compare `in_mask` with the baselines `mask_area` and `mean_map`. `in_mask` equals `mask_area` if
    a map is constant. It is close to `mean_map` if a network judges by position alone.

    Args:
        maps: (N, h, w) array or tensor of numbers, 0 or more. `attention_in_mask` resizes each map
            to the size of the masks by bilinear interpolation.
        masks: (N, H, W) array, true inside the embolus.
        others: (M, h, w), the maps from which the mean map is computed, for example the maps of
            more images. The default is `maps`.

    Returns:
        A DataFrame with one row per image and shares from 0 to 1. `in_mask` is the share of the map
        inside the mask, and `mean_map` that of the mean map. `mask_area` is the share of the image
        that the mask covers. All are nan if the mask is empty; `in_mask` also if the map is 0
        everywhere.

    Raises:
        ValueError: the shapes do not match, or a map has negative values, nan or infinity.
    """
    import numpy as np
    import pandas as pd

    masks = np.asarray(masks).astype(bool)
    large = enlarge(maps, masks.shape)
    mean = enlarge(mean_map(maps if others is None else others)[None], (1, *masks.shape[1:]))
    area = masks.mean((1, 2))
    columns = {"in_mask": _share_inside(large, masks), "mean_map": _share_inside(mean, masks)}
    return pd.DataFrame({**columns, "mask_area": np.where(area > 0, area, np.nan)})


def mean_map(maps):
    """Return the mean, (h, w), of maps, (N, h, w), after each is scaled to a sum of 1."""
    import numpy as np

    array = _as_array(maps)
    mass = array.sum((1, 2), keepdims=True)
    return np.divide(array, mass, out=np.zeros_like(array), where=mass > 0).mean(0)


def _share_inside(large, masks):
    """Return the share of each map's sum inside its mask, (N,); nan if map or mask is all 0."""
    import numpy as np

    mass = np.broadcast_to(large.sum((1, 2)), len(masks))
    unknown = np.full(len(masks), np.nan)
    is_known = (mass > 0) & masks.any((1, 2))
    return np.divide((large * masks).sum((1, 2)), mass, out=unknown, where=is_known)


def enlarge(maps, shape: tuple):
    """Resize maps, (N, h, w), to `shape`, (N, H, W), bilinearly; return float64.

    An entry of a map covers a block of pixels. The receptive field of the entry is centred on the
    first pixel of the block, so the entry is drawn at this pixel. For layer2, the middle of the
    block would be 3.5 pixels too far right and down.

    Raises:
        ValueError: as for `attention_in_mask`.
    """
    import numpy as np
    from PIL import Image

    array = _as_array(maps)
    if array.ndim != 3 or len(shape) != 3 or len(array) != shape[0]:
        given = f"got {array.shape} and {tuple(shape)}"
        raise InvalidValueError(
            f"maps must be (N, h, w) and masks (N, H, W), of the same images, {given}",
            fix="index both with the same numbers: maps[chosen], masks[chosen]",
        )
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise InvalidValueError(
            "a map must have finite values of 0 or more, "
            f"got {array.min():.4g} to {array.max():.4g}",
            fix="pass the outputs of class_activation(model) unchanged",
        )
    _, height, width = shape
    _, rows, columns = array.shape
    shift = 0.5 - _CENTRE
    box = (shift, shift, columns + shift, rows + shift)
    large = []
    # Repeat the last column and row, because the box extends beyond the last centre.
    for values in np.pad(array, ((0, 0), (0, 1), (0, 1)), mode="edge"):
        image = Image.fromarray(values)
        large.append(image.resize((width, height), Image.Resampling.BILINEAR, box=box))
    return np.array(large, np.float64)


def _as_array(maps):
    import numpy as np

    if hasattr(maps, "detach"):
        maps = maps.detach().cpu()
    return np.asarray(maps, np.float32)
