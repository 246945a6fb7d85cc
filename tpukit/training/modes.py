"""Switch between training and evaluation mode: a model's layers, and optimizers with these modes.

    model.backbone.eval()            # dropout is off, BatchNorm's statistics stay
    fit(core, model, ...)            # puts all other layers into training mode

A layer in evaluation mode is called frozen here. Its weights are still trained if they require a
gradient.

A schedule-free optimizer has two sets of weights, for training and for evaluation. Its `train()`
and `eval()` put one of the sets into the model.
"""

import contextlib

from tpukit.essentials.display import first_few
from tpukit.essentials.launcher import Core


class LayerModes:
    """Keeps layers in evaluation mode if they were in it when `fit` began.

    If all layers were in evaluation mode, the model was probably just loaded or evaluated. In this
    case all layers are put into training mode, and a line is printed.

    Args:
        core: this core.
        model: the model.
    """

    def __init__(self, core: Core, model):
        self._core = core
        self._model = model
        self._has_reported = False
        # Read the modes before `model.train()` changes them.
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
            # A class may override `train` and freeze layers in it. `model.train()` above has put
            # these into evaluation mode already, so only the others are frozen here.
            self._frozen = [layer for layer in given if layer.training]
        for layer in self._frozen:
            layer.training = False
        self.train()
        _report_statistics(core, model)
        if self._frozen:
            frozen = {names[layer] for layer in self._frozen}
            # Print the name of a frozen block, and not the names of the layers in it.
            outermost = [name for name in frozen if name.rpartition(".")[0] not in frozen - {name}]
            shown = first_few(sorted(name or "the model" for name in outermost), 3)
            core.print(
                f"these layers stay in evaluation mode: {shown}; to train all: model.train()"
            )

    def train(self) -> None:
        """Put the model into training mode, and the frozen layers into evaluation mode.

        Print once if something, such as `on_epoch_end`, has put a frozen layer into training mode.
        """
        is_thawed = any(layer.training for layer in self._frozen)
        if is_thawed and not self._has_reported:
            self._has_reported = True
            self._core.print(
                "frozen layers were put into training mode during fit, and fit puts them into "
                "evaluation mode again; to train them: call model.train(), then fit again"
            )
        self._model.train()
        for layer in self._frozen:
            if type(layer).train is _torch_train():
                # Not `eval()`, which would also freeze the layers in it: those may be trained.
                layer.training = False
            else:
                layer.train(False)


def _torch_train():
    from torch import nn

    return nn.Module.train


def _report_statistics(core: Core, model) -> None:
    """Print the layers that have frozen weights, but running statistics that training changes."""
    modules = dict(model.named_modules())
    moving = []
    for name, layer in modules.items():
        has_statistics = getattr(layer, "running_mean", None) is not None
        if has_statistics and layer.training and _has_frozen_weights(name, modules):
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


def _has_frozen_weights(name: str, modules: dict) -> bool:
    """Return whether no parameter of a layer requires a gradient.

    For a layer without parameters, such as BatchNorm with `affine=False`, the parameters of the
    module that contains it decide.
    """
    parameters = list(modules[name].parameters())
    if not parameters and name:
        parent, _, _ = name.rpartition(".")
        return _has_frozen_weights(parent, modules)
    return not any(parameter.requires_grad for parameter in parameters)


class OptimizerModes:
    """Calls `train()` and `eval()` of an optimizer that has them; does nothing for others.

    A checkpoint after an epoch has the weights for evaluation, as `best.pt` has. A checkpoint
    within an epoch has the weights for training. Exchanging weights within an epoch would change
    the rounding of all later steps, so a resumed run would differ in the last bits.

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
        """Put the weights for training into the model."""
        self._switch(True)

    def eval(self) -> None:
        """Put the weights for evaluation into the model."""
        self._switch(False)

    def _switch(self, is_training: bool) -> None:
        if not self.has_modes:
            return
        self._is_training = is_training
        if is_training:
            self._optimizer.train()
        else:
            self._optimizer.eval()
        self._core.sync()  # otherwise the exchange would be a part of the next step's graph on XLA

    def state_dict(self) -> dict:
        """Return, for a checkpoint, whether the model has the weights for training."""
        return {"is_training": self._is_training}

    def load_state_dict(self, state: dict) -> None:
        """Switch to the mode of a checkpoint, before weights and optimizer are loaded."""
        # A new optimizer has no second set of weights yet, and may raise KeyError. Its mode is then
        # a setting of its groups, which its own `load_state_dict` restores.
        with contextlib.suppress(KeyError):
            self._switch(state["is_training"])
