"""What a training step can reach in Python is seen where it changes, or the step is recorded each time, and said."""

import array
import collections
import contextvars
import ctypes
import dataclasses
import datetime
import enum
import functools
import gc
import io
import itertools
import logging
import math
import os
import queue
import random
import re
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from replay_workers import Trained, assert_same, both, net
from torch import nn
from workers import Pairs

from tpukit import Augment, launch
from tpukit.train import host_state as looked
from tpukit.train.host_state import first_change, host_state


def changed_late(make_count):
    """Return a row of `both`: a loss that is four times as large where the count is above nine."""

    def make(core):
        one, count = Trained(core, net(norm=False)), make_count()
        one.loss = lambda outputs, targets: nn.functional.mse_loss(outputs, targets) * (2.0 if count() > 9 else 0.5)
        return one

    return make


class Slotted:
    __slots__ = ("__calls",)

    def __init__(self):
        self.__calls = 0

    def __call__(self):
        self.__calls += 1
        return self.__calls


@dataclasses.dataclass(slots=True)
class Data:
    calls: int = 0


class Counter:
    """An object with a number, `calls`."""

    def __init__(self, calls=0):
        self.calls = calls


def adding(one, name="calls"):
    """Return a function that adds one to an attribute of an object."""
    setattr(one, name, 0)

    def count():
        setattr(one, name, getattr(one, name) + 1)
        return getattr(one, name)

    return count


def in_its_attribute():
    def count():
        count.calls += 1
        return count.calls

    count.calls = 0
    return count


def drawing(draw):
    """Return a function that counts the draws below 0.9, and is at ten with the first that is not."""
    return lambda: 10 if draw() > 0.9 else 0


def late_seed(make):
    """Return a seed whose first nine numbers are below 0.9, and the tenth is above."""
    return next(
        seed for seed in range(100_000) for draw in [make(seed)] if all(draw() < 0.9 for _ in range(9)) and draw() > 0.9
    )


def of_python(seed):
    return random.Random(seed).random


def of_numpy(seed):
    return numpy.random.default_rng(seed).random


def of_old_numpy(seed):
    return numpy.random.RandomState(seed).random_sample


def of_torch(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda: float(torch.rand((), generator=generator))


def with_method(make):
    """Return a function that draws from an object whose method it looks up, not one that it holds."""
    drawn = make(late_seed(make)).__self__
    return lambda: 10 if drawn.random() > 0.9 else 0


def in_items(one, at=0):
    def count():
        one[at] += 1
        return one[at]

    return count


def in_view():
    under = bytearray(1)
    return in_items(memoryview(under))


def under_tensor():
    numbers = numpy.zeros(5)
    tensor = torch.from_numpy(numbers)  # whose version numpy does not know
    hidden = ctypes.cast(numbers.ctypes.data, ctypes.POINTER(ctypes.c_double))

    def count():
        hidden[0] = hidden[0] + 1
        return float(tensor[0])

    return count


settings = types.ModuleType("late_settings")
settings.inner = types.ModuleType("late_settings.inner")
KEPT = []
CALLS = 0


def in_own_module():
    settings.inner.calls = 0

    def count():
        settings.inner.calls += 1
        return settings.inner.calls

    return count


def in_module_imported_within():
    sys.modules["late_settings"] = settings
    settings.calls = 0

    def count():
        import late_settings

        late_settings.calls += 1
        return late_settings.calls

    return count


def in_function_of_module():
    settings.add_one = adding(Counter())

    def count():
        return settings.add_one()

    return count


def in_library_module():
    math.n = 0

    def count():
        math.n += 1
        return math.n

    return count


def in_module_of_object():
    owner = Counter()
    owner.settings = settings
    settings.of_owner = 0

    def count():
        owner.settings.of_owner += 1
        return owner.settings.of_owner

    return count


def by_name():
    globals()["CALLS"] = 0

    def count():
        globals()["CALLS"] += 1
        return globals()["CALLS"]

    return count


def in_context():
    variable = contextvars.ContextVar("calls", default=0)

    def count():
        variable.set(variable.get() + 1)
        return variable.get()

    return count


def in_environ():
    os.environ["TPUKIT_TEST_CALLS"] = "0"

    def count():
        os.environ["TPUKIT_TEST_CALLS"] = str(1 + int(os.getenv("TPUKIT_TEST_CALLS")))
        return int(os.getenv("TPUKIT_TEST_CALLS"))

    return count


def behind_weak_reference():
    KEPT.append(Counter())
    reference = weakref.ref(KEPT[-1])
    return lambda: adding_to(reference())


def adding_to(one):
    one.calls += 1
    return one.calls


def in_dict_view():
    view = {"calls": Counter()}.values()
    return lambda: adding_to(next(iter(view)))


def in_base():
    class Base:
        calls = 0

    class Sub(Base):
        pass

    one = Sub()

    def count():
        Base.calls += 1
        return one.calls

    return count


def in_class_of_object():
    class Base:
        calls = 0

    class Sub(Base):
        pass

    one = Sub()

    def count():
        type(one).__mro__[1].calls += 1
        return one.calls

    return count


def in_library_class():
    nn.Module.calls, layer = 0, nn.ReLU()

    def count():
        type(layer).__mro__[1].calls += 1
        return layer.calls

    return count


def in_enum():
    class Phase(enum.Enum):
        FIRST = "first"

    return adding(Phase.FIRST)


def behind_property():
    class Owner:
        @property
        def calls(self):
            return adding_to(COUNTER)

    COUNTER.calls, owner = 0, Owner()
    return lambda: owner.calls


COUNTER = Counter()


def in_cache():
    @functools.lru_cache
    def cached(size):
        return size

    def count():
        cached(cached.cache_info().currsize)
        return cached.cache_info().currsize

    return count


def in_loop():
    functions = []
    for place in range(3):
        kept = [place, 0]
        functions.append(lambda kept=kept: in_items(kept, 1)())
    return lambda: max(function() for function in functions)


def in_container_of_c():
    waiting = collections.deque([functools.partial(adding(Counter()))])
    return lambda: waiting[0]()


def by_turns():
    """A list of two like objects, of which one is the current."""
    slow, fast = Counter(0), Counter(0)
    owner = Counter(slow)
    owner.turns, owner.all = [slow] * 9 + [fast] * 90, [slow, fast]

    def count():
        owner.turns.append(owner.turns.pop(0))
        return 10 if owner.turns[0] is fast else 0

    return count


def switched(first, second):
    """A function in an attribute, and another of as many parts from the tenth step on."""
    owner, turns = Counter(first), [first] * 9 + [second] * 90

    def count():
        owner.calls, *turns[:] = *turns, owner.calls
        return 0 if owner.calls is first else 10

    return count


def in_long_list():
    kept = [Counter(place) for place in range(1500)]
    kept[1200].calls = 0
    return lambda: adding_to(kept[1200])


def in_many():
    apart, big = Counter(0), [Counter(place) for place in range(looked._MOST)]
    big[0] = apart
    return lambda: adding_to(apart) if big else 0


def in_simple_queue():
    waiting = queue.SimpleQueue()

    def count():
        waiting.put(None)
        return waiting.qsize()

    return count


def in_file():
    file = io.BytesIO()
    opened = io.BufferedWriter(file)

    def count():
        opened.write(b".")
        opened.flush()
        return opened.tell()

    return count


def in_generator():
    steps = (step for step in range(1, 100))
    return lambda: next(steps)


def by_clock():
    until = time.monotonic() + 3600
    return lambda: 10 if time.monotonic() > until else 0


def by_date():
    return lambda: 10 if datetime.datetime.now().year > 3000 else 0


def by_file():
    return lambda: 10 if Path("/no/such/file").exists() else 0


def in_training():
    layer = nn.Dropout()
    turns = [True] * 9 + [False] * 90

    def count():
        layer.train(turns[0])
        turns.append(turns.pop(0))
        return 0 if layer.training else 10

    return count


def of_big_array():
    return in_items(numpy.zeros(10_000_000))


LATE = {
    "slots": (Slotted, r"loss.count._Slotted__calls was 0 and is 1"),
    "a dataclass with slots": (lambda: adding(Data()), r"loss.count.one.calls was 0 and is 1"),
    "an attribute of the function": (in_its_attribute, r"loss.count.calls was 0 and is 1"),
    "a random.Random": (lambda: with_method(of_python), r"loss.count.drawn\..* was .* and is .*"),
    "its method": (lambda: drawing(of_python(late_seed(of_python))), r"loss.count.draw\..* was .* and is .*"),
    "a numpy Generator": (lambda: with_method(of_numpy), r"loss.count.drawn\..* was .* and is .*"),
    "a numpy RandomState": (
        lambda: drawing(of_old_numpy(late_seed(of_old_numpy))),
        r"loss.count.draw\..* was .* and is .*",
    ),
    "a generator of torch": (
        lambda: drawing(of_torch(late_seed(of_torch))),
        r"loss.count.draw.generator.* was .* and is .*",
    ),
    "bytearray": (lambda: in_items(bytearray(1)), r"loss.count.one was .* and is .*"),
    "array.array": (lambda: in_items(array.array("i", [0])), r"loss.count.one was .* and is .*"),
    "memoryview": (in_view, r"loss.count.one was .* and is .*"),
    "an array of 40,000 bytes": (lambda: in_items(numpy.zeros(5000)), r"loss.count.one was .* and is .*"),
    "an array of objects": (
        lambda: in_items(numpy.array([0, None], dtype=object)),
        r"loss.count.one\[0\] was 0 and is 1",
    ),
    "an array of 80 MB": (of_big_array, r"loss.count.one holds 80,000,000 bytes, .*"),
    "a tensor of the host that numpy writes": (under_tensor, r"loss.count.tensor was .* and is .*"),
    "a module of one's own": (in_own_module, r"late_settings.inner.calls was 0 and is 1"),
    "a module that the function imports": (in_module_imported_within, r"late_settings.calls was 0 and is 1"),
    "a function of a module": (in_function_of_module, r"late_settings.add_one.one.calls was 0 and is 1"),
    "a module of Python": (in_library_module, r"math.n was 0 and is 1"),
    "a module in an attribute": (in_module_of_object, r"late_settings.of_owner was 0 and is 1"),
    "globals()": (by_name, r"loss.count:CALLS was 0 and is 1"),
    "a context variable": (in_context, r"loss.count.variable.get\(\) was None and is 1"),
    "os.environ": (in_environ, r"loss.count:environ.*TPUKIT_TEST_CALLS.* was b'0' and is b'1'"),
    "threading.local": (lambda: adding(threading.local()), r"loss.count.one.calls was 0 and is 1"),
    "behind a weak reference": (behind_weak_reference, r".*calls was 0 and is 1"),
    "a view of a dict": (in_dict_view, r".*calls was 0 and is 1"),
    "a class without methods": (in_base, r".*Base.calls was 0 and is 1"),
    "the class of an object, without methods": (in_class_of_object, r".*Base.calls was 0 and is 1"),
    "a class of a library": (in_library_class, r".*Module.calls was 0 and is 1"),
    "a member of an enum": (in_enum, r".*calls was 0 and is 1"),
    "behind a property": (behind_property, r".*COUNTER.calls was 0 and is 1"),
    "the cache of a function": (in_cache, r".*cached.* was .* and is .*"),
    "closures of a loop": (in_loop, r".*kept\[1\] was 0 and is 1|.*\[1\] was 0 and is 1"),
    "a callback in a deque": (in_container_of_c, r".*calls was 0 and is 1"),
    "which of two like objects": (by_turns, r".* was .* and is .*"),
    "which function of a library": (
        lambda: switched(nn.functional.relu, nn.functional.gelu),
        r".* was .*relu.* and is .*gelu.*|.* was .* and is .*",
    ),
    "which function of C": (lambda: switched(math.sin, math.cos), r".* was .* and is .*"),
    "which lambda": (lambda: switched(lambda x: x + 1, lambda x: x + 2), r".* was .* and is .*"),
    "a list of 1,500": (in_long_list, r".*\[1200\].calls was 0 and is 1"),
    "a list of 1,500 numbers": (lambda: in_items([0] * 1500, 1200), r"loss.count.one was .* and is .*"),
    "too many values": (in_many, r"it can reach more than [0-9,]+ values.*"),
    "queue.Queue": (lambda: in_items(queue.deque([0])), r".*\[0\] was 0 and is 1"),
    "queue.SimpleQueue": (in_simple_queue, r"loss.count.waiting is a SimpleQueue, which cannot be looked into"),
    "a file": (
        in_file,
        r"loss.count.opened is a BufferedWriter, which cannot be looked into"
        if sys.version_info < (3, 12)
        else r"loss.count.opened.raw.state\[1\] was 0 and is 1",
    ),
    "a generator": (in_generator, r"loss.count.steps is a generator, which cannot be looked into"),
    "itertools.count": (
        lambda: functools.partial(next, itertools.count(1)),
        r"loss.count.*count.*|loss.count.* was .* and is .*",
    ),
    "the clock": (by_clock, r"it calls time.monotonic"),
    "the date": (by_date, r"it calls datetime.datetime.now"),
    "whether a file is there": (
        by_file,
        rf"it calls pathlib.{'Path' if sys.version_info < (3, 13) else '_abc.PathBase'}.*",
    ),
    "train and eval": (in_training, r".* was .* and is .*"),
}


@functools.cache
def launched():
    rows = {name: changed_late(make) for name, (make, _) in LATE.items()}
    return launch(both, rows, 12, cores=1, backend="xla:cpu", progress="off", seed=5).results[0]


@pytest.mark.xla
@pytest.mark.parametrize("row", LATE)
def test_what_changes_late_is_seen_wherever_it_is_kept_or_each_step_is_recorded(row):
    replayed, recorded = launched()[row]
    assert_same(replayed, recorded)
    said = [line for line in replayed["lines"] if "recorded" in line]
    assert len(said) == 1, replayed["lines"]
    assert re.fullmatch("every step is recorded: (?:" + LATE[row][1] + ")", said[0]), said[0]


class LikeHuggingFace(nn.Module):
    """A model with a configuration of many labels, layers in a list, a logger, caches, and outputs of its own class."""

    log = logging.getLogger(__name__)

    @dataclasses.dataclass
    class Output:
        loss: torch.Tensor | None
        logits: torch.Tensor

    def __init__(self):
        super().__init__()
        names = {number: f"label {number}" for number in range(30_000)}
        back = {name: number for number, name in names.items()}
        self.config = types.SimpleNamespace(id2label=names, label2id=back, hidden_act="gelu", dtype=torch.float32)
        self.act, self.generator = {"gelu": nn.functional.gelu}[self.config.hidden_act], None
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.path, self.pattern, self.lock = Path("model"), re.compile("layer"), threading.Lock()
        self.tied = self.layers[0].weight

    @functools.cached_property
    def device(self):
        return self.mask.device

    @functools.lru_cache  # noqa: B019
    def scale(self, size):
        return size**-0.5

    def forward(self, inputs):
        self.log.debug("forward on %s, after %d", self.device, gc.get_count()[0])
        for layer in self.layers:
            inputs = self.act(layer(inputs)) * self.scale(8) * self.mask + nn.functional.linear(inputs, self.tied)
        return self.Output(None, inputs[:, :2]).logits


class WithMetrics(nn.Module):
    def __init__(self):
        super().__init__()
        import torchmetrics

        self.layer, self.accuracy = nn.Linear(8, 2), torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, inputs):
        return self.layer(inputs)


def resnet():
    import torchvision

    return torchvision.models.resnet18(num_classes=2), torch.rand(4, 3, 32, 32)


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(64, 2)), torch.rand(4, 8, 8)


ORDINARY = {
    "a ResNet": resnet,
    "a transformer": transformer,
    "a model as Hugging Face's": lambda: (LikeHuggingFace(), torch.rand(4, 8)),
    "metrics of torchmetrics": lambda: (WithMetrics(), torch.rand(4, 8)),
    "a layer with weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 2)), torch.rand(4, 8)),
}


@pytest.mark.xla
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch's own, of the transformer
@pytest.mark.parametrize("row", ORDINARY)
def test_of_ordinary_training_nothing_is_said(row):
    model, inputs = ORDINARY[row]()
    optimizer = torch.optim.AdamW(model.parameters())
    called = {"model": model, "loss": nn.CrossEntropyLoss(), "augment": Augment(), "optimizer": optimizer}
    tensors = [*model.parameters(), *model.buffers(), optimizer.state, optimizer.param_groups]
    states = [host_state(called, without=tensors)]
    for _ in range(3):
        optimizer.zero_grad()
        called["loss"](model(inputs), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
        states.append(host_state(called, without=tensors))
    changes = [first_change(*states[at : at + 2], new=at > 0) for at in range(3)]
    assert changes == [None] * 3


def with_evaluation(core):
    import torchmetrics

    one = Trained(core, net(norm=False))
    metric = torchmetrics.MeanSquaredError()
    one.options = {"valid": core.batches(Pairs(16), batch_size=4), "metrics": {"error": metric}, "augment": Images()}
    return one


class Images:
    """A change of images that keeps count of nothing."""

    factors = (0.5, 1.5)

    def __call__(self, images, targets):
        low, high = self.factors
        return images * torch.empty(len(images), 1, 1, 1, device=images.device).uniform_(low, high), targets


@pytest.mark.xla
def test_with_metrics_an_evaluation_and_a_class_of_ones_own_a_step_is_replayed():
    table = {"evaluated": with_evaluation}
    replayed, recorded = launch(both, table, 12, cores=1, backend="xla:cpu", progress="off", seed=5).results[0][
        "evaluated"
    ]
    assert_same(replayed, recorded)
    assert [line[:37] for line in replayed["lines"]] == ["the step is replayed from step 4 on: "]
