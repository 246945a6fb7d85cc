"""Class activation maps and occlusion: the places of an image that raise an output of a network.

This is LayerCAM (Jiang et al., IEEE Transactions on Image Processing 2021, doi
10.1109/TIP.2021.3089943). Each place of a layer's output is multiplied by its own gradient if that
is positive, and the products are summed over the channels:

    outputs (C, h, w)   2.0   1.0      gradients   0.5   -1.0      map   1.0   0.0

Grad-CAM averages the gradient over all places first. In early layers, whose features are small,
little of the map remains then. The packages grad-cam and captum are not used because neither
Colab's nor Kaggle's TPU image has them, and a worker must be able to run this module.

Occlusion (Zeiler and Fergus, ECCV 2014) needs no gradient: it hides a part of the image, and looks
how much the output falls.

The module imports torch; `class_activation` and `occlusion` import it.
"""

import torch


class LayerCAM(torch.nn.Module):
    """A network that returns the activation map of one of its outputs, in place of the outputs.

    Args:
        network: from (N, 3, H, W) to (N, L) logits.
        layer: a module of the network, with the output (N, C, h, w).
        output: index of the output, 0 to L - 1.
    """

    def __init__(self, network: torch.nn.Module, layer: torch.nn.Module, output: int):
        super().__init__()
        self.network = network
        self.output = output
        # In a list, because a module would be registered, and so averaged and moved, twice.
        self._layer = [layer]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the (N, h, w) float32 maps of (N, 3, H, W) images, 0 or more.

        Gradients are computed even if the caller has switched them off.
        """
        outputs = []

        def keep(module, inputs, output):
            outputs.append(output.detach().requires_grad_())
            return outputs[-1]

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
    """A network that returns, for each part of an image, the fall of an output without that part.

    Args:
        network: from (N, 3, H, W) to (N, L) logits.
        output: index of the output, 0 to L - 1.
        patches: the number of patches per side.
    """

    def __init__(self, network: torch.nn.Module, output: int, patches: int):
        super().__init__()
        self.network = network
        self.output = output
        self.patches = patches

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N, H, W) float32, the fall of the logit, 0 or more, at all pixels of a patch."""
        height, width = images.shape[2:]
        row = torch.arange(height, device=images.device) * self.patches // height
        column = torch.arange(width, device=images.device) * self.patches // width
        patch_of = row[:, None] * self.patches + column
        patches = torch.arange(self.patches**2, device=images.device)
        is_shown = patch_of != patches[:, None, None]
        # Hidden pixels are 0, which is the mean grey of normalised images.
        occluded = images[:, None] * is_shown[:, None]
        logits = self.network(occluded.flatten(0, 1))[:, self.output].view(len(images), -1)
        fall = self.network(images)[:, self.output, None] - logits
        return fall.clamp(min=0).float()[:, patch_of.flatten()].view(-1, height, width)
