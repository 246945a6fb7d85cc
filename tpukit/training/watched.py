"""Detect whether this thread uses an object in a block of code.

    with watching([optimizer]) as found:
        loss = loss_fn(model(images), targets)  # reads optimizer.state
    found.is_used  # True

In the block, the object has another class, which reports each use. The object itself stays the
same, so a use through any reference to it is detected.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Found:
    """The result of `watching`.

    Attributes:
        is_used: whether one of the watched objects was used.
        unwatched: names of the classes whose objects cannot be watched.
    """

    is_used: bool = False
    unwatched: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watching(objects: Iterable[object]) -> Iterator[Found]:
    """Yield a `Found`, which records the first use of one of the objects by this thread.

    Reading an attribute is a use, and so is a torch operation on a tensor. If an attribute is a
    list or a dict, later uses of its entries are not detected.
    """
    found = Found()
    own_thread = threading.get_ident()
    reporting: dict[type, type] = {}
    watched: list[tuple[object, type]] = []

    def end() -> None:
        while watched:
            one, kind = watched.pop()
            object.__setattr__(one, "__class__", kind)

    def on_use() -> bool:
        """Record a use and stop watching; return False if another thread calls this."""
        if threading.get_ident() != own_thread:
            return False
        found.is_used = True
        # Restore the classes before the use, whose result may depend on the class: a copy of a
        # tensor has the tensor's class.
        end()
        return True

    try:
        for one in {id(one): one for one in objects}.values():
            kind = type(one)
            try:
                if kind not in reporting:
                    reporting[kind] = _reporting_class(kind, on_use)
                # Not one.__class__ = ..., because the class may have a __setattr__ of its own.
                object.__setattr__(one, "__class__", reporting[kind])
            except Exception:  # a class in C, or a class that cannot be subclassed
                found.unwatched.append(kind.__name__)
            else:
                watched.append((one, kind))
        yield found
    finally:
        end()


def _reporting_class(kind: type, on_use: Callable[[], bool]) -> type:
    """Return a subclass that calls `on_use` before an attribute is read or torch uses a tensor."""
    import torch

    def get(one, name: str):
        # Before an operation, torch looks this attribute up, and then calls it: see `call`.
        if name != "__torch_function__":
            on_use()
        return kind.__getattribute__(one, name)

    def call(cls, function, types, args=(), kwargs=None):
        if on_use():
            return function(*args, **(kwargs or {}))
        # In another thread the tensor keeps the reporting class, and torch would call this again.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    members = {"__getattribute__": get, "__module__": kind.__module__, "__slots__": ()}
    if issubclass(kind, torch.Tensor):
        members["__torch_function__"] = classmethod(call)
    return type(kind)(kind.__name__, (kind,), members)
