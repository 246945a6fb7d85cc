import pytest

from tpukit.essentials.data.sampler import ShardedSampler


def seen(count, world_size, batch_size, *, epoch=0, seed=0, done=0, **options):
    """Return the samples of every rank, batch by batch."""
    samplers = [
        ShardedSampler(count, batch_size, rank, world_size, **options) for rank in range(world_size)
    ]
    return [one.samples(one.positions(done), epoch=epoch, seed=seed).tolist() for one in samplers]


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
    flat = [
        sample
        for batches in seen(97, world_size, 4, shuffle=True)
        for batch in batches
        for sample in batch
    ]
    assert set(flat) == set(range(97))
    flat = [
        s
        for batches in seen(97, world_size, 4, shuffle=True, drop_last=True)
        for b in batches
        for s in b
    ]
    assert len(flat) == len(set(flat)) == 97 // (4 * world_size) * 4 * world_size


def test_two_cores_see_in_a_step_what_one_sees_with_twice_the_batch():
    (one,) = seen(40, 1, 8, shuffle=True)
    first, second = seen(40, 2, 4, shuffle=True)
    assert [set(batch) for batch in one] == [
        set(a) | set(b) for a, b in zip(first, second, strict=True)
    ]


def test_each_epoch_has_its_own_order_and_the_seed_decides_it():
    first, second, other = (
        seen(40, 1, 8, epoch=e, seed=s, shuffle=True) for e, s in [(0, 0), (1, 0), (0, 1)]
    )
    assert first != second
    assert first != other
    assert first == seen(40, 1, 8, shuffle=True)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "batch_size", "world_size"), [(97, 4, 3), (40, 5, 8), (7, 4, 2)])
def test_an_epoch_that_is_resumed_has_the_batches_that_were_left(
    count, batch_size, world_size, shuffle
):
    whole = seen(count, world_size, batch_size, shuffle=shuffle)
    for steps in range(len(whole[0]) + 1):
        rest = seen(
            count, world_size, batch_size, shuffle=shuffle, done=steps * batch_size * world_size
        )
        assert rest == [batches[steps:] for batches in whole]


@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_from_count_on_are_padding(shuffle):
    samplers = [ShardedSampler(50, 4, rank, 3, shuffle) for rank in range(3)]
    positions = sorted(int(position) for one in samplers for position in one.positions().ravel())
    assert positions == list(range(60))  # five steps of twelve: fifty samples, ten of padding
