"""Class activation maps: where in an image a network found what it says. Loads torch; `class_activation` imports it.

LayerCAM (Jiang et al., IEEE Transactions on Image Processing 2021, doi 10.1109/TIP.2021.3089943): each place of a
layer's output, times its own gradient where that is positive, summed over the channels. Grad-CAM averages the gradient
over all places first, which leaves little of it in the earlier layers that see small things. Own lines and neither the
package grad-cam nor captum: those are in neither Colab's nor Kaggle's TPU image, and a worker has to run it.
"""

import torch


class LayerCAM(torch.nn.Module):
    """A network that returns the activation map of one of its outputs, in place of the outputs.

    Args:
        network: from (N, 3, H, W) to (N, L) logits.
        layer: one of its modules, whose output is (N, C, h, w).
        output: which of the L.
    """

    def __init__(self, network: torch.nn.Module, layer: torch.nn.Module, output: int):
        super().__init__()
        self.network, self.output = network, output
        self._layer = [layer]  # in a list: as a module it would be registered, and averaged and moved, twice

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the (N, h, w) float32 maps of (N, 3, H, W) images, 0 or more, also where gradients are off."""
        seen = []

        def keep(module, inputs, output):
            seen.append(output.detach().requires_grad_())
            return seen[-1]

        hook = self._layer[0].register_forward_hook(keep)
        try:
            with torch.enable_grad():
                logits = self.network(images)
                (gradient,) = torch.autograd.grad(logits[:, self.output].sum(), seen[-1])
        finally:
            hook.remove()
        return (seen[-1].detach() * gradient.clamp(min=0)).sum(1).clamp(min=0).float()
