"""The options of `fit` by their own names, for tests that pass them through a function of theirs."""

from dataclasses import fields

from tpukit.training import Checkpoints, EarlyStopping, FitOptions


def grouped(options: dict) -> dict:
    """Return arguments of `fit`: fields of its dataclasses are put into these.

    grouped({"epochs": 2, "folder": "run", "save_every": 0, "log_every": 3})
    {"epochs": 2, "checkpoints": Checkpoints("run", save_every=0), "options": FitOptions(log_every=3)}

    Without a folder nothing is saved, whatever is given for `save_every`.
    """
    rest = dict(options)
    checkpoints = _taken(rest, Checkpoints)
    if checkpoints.get("folder") is not None:
        rest["checkpoints"] = Checkpoints(**checkpoints)
    early_stopping = _taken(rest, EarlyStopping)
    if early_stopping:
        rest["early_stopping"] = EarlyStopping(**early_stopping)
    rare = _taken(rest, FitOptions)
    if rare:
        rest["options"] = FitOptions(**rare)
    return rest


def _taken(options: dict, kind: type) -> dict:
    names = [field.name for field in fields(kind)]
    return {name: options.pop(name) for name in names if name in options}
