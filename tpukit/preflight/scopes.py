"""Find the module and the line of Python that recorded each operation of a graph."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tpukit.profiling import named, record_lines

_KIT = f"{Path(__file__).parents[1]}{os.sep}"


class Call(NamedTuple):
    """A call of a module or an optimizer, during which operations were recorded."""

    module: str  # the name of the module, or the class of the optimizer
    line: str  # "file:line" of the call in the user's code
    direction: str  # "forward", "backward" or "optimizer"


def name_operations() -> tuple[list[Call], Callable[[], None]]:
    """From now on, give each recorded operation a scope that refers to the call that recorded it.

    The scope of an operation in the graph is, for example, "call12": entry 12 of the returned list
    is the call. In the backward pass, an operation refers to a module without children: the one
    whose output autograd has most recently passed.

    Returns:
        The list of calls, which grows during the run; and a function that ends the naming. Call
        that function between two steps.
    """
    namer = _Namer()
    return namer.calls, namer.end


class _Namer:
    """Follow the calls of modules and optimizers through torch's hooks.

    A scope lasts from `_enter` to the next `_enter`. Forward passes are nested, so a stack has the
    module to which each child returns.
    """

    def __init__(self) -> None:
        import torch
        from torch.nn.modules import module as hooks
        from torch.optim import optimizer as optimizers

        self.calls: list[Call] = []
        self._numbers: dict[Call, int] = {}
        self._stack: list[Call | None] = [None]
        self._names: dict[int, str] = {}  # of modules, by id
        self._scope = None  # torch_xla's scope object; the scope ends when it is deleted
        self._inside = (str(Path(torch.__file__).parent), _KIT)
        self._engine = torch.autograd.Variable._execution_engine
        self._handles = (
            hooks.register_module_forward_pre_hook(self._before_forward),
            hooks.register_module_forward_hook(self._after_forward, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizers.register_optimizer_step_post_hook(lambda *_: self._return()),
        )
        record_lines(True)

    def end(self) -> None:
        """Stop naming operations."""
        for handle in self._handles:
            handle.remove()
        record_lines(False)
        self._enter(None)

    def _enter(self, call: Call | None) -> None:
        self._scope = None  # end the old scope before the new one begins
        if call is None:
            return
        if call not in self._numbers:
            self._numbers[call] = len(self.calls)
            self.calls.append(call)
        self._scope = named(f"call{self._numbers[call]}")

    def _return(self) -> None:
        self._enter(self._stack[-1])

    def _before_forward(self, module, _inputs) -> None:
        if id(module) not in self._names:
            self._name_parts(module)
        call = Call(self._names[id(module)], _line_outside(self._inside), "forward")
        self._stack.append(call)
        self._enter(call)

    def _name_parts(self, module) -> None:
        for name, part in module.named_modules():
            kind = type(part).__name__
            if name[-1:].isdigit():
                name = f"{name} {kind}"  # a number, as in layer1.0 or conv1, does not say much
            self._names.setdefault(id(part), name or kind)

    def _after_forward(self, module, _inputs, outputs) -> None:
        call = self._stack.pop()._replace(direction="backward")
        self._return()
        function = getattr(outputs, "grad_fn", None)
        has_children = next(module.children(), None) is not None
        if function is not None and not has_children:
            function.register_prehook(lambda _gradients: self._before_backward(call))

    def _before_backward(self, call: Call) -> None:
        self._engine.queue_callback(self._return)  # called at the end of the whole backward pass
        self._enter(call)

    def _before_optimizer(self, optimizer, _args, _kwargs) -> None:
        line = _line_outside(self._inside)
        self._enter(Call(type(optimizer).__name__, line, "optimizer"))


def _line_outside(inside: tuple[str, ...]) -> str:
    """Return "file:line" of the innermost frame that is neither in torch nor in tpukit."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
