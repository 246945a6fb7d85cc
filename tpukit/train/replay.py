"""Capture a training step once and run its program again without the Python of the step. XLA only.

    step 1           captured: the optimizer makes its state
    steps 2 and 3    captured: both must have the same program
    steps 4 to 46    replayed: the program runs with the state that it returned, the next batch and new numbers
    step 47          captured: the program must still be the same; so after every 46 steps, at both ends of an epoch
                     and whenever somebody has used the weights in between

A captured step and a replayed one run the same program, so both have the same bits as a result. docs/replay.md is the
contract: it lists the facts that make `fit` capture every step, and the differences that nothing can notice.
"""

import contextlib
import pickle
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.essentials.data import TURN, host_numbers
from tpukit.essentials.run import Core, gather_objects
from tpukit.essentials.show import Failed, counted
from tpukit.train.python_calls import calls_outside
from tpukit.train.replay_obstacles import obstacle
from tpukit.train.step_numbers import CONSTANT, StepNumbers, followed
from tpukit.train.watched import Watch

_FIRST = 3  # steps that are captured in any case
_LOOK_EVERY = 47  # steps; a prime, so that a branch that is taken every few steps is met sooner or later
_SMALL = 1000  # elements: a larger input is never copied to the host


class BatchForm(NamedTuple):
    """The properties of a batch that belong to the key of a program.

    Attributes:
        structure: the names, types and nesting of its entries.
        leaves: shape and dtype of each tensor; the value of each number or text.
        shared: for each tensor the place of the first that is the same object.
    """

    structure: object
    leaves: tuple
    shared: tuple


@dataclass
class _Number:
    """An input that is neither state, batch nor seed; `value` is None for one too large to be compared."""

    id: int
    tensor: object
    value: object
    sources: set


@dataclass
class _Program:
    """A captured step.

    Attributes:
        key: of `Programs`.
        order: for each input its place among the state, the batch, the flag, the seed and the numbers.
        puts: for each result its place in the state, or behind that for the two losses.
        settings: of the optimizer, in the last captured step.
        form: the settings that decide which operations there are.
        captured: how many captured steps in a row had this program.
        last: number of the last captured step.
        replayed: numbers of the steps that were replayed since then.
    """

    key: bytes
    order: list[int]
    puts: list[int]
    numbers: list[_Number]
    settings: dict
    form: dict
    last: int
    captured: int = 1
    replayed: list[int] = field(default_factory=list)


class _Before(NamedTuple):
    """The state of device and host before a captured step."""

    places: dict
    ids: list[int]
    batch: object
    waiting: int
    counts: dict
    drawn: int
    interruptions: int
    began: float


class Replay:
    """Captures and replays the steps of one `fit`.

    Args:
        core: this core.
        programs: of its backend.
        optimizer: the one whose steps they are.
        called: the parts of a step, by name: the model, the loss, `prepare`, `augment`, the average; None is left out.
        schedule: steps after each step, or None.
    """

    def __init__(self, core: Core, programs, optimizer, called: Mapping[str, object], schedule=None):
        self._core, self._programs, self._optimizer = core, programs, optimizer
        self._called = {name: one for name, one in called.items() if one is not None}
        self._schedule = schedule
        self._average = called.get("average")
        self._known: dict[BatchForm, _Program] = {}
        self._state: list | None = None  # after the last step; None if it may have been changed
        self._places: dict[tuple, dict] = {}  # of the state, in its order
        self._counters: dict[tuple, dict] = {}  # places of the host's numbers that grow by one in each step
        self._counted: list[float] = []  # the average's, after the last captured step
        self._ahead = 0  # replayed steps that modules, optimizer and counters do not hold yet
        self._looks = _FIRST  # steps from now on that all cores capture, and after which they agree
        self._reason: str | None = None  # why each step has to be captured
        self._is_over = self._has_begun = self._has_explained = False
        self._away, self._thread = Watch(self._bring_back), threading.get_ident()
        self._forward = Watch(lambda: self._note("the model or the loss reads the optimizer, a count or the schedule"))

    def begin_step(self, number: int, *, is_last: bool) -> None:
        """Have all cores capture this step if it is time to look again; `is_last` says that an epoch ends with it."""
        if is_last or number % _LOOK_EVERY == 0:
            self._looks = max(self._looks, 1)

    def step(self, number: int, batches: tuple, flag) -> tuple | None:
        """Replay a step and return its losses, as `TrainStep` does; None if it has to be captured."""
        if self._state is None or self._looks or self._reason:
            return None
        began = time.thread_time()
        leaves, form = self._leaves(batches)
        program = self._known.get(form)
        if program is None or program.captured < 2 or self._reason:
            return None
        step_numbers = self._step_numbers()
        self._note(_not_followed(program, step_numbers))
        numbers = None if self._reason else self._numbers(program, step_numbers)
        if numbers is None:
            return None
        with self._core.replayed_step():
            pool = [*self._state, *leaves, flag, self._programs.next_seed(), *numbers]
            results = self._programs.run(program.key, [pool[place] for place in program.order])
        held = [*self._state, None, None]
        for place, result in zip(program.puts, results, strict=True):
            held[place] = result
        *self._state, local, reduced = held
        self._ahead += 1
        program.replayed.append(number)
        if self._ahead == 1:
            self._put_away()
        if not self._has_begun:
            self._has_begun = True
            own, before = 1000 * (time.thread_time() - began), 1000 * self._seconds
            self._core.print(
                f"the step is replayed from step {number} on: {own:.1f} ms of the host instead of {before:.1f}"
            )
        return local, reduced

    def _numbers(self, program: _Program, step_numbers: StepNumbers) -> list | None:
        """Return the inputs from the host for the next step, on the device; None if they are not certain."""
        if step_numbers.form() != program.form:
            return None
        new = {}
        for at, one in enumerate(program.numbers):
            if one.value is None:
                continue
            known = one.sources - {CONSTANT}
            values = [step_numbers.value(source, self._ahead + 1).to(one.value.dtype) for source in known]
            if CONSTANT in one.sources:
                values.append(one.value)
            if not all(value.equal(values[0]) for value in values[1:]):
                return None  # this step shows which of the sources it is
            if not values[0].equal(one.value):
                new[at] = values[0]
        sent = dict(zip(new, self._core.to_device(list(new.values())), strict=True)) if new else {}
        return [sent.get(at, one.tensor) for at, one in enumerate(program.numbers)]

    def _put_away(self) -> None:
        """Take the old weights out of modules and optimizer, and have whoever uses them get the new ones."""
        import torch

        empty = {}
        tensors = [table[name] for (_, name), table in self._places.items()]
        for one, new in zip(tensors, self._state, strict=True):
            if one is new:
                continue  # the step only reads it
            if one.dtype not in empty:
                empty[one.dtype] = torch.empty(0, dtype=one.dtype).to(self._core.device)
            one.data = empty[one.dtype]  # else their memory would be taken until the next captured step
        counters = [table[name] for (_, name), table in self._counters.items() if hasattr(table[name], "device")]
        self._away.begin([*tensors, *counters])

    def _bring_back(self) -> None:
        if threading.get_ident() != self._thread:
            raise Failed(
                "a thread uses weights while fit replays steps, and they are not in the model then",
                found=f"thread {threading.current_thread().name!r}",
                fix="fit(replay=False), or use them in on_epoch",
            )
        self.write_back()

    def look_again(self) -> None:
        """Capture the next step on all cores."""
        self._looks = max(self._looks, 1)

    def write_back(self) -> None:
        """Give modules and optimizer the results of the replayed steps; see `TrainStep.write_back`."""
        self._away.end()
        state, self._state = self._state, None
        ahead, self._ahead = self._ahead, 0
        if ahead:
            for (_, name), table, new in zip(self._places, self._places.values(), state, strict=True):
                if table[name] is not new:
                    table[name].data = new
            for (_, name), table in self._counters.items():
                table[name] += ahead

    @contextlib.contextmanager
    def watching_forward(self) -> Iterator[None]:
        """Notice within that the model or the loss reads a count or a setting that moves on with each step."""
        if self._is_over or self._reason:
            yield
            return
        counts = [state.get("step") for state in self._states()]
        counts.append(getattr(self._average, "n_averaged", None))
        schedule = [] if self._schedule is None else [self._schedule]
        self._forward.begin([self._optimizer, *schedule, *(one for one in counts if _on(one, "cpu"))])
        try:
            yield
        finally:
            self._forward.end()

    @contextlib.contextmanager
    def capturing(self, number: int, batches: tuple, flag) -> Iterator[list]:
        """Capture a step within, whose two losses are put into the list; then run its program.

        A step that is not one program is left to the sync at its end.
        """
        losses: list = []
        if self._is_over:
            yield losses
            return
        self.write_back()
        is_first = self._looks == _FIRST
        if is_first:  # otherwise work that waits since before this run would be a part of its first step
            self._programs.run_all()
        self._note(obstacle(self._optimizer, self._average))
        leaves, form = self._leaves(batches)
        before = self._before(leaves, flag, form)
        # Not in the first step, in which libraries open files of their own.
        with contextlib.nullcontext(()) if is_first else calls_outside() as asked:
            yield losses
        self._seconds = time.thread_time() - before.began
        self._note(next((f"it asks {name}" for name in sorted(asked)), None))
        if puts := self._results(before, losses):
            self._run_captured(number, before, losses, puts)

    def _before(self, leaves: list, flag, form: BatchForm | None) -> _Before:
        places, tensors = self._look_up()
        return _Before(
            places=places,
            ids=self._programs.ids([*tensors, *leaves, flag]),
            batch=form,
            waiting=self._programs.all_waiting(),
            counts=self._counts(),
            drawn=_host_numbers_checksum(),
            interruptions=self._programs.interruptions(),
            began=time.thread_time(),
        )

    def _results(self, before: _Before, losses: list) -> list[int] | None:
        """Return the places of a captured step's results, in their order; None if it cannot run as one program."""
        is_read = before.interruptions != self._programs.interruptions()
        if before.drawn != _host_numbers_checksum():
            self._note("it draws random numbers on the host")
        if is_read:
            self._note("it reads from the device, or runs a part of its work")
        if before.waiting and self._looks < _FIRST:
            self._note("something is computed on the device between the steps")
        _, held = self._look_up()
        held += losses
        waits = zip(self._programs.ids(held), range(len(held)), self._programs.waiting(held), strict=True)
        outputs = {one: place for one, place, is_waiting in sorted(waits) if is_waiting}  # in the order of a sync
        puts = list(outputs.values())
        is_whole = self._programs.all_waiting() == len(puts) and {len(held) - 2, len(held) - 1} <= {*puts}
        if not is_whole and not before.waiting:
            self._note("a tensor that it computes is kept")
        is_twice = self._programs.held_twice(held)
        if is_twice:
            self._note("a tensor of it is held a second time")
        if before.waiting or is_read or is_twice or not is_whole or (self._reason and self._core.world_size == 1):
            return None
        return puts

    def _run_captured(self, number: int, before: _Before, losses: list, puts: list[int]) -> None:
        now, held = self._look_up()
        held += losses
        key, inputs = self._programs.compile([held[place] for place in puts])
        self._count(before.counts)
        if list(now) != list(self._places):  # the optimizer has made its state, or more of it
            if any(program.replayed for program in self._known.values()):
                self._note("model or optimizer hold other tensors than before")
            else:
                self._known = {}
            self._places = now
        # The first step makes state, and copies of weights that were made before share their buffers in it alone.
        if list(now) == list(before.places) and self._looks < _FIRST:
            self._learn(number, before, key, inputs, puts)
        for place, result in zip(puts, self._programs.run(key, [value for _, value in inputs]), strict=True):
            held[place].data = result
        if before.batch in self._known and not self._reason:
            self._state = held[:-2]

    def agree(self, number: int) -> bool:
        """After a captured step, print why all steps are captured from here on, if so, on all cores or on none."""
        is_alone = self._core.world_size == 1
        if self._is_over or not self._looks and not (is_alone and self._reason):
            return False  # one of several cores captures alone until the others look, too
        self._looks = max(0, self._looks - 1)
        found = [(self._reason, self._unconfirmed())]
        if not is_alone:
            found = gather_objects(self._core, found[0])
        reason, replayed = next((one for one in found if one[0]), (None, ""))
        if reason:
            self.write_back()
            self._is_over = True
            when = f" from step {number} on" if self._has_begun else ""
            self._core.print(f"every step is recorded{when}: {reason}{replayed}")
        elif number >= _LOOK_EVERY and not (self._has_begun or self._has_explained):
            self._has_explained = True
            forms = counted(len(self._known), "form")
            self._core.print(
                f"no step of the first {number} was replayed, all were recorded: their batches have {forms}, and each "
                f"is replayed from its third step on"
            )
        return self._is_over

    def _unconfirmed(self) -> str:
        """Return which steps were replayed since the last captured step with their program."""
        programs = [program for program in self._known.values() if program.replayed]
        if not programs:
            return ""
        steps = sorted(number for program in programs for number in program.replayed)
        before = min(program.last for program in programs)
        return f"; {len(steps)} of steps {steps[0]} to {steps[-1]} were replayed as step {before} was"

    def _learn(self, number: int, before: _Before, key: bytes, inputs: list, puts: list[int]) -> None:
        """Keep a captured step as the program of its batch's form; note a difference from the one before."""
        ids = before.ids
        places_of = {one: place for place, one in enumerate(ids)} | {self._programs.seed_id: len(ids)}
        made = [(one, tensor) for one, tensor in inputs if one not in places_of]
        places = iter(range(len(ids) + 1, len(ids) + 1 + len(made)))
        order = [places_of[one] if one in places_of else next(places) for one, _ in inputs]
        old = self._known.get(before.batch)
        step_numbers = self._step_numbers()
        if old and old.key != key and self._numbers(old, step_numbers) is None:
            if old.replayed:
                self._note("other operations than before are recorded, and the optimizer has other settings")
            old = None
        if old and old.key != key:
            self._note("other operations than before are recorded")
        elif old and (old.order, old.puts) != (order, puts):
            self._note("it works with other tensors than before")
        if self._reason:
            return
        numbers = self._recognized(made, step_numbers, old)
        if self._reason:
            return
        captured = old.captured + 1 if old else 1
        self._known[before.batch] = _Program(
            key, order, puts, numbers, step_numbers.settings, step_numbers.form(), number, captured
        )

    def _recognized(self, made: list, step_numbers: StepNumbers, old: _Program | None) -> list[_Number]:
        """Return the inputs from elsewhere with their possible sources; note one that has none."""
        small = [tensor for _, tensor in made if tensor.numel() <= _SMALL]
        values = iter(self._core.backend.to_cpu(small))
        found, sources = [], step_numbers.sources()
        for at, (one, tensor) in enumerate(made):
            was = old.numbers[at] if old else None
            if tensor.numel() > _SMALL:
                if was and was.id != one:
                    self._note(f"it reads another tensor of shape {tuple(tensor.shape)} than before")
                found.append(_Number(one, tensor, None, {CONSTANT}))
                continue
            value = next(values)
            possible = {CONSTANT, *(source for source in sources if _is(step_numbers.value(source), value))}
            if was:
                possible &= was.sources
                if not was.value.equal(value):
                    possible -= {CONSTANT}
            if not possible:
                self._note(f"a number of the host was {_short(was.value)} and is {_short(value)}")
            found.append(_Number(one, tensor, value, possible))
        return found

    def _note(self, reason: str | None) -> None:
        self._reason = self._reason or reason or None

    def _step_numbers(self) -> StepNumbers:
        """Return the sources as of the last captured step; replayed ones leave counters where they are."""
        if not self._ahead:
            counters = self._counters.items()
            self._counted = [float(table[name]) for (_, name), table in counters if name == "n_averaged"]
            self._steps = [self._steps_of(group) for group in self._optimizer.param_groups]
        return StepNumbers(self._optimizer, self._counted, self._steps)

    def _steps_of(self, group: dict) -> list[float | None]:
        steps = [self._optimizer.state.get(parameter, {}).get("step") for parameter in group["params"]]
        return [float(step) if hasattr(step, "device") else None for step in steps]

    def _tables(self) -> Iterator[dict]:
        """Yield the dicts that hold the tensors and numbers of modules and optimizer."""
        roots = [one for one in self._called.values() if hasattr(one, "modules")]
        for part in dict.fromkeys(part for one in roots for part in one.modules()):
            yield from (part._parameters, part._buffers)
        yield from self._states()

    def _states(self) -> list[dict]:
        return [state for state in self._optimizer.state.values() if isinstance(state, dict)]

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
        """Find the counters that grow by one in a step; note another number of the host that changes."""
        import torch

        may_grow = {(id(state), "step") for state in self._states()}
        may_grow.add((id(getattr(self._average, "_buffers", None)), "n_averaged"))
        grown = {}
        for place, (table, was) in before.items():
            change = set(torch.as_tensor(table[place[1]] - was).flatten().tolist())
            if change == {1} and place in may_grow:
                grown[place] = table
            elif change - {0}:
                self._note(f"{place[1]!r} changes on the host, and not as a counter of torch.optim does")
        if self._known and grown.keys() != self._counters.keys():
            self._note("the host counts otherwise than before")
        self._counters = grown

    def _leaves(self, batches: tuple) -> tuple[list, BatchForm | None]:
        """Return the tensors of batches and their form; note an entry that cannot be compared."""
        from torch.utils import _pytree as tree

        leaves, structure = tree.tree_flatten(batches)
        tensors, facts = [], []
        for leaf in leaves:
            if _on(leaf, self._core.device.type):
                tensors.append(leaf)
                facts.append((leaf.shape, leaf.dtype))
            elif type(leaf) in (bool, int, float, str, bytes, type(None)):
                facts.append((type(leaf), leaf))
            else:
                self._note(f"a batch holds a {type(leaf).__name__}, which cannot be compared")
        first = {}
        shared = tuple(first.setdefault(id(one), place) for place, one in enumerate(tensors))
        return tensors, BatchForm(repr(structure), tuple(facts), shared)


def _not_followed(program: _Program, step_numbers: StepNumbers) -> str | None:
    """Return which setting has changed that no input of the program follows; None if there is none."""
    if step_numbers.form() != program.form:
        return None  # another program, which the next step shows
    sources = set().union(*(one.sources for one in program.numbers))
    left = sorted(step_numbers.changed(program.settings) - followed(sources))
    if not left:
        return None
    group, name = left[0]
    return f"the optimizer's {name!r} of group {group} has changed, and no input of the program follows it"


def _on(one: object, kind: str) -> bool:
    return getattr(getattr(one, "device", None), "type", None) == kind


def _is(found, value) -> bool:
    if found is None or found.shape != value.shape:
        return False
    if value.is_floating_point():
        return found.to(value.dtype).equal(value)
    return found.double().equal(value.double())  # a rate of 0.01 is not the whole number 0


def _short(value) -> str:
    return f"{value.item():g}" if value.numel() == 1 else f"{tuple(value.shape)} of sum {value.sum().item():g}"


def _host_numbers_checksum() -> int:
    """Return a checksum of the host's random numbers, while no thread is in a block of `seeded_in_turn`."""
    with TURN:
        *others, torchs = host_numbers()
    return zlib.crc32(pickle.dumps((others, torchs.numpy())))
