"""torchmetrics' metrics updated step by step on each core, and their states combined over the cores."""

import copy
import inspect
from collections.abc import Mapping

from tpukit.essentials.display import InvalidTypeError
from tpukit.essentials.launcher import gather_objects


def own_metrics(metrics: Mapping[str, object], *, one_core: bool) -> dict[str, object]:
    """Return metrics that no other core uses: as they were passed, or, of cores that share a process, copies.

    Only torchmetrics' are copied: they have a state. What else a metric holds, a lock or a file, may not be copied.
    """
    return {name: one if one_core or not has_state(one) else copy.deepcopy(one) for name, one in metrics.items()}


def fresh_metrics(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return metrics for one evaluation, which begins with nothing that another has left in them.

    torchmetrics' are reset there. Functions and bound methods stay what they are, since somebody may look at what they
    record; other objects are copied, unless they hold what cannot be, a lock or a file.
    """
    return {name: _fresh(metric) for name, metric in metrics.items()}


def _fresh(metric: object) -> object:
    if has_state(metric) or inspect.isroutine(metric):
        return metric
    try:
        return copy.deepcopy(metric)
    except Exception:  # whatever a stranger's object raises
        return metric


def has_state(metric: object) -> bool:
    """Say whether a metric is one of torchmetrics', or like them."""
    return hasattr(metric, "reset") and hasattr(metric, "update")


class StreamedMetrics:
    """Copies of metrics that each core updates with its own samples; no core needs to see all outputs.

    Raises:
        TypeError: one is not torchmetrics' or has a state that cannot be combined exactly.
    """

    def __init__(self, core, metrics: Mapping[str, object]):
        self._core, self._metrics = core, {}
        self._updated = False
        for name, metric in metrics.items():
            _check(name, metric)
            self._metrics[name] = copy.deepcopy(metric)
            self._metrics[name].reset()

    def update(self, outputs, targets) -> None:
        """Let every metric see these samples of this core."""
        self._updated = True
        for metric in self._metrics.values():
            metric.update(outputs, as_classes(metric, targets))

    def compute(self) -> dict[str, object]:
        """Return what the metrics are of the samples of all cores, by name, the same on each, together."""
        parts = [part for metric in self._metrics.values() for part in _parts(metric)]
        mine = [_state(part) for part in parts] if self._updated else None
        # In the order of the ranks, which is the dataset's; a core that had only padding has no say.
        everyone = [states for states in gather_objects(self._core, mine) if states is not None]
        for part, states in zip(parts, zip(*everyone, strict=True), strict=True):
            _set_combined(part, states)
        return {name: metric.compute() for name, metric in self._metrics.items()}


def _check(name: str, metric: object) -> None:
    from torchmetrics import Metric

    if not isinstance(metric, Metric):
        raise InvalidTypeError(
            "with keep_outputs=False a metric is updated step by step, as torchmetrics' are",
            found=f"{name} is a {type(metric).__name__}",
            fix="a torchmetrics.Metric, or keep_outputs=True",
        )
    for part in _parts(metric):
        for state, reduce in part._reductions.items():
            if getattr(reduce, "__name__", None) == "dim_zero_mean":  # cores may have different numbers of samples
                raise InvalidTypeError(
                    f"{name} cannot be combined exactly over the cores",
                    found=f"{type(part).__name__} takes the mean of the cores' {state!r}, whatever their samples",
                    fix="keep_outputs=True",
                )


def _parts(metric) -> list:
    """Return a metric and those within it: a wrapper has no state of its own."""
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def _state(metric) -> dict:
    return {"_update_count": metric._update_count} | {name: getattr(metric, name) for name in metric._reductions}


def _set_combined(metric, states: tuple) -> None:
    """Give a metric the states of several cores as one, as `Metric._sync_dist` does.

    Not `Metric.sync` itself: it makes a collective per state, and where a core has had no samples it makes fewer of
    them (lists without a reduction) or changes the dtype of the others' (torchmetrics 1.9).
    """
    import torch

    for name, reduce in metric._reductions.items():
        parts = [state[name] for state in states]
        if isinstance(parts[0], list):
            value = [item for part in parts for item in part]
        elif len(parts) == 1:
            (value,) = parts
        else:
            value = reduce(torch.stack(parts)) if reduce else torch.stack(parts)
        setattr(metric, name, value)
    metric._update_count = sum(state["_update_count"] for state in states)
    # `compute` would combine the states once more wherever torch.distributed is running, as it is in a rehearsal.
    metric.distributed_available_fn = lambda: False


def as_classes(metric, targets):
    """Return whole numbers as integers where a metric compares classes: a loss often needs the same ones as floats."""
    import torch

    is_float = isinstance(targets, torch.Tensor) and targets.is_floating_point()
    is_whole = is_float and _takes_classes(metric) and bool((targets == targets.round()).all())
    return targets.int() if is_whole else targets


def _takes_classes(metric) -> bool:
    """Say whether a metric, or one that it wraps, compares classes, and not numbers."""
    rooms = ("torchmetrics.classification", "torchmetrics.retrieval", "torchmetrics.segmentation")
    parts = metric.modules() if hasattr(metric, "modules") else [metric]
    return any(base.__module__.startswith(rooms) for part in parts for base in type(part).__mro__)
