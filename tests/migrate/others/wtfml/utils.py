"""What keeps the best model."""

import torch_xla.core.xla_model as xm


class EarlyStopping:
    """Saves a model that is better than those before it."""

    def __init__(self, patience, mode, tpu):
        self.best, self.early_stop = float("inf"), False

    def __call__(self, score, model, model_path):
        if score < self.best:
            self.best = score
            xm.save(model.state_dict(), model_path)
