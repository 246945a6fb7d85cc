"""Networks for exams: a ResNet that also returns its features, and a GRU that reads them in order.

    images (N, 3, H, W) -> SliceFeatures -> features (N, F) -> ExamSequences -> (B, S, 2F)
    (B, S, 2F) -> ExamNetwork -> answers (B, 9), images (B, S), attention (B, S)

The module imports torch.
"""

import torch
from torch import nn

# torch_xla replaces torch.nn.GRU with a class that has one direction only.
from torch.nn.modules.rnn import GRU

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.labels import EXAM_LABELS


class SliceFeatures(nn.Module):
    """A trained ResNet that returns the input of its last layer together with its logits.

    Takes the input of the ResNet. Returns {"features": (N, F), "logits": (N, outputs)}; F is 512
    for a ResNet-34. The parameters are shared with the ResNet.

    Args:
        resnet: a ResNet of torchvision or `resnet34`, with its last layer in `fc`.
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
    """Answer for whole exams with a bidirectional GRU along the body.

    Each slice gets an answer, and the exam gets nine. The nine answers come from two summaries of
    the exam: the maximum over its slices, and their mean weighted by attention, which the network
    computes per slice. The design is a small version of the published first place. XLA unrolls the
    GRU: S parts are S steps of one graph in each direction. Therefore all exams are divided into
    the same, moderate number of parts.

    Takes (B, S, 2F) float32, as `ExamSequences` returns them: mean and maximum of each part.
    Returns logits, "answers" (B, answers), by default in the order of `EXAM_LABELS`, and "images"
    (B, S), and "attention" (B, S), which adds up to 1 over an exam.

    Args:
        features: F, the number of features per slice.
        hidden: width of the GRU in each direction.
        dropout: share of the numbers that are dropped in training, before and after the GRU.
        answers: number of labels per exam.
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
        pooled = 2 * features
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
        """Return the logits of the exams and of their slices, and the attention."""
        along, _ = self.gru(self.enter(features))
        along = self.leave(along)
        attention = self.attend(along).squeeze(2).softmax(1)
        attended = (attention.unsqueeze(2) * along).sum(1)
        answers = self.exam(torch.cat([attended, along.amax(1)], dim=1))
        images = self.image(along).squeeze(2)
        return {"answers": answers, "images": images, "attention": attention}


def _check_weights(network: ExamNetwork, weights: dict, prefix: str, *_) -> None:
    """Raise for the weights of a network with another number of features per part."""
    given = weights.get(f"{prefix}enter.0.weight")
    own = network.enter[0].weight
    if given is None or given.shape == own.shape:
        return
    half = len(own) // 2
    fix = "train the network of exams again, in another folder"
    raise InvalidValueError(
        f"these weights belong to an ExamNetwork with {len(given)} features per part, but this "
        f"one has {len(own)}",
        found=f"mean and maximum of {half}; networks of earlier versions used the mean alone",
        fix=f"{fix}; or pe.ExamNetwork(features) with the features that it was trained with",
    )
