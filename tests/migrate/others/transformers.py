"""A few weights in place of each model of transformers, a number in place of each word; as it was in 2020.

Models give tuples, as version 3 did: what that means today is a note of the migration ("pooled").
"""

import os

import torch

VOCABULARY, SPECIAL = 64, 4


class Config:
    """What a model is made by."""

    def __init__(self, name="base"):
        self.hidden_size = 1024 if "large" in str(name) else 768
        self.output_hidden_states = False

    from_pretrained = classmethod(lambda cls, name, **_: cls(name))

    def save_pretrained(self, folder):
        """Write it into a folder."""
        os.makedirs(folder, exist_ok=True)
        torch.save(vars(self), os.path.join(folder, "config.pt"))


class Pooler(torch.nn.Module):
    """What the first place of a text becomes."""

    def __init__(self, width):
        super().__init__()
        self.dense = torch.nn.Linear(width, width)

    def forward(self, hidden):
        """Return (N, C) of (N, T, C)."""
        return torch.tanh(self.dense(hidden[:, 0]))


class Model(torch.nn.Module):
    """An embedding and a pooler."""

    def __init__(self, config=None, output_hidden_states=False):
        super().__init__()
        self.config = config or Config()
        self.config.output_hidden_states |= output_hidden_states
        self.embeddings = torch.nn.Embedding(VOCABULARY, self.config.hidden_size)
        self.LayerNorm = torch.nn.LayerNorm(self.config.hidden_size)
        self.pooler = Pooler(self.config.hidden_size)

    @classmethod
    def from_pretrained(cls, name, config=None, output_hidden_states=False, **_):
        """Make one, of the width that the name says."""
        return cls(config or Config(name), output_hidden_states)

    def forward(self, input_ids, attention_mask=None, **_):
        """Return the hidden states (N, T, C), the pooled (N, C), and if asked for those of all layers."""
        hidden = self.LayerNorm(self.embeddings(input_ids))
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        layers = tuple(hidden * scale for scale in range(1, 8)) if self.config.output_hidden_states else None
        return (hidden, self.pooler(hidden), layers) if layers else (hidden, self.pooler(hidden))


class BertPreTrainedModel(torch.nn.Module):
    """What a model of one's own derives from."""

    def __init__(self, config):
        super().__init__()
        self.config = config


class Encoded(dict):
    """The numbers of some texts."""

    def to(self, device):
        """Move them."""
        return Encoded({name: value.to(device) for name, value in self.items()})


class Tokenizer:
    """Counts letters."""

    from_pretrained = classmethod(lambda cls, *_, **__: cls())

    def save_pretrained(self, folder):
        """Write it into a folder."""
        os.makedirs(folder, exist_ok=True)

    def encode_plus(self, text, pair=None, max_length=None, pad_to_max_length=False, **_):
        """Return the numbers of one text, or of a pair, as lists."""
        words = [(word, 0) for word in str(text).split()] + [(word, 1) for word in str(pair or "").split()]
        words = words[: (max_length or 512) - 2]
        places, at = [(0, 0)], {0: 0, 1: 0}
        for word, of in words:
            at[of] = str((text, pair)[of]).index(word, at[of]) + len(word)
            places.append((at[of] - len(word), at[of]))
        ids = [0, *(SPECIAL + sum(map(ord, word)) % (VOCABULARY - SPECIAL) for word, _ in words), 2]
        padding = (max_length - len(ids)) * pad_to_max_length if max_length else 0
        return Encoded(
            input_ids=ids + [1] * padding,
            attention_mask=[1] * len(ids) + [0] * padding,
            token_type_ids=[0, *(of for _, of in words), 0] + [0] * padding,
            offset_mapping=places + [(0, 0)] * (padding + 1),
        )

    def __call__(self, texts, max_length=16, **_):
        found = [self.encode_plus(text, max_length=max_length, pad_to_max_length=True) for text in texts]
        names = ("input_ids", "attention_mask")
        return Encoded({name: torch.tensor([one[name] for one in found]) for name in names})

    def decode(self, ids, **_):
        """Return a text of as many words."""
        return " ".join(str(one) for one in ids)


RobertaConfig = XLMRobertaConfig = AutoConfig = Config
BertModel = RobertaModel = XLMRobertaModel = AutoModel = Model
BertTokenizer = RobertaTokenizerFast = XLMRobertaTokenizer = AutoTokenizer = Tokenizer


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    """Return a scheduler that falls from 1 to 0."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0, 1 - step / max(1, num_training_steps)))


get_cosine_schedule_with_warmup = get_linear_schedule_with_warmup


def get_constant_schedule(optimizer):
    """Return a scheduler that stays."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1)


def set_seed(seed):
    """Seed torch."""
    torch.manual_seed(seed)
