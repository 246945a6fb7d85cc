import pytest
import torch

from tpukit.batches import Batches


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


def seen(count, world_size, batch_size, **options):
    """Return the batches of every rank, as lists of sample numbers."""
    return [
        [
            batch.tolist()
            for batch in Batches(Numbers(count), batch_size=batch_size, rank=rank, world_size=world_size, **options)
        ]
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 24, 97])
def test_in_order_every_sample_comes_once_and_the_padding_is_at_the_end(count, world_size):
    ranks = seen(count, world_size, batch_size=4)
    gathered = [sample for batches in ranks for batch in batches for sample in batch]
    assert gathered[:count] == list(range(count))
    assert set(gathered[count:]) <= {count - 1}


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True}])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_core_gets_the_same_number_of_batches_of_one_size(world_size, options):
    ranks = seen(50, world_size, batch_size=4, **options)
    assert len({len(batches) for batches in ranks}) == 1
    assert {len(batch) for batches in ranks for batch in batches} == {4}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shuffled_every_sample_comes_at_least_once_and_with_drop_last_at_most_once(world_size):
    flat = [sample for batches in seen(97, world_size, 4, shuffle=True) for batch in batches for sample in batch]
    assert set(flat) == set(range(97))
    flat = [s for batches in seen(97, world_size, 4, shuffle=True, drop_last=True) for b in batches for s in b]
    assert len(flat) == len(set(flat)) == 97 // (4 * world_size) * 4 * world_size


def test_two_cores_see_in_a_step_what_one_sees_with_twice_the_batch():
    (one,) = seen(40, 1, 8, shuffle=True)
    first, second = seen(40, 2, 4, shuffle=True)
    assert [set(batch) for batch in one] == [set(a) | set(b) for a, b in zip(first, second, strict=True)]


def test_each_epoch_has_its_own_order_and_the_seed_decides_it():
    batches = Batches(Numbers(40), batch_size=8, shuffle=True)
    first, second = ([batch.tolist() for batch in batches] for _ in range(2))
    assert first != second
    assert first == [batch.tolist() for batch in Batches(Numbers(40), batch_size=8, shuffle=True)]
    assert first != [batch.tolist() for batch in Batches(Numbers(40), batch_size=8, shuffle=True, seed=1)]


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {}, "dataset is empty"),
        (7, {"drop_last": True, "world_size": 2}, "7 samples do not fill one batch of 4 on each of 2 cores"),
    ],
)
def test_what_cannot_be_batched_is_refused_with_the_fix(count, options, message):
    with pytest.raises(ValueError, match=message):
        Batches(Numbers(count), batch_size=4, **options)


def test_the_fix_for_a_batch_that_does_not_fill_works():
    with pytest.raises(ValueError, match="batch_size=3, or drop_last=False"):
        Batches(Numbers(7), batch_size=4, world_size=2, drop_last=True)
    assert len(Batches(Numbers(7), batch_size=3, world_size=2, drop_last=True)) == 1
    assert len(Batches(Numbers(7), batch_size=4, world_size=2)) == 1
