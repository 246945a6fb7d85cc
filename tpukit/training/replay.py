"""Capture a training step once and run its program again without the Python of the step. XLA only.

    step 1           captured: the optimizer makes its state
    steps 2 and 3    captured: both must have the same program
    steps 4 to 46    replayed: the program runs with the state, the next batch and new numbers
    step 47          captured: the program must still be the same

Every 47th step is captured, and so are the first and the last step of each epoch. After a replayed
step, as after a captured step, modules and optimizer have the new values. Captured and replayed
steps run the same program, so their results have the same bits.

docs/replay.md lists the reasons why `fit` captures every step, and the differences that it cannot
notice.
"""

import contextlib
import pickle
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.essentials.data import TURN, random_states
from tpukit.essentials.display import counted
from tpukit.essentials.launcher import Core, gather_objects
from tpukit.training.python_calls import calls_outside
from tpukit.training.replay_obstacles import obstacle
from tpukit.training.replay_state import HostNumbers, Places, ReplayState
from tpukit.training.step_numbers import HostInput, StepNumbers, changed_values, recognize
from tpukit.training.watched import watching

_CAPTURED_FIRST = 3  # steps that all cores capture at the start of a `Replay`
_CAPTURE_EVERY = 47  # steps; a prime, so that a branch in every k-th step is captured at last
_SAME_PROGRAMS = 2  # captured steps in a row with the same program, before it is replayed
# Values in a batch that are constants of its program.
_SCALARS = (bool, int, float, str, bytes, type(None))


class BatchForm(NamedTuple):
    """The properties of a step's batches that decide which program the step needs.

    Attributes:
        structure: the names, types and nesting of the batches' entries.
        leaves: shape and dtype of each tensor; type and value of each number or text.
        shared: for each tensor, the index of the first tensor that is the same object.
    """

    structure: str
    leaves: tuple
    shared: tuple


@dataclass
class _Program:
    """The program of the captured steps with batches of one form.

    Attributes:
        key: the key of the program in `Programs`.
        order: for each input of the program, its index in the list of state, batch, flags, seed
            and `inputs`.
        puts: for each result of the program, its index in the list of state and two losses.
        inputs: the inputs that are neither state, batch, flags nor seed.
        settings: the settings of the optimizer, in the last captured step.
        graph_settings: the settings that are a part of the program itself.
        last: number of the last captured step.
        captured: how many captured steps in a row had this program.
        replayed: numbers of the steps that were replayed after step `last`.
    """

    key: bytes
    order: list[int]
    puts: list[int]
    inputs: list[HostInput]
    settings: dict
    graph_settings: dict
    last: int
    captured: int = 1
    replayed: list[int] = field(default_factory=list)


class _Before(NamedTuple):
    """Facts about device and host before a captured step.

    Attributes:
        places: the places of the state.
        ids: torch_xla's ids of the tensors of state, batch and flags.
        form: the form of the batches.
        waiting: number of tensors that are recorded but not computed yet.
        numbers: the numbers on the host.
        drawn: checksum of the host's random generators.
        interruptions: how often this process has run a graph or copied from the device.
    """

    places: Places
    ids: list[int]
    form: BatchForm | None
    waiting: int
    numbers: HostNumbers
    drawn: int
    interruptions: int


class _Finding(NamedTuple):
    """The facts that a core sends to the others when the cores agree on replay.

    Attributes:
        reason: why every step has to be captured; None if steps may be replayed.
        replayed: numbers of the steps that were replayed since their program was last captured.
        since: the number of the step in which that program was last captured.
    """

    reason: str | None
    replayed: list[int]
    since: int


class Replay:
    """Captures and replays the steps of one `fit`.

    Args:
        core: this core.
        programs: the programs of the core's backend, from `programs_of`.
        optimizer: the optimizer of the steps.
        called: model, loss, `preprocess`, `augment` and `averaged_model` by name; each may be None.
        schedule: the scheduler that `fit` steps after each step, or None.
    """

    def __init__(
        self,
        core: Core,
        programs,
        optimizer,
        called: Mapping[str, object],
        schedule=None,
    ):
        self._core = core
        self._programs = programs
        self._optimizer = optimizer
        self._schedule = schedule
        self._average = called.get("averaged_model")
        self._training_state = ReplayState(called.values(), optimizer, self._average)
        self._known: dict[BatchForm, _Program] = {}
        # Facts of the last captured step:
        self._places = Places()
        self._is_trainable: list[bool] = []  # for each place
        self._counters = Places()
        self._seconds = 0.0  # of the step's Python code
        # All cores capture this number of steps next, and agree on replay after each of them.
        self._captures_due = _CAPTURED_FIRST
        self._reason: str | None = None  # why each step has to be captured
        self._is_over = False  # whether the cores have agreed to capture every step
        self._has_replayed = False
        self._has_explained = False  # whether the line about forms of batches was printed

    def begin_step(self, number: int, *, is_last: bool) -> None:
        """Make all cores capture the last step of an epoch, and every 47th step."""
        if is_last or number % _CAPTURE_EVERY == 0:
            self.capture_next()

    def capture_next(self) -> None:
        """Make all cores capture the next step."""
        self._captures_due = max(self._captures_due, 1)

    # Replay

    def step(self, number: int, batches: tuple, flags: tuple) -> tuple | None:
        """Replay a step if possible.

        Returns:
            the two losses of the step, as `TrainStep` returns them; None if the step must be
            captured instead.
        """
        if self._captures_due or self._reason:
            return None
        began = time.thread_time()
        leaves, form = self._form_of(batches)
        program = self._known.get(form)
        # After each `return None` below, this core alone captures the step.
        if program is None or program.captured < _SAME_PROGRAMS:
            return None
        if self._reason or not self._is_untouched():
            return None
        numbers = self._next_numbers(program)
        if numbers is None:
            return None
        state = self._places.values()
        with self._core.internal.replayed_step():
            # The same order as in `_order`, whose result is `program.order`.
            pool = [*state, *leaves, *flags, self._programs.next_seed(), *numbers]
            results = self._programs.run(program.key, [pool[place] for place in program.order])
        losses = self._put(state, program.puts, results)
        self._counters.add(1)
        program.replayed.append(number)
        if not self._has_replayed:
            self._has_replayed = True
            replayed = 1000 * (time.thread_time() - began)
            self._core.print(
                f"the step is replayed from step {number} on: "
                f"{replayed:.1f} ms of host time per step instead of {1000 * self._seconds:.1f}"
            )
        return losses

    def _is_untouched(self) -> bool:
        """Return whether user code has left the state as the last step has made it.

        The state must have the same places and flags `requires_grad`. No operation on the device
        may be waiting, and no other tensor may share memory with the state.
        """
        if self._programs.all_waiting() or self._training_state.on_device() != self._places:
            return False
        state = self._places.values()
        if self._programs.held_twice(state):
            return False
        return [tensor.requires_grad for tensor in state] == self._is_trainable

    def _next_numbers(self, program: _Program) -> list | None:
        """Return the `inputs` of a program for the next step; None if a value is not certain."""
        numbers = StepNumbers(self._optimizer, self._average, ahead=1)
        if numbers.graph_settings() != program.graph_settings:
            return None  # another program, which a captured step shows
        sources = set().union(*(one.sources for one in program.inputs))
        unfollowed = numbers.unfollowed(program.settings, sources)
        if unfollowed:
            group, name = unfollowed[0]
            setting = f"the optimizer's {name!r} of group {group}"
            self._note(f"{setting} has changed, and no input of the program follows it")
            return None
        changed = changed_values(program.inputs, numbers)
        if changed is None:
            return None
        inputs = [one.tensor for one in program.inputs]
        # Send only the numbers that have changed; the other inputs are on the device already.
        if changed:
            sent = self._core.to_device(list(changed.values()))
            for place, tensor in zip(changed, sent, strict=True):
                inputs[place] = tensor
        return inputs

    def _put(self, state: list, puts: list[int], results: list) -> tuple | None:
        """Store the results of a program in the state; return the two losses."""
        losses = [None, None]
        for place, result in zip(puts, results, strict=True):
            if place < len(state):
                state[place].data = result
            else:
                losses[place - len(state)] = result
        return tuple(losses)

    # Capture

    @contextlib.contextmanager
    def capturing(self, number: int, batches: tuple, flags: tuple) -> Iterator[list]:
        """Capture the step that runs in the block, and then run its program.

        Yields a list, to which the block appends the step's loss on this core and its mean over the
        cores. If a step has several programs, the sync at the end of the step runs them instead.
        """
        losses: list = []
        if self._is_over:
            yield losses
            return
        is_first = self._captures_due == _CAPTURED_FIRST
        if is_first:
            # Operations that were recorded before this run must not become a part of this step.
            self._programs.run_all()
        self._note(obstacle(self._optimizer, self._average))
        before = self._before(batches, flags)
        began = time.thread_time()
        # Do not look in the first step, because libraries may open their own files in it.
        asking = contextlib.nullcontext(()) if is_first else calls_outside()
        with asking as asked:
            yield losses
        self._seconds = time.thread_time() - began
        for name in sorted(asked):
            self._note(f"the step asks {name}")
        # The block has only recorded operations. Its random numbers and results are checked now,
        # before the program runs.
        puts = self._results(before, losses)
        if puts:
            self._run_captured(number, before, losses=losses, puts=puts)

    @contextlib.contextmanager
    def watching_forward(self) -> Iterator[None]:
        """Detect whether model or loss reads the optimizer, a counter or the scheduler in a block.

        A replayed step would not read their new values.
        """
        if self._is_over or self._reason:
            yield
            return
        watched = [self._optimizer, *self._training_state.count_tensors()]
        if self._schedule is not None:
            watched.append(self._schedule)
        with watching(watched) as found:
            yield
        if found.is_used:
            self._note("the model or the loss reads the optimizer, a count or the schedule")
        for name in found.unwatched:
            self._note(f"reads of {name} by the model or the loss cannot be noticed")

    def _before(self, batches: tuple, flags: tuple) -> _Before:
        leaves, form = self._form_of(batches)
        places = self._training_state.on_device()
        return _Before(
            places=places,
            ids=self._programs.ids([*places.values(), *leaves, *flags]),
            form=form,
            waiting=self._programs.all_waiting(),
            numbers=self._training_state.on_host(),
            drawn=_host_numbers_checksum(),
            interruptions=self._programs.interruptions(),
        )

    def _results(self, before: _Before, losses: list) -> list[int] | None:
        """Return for each result of a captured step its index in the list of state and losses.

        Returns None if the step is not a single program, or if replay is over.
        """
        held = self._training_state.on_device().values() + losses
        is_read = before.interruptions != self._programs.interruptions()
        is_twice = self._programs.held_twice(held)
        outputs = {}
        # Results are tensors that are recorded but not computed yet. Tied weights have one id.
        waiting = self._programs.waiting(held)
        for place, number in enumerate(self._programs.ids(held)):
            if waiting[place]:
                outputs[number] = place
        puts = [outputs[number] for number in sorted(outputs)]  # in the order of a sync
        has_losses = {len(held) - 2, len(held) - 1} <= set(puts)
        # More waiting tensors than results: user code keeps a tensor that the step computes.
        is_whole = self._programs.all_waiting() == len(puts) and has_losses
        if before.drawn != _host_numbers_checksum():
            self._note("the step draws random numbers on the host")
        if is_read:
            self._note("the step reads from the device, or runs a part of its operations early")
        if before.waiting:
            if self._captures_due < _CAPTURED_FIRST:
                self._note("something is computed on the device between the steps")
        elif not is_whole:
            self._note("a tensor that the step computes still exists after the step")
        if is_twice:
            self._note("another tensor shares the memory of a tensor of the step")
        is_one_program = is_whole and not (is_read or is_twice or before.waiting)
        is_over = self._reason and self._core.world_size == 1
        if is_over or not is_one_program:
            return None
        return puts

    def _run_captured(self, number: int, before: _Before, *, losses: list, puts: list[int]) -> None:
        """Compile and run the program of a captured step, and store the program for replay."""
        places = self._training_state.on_device()
        held = places.values() + losses
        key, inputs = self._programs.compile([held[place] for place in puts])
        self._find_counters(before.numbers)
        if places != self._places:  # the optimizer has made its state, or more of it
            if any(program.replayed for program in self._known.values()):
                self._note("model or optimizer hold other tensors than before")
            else:
                self._known = {}
            self._places = places
        # Do not learn from the first step: its weights may share buffers with earlier copies.
        if places == before.places and self._captures_due < _CAPTURED_FIRST:
            self._learn(number, before, key=key, inputs=inputs, puts=puts)
        self._is_trainable = [tensor.requires_grad for tensor in places.values()]
        results = self._programs.run(key, [value for _, value in inputs])
        self._put(held, puts, results)

    def _find_counters(self, before: HostNumbers) -> None:
        """Find the step counters that a replayed step must increase; note any other change."""
        counters, other = self._training_state.counters(before)
        if other:
            self._note(f"{other!r} changes on the host, and not as a counter of torch.optim does")
        if self._known and set(counters.keys) != set(self._counters.keys):
            self._note("other step counters have grown on the host than before")
        self._counters = counters

    def _learn(self, number: int, before: _Before, *, key: bytes, inputs: list, puts: list) -> None:
        """Store a captured step as the program for its form of batches; note a difference.

        Args:
            number: the number of the step.
            before: the facts before the step.
            key: the key of its program.
            inputs: (id, tensor) of each input of the program.
            puts: the places of the results.
        """
        order, others = self._order(before.ids, inputs)
        numbers = StepNumbers(self._optimizer, self._average, ahead=0)
        old = self._known.get(before.form)
        if old and old.key != key:
            # A new program is expected if a setting in the graph has changed, such as a momentum of
            # 0, or if `changed_values` cannot tell.
            is_other = numbers.graph_settings() != old.graph_settings
            is_expected = is_other or changed_values(old.inputs, numbers) is None
            if not is_expected:
                self._note("other operations than before are recorded")
            elif old.replayed:
                operations = "other operations than before are recorded"
                self._note(f"{operations}, and the optimizer has other settings")
            old = None
        elif old and (old.order, old.puts) != (order, puts):
            self._note("the step uses other tensors than before")
        if self._reason:
            return
        known_inputs = old.inputs if old else None
        found = recognize(others, numbers, known_inputs, self._core.backend.to_cpu)
        for place, one in enumerate(found):
            if not one.sources:
                self._note(one.difference(known_inputs[place]))
        if self._reason:
            return
        self._known[before.form] = _Program(
            key=key,
            order=order,
            puts=puts,
            inputs=found,
            settings=numbers.settings,
            graph_settings=numbers.graph_settings(),
            last=number,
            captured=old.captured + 1 if old else 1,
        )

    def _order(self, ids: list[int], inputs: list) -> tuple[list[int], list]:
        """Return for each input its index in the list `pool` of `step`, and the other inputs.

        The other inputs are neither state, batch, flags nor seed.
        """
        # The list begins with state, batch and flags, in the order of `ids`; then comes the seed.
        places = {number: place for place, number in enumerate(ids)}
        places[self._programs.seed_id] = len(ids)
        order = []
        others = []
        for number, tensor in inputs:
            if number in places:
                order.append(places[number])
            else:  # not found by id: all Python numbers have the same id
                order.append(len(ids) + 1 + len(others))
                others.append((number, tensor))
        return order, others

    # Agreement

    def agree(self, number: int) -> bool:
        """End replay on all cores if a core has a reason for this; return whether replay ends.

        The cores exchange their reasons after a captured step, and core 0 prints one. Collective:
        call it on every core.
        """
        is_alone = self._core.world_size == 1
        is_due = self._captures_due or (is_alone and self._reason)
        if self._is_over or not is_due:
            # A core that captured this step alone waits for the next step that all cores capture.
            return False
        self._captures_due = max(0, self._captures_due - 1)
        findings = [self._finding()]
        if not is_alone:
            findings = gather_objects(self._core, findings[0])
        reasons = [finding.reason for finding in findings if finding.reason]
        if reasons:
            self._is_over = True
            start = f" from step {number} on" if self._has_replayed else ""
            self._core.print(f"every step is captured{start}: {reasons[0]}{_unconfirmed(findings)}")
            return True
        # Without a reason, but also without a replayed step: the batches have too many forms.
        if number >= _CAPTURE_EVERY and not (self._has_replayed or self._has_explained):
            self._has_explained = True
            self._core.print(
                f"no step of the first {number} was replayed, all were captured: their batches "
                f"have {counted(len(self._known), 'form')}, and a form is replayed from its third "
                f"step on"
            )
        return False

    def _finding(self) -> _Finding:
        replayed = []
        since = []
        for program in self._known.values():
            if program.replayed:
                replayed += program.replayed
                since.append(program.last)
        return _Finding(self._reason, replayed, since=min(since, default=0))

    def _note(self, reason: str | None) -> None:
        self._reason = self._reason or reason

    def _form_of(self, batches: tuple) -> tuple[list, BatchForm | None]:
        """Return the tensors of batches, and the batches' form; note values of other types."""
        from torch.utils import _pytree as tree

        leaves, structure = tree.tree_flatten(batches)
        tensors = []
        facts = []
        for leaf in leaves:
            if getattr(leaf, "is_xla", False):
                tensors.append(leaf)
                facts.append((leaf.shape, leaf.dtype))
            # A number in a batch is a constant of the program, so its value is a part of the form.
            elif type(leaf) in _SCALARS:
                facts.append((type(leaf), leaf))
            else:
                self._note(f"a batch holds a {type(leaf).__name__}, which cannot be compared")
        first = {}
        shared = [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
        return tensors, BatchForm(repr(structure), tuple(facts), tuple(shared))


def _unconfirmed(findings: list[_Finding]) -> str:
    """Return, for a message, which replayed steps of all cores may be wrong."""
    findings = [finding for finding in findings if finding.replayed]
    if not findings:
        return ""
    steps = set().union(*(finding.replayed for finding in findings))
    since = min(finding.since for finding in findings)
    return f"; {len(steps)} of steps {min(steps)} to {max(steps)} were replayed as step {since} was"


def _host_numbers_checksum() -> int:
    """Return a checksum of the states of the host's random generators.

    Waits until no other thread is in a block of `seeded_in_turn`.
    """
    with TURN:
        *others, torchs = random_states()
    return zlib.crc32(pickle.dumps((others, torchs.numpy())))
