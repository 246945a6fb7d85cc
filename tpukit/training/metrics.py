"""Update torchmetrics' metrics on each core, and combine their states over the cores.

With `keep_outputs=False` no core sees all outputs. For an accuracy over 10 samples on two cores:

               core 0         core 1         combined, on both cores
    updates    6 samples      4 samples
    state      correct = 5    correct = 2    correct = 7
    compute()                                7 / 10 = 0.7
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpukit.essentials.display import InvalidTypeError, InvalidValueError, first_few
from tpukit.essentials.launcher import gather_objects

# The packages of torchmetrics whose metrics compare classes.
_OF_CLASSES = (
    "torchmetrics.classification",
    "torchmetrics.retrieval",
    "torchmetrics.segmentation",
)


def separate_metrics(core, metrics: Mapping[str, object]) -> dict[str, object]:
    """Return single metrics by name: functions of (outputs, targets), or torchmetrics' metrics.

    A MetricCollection of torchmetrics is split into its metrics. A function whose first parameter
    is the targets is wrapped, and core 0 prints its name.

    Raises:
        InvalidTypeError: `metrics` has no names, or a metric is not a function.
        InvalidValueError: a metric of a collection and another metric have the same name.
    """
    if not hasattr(metrics, "items") or not all(map(callable, metrics.values())):
        raise InvalidTypeError(
            f"metrics must be functions by name, got {metrics!r}",
            fix='metrics={"mse": torch.nn.functional.mse_loss}',
        )
    separate = {}
    for name, metric in metrics.items():
        # A MetricCollection has both. torchmetrics is not imported here, because it is optional.
        if hasattr(metric, "update") and hasattr(metric, "items"):
            parts = {f"{name}_{key}": part for key, part in metric.items()}
        elif _takes_truth_first(metric):
            core.print(f"{name} takes the truth first (y_true), so it gets (targets, outputs)")
            parts = {name: TruthFirst(metric)}
        else:
            parts = {name: metric}
        twice = parts.keys() & separate.keys()
        if twice:
            raise InvalidValueError(
                f"two metrics have the name {min(twice)!r}",
                found=f"metrics= has {first_few(map(repr, metrics), 4)}; a metric in a collection "
                "is named <name of the collection>_<its own name>",
                fix="another name for the collection, or for the other metric",
            )
        separate |= parts
    return separate


@dataclass(frozen=True)
class TruthFirst:
    """A function of (outputs, targets) that calls a metric of (y_true, y_pred).

    The functions of scikit-learn are such metrics.
    """

    metric: Callable

    def __call__(self, outputs, targets) -> object:
        """Return the metric's value."""
        return self.metric(targets, outputs)


def _takes_truth_first(metric: object) -> bool:
    if not callable(metric) or has_state(metric):
        return False
    try:
        names = list(inspect.signature(metric).parameters)
    except (TypeError, ValueError):  # a function in C
        return False
    # scikit-learn names the first parameter `labels_true` in the metrics of clusterings.
    return names[:1] in (["y_true"], ["labels_true"])


def own_metrics(metrics: Mapping[str, object], *, one_core: bool) -> dict[str, object]:
    """Return metrics for this core alone: copies if several cores are threads of this process.

    Only metrics of torchmetrics are copied, because they have a state. Another metric may have a
    lock or a file, which cannot be copied.

    Args:
        metrics: single metrics by name.
        one_core: whether this process runs only one core.
    """
    own = {}
    for name, metric in metrics.items():
        is_shared = has_state(metric) and not one_core
        own[name] = copy.deepcopy(metric) if is_shared else metric
    return own


def fresh_metrics(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return metrics for one evaluation, without the state of an earlier evaluation.

    Metrics of torchmetrics are returned as they are, because the evaluation resets them. Functions
    and bound methods are returned as they are, because the user may read what they have recorded.
    Other objects are copied, unless a lock or a file prevents this.
    """
    return {name: _fresh(metric) for name, metric in metrics.items()}


def _fresh(metric: object) -> object:
    if has_state(metric) or inspect.isroutine(metric):
        return metric
    try:
        return copy.deepcopy(metric)
    except Exception:  # an object of the user may raise anything
        return metric


def has_state(metric: object) -> bool:
    """Return whether a metric has torchmetrics' interface."""
    return hasattr(metric, "reset") and hasattr(metric, "update")


class StreamedMetrics:
    """One core's copies of the metrics, updated with the samples of this core.

    Raises:
        TypeError: a metric is not a torchmetrics.Metric, or its states on several cores cannot be
            combined exactly.
    """

    def __init__(self, core, metrics: Mapping[str, object]):
        self._core = core
        self._metrics = {}
        self._is_updated = False
        for name, metric in metrics.items():
            _check(name, metric)
            self._metrics[name] = copy.deepcopy(metric)
            self._metrics[name].reset()

    def update(self, outputs, targets) -> None:
        """Update every metric with samples of this core."""
        self._is_updated = True
        for metric in self._metrics.values():
            metric.update(outputs, as_classes(metric, targets))

    def compute(self) -> dict[str, object]:
        """Return the values for all cores' samples, by name; equal on all cores. Collective."""
        parts = []
        for metric in self._metrics.values():
            parts += _parts(metric)
        # A core whose batches were all padding sends None: its states are only initial values.
        mine = [_state(part) for part in parts] if self._is_updated else None
        # Some metrics join lists of samples, so the order of the ranks matters.
        everyone = [states for states in gather_objects(self._core, mine) if states is not None]
        for part, states in zip(parts, zip(*everyone, strict=True), strict=True):
            _set_combined(part, states)
        return {name: metric.compute() for name, metric in self._metrics.items()}


def _check(name: str, metric: object) -> None:
    from torchmetrics import Metric

    if not isinstance(metric, Metric):
        raise InvalidTypeError(
            "keep_outputs=False needs metrics that are updated step by step, like those of "
            "torchmetrics",
            found=f"{name} is a {type(metric).__name__}",
            fix="pass a torchmetrics.Metric, or keep_outputs=True, the default",
        )
    for part in _parts(metric):
        for state, reduce in part._reductions.items():
            # Cores may have different numbers of samples, and a plain mean would ignore that.
            if getattr(reduce, "__name__", None) == "dim_zero_mean":
                raise InvalidTypeError(
                    f"{name} cannot be combined exactly over the cores",
                    found=(
                        f"{type(part).__name__} takes the plain mean of {state!r} over the "
                        "cores, although cores may have different numbers of samples"
                    ),
                    fix="pass keep_outputs=True, the default",
                )


def _parts(metric) -> list:
    """Return a metric and the metrics in it: a wrapper, such as MinMaxMetric, contains another."""
    from torchmetrics import Metric

    return [module for module in metric.modules() if isinstance(module, Metric)]


def _state(metric) -> dict:
    state = {name: getattr(metric, name) for name in metric._reductions}
    return {"_update_count": metric._update_count, **state}


def _set_combined(metric, states: tuple) -> None:
    """Combine the states of several cores, and set the result as a metric's state.

    `Metric._sync_dist` of torchmetrics combines them in the same way. But `Metric.sync` needs one
    collective per state. On a core without samples it also makes fewer collectives, so that the
    others wait, or it changes the dtype of the others' states (torchmetrics 1.9).
    """
    for name, reduce in metric._reductions.items():
        setattr(metric, name, _combined([state[name] for state in states], reduce))
    metric._update_count = sum(state["_update_count"] for state in states)
    # `compute` would combine the states again if torch.distributed runs, as in a dry run on CPU.
    metric.distributed_available_fn = lambda: False


def _combined(parts: list, reduce) -> object:
    """Return the combination of one state's values: lists are joined, tensors are reduced."""
    import torch

    # A list state has an entry per update; torchmetrics joins them in `compute`.
    if isinstance(parts[0], list):
        joined = []
        for part in parts:
            joined += part
        return joined
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack(parts)
    return reduce(stacked) if reduce else stacked


def as_classes(metric, targets):
    """Convert float targets to integers if a metric compares classes; else return them unchanged.

    A loss such as BCEWithLogitsLoss needs float targets, but metrics of classes need integers.
    """
    import torch

    is_float = isinstance(targets, torch.Tensor) and targets.is_floating_point()
    if not is_float or not _takes_classes(metric):
        return targets
    is_whole = bool((targets == targets.round()).all())
    return targets.int() if is_whole else targets


def _takes_classes(metric) -> bool:
    """Return whether a metric, or a metric in it, compares classes and not numbers."""
    parts = metric.modules() if hasattr(metric, "modules") else [metric]
    return any(_is_of_classes(type(part)) for part in parts)


def _is_of_classes(kind: type) -> bool:
    return any(base.__module__.startswith(_OF_CLASSES) for base in kind.__mro__)
