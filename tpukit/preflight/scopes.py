"""Names for the operations of a graph: the module and the line of Python that each came from."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tpukit.measure import named, record_lines

_KIT = f"{Path(__file__).parents[1]}{os.sep}"


def name_operations() -> tuple[list[tuple[str, str, str]], Callable[[], None]]:
    """Have every operation recorded from here on say which call it came from.

    In the graph the scope of an operation is "call12", and entry 12 here is that call: the module's name, the line of
    Python outside of torch that called it, and "forward", "backward" or "optimizer". The backward pass of a module
    begins with the gradient of its output; what belongs to no module counts for the one before it.

    Returns:
        the calls, which fill up; and a function that ends it, to be called between two steps.
    """
    import torch
    from torch.nn.modules import module as hooks
    from torch.optim import optimizer as optimizers

    inside = (str(Path(torch.__file__).parent), _KIT)
    names: dict[int, str] = {}
    calls: list[tuple[str, str, str]] = []
    numbers: dict[tuple[str, str, str], int] = {}
    stack: list[tuple[str, str, str] | None] = [None]
    scope = None

    def enter(call: tuple[str, str, str] | None) -> None:
        nonlocal scope
        if call is not None and call not in numbers:
            numbers[call] = len(calls)
            calls.append(call)
        scope = None  # first out of the one, then into the other
        scope = call and named(f"call{numbers[call]}")

    def before_forward(module, _inputs) -> None:
        if id(module) not in names:
            for name, part in module.named_modules():
                kind = type(part).__name__
                # "layer1.0.conv1" says what it is, "3" in a Sequential does not.
                names.setdefault(id(part), f"{name} {kind}" if name[-1:].isdigit() else name or kind)
        stack.append((names[id(module)], _line_outside(inside), "forward"))
        enter(stack[-1])

    def after_forward(module, _inputs, outputs) -> None:
        name, line, _ = stack.pop()
        enter(stack[-1])
        function = getattr(outputs, "grad_fn", None)
        if function is not None and next(module.children(), None) is None:
            function.register_prehook(lambda _gradients: before_backward((name, line, "backward")))

    def before_backward(call: tuple[str, str, str]) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: enter(stack[-1]))
        enter(call)

    def before_optimizer(optimizer, _args, _kwargs) -> None:
        enter((type(optimizer).__name__, _line_outside(inside), "optimizer"))

    handles = (
        hooks.register_module_forward_pre_hook(before_forward),
        hooks.register_module_forward_hook(after_forward, always_call=True),
        optimizers.register_optimizer_step_pre_hook(before_optimizer),
        optimizers.register_optimizer_step_post_hook(lambda *_: enter(stack[-1])),
    )
    record_lines(True)

    def end() -> None:
        for handle in handles:
            handle.remove()
        record_lines(False)
        enter(None)

    return calls, end


def _line_outside(inside: tuple[str, ...]) -> str:
    """Return the innermost line that is neither torch's nor the kit's, as "file:line"."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
