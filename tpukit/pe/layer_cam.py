"""Class activation maps and occlusion: find the parts of an image that raise a network's output.

LayerCAM is by Jiang et al., IEEE Transactions on Image Processing 2021, doi
10.1109/TIP.2021.3089943. Each entry of a layer's output is multiplied by its own gradient, or by 0
if the gradient is negative. The map is the sum of these products over the channels, or 0 if that is
negative:

    outputs (C, h, w)   2.0   1.0      gradients   0.5   -1.0      map   1.0   0.0

Grad-CAM averages the gradient over all positions first. In early layers, whose features are small,
this leaves little of the map. The packages grad-cam and captum are not used, because neither
Colab's nor Kaggle's TPU image has them, and a worker must be able to run this module.

Occlusion (Zeiler and Fergus, ECCV 2014) needs no gradient: it hides one part of the image after the
other, and measures how much the output falls.

This module imports torch; `class_activation` and `occlusion` import it when they are called.
"""

import torch


class LayerCAM(torch.nn.Module):
    """A network that returns the class activation map of one output instead of the logits.

    Args:
        network: a network with the input (N, 3, H, W) and the output (N, L) logits.
        layer: a module of the network with the output (N, C, h, w).
        output: the index of the output, 0 to L - 1.
    """

    def __init__(self, network: torch.nn.Module, layer: torch.nn.Module, output: int):
        super().__init__()
        self.network = network
        self.output = output
        # In a list: as an attribute, the layer would be registered a second time as a submodule.
        self._layer = [layer]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return one map per image, (N, h, w) float32, with values of 0 or more.

        Gradients are computed even under `torch.no_grad()`.
        """
        outputs = []

        # Make the layer's output a leaf, so that only the layers after it are differentiated.
        def keep(module, inputs, output):
            outputs.append(output.detach().requires_grad_())
            return outputs[-1].clone()  # the next layer may overwrite its input

        hook = self._layer[0].register_forward_hook(keep)
        try:
            with torch.enable_grad():
                logits = self.network(images)
                total = logits[:, self.output].sum()
                (gradient,) = torch.autograd.grad(total, outputs[-1])
        finally:
            hook.remove()
        products = outputs[-1].detach() * gradient.clamp(min=0)
        return products.sum(1).clamp(min=0).float()


class Occlusion(torch.nn.Module):
    """A network that returns how much an output falls if a part of the image is hidden.

    Args:
        network: a network with the input (N, 3, H, W) and the output (N, L) logits.
        output: the index of the output, 0 to L - 1.
        patches: the number of patches per side.
    """

    def __init__(self, network: torch.nn.Module, output: int, patches: int):
        super().__init__()
        self.network = network
        self.output = output
        self.patches = patches

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return for each pixel how much the logit falls without its patch, (N, H, W) float32."""
        height, width = images.shape[2:]
        row = torch.arange(height, device=images.device) * self.patches // height
        column = torch.arange(width, device=images.device) * self.patches // width
        patch_of = row[:, None] * self.patches + column  # (H, W), the number of each pixel's patch
        patches = torch.arange(self.patches**2, device=images.device)
        is_shown = patch_of != patches[:, None, None]
        # Hidden pixels are 0, which is the mean grey of normalised images.
        occluded = images[:, None] * is_shown[:, None]
        logits = self.network(occluded.flatten(0, 1))[:, self.output].view(len(images), -1)
        fall = self.network(images)[:, self.output, None] - logits
        return fall.clamp(min=0).float()[:, patch_of.flatten()].view(-1, height, width)
