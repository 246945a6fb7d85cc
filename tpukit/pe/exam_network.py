"""A ResNet that also says what it saw, and the network that reads it along the body; importing this loads torch."""

import torch
from torch import nn
from torch.nn.modules.rnn import GRU  # torch_xla puts another one into torch.nn, which knows one direction only

from tpukit.essentials.show import WrongValue
from tpukit.pe.labels import EXAM_LABELS


class SliceFeatures(nn.Module):
    """A trained ResNet that returns what its last layer gets beside what it says.

    Takes what the ResNet takes. Returns {"features": (N, 512) for a ResNet-34, "logits": (N, outputs)}; the parameters
    are the ResNet's own.

    Args:
        resnet: of torchvision or `resnet34`, with its last layer in `fc`.
    """

    def __init__(self, resnet: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*(layer for name, layer in resnet.named_children() if name != "fc"))
        self.head = resnet.fc

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the features of each image, and its logits."""
        features = self.body(images).flatten(1)
        return {"features": features, "logits": self.head(features)}


class ExamNetwork(nn.Module):
    """Answer for whole exams: a bidirectional GRU along the body, an answer for each slice, nine for the exam.

    The nine come from two summaries of the exam: the maximum over its slices, and a mean weighted by attention, which
    the network decides slice by slice. The design is that of the published first place, in small. XLA unrolls the GRU,
    so S parts are S steps of one graph in each direction: that is why exams are divided into one, moderate number.

    Takes (B, S, 2F) float32, as `ExamSequences` gives them: mean and maximum of each part. Returns logits, "answers"
    (B, 9) in the order of `EXAM_LABELS` and "images" (B, S), and "attention" (B, S), which adds up to 1 over an exam.

    Args:
        features: F, of a slice.
        hidden: width of the GRU in each direction.
        dropout: share of the numbers that are left out in training, before and after the GRU.
    """

    def __init__(self, features: int, hidden: int = 64, dropout: float = 0.3):
        super().__init__()
        pooled = 2 * features
        self.enter = nn.Sequential(
            nn.LayerNorm(pooled), nn.Dropout(dropout), nn.Linear(pooled, hidden), nn.ReLU(), nn.Dropout(dropout)
        )
        self.gru = GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.leave = nn.Dropout(dropout)
        self.image, self.attend = nn.Linear(2 * hidden, 1), nn.Linear(2 * hidden, 1)
        self.exam = nn.Linear(4 * hidden, len(EXAM_LABELS))
        self.register_load_state_dict_pre_hook(_check_weights)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits of the exams and of their slices, and the attention."""
        along, _ = self.gru(self.enter(features))
        along = self.leave(along)
        attention = self.attend(along).squeeze(2).softmax(1)
        attended = (attention.unsqueeze(2) * along).sum(1)
        answers = self.exam(torch.cat([attended, along.amax(1)], dim=1))
        return {"answers": answers, "images": self.image(along).squeeze(2), "attention": attention}


def _check_weights(network: ExamNetwork, weights: dict, prefix: str, *_) -> None:
    """Raise WrongValue for the weights of a network that was made for other features."""
    given, own = weights.get(f"{prefix}enter.0.weight"), network.enter[0].weight
    if given is not None and given.shape != own.shape:
        raise WrongValue(
            f"these weights are of an ExamNetwork that read {len(given)} features of each part, and this one reads "
            f"{len(own)}",
            found=f"mean and maximum of {len(own) // 2}; a network from before both were read has half as many",
            fix="train the network of exams again, in another folder; or pe.ExamNetwork(features) as it was trained",
        )
