"""cycles: which graphs are a step of the training, what it takes, and which graphs were compiled again."""

from pathlib import Path

import pytest

from tpukit.preflight.cycles import (
    Cycle,
    Mark,
    Ran,
    batches_of,
    cycles,
    is_steady,
    main_cycle,
    other_shapes,
    read_log,
    recompiled,
    samples,
)
from tpukit.preflight.recording import _reason


def trained(text):
    """Return the cycles of a run: a letter is a graph, compiled when it first comes; D and G are optimisers' steps."""
    log, marks, seen = [], [], {}
    for one in text:
        if one in "DG":
            marks.append(Mark(len(log), frozenset(one)))
            continue
        if one not in seen:
            seen[one] = len(seen)
            log.append(seen[one])
        log.append(Ran(seen[one]))
    letters = {number: letter for letter, number in seen.items()}
    return cycles(log, marks), letters


def letters_of(text):
    found, letters = trained(text)
    return ["".join(letters[number] for number in one.programs) for one in found]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("aD bD bD bD", ["a", "b", "b", "b"]),
        ("aaab D aaac D aaac D", ["aaab", "aaac", "aaac"]),  # added-up gradients
        ("xxxxxxxx aD bD bD", ["xxxxxxxxa", "b", "b"]),  # a loop before the training
        ("aD bG aD bG aD bG", ["ab", "ab", "ab"]),  # a GAN
        ("aDaDaDbG aDaDaDbG", ["aaab", "aaab"]),  # whose critic steps three times
        ("bG aDaDaDbG aDaDaDbG aDaDaDbG", ["ba", "aab", "aaab", "aaab"]),
        (
            "pG pG pG" + "aD" * 16,
            ["pppa", *"a" * 15],
        ),  # another network before; its optimiser is not in use any more
        ("aD bD tbD tbD", ["a", "b", "tb", "tb"]),  # a teacher
        ("aDD bDD", ["a", "b"]),  # two optimisers' steps in one graph
        ("xxx", []),
    ],
)
def test_a_cycle_ends_when_all_optimisers_in_use_have_stepped(text, steps):
    assert letters_of(text.replace(" ", "")) == steps


def test_a_cycle_is_steady_when_it_comes_a_third_time():
    assert [is_steady(trained("aDbDbDbDcD"[: 2 * count])[0]) for count in range(6)] == [
        False
    ] * 4 + [True, False]


def of_shapes(*names):
    """Return cycles of one graph each; "16" and "64" are lengths of the batch, a letter behind it another graph."""
    seen, found = {}, []
    for name in names:
        new = (len(seen),) if name not in seen else ()
        number = seen.setdefault(name, len(seen))
        length = int(name.rstrip("abcdefgh"))
        found.append(Cycle((Ran(number, 100, (((4, length), "int32"), ((4, 1), "float32"))),), new))
    return found


def test_batches_of_a_few_lengths_are_steps_of_a_few_shapes():
    found = of_shapes("16a", "64", "16", "64", "16", "16", "16")
    assert main_cycle(found).taken[0] == (
        (4, 64),
        "int32",
    )  # the largest, though the other came more often
    assert [one.taken[0] for one in other_shapes(found)] == [((4, 16), "int32")]
    assert recompiled(found) == []


def test_a_length_that_comes_once_in_a_while_is_one_shape_more():
    assert recompiled(of_shapes(*["16"] * 8, "12", *["16"] * 3)) == []


def test_a_new_length_in_each_step_is_a_step_compiled_again():
    found = of_shapes(*map(str, range(10, 30)))
    assert (len(recompiled(found)), other_shapes(found)) == (18, [])


def test_one_shape_and_many_graphs_is_a_step_compiled_again():
    found = of_shapes("16a", "16b", "16c", "16d", "16c", "16e", "16c")
    assert [after.programs for _, after in recompiled(found)] == [(2,), (3,), (4,)]


def test_an_evaluation_between_steps_is_no_recompile_and_no_part_of_the_step():
    assert recompiled(trained("aDbDbDebDbDbDebD")[0]) == []
    found, letters = trained("aDbDebDbDebDbD")
    assert [letters[number] for number in main_cycle(found).programs] == ["b"]


IMAGES, LABELS = ((4, 3, 8, 8), "float32"), ((4, 1), "float32")
BATCH = (IMAGES, LABELS)
RATE = ((1,), "float32")


def of_a_step(*taken, batches=(), sent=(), graphs=1):
    """Return the batches of a step that takes these tensors; each graph takes an equal part."""
    each = len(taken) // graphs
    runs = [Ran(0, taken=taken[at : at + each]) for at in range(0, len(taken), each)]
    return batches_of(Cycle(tuple(runs), batches=tuple(batches), sent=tuple(sent)))


def test_the_samples_are_those_of_the_loops_batches():
    # The same shape has noise, or the result of an operation that fell back to the host.
    assert of_a_step(IMAGES, LABELS, IMAGES, IMAGES, batches=[BATCH]) == (BATCH,)
    larger = ((1000, 512), "float32")  # a table
    assert of_a_step(larger, IMAGES, LABELS, batches=[BATCH], sent=[(larger,), BATCH]) == (BATCH,)
    four = of_a_step(*BATCH * 4, RATE, batches=[BATCH] * 4)
    assert (four, samples(four)) == ((BATCH,) * 4, 16)


def test_a_loop_without_core_batches_takes_the_largest_tensors_it_sent():
    assert of_a_step(*BATCH * 3, RATE, RATE, sent=[BATCH, BATCH, (RATE,), BATCH]) == (BATCH,) * 3
    assert of_a_step(IMAGES, LABELS, IMAGES, sent=[BATCH]) == (BATCH,)  # with noise
    assert of_a_step(IMAGES, LABELS, IMAGES) == ((IMAGES,),)  # sent by tensor.to(device)
    assert of_a_step(*BATCH * 3, graphs=3) == ((IMAGES,),) * 3
    assert samples(of_a_step(RATE)) == 1
    assert samples(()) is None


def test_a_mask_that_no_graph_takes_is_left_out():
    texts, mask = ((4, 64), "int32"), ((4, 64), "bool")
    assert of_a_step(texts, batches=[(texts, mask)]) == ((texts,),)


def test_two_views_of_a_sample_are_one_sample():
    views = (IMAGES, IMAGES)
    assert samples(of_a_step(*views, batches=[views])) == 4


def test_the_log_of_the_simulator_is_read(tmp_path):
    assert read_log(tmp_path / "log") == []
    (tmp_path / "log").write_text("compile 3\nrun 3 120 6:4,3,8,8 13:4\nrun 4 0\nrun 5 1")
    taken = (((4, 3, 8, 8), "uint8"), ((4,), "bfloat16"))
    assert read_log(tmp_path / "log") == [3, Ran(3, 120, taken), Ran(4)]


def test_without_a_step_of_an_optimizer_there_is_no_cycle():
    assert main_cycle([]) is None
    assert other_shapes([]) == recompiled([]) == []


class _Texts:
    """A backend that has the HLO texts of the recorded programs."""

    def text_of(self, file):
        return f"ENTRY {{\n  x.1 = f32[{file.stem}]{{0}} add(a.1, b.1)\n}}"


def reason_of(*found):
    return _reason(_Texts(), Path(), found)


def test_the_first_step_that_is_compiled_again_is_explained_and_no_later_one():
    first, step = [Cycle((Ran(number),), (number,)) for number in (0, 1)]
    again = Cycle((Ran(1),))
    assert reason_of(first, step, again, again) == ("", "")
    fact, fix = reason_of(first, step, again, Cycle((Ran(2),), (2,)), Cycle((Ran(3),), (3,)), again)
    assert "f32[1]" in fact
    assert "f32[2]" in fact
    assert "the same shapes and positions" in fix
    cut = Cycle((Ran(1), Ran(2)), (2,))
    last = Cycle((Ran(3),))
    fact, fix = reason_of(first, step, cut, Cycle((Ran(3),), (3,)), last, last)
    assert fact == "a step runs 2 graphs, but the previous step ran 1"
    assert fix == "no .item(), print or if on a tensor inside of core.step()"


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        ([RATE], [LABELS], "takes (4, 1) float32, but the previous step took (1,) float32"),
        ([RATE], [RATE, LABELS], "takes (4, 1) float32 too, unlike the previous step"),
        ([RATE, LABELS], [RATE], "does not take (4, 1) float32, unlike the previous step"),
        ([RATE, RATE], [RATE], "does not take (1,) float32, unlike the previous step"),
    ],
)
def test_a_step_that_takes_other_tensors_is_explained_by_them(before, after, fact):
    first = Cycle((Ran(0),), (0,))
    cycles = [Cycle((Ran(1, taken=tuple(before)),), compiled) for compiled in ((1,), (), (), ())]
    assert (
        reason_of(first, *cycles, Cycle((Ran(2, taken=tuple(after)),), (2,)))[0] == f"a step {fact}"
    )
