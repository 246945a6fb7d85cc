"""Save and load the weights of `torch.compile(model)` under the names of the plain model.

`torch.compile` wraps a module, and the wrapper's state dict has the prefix `_orig_mod.`. So a
checkpoint of a compiled model would not load into the plain model (pytorch/pytorch#101107):

    compiled       "_orig_mod.0.weight", "backbone._orig_mod.weight"
    in the file    "0.weight",           "backbone.weight"
"""

import re

# Match only a whole part between dots, because a layer may have the name "my_orig_mod".
_WRAPPER = re.compile(r"(?<![^.])_orig_mod\.")


class PlainNames:
    """Saves and loads a module's state without the prefixes of `torch.compile`.

    Args:
        module: a compiled module, a plain module, or a module with compiled layers.
    """

    def __init__(self, module):
        self._module = module

    def state_dict(self) -> dict:
        """Return the module's state under plain names."""
        state = self._module.state_dict()
        if not any(map(_WRAPPER.search, state)):
            return state
        return {_plain(name): value for name, value in state.items()}

    def load_state_dict(self, state: dict) -> None:
        """Load the state of a plain or a compiled module.

        Raises:
            RuntimeError: the state belongs to another architecture.
        """
        # From plain names to this module's own names, which may have prefixes.
        own = {_plain(name): name for name in self._module.state_dict()}
        is_same = all(plain == name for plain, name in own.items())
        if is_same and not any(map(_WRAPPER.search, state)):
            self._module.load_state_dict(state)
            return
        renamed = {}
        for name, value in state.items():
            plain = _plain(name)
            renamed[own.get(plain, plain)] = value
        self._module.load_state_dict(renamed)


def _plain(name: str) -> str:
    return _WRAPPER.sub("", name)
