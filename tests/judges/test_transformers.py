"""Three steps of `fit` on XLA equal three steps on the CPU, for ten architectures of transformers.

The networks are tiny and have random weights, so nothing is downloaded. Dropout is off because the
random numbers of XLA and the CPU differ.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from helpers.launching import quietly
from torch import nn

from tpukit import fit

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.judges, pytest.mark.xla]

STEPS = 3
BATCH = 2
TOKENS = 8
WORDS = 32
CLASSES = 3
SIDE = 32  # of images

TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 2 * TOKENS,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CAUSAL = {**TEXT, "num_key_value_heads": 1, "attention_dropout": 0.0}
IMAGES = {**TEXT, "image_size": SIDE, "patch_size": 8}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": TOKENS,
    "vocab_size": WORDS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": WORDS,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
DISTILBERT = {
    "dim": 16,
    "hidden_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": TOKENS,
    "num_labels": CLASSES,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": CLASSES}
SWIN = {
    "image_size": SIDE,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "num_labels": CLASSES,
    "drop_path_rate": 0.0,
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
    "num_labels": CLASSES,
    "classifier_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True)
class Architecture:
    """The names of a model and of its configuration in transformers, and its small sizes."""

    model: str
    config: str
    sizes: dict


ARCHITECTURES = (
    Architecture("BertForSequenceClassification", "BertConfig", TEXT),
    Architecture("DistilBertForSequenceClassification", "DistilBertConfig", DISTILBERT),
    Architecture("RobertaForTokenClassification", "RobertaConfig", TEXT),
    Architecture("GPT2LMHeadModel", "GPT2Config", GPT2),
    Architecture("LlamaForCausalLM", "LlamaConfig", CAUSAL),
    Architecture("T5ForConditionalGeneration", "T5Config", T5),
    Architecture("ViTForImageClassification", "ViTConfig", IMAGES),
    Architecture("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT),
    Architecture("SwinForImageClassification", "SwinConfig", SWIN),
    Architecture("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER),
)


# torch_xla computes the gradient of bilinear upsampling on the host, except on a TPU: 3 in a step.
SPLITS = {"SegformerForSemanticSegmentation": 3}


class Samples:
    """A dataset of random inputs and labels for a model, as Hugging Face's datasets give them."""

    def __init__(self, model: str):
        self.model = model

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (TOKENS,), generator=random)
        label = torch.randint(CLASSES, (), generator=random)
        if "Image" in self.model:
            return {"pixel_values": torch.randn(3, SIDE, SIDE, generator=random), "labels": label}
        if "Segmentation" in self.model:
            masks = torch.randint(CLASSES, (SIDE, SIDE), generator=random)
            return {"pixel_values": torch.randn(3, SIDE, SIDE, generator=random), "labels": masks}
        if "Token" in self.model:
            return {"input_ids": words, "labels": words % CLASSES}
        if "Sequence" in self.model:
            return {"input_ids": words, "labels": label}
        return {"input_ids": words, "labels": words}


def network(architecture: Architecture) -> nn.Module:
    torch.manual_seed(1)
    config = getattr(transformers, architecture.config)(**architecture.sizes)
    return getattr(transformers, architecture.model)(config)


def graphs_so_far(core) -> int:
    if core.device.type != "xla":
        return 0
    import torch_xla.debug.metrics as metrics

    count, *_ = metrics.metric_data("CompileTime") or (0,)
    return count


@dataclass(frozen=True)
class Trained:
    """The weights and the loss after three steps, and the graphs that they needed."""

    weights: dict[str, torch.Tensor]
    loss: float
    graphs: int


def train(core, architecture: Architecture) -> Trained:
    model = core.model(network(architecture))
    # Adam would turn the rounding error of a gradient that is zero into a step of full size.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = core.batches(Samples(architecture.model), batch_size=BATCH, drop_last=True)
    core.sync()
    graphs = []

    def note_graphs(inputs):
        """Note the graphs before each step; those before the first copy the weights."""
        graphs.append(graphs_so_far(core))
        return inputs

    loss = lambda outputs, labels: outputs["loss"]  # noqa: E731
    history = fit(core, model, optimizer, loss, batches, preprocess=note_graphs)
    graphs.append(graphs_so_far(core))
    state = core.to_host(model.state_dict())
    return Trained(state, history.epochs[-1]["train_loss"], graphs[-1] - graphs[0])


def train_all(core) -> dict[str, Trained | Exception]:
    """Train every architecture in one launch, because a start of torch_xla takes seconds."""
    found = {}
    for architecture in ARCHITECTURES:
        try:
            found[architecture.model] = train(core, architecture)
        except Exception as error:
            found[architecture.model] = error
    return found


@pytest.fixture(scope="module")
def on_xla():
    return quietly(train_all, cores=1, backend="xla:cpu").results[0]


@pytest.fixture(scope="module")
def on_cpu():
    return quietly(train_all, cores=1, backend="cpu").results[0]


@pytest.mark.parametrize("name", [architecture.model for architecture in ARCHITECTURES])
def test_three_steps_on_xla_are_those_on_the_cpu(name, on_xla, on_cpu):
    for found in (on_cpu[name], on_xla[name]):
        if isinstance(found, Exception):
            raise found
    assert math.isfinite(on_cpu[name].loss)
    assert on_xla[name].loss == pytest.approx(on_cpu[name].loss, abs=1e-4)
    torch.testing.assert_close(on_xla[name].weights, on_cpu[name].weights, rtol=0, atol=1e-4)
    # The first step creates the state of the optimizer, so its graph differs from the others'.
    assert on_xla[name].graphs <= 2 + SPLITS.get(name, 0)
