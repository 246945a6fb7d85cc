"""Notice that somebody uses an object: for a while it gets a class that reports every use.

A class is exchanged in place, so a use is noticed through every reference to the object, wherever it is kept.
"""

import contextlib
from collections.abc import Callable, Iterable


class Watch:
    """Calls a function when somebody uses one of the watched objects.

    Reading an attribute is a use, and so is a torch operation on a tensor. The entries of a list or of a dict within
    the object are not watched.

    Args:
        on_use: called before each use, with nothing. It may end the watch.
    """

    def __init__(self, on_use: Callable[[], None]):
        self._on_use = on_use
        self._reporting: dict[type, type] = {}
        self._watched: list[tuple[object, type]] = []

    def begin(self, objects: Iterable[object]) -> None:
        """Watch objects from here on, each of them once."""
        for one in {id(one): one for one in objects}.values():
            kind = type(one)
            if kind not in self._reporting:
                self._reporting[kind] = self._reporting_class(kind)
            with contextlib.suppress(TypeError):  # an object with slots, or of a class in C, cannot be watched
                one.__class__ = self._reporting[kind]
                self._watched.append((one, kind))

    def end(self) -> None:
        """Give all watched objects their own class back."""
        watched, self._watched = self._watched, []
        for one, kind in watched:
            one.__class__ = kind

    def _reporting_class(self, kind: type) -> type:
        import torch

        def get(one, name: str):
            if name != "__torch_function__":  # torch asks for it in an operation, and then calls it
                self._on_use()
            return kind.__getattribute__(one, name)

        def call(cls, function, types, args=(), kwargs=None):
            self._on_use()
            if not self._watched:  # the arguments have their own classes again
                return function(*args, **(kwargs or {}))
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

        members = {"__getattribute__": get, "__module__": kind.__module__, "__slots__": ()}
        if issubclass(kind, torch.Tensor):
            members["__torch_function__"] = classmethod(call)
        return type(kind)(kind.__name__, (kind,), members)
