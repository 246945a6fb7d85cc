"""Notice that this thread reads an object: its class is exchanged for one that reports uses.

    with watching([optimizer]) as found:
        loss = loss_fn(model(images), targets)  # reads optimizer.state
    found.is_used  # True

The class is exchanged in place, so a use is noticed through every reference, wherever it is kept.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class Found:
    """The result of watching.

    Attributes:
        is_used: whether an object was used.
        unwatched: names of the classes that cannot be exchanged, so that uses are not noticed.
    """

    is_used: bool = False
    unwatched: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watching(objects: Iterable[object]) -> Iterator[Found]:
    """Notice whether this thread uses one of the objects in this block; yield the result.

    Reading an attribute is a use, and so is a torch operation on a tensor. The entries of a list
    or of a dict within the object are not watched.
    """
    found = Found()
    own_thread = threading.get_ident()
    reporting: dict[type, type] = {}
    watched: list[tuple[object, type]] = []

    def end() -> None:
        while watched:
            one, kind = watched.pop()
            object.__setattr__(one, "__class__", kind)

    def on_use() -> None:
        if threading.get_ident() == own_thread:
            found.is_used = True
            end()  # before the use: it may depend on the class, as a copy of a tensor does

    try:
        for one in {id(one): one for one in objects}.values():
            kind = type(one)
            try:
                if kind not in reporting:
                    reporting[kind] = _reporting_class(kind, on_use)
                # Not one.__class__ = ..., because the class may have a __setattr__ of its own.
                object.__setattr__(one, "__class__", reporting[kind])
            except Exception:  # a class in C, or Python that runs when a class is derived from it
                found.unwatched.append(kind.__name__)
            else:
                watched.append((one, kind))
        yield found
    finally:
        end()


def _reporting_class(kind: type, on_use: Callable[[], None]) -> type:
    import torch

    def get(one, name: str):
        if name != "__torch_function__":  # torch asks for it in an operation, and then calls it
            on_use()
        return kind.__getattribute__(one, name)

    def call(cls, function, types, args=(), kwargs=None):
        on_use()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    members = {"__getattribute__": get, "__module__": kind.__module__, "__slots__": ()}
    if issubclass(kind, torch.Tensor):
        members["__torch_function__"] = classmethod(call)
    return type(kind)(kind.__name__, (kind,), members)
