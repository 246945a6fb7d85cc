"""A step recorded once and run again: on XLA the host need not go through the Python of a step that stays the same.

The first steps are recorded. Then their compiled program runs again with new inputs: the state that it returned the
last time, the batch, where the random numbers start, and what the host tells it, as the learning rate. The steps that
are recorded run the same program in the same way, so no bit differs.

What is Python in a step no longer happens, so a step is replayed only as long as nothing shows that this would be felt:
no hook, no random number of the host, nothing that the host reads or keeps, no change in what Python can reach, no call
of the clock or a file, no tensor that two hold, and only numbers that are understood. This is looked at in the first
three steps, and in the first step after somebody needed the weights, so after each log interval and each epoch. Where
it shows something, each step is recorded from then on.
"""

import contextlib
import pickle
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tpukit.essentials.data import TURN, host_numbers
from tpukit.essentials.run import Core, gather_objects
from tpukit.train.host_state import first_change, host_state, obstacle
from tpukit.train.outside import calls_outside
from tpukit.train.told import CONSTANT, Told

_FIRST = 3  # steps that are recorded: the first makes the optimiser's state, the other two have to be the same


@dataclass
class _Number:
    """An input that the host made: its id, the tensor, its value on the host, and what that may come from."""

    id: int
    tensor: object
    value: object
    sources: set[tuple]


@dataclass
class _Program:
    """A recorded step: where its inputs are from, where its results go, and how many steps were the same.

    Attributes:
        key: of `Programs`.
        order: of each input its place among the state, the batch, the flag, the seed and the numbers.
        puts: for each result its place in the state, or behind that for the two losses.
        numbers: what the host sent.
        settings: of the optimiser, then.
    """

    key: bytes
    order: list[int]
    puts: list[int]
    numbers: list[_Number]
    settings: dict
    seen: int = 1


class Replay:
    """Runs the steps of one `fit` again, as long as they may be.

    Args:
        core: this core.
        programs: of its backend.
        optimizer: the one whose steps they are.
        called: what a step calls, by name: the model, the loss, what prepares a batch; None is left out.
    """

    def __init__(self, core: Core, programs, optimizer, called: Mapping[str, object]):
        self._core, self._programs, self._optimizer = core, programs, optimizer
        self._called = {name: one for name, one in called.items() if one is not None}
        self._known: dict[tuple, _Program] = {}  # by the shapes of the batch
        self._state: list | None = None  # after the last step; None where modules and optimiser hold it
        self._places: dict[tuple, dict] = {}  # of the state, in its order
        self._counters: dict[tuple, dict] = {}  # places of what grows by one in each step, on the host
        self._ahead = 0  # steps of which modules, optimiser and counters do not know
        self._checks = _FIRST  # steps from now that all cores record, and after which they agree
        self._held: dict[str, object] | None = None  # what Python could reach before the last recorded step
        self._reason: str | None = None  # why each step has to be recorded
        self._is_over = self._has_begun = False
        self._recorded, self._before_it = 0, 0  # the last two steps that were recorded

    def step(self, number: int, batches: tuple, flag) -> tuple | None:
        """Run a step again and return its losses, as `TrainStep` does; None where it has to be recorded."""
        if self._state is None or self._checks:
            return None
        began = time.thread_time()
        leaves, shapes = self._leaves(batches)
        program = self._known.get(shapes)
        numbers = self._numbers(program) if program and program.seen > 1 else None
        if numbers is None:
            return None
        with self._core.replayed_step():
            pool = [*self._state, *leaves, flag, self._programs.next_seed(), *numbers]
            held = [*self._state, None, None]
            results = self._programs.run(program.key, [pool[place] for place in program.order])
            for place, result in zip(program.puts, results, strict=True):
                held[place] = result
            *self._state, local, reduced = held
            self._ahead += 1
        if not self._has_begun:
            self._has_begun = True
            own, before = 1000 * (time.thread_time() - began), 1000 * self._seconds
            self._core.print(
                f"the step is replayed from step {number} on: {own:.1f} ms of the host instead of {before:.1f}"
            )
        return local, reduced

    def _numbers(self, program: _Program) -> list | None:
        """Return what the host sends in the next step, on the device; None where that cannot be told."""
        told = self._told()
        if told.settings != program.settings:
            changed = {key for key, value in told.settings.items() if program.settings.get(key, self) != value}
            understood = told.understood(set().union(*(one.sources for one in program.numbers)))
            if len(told.settings) != len(program.settings) or not changed <= understood:
                return None
        new = {}
        for at, one in enumerate(program.numbers):
            values = [told.value(source, self._ahead + 1).to(one.value.dtype) for source in one.sources - {CONSTANT}]
            values += [one.value] * (CONSTANT in one.sources)
            if not all(value.equal(values[0]) for value in values[1:]):
                return None  # which of them it was shows in this step
            if not values[0].equal(one.value):
                new[at] = values[0]
        sent = dict(zip(new, self._core.to_device(list(new.values())), strict=True)) if new else {}
        return [sent.get(at, one.tensor) for at, one in enumerate(program.numbers)]

    def write_back(self, *, and_check: bool = False) -> None:
        """Give modules and optimiser what was computed since the last recorded step; see `TrainStep.write_back`."""
        self._checks = max(self._checks, int(and_check))
        state, self._state = self._state, None
        ahead, self._ahead = self._ahead, 0
        if ahead:
            for (_, name), table, new in zip(self._places, self._places.values(), state, strict=True):
                if table[name] is not new:
                    table[name].data = new
            for (_, name), table in self._counters.items():
                table[name] += ahead

    @contextlib.contextmanager
    def recording(self, batches: tuple, flag) -> Iterator[list]:
        """Record a step within, whose two losses are put into the list; then run what was recorded.

        What cannot be run as one program is left to the end of the step.
        """
        losses: list = []
        if self._is_over:
            yield losses
            return
        self.write_back()
        if self._checks == _FIRST:  # else what waits since before this run would be a part of its first step
            self._programs.run_all()
        self._note(obstacle(self._called.values(), self._optimizer) or self._change())
        places, tensors = self._look_up()
        leaves, shapes = self._leaves(batches)
        ids = self._programs.ids([*tensors, *leaves, flag])
        waiting, counts = self._programs.all_waiting(), self._counts()
        # Not in the first, in which libraries open what they need, and seldom, since it takes time.
        is_second = self._checks == _FIRST - 1 or (self._checks < _FIRST - 1 and shapes not in self._known)
        drawn, read, began = _host_numbers_checksum(), self._programs.interruptions(), time.thread_time()
        with calls_outside() if is_second else contextlib.nullcontext(()) as asked:
            yield losses
        self._seconds, is_read = time.thread_time() - began, read != self._programs.interruptions()
        self._note(next((f"it calls {name}" for name in sorted(asked)), None))
        self._note("it draws random numbers on the host" * (drawn != _host_numbers_checksum()))
        self._note("it reads from the device, or runs a part of its work" * is_read)
        self._note("something is computed on the device between the steps" * (waiting > 0 and self._checks < _FIRST))
        now, held = self._look_up()
        held += losses
        waits = zip(self._programs.ids(held), range(len(held)), self._programs.waiting(held), strict=True)
        outputs = {one: place for one, place, is_waiting in sorted(waits) if is_waiting}  # in the order of a sync
        puts = list(outputs.values())
        is_whole = self._programs.all_waiting() == len(puts) and {len(held) - 2, len(held) - 1} <= {*puts}
        self._note("a tensor that it computes is kept" * (not is_whole and not waiting))
        is_twice = self._programs.held_twice(held)
        self._note("a tensor of it is held a second time" * is_twice)
        if waiting or is_read or is_twice or not is_whole or (self._reason and self._core.world_size == 1):
            return
        computed = {id(held[place]) for place in puts}
        replaced = {one for one, tensor in zip(ids, tensors, strict=False) if id(tensor) in computed}
        key, inputs = self._programs.compile([held[place] for place in puts], replaced)
        self._count(counts)
        if list(now) != list(self._places):  # the optimiser has made its state, or more of it
            self._known, self._places = {}, now
        if list(now) == list(places):
            self._learn(shapes, key, inputs, ids, puts)
        for place, result in zip(puts, self._programs.run(key, [value for _, value in inputs]), strict=True):
            held[place].data = result
        if shapes in self._known and not self._reason:
            self._state = held[:-2]

    def agree(self, number: int) -> bool:
        """After a recorded step, say why none is replayed from here on, if so, all cores or none, together."""
        self._recorded, self._before_it = number, self._recorded
        alone = self._core.world_size == 1
        if self._is_over or not self._checks and not (alone and self._reason):
            return False  # one core alone records until the others look, too
        self._checks = max(0, self._checks - 1)
        reasons = [self._reason] if alone else gather_objects(self._core, self._reason)
        if reason := next(filter(None, reasons), None):
            self._is_over, self._state = True, None
            when = f" from step {number} on" if self._has_begun else ""
            replayed = f"; steps {self._before_it + 1} to {number - 1} were replayed as step {self._before_it} was"
            self._core.print(f"every step is recorded{when}: {reason}" + replayed * (number > self._before_it + 1))
        return self._is_over

    def _learn(self, shapes: tuple, key: bytes, inputs: list, ids: list[int], puts: list[int]) -> None:
        """Keep a recorded step as the program of these shapes; note what is not as it was before."""
        known = {one: place for place, one in enumerate(ids)} | {self._programs.seed_id: len(ids)}
        made = [(one, tensor) for one, tensor in inputs if one not in known]
        places = iter(range(len(ids) + 1, len(ids) + 1 + len(made)))
        order = [known[one] if one in known else next(places) for one, _ in inputs]
        told, old = self._told(), self._known.get(shapes)
        if old and old.key != key and old.settings != told.settings:  # a rate of 1, say, is no input of the program
            old = None
        self._note("other operations than before are recorded" * bool(old and old.key != key))
        self._note("it works with other tensors than before" * bool(old and (old.order, old.puts) != (order, puts)))
        if not self._reason:
            numbers = self._recognized(made, told, old)
            self._known[shapes] = _Program(key, order, puts, numbers, told.settings, old.seen + 1 if old else 1)

    def _recognized(self, made: list, told: Told, old: _Program | None) -> list[_Number]:
        """Return what the host has sent, with what it may come from; note what comes from nowhere."""
        values = self._core.backend.to_cpu([tensor for _, tensor in made])
        found, sources = [], told.sources()
        for at, ((one, tensor), value) in enumerate(zip(made, values, strict=True)):
            possible = {CONSTANT, *(source for source in sources if _is(told.value(source), value))}
            if old:
                was = old.numbers[at]
                possible = {source for source in possible & was.sources if source != CONSTANT or was.value.equal(value)}
            self._note("" if possible else f"a number of the host was {_short(was.value)} and is {_short(value)}")
            found.append(_Number(one, tensor, value, possible))
        return found

    def _note(self, reason: str | None) -> None:
        self._reason = self._reason or reason or None

    def _told(self) -> Told:
        return Told(self._optimizer, [table[name] for (_, name), table in self._counters.items()])

    def _change(self) -> str | None:
        """Return what Python can reach and has changed since the last recorded step; the first may make new things."""
        counted = [table[name] for (_, name), (table, _) in self._counts().items() if _on(table[name], "cpu")]
        without = [self._core, self._optimizer.state, self._optimizer.param_groups, *counted]
        before, self._held = self._held, host_state(self._called, without=without)
        return first_change(before, self._held, new=self._checks != _FIRST - 1) if before else None

    def _tables(self) -> Iterator[dict]:
        """Yield what holds the tensors and numbers of modules and optimiser, each by its name."""
        roots = [one for one in self._called.values() if hasattr(one, "modules")]
        for part in dict.fromkeys(part for one in roots for part in one.modules()):
            yield from (part._parameters, part._buffers)
        yield from self._optimizer.state.values()

    def _look_up(self) -> tuple[dict[tuple, dict], list]:
        """Return where tensors of the device are held, each once, and the tensors."""
        kind = self._core.device.type
        found = {id(one): (table, name) for table in self._tables() for name, one in table.items() if _on(one, kind)}
        places = {(id(table), name): table for table, name in found.values()}
        return places, [table[name] for (_, name), table in places.items()]

    def _counts(self) -> dict[tuple, tuple]:
        """Return the numbers that the host holds beside them, with where."""
        return {
            (id(table), name): (table, one.clone() if hasattr(one, "clone") else one)
            for table in self._tables()
            for name, one in table.items()
            if type(one) in (int, float) or _on(one, "cpu")
        }

    def _count(self, before: dict[tuple, tuple]) -> None:
        """Find what grows by one in a step; note what changes in another way."""
        import torch

        grown = {}
        for (place, name), (table, was) in before.items():
            change = set(torch.as_tensor(table[name] - was).flatten().tolist())
            if change == {1}:
                grown[place, name] = table
            self._note(f"{name!r} in the optimiser's state changes, and not by one" * (not change <= {0, 1}))
        self._note(
            "the host counts otherwise than before" * bool(self._known and grown.keys() != self._counters.keys())
        )
        self._counters = grown

    def _leaves(self, batches: tuple) -> tuple[list, tuple]:
        """Return the tensors of batches, and what has to be the same for one program: shapes, and which are one."""
        from torch.utils import _pytree as tree

        leaves = [leaf for leaf in tree.tree_leaves(batches) if _on(leaf, self._core.device.type)]
        return leaves, (len({id(leaf) for leaf in leaves}), *((leaf.shape, leaf.dtype) for leaf in leaves))


def _on(one: object, kind: str) -> bool:
    return getattr(getattr(one, "device", None), "type", None) == kind


def _is(found, value) -> bool:
    if found is None or found.is_floating_point() != value.is_floating_point():
        return False
    return found.shape == value.shape and found.to(value.dtype).equal(value)


def _short(value) -> str:
    return f"{value.item():g}" if value.numel() == 1 else f"{tuple(value.shape)} of sum {value.sum().item():g}"


def _host_numbers_checksum() -> int:
    """Return a checksum of where the host's random numbers stand, while no thread is in a block of `seeded_in_turn`."""
    with TURN:
        *others, torchs = host_numbers()
    return zlib.crc32(pickle.dumps((others, torchs.numpy())))
