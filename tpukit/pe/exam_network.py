"""Networks for exams: a ResNet that returns the features of slices, and a GRU that reads them.

    images (N, 3, H, W) -> SliceFeatures -> features (N, F) -> ExamSequences -> (B, S, 2F)
    (B, S, 2F) -> ExamNetwork -> answers (B, 9), images (B, S), attention (B, S)

This module imports torch, so `tpukit.pe` imports it only when it is needed.
"""

import torch
from torch import nn

# torch_xla replaces torch.nn.GRU with a class that has one direction only.
from torch.nn.modules.rnn import GRU

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.labels import EXAM_LABELS


class SliceFeatures(nn.Module):
    """A trained ResNet that returns the input of its last layer together with its logits.

    The input is that of the ResNet, (N, 3, H, W) float32. The output is {"features": (N, F),
    "logits": (N, outputs)}, float32; F is 512 for a ResNet-34. The parameters are those of the
    ResNet, not copies.

    Args:
        resnet: a ResNet whose last layer is named `fc`, such as `resnet34()` or torchvision's.
    """

    def __init__(self, resnet: nn.Module):
        super().__init__()
        layers = [layer for name, layer in resnet.named_children() if name != "fc"]
        self.body = nn.Sequential(*layers)
        self.head = resnet.fc

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the features of each image, and its logits."""
        features = self.body(images).flatten(1)
        return {"features": features, "logits": self.head(features)}


class ExamNetwork(nn.Module):
    """A network that predicts the labels of whole exams with a bidirectional GRU along the body.

    It predicts one label per part of an exam, and nine labels of the exam. The nine come from two
    summaries of the exam: the maximum over its parts, and the mean weighted by attention, which the
    network computes per part. The design is a small version of the challenge winner's. XLA
    unrolls the GRU: S parts are S steps of one graph in each direction. Therefore all exams are
    divided into the same, moderate number of parts.

    The input is (B, S, 2F) float32, as from `ExamSequences`: mean and maximum of each part. The
    output is a dict of float32: the logits "answers", (B, answers), by default in the order of
    `EXAM_LABELS`; the logits "images", (B, S); and "attention", (B, S), whose sum over an exam is
    1.

    Args:
        features: F, the number of features per slice.
        hidden: the width of the GRU in each direction.
        dropout: the dropout rate in training, before and after the GRU.
        answers: the number of labels per exam.
    """

    def __init__(
        self,
        features: int,
        hidden: int = 64,
        dropout: float = 0.3,
        *,
        answers: int = len(EXAM_LABELS),
    ):
        super().__init__()
        pooled = 2 * features  # the mean and the maximum of each feature over a part
        layers = [
            nn.LayerNorm(pooled),
            nn.Dropout(dropout),
            nn.Linear(pooled, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
        ]
        self.enter = nn.Sequential(*layers)
        self.gru = GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.leave = nn.Dropout(dropout)
        self.image = nn.Linear(2 * hidden, 1)
        self.attend = nn.Linear(2 * hidden, 1)
        self.exam = nn.Linear(4 * hidden, answers)
        self.register_load_state_dict_pre_hook(_check_weights)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits of exams, the logits of the exams' parts, and the attention."""
        along, _ = self.gru(self.enter(features))
        along = self.leave(along)
        attention = self.attend(along).squeeze(2).softmax(1)
        attended = (attention.unsqueeze(2) * along).sum(1)
        answers = self.exam(torch.cat([attended, along.amax(1)], dim=1))
        images = self.image(along).squeeze(2)
        return {"answers": answers, "images": images, "attention": attention}


def _check_weights(network: ExamNetwork, weights: dict, prefix: str, *_) -> None:
    """Raise ValueError for weights of a network with another number of features per part.

    It is a hook that `load_state_dict` calls first, because torch's own error would not say why the
    sizes differ.
    """
    given = weights.get(f"{prefix}enter.0.weight")
    own = network.enter[0].weight
    if given is None or given.shape == own.shape:
        return
    half = len(own) // 2
    fix = "train the ExamNetwork again, with another folder for checkpoints"
    raise InvalidValueError(
        f"the weights are of an ExamNetwork with {len(given)} inputs per part, but this network "
        f"has {len(own)}",
        found=f"this one uses mean and maximum of {half} features; earlier versions used the mean",
        fix=f"{fix}; or pass the `features` of the trained network: pe.ExamNetwork(features)",
    )
