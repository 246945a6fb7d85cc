"""Training and evaluation modes, of a model's layers and of optimizers that have them.

    model.backbone.eval()            # frozen: dropout is off, BatchNorm's statistics stay
    fit(core, model, ...)            # trains the other layers, and leaves this one as it is

A schedule-free optimizer trains one set of weights and evaluates another. Its `eval()` puts the
second into the model, and its `train()` the first.
"""

import contextlib

from tpukit.essentials.display import first_few
from tpukit.essentials.launcher import Core


class LayerModes:
    """The modes (training or evaluation) of a model's layers when `fit` was called.

    Layers in evaluation mode stay in it. If all layers are in evaluation mode, as in a model that
    was loaded or evaluated before, all of them are trained, and a line is printed.

    Args:
        core: this core.
        model: changed to training mode, except for its frozen layers.
    """

    def __init__(self, core: Core, model):
        self._core = core
        self._model = model
        self._has_reported = False
        # Before `model.train()` changes the modes.
        names = {layer: name for name, layer in model.named_modules()}
        given = [layer for layer in names if not layer.training]
        self._frozen: list = []
        model.train()
        if len(given) == len(names):
            core.print(
                "all layers were in evaluation mode, and fit trains all of them; to keep some "
                "frozen: model.train(), then model.backbone.eval()"
            )
        else:
            # A class may have a `train` of its own, which freezes layers. These are left to it.
            self._frozen = [layer for layer in given if layer.training]
        for layer in self._frozen:
            layer.training = False
        self.train()
        _report_statistics(core, model)
        if self._frozen:
            frozen = {names[layer] for layer in self._frozen}
            # A frozen block is named, and not each of the layers in it.
            outermost = [name for name in frozen if name.rpartition(".")[0] not in frozen - {name}]
            shown = first_few(sorted(name or "the model" for name in outermost), 3)
            core.print(
                f"in evaluation mode, and kept in it: {shown}; to train all layers: model.train()"
            )

    def train(self) -> None:
        """Switch to training, and put the frozen layers into evaluation again.

        Print once if something has put them into training mode since, for example `on_epoch_end`.
        """
        is_thawed = any(layer.training for layer in self._frozen)
        if is_thawed and not self._has_reported:
            self._has_reported = True
            self._core.print(
                "frozen layers were put into training mode during fit, which puts them back; to "
                "train them: another call of fit, with model.train() before it"
            )
        self._model.train()
        for layer in self._frozen:
            if type(layer).train is _torch_train():
                layer.training = False  # of this layer only: a layer within it may be trained
            else:
                layer.train(False)


def _torch_train():
    from torch import nn

    return nn.Module.train


def _report_statistics(core: Core, model) -> None:
    """Print the frozen layers whose running statistics would still follow the training data."""
    modules = dict(model.named_modules())
    moving = []
    for name, layer in modules.items():
        has_statistics = getattr(layer, "running_mean", None) is not None
        if has_statistics and layer.training and _is_frozen(name, modules):
            moving.append(name)
    if moving:
        shown = first_few([name or "the model" for name in moving], 3)
        core.print(
            f"the weights of {shown} are frozen, and the running statistics are not: they will "
            f"follow the training data; to keep them, before fit: {_as_code(moving[0])}.eval()"
        )


def _as_code(name: str) -> str:
    """Return a layer's name as Python: "body.0.norm" as "model.body[0].norm"."""
    code = "model"
    for part in name.split("."):
        if part.isdecimal():
            code += f"[{part}]"
        elif part:
            code += f".{part}"
    return code


def _is_frozen(name: str, modules: dict) -> bool:
    """Return whether no parameter of a layer requires a gradient.

    A layer without parameters, such as BatchNorm with `affine=False`, is as frozen as the module
    that contains it.
    """
    parameters = list(modules[name].parameters())
    if not parameters and name:
        parent, _, _ = name.rpartition(".")
        return _is_frozen(parent, modules)
    return not any(parameter.requires_grad for parameter in parameters)


class OptimizerModes:
    """Calls `train()` and `eval()` of an optimizer that has them; others are left alone.

    A checkpoint after an epoch holds the weights of evaluation, as `best.pt` does. A checkpoint
    within an epoch holds the weights of training: to exchange the weights there would change the
    rounding of all later steps, so a resumed run would not be equal to the last bit.

    Args:
        core: this core.
        optimizer: the optimizer of the training.
    """

    def __init__(self, core: Core, optimizer):
        self._core = core
        self._optimizer = optimizer
        self._is_training = False
        self.has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))

    def train(self) -> None:
        """Put the weights of training into the model."""
        self._switch(True)

    def eval(self) -> None:
        """Put the weights of evaluation into the model."""
        self._switch(False)

    def _switch(self, is_training: bool) -> None:
        if not self.has_modes:
            return
        self._is_training = is_training
        if is_training:
            self._optimizer.train()
        else:
            self._optimizer.eval()
        self._core.sync()  # on XLA it would be a part of the next step's graph

    def state_dict(self) -> dict:
        """Return whether the model has the weights of training, for a checkpoint."""
        return {"is_training": self._is_training}

    def load_state_dict(self, state: dict) -> None:
        """Switch to the mode of a checkpoint, before weights and optimizer are loaded."""
        # A new optimizer has no weights to exchange, and may not expect this. Its mode is then a
        # setting of its groups, which `load_state_dict` restores.
        with contextlib.suppress(KeyError):
            self._switch(state["is_training"])
