import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier

Chain = tuple[str, ...]


def chain(path: str) -> Chain:
    """Chained hashes of a sequence, one per letter: two sequences share those of their common prefix."""
    return tuple(path[: i + 1] for i in range(len(path)))


def tier(capacity_chunks: int, *, bytes_per_s: float = 100.0, name: str = "host") -> Tier:
    return Tier(name, capacity_bytes=10 * capacity_chunks, chunk_bytes=10, link=Link(bytes_per_s))


def test_copies_queue_on_a_link() -> None:
    link = Link(bytes_per_s=100.0, latency_s=0.5)
    assert link.transfer(200, now_s=1.0) == 3.5  # 1 + 200 / 100, and the latency
    assert link.transfer(100, now_s=1.0) == 4.5  # waits until 3, then 100 / 100
    assert link.transfer(100, now_s=10.0) == 11.5  # the link was free again


def test_copying_nothing_is_done_at_once() -> None:
    link = Link(bytes_per_s=100.0, latency_s=0.5)
    link.transfer(1000, now_s=0.0)
    assert link.transfer(0, now_s=1.0) == 1.0
    assert link.free_at_s == 10.0


@given(copies=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 10)), max_size=20))
def test_a_link_is_never_faster_than_its_bandwidth_and_never_idles_with_work(
    copies: list[tuple[int, float]],
) -> None:
    link = Link(bytes_per_s=1000.0)
    now_s = last_done_s = 0.0
    for num_bytes, gap_s in copies:
        now_s += gap_s
        done_s = link.transfer(num_bytes, now_s)
        assert done_s == pytest.approx(max(now_s, last_done_s) + num_bytes / 1000.0)
        last_done_s = done_s


def test_a_tier_finds_the_longest_prefix_it_holds() -> None:
    host = tier(10)
    assert host.put(chain("abcd")) == chain("abcd")
    assert host.put(chain("abxy")) == chain("abxy")[2:]  # a and ab are shared
    assert len(host) == 6
    assert [host.hit_length(chain(path)) for path in ("abcd", "abxz", "abq", "q", "")] == [4, 3, 2, 0, 0]


def test_tails_are_evicted_before_the_prefixes_they_continue() -> None:
    host = tier(4)
    host.put(chain("abc"))
    host.put(chain("xy"))  # 5 chunks: the tail of the older sequence goes
    assert (host.hit_length(chain("abc")), host.hit_length(chain("xy"))) == (2, 2)
    host.put(chain("ab"))  # used again
    host.put(chain("pq"))
    assert [host.hit_length(chain(path)) for path in ("abc", "xy", "pq")] == [2, 0, 2]


def test_a_sequence_beyond_the_capacity_keeps_its_start() -> None:
    host = tier(3)
    assert host.put(chain("abcdef")) == chain("abc")
    assert host.hit_length(chain("abcdef")) == 3


PATHS = st.lists(st.text(alphabet="ab", min_size=1, max_size=8), min_size=1, max_size=25)


@given(capacity=st.integers(1, 12), paths=PATHS)
def test_what_is_held_is_always_a_prefix_and_within_capacity(capacity: int, paths: list[str]) -> None:
    host = tier(capacity)
    for path in paths:
        before = host.hit_length(chain(path))
        assert len(host.put(chain(path))) == min(len(path), capacity) - min(before, capacity)
        assert len(host) <= capacity
        assert host.hit_length(chain(path)) == min(len(path), capacity)
        for other in paths:
            held = [host.hit_length(chain(other)[i:][:1]) == 1 for i in range(len(other))]
            assert held == sorted(held, reverse=True)
            assert host.hit_length(chain(other)) == sum(held)


def test_a_load_moves_what_the_gpu_lacks() -> None:
    tiers = OffloadTiers([tier(10)])
    assert tiers.store(chain("abcd"), now_s=0.0) == (4, 0.4)  # 40 bytes at 100 per second
    assert tiers.store(chain("abcdef"), now_s=1.0) == (2, 1.2)  # only what is new
    assert tiers.load(chain("abcdxy"), now_s=2.0, skip=1) == 2.3
    assert tiers.load(chain("abcdxy"), now_s=3.0, skip=4) == 3.0
    assert tiers.load(chain("zz"), now_s=3.0, skip=1) == 3.0
    assert tiers.hit_length(chain("zz")) == 0  # what the GPU has is not taken for stored


def test_what_is_being_copied_is_not_evicted() -> None:
    tiers = OffloadTiers([tier(4)])
    tiers.store(chain("abcd"), now_s=0.0)  # until 0.4
    assert tiers.store(chain("x"), now_s=0.3)[0] == 0
    tiers.load(chain("abcd"), now_s=1.0, skip=2)  # until 1.2
    assert tiers.store(chain("x"), now_s=1.1)[0] == 0
    assert tiers.store(chain("xyz"), now_s=1.2)[0] == 3
    assert tiers.hit_length(chain("abcd")) == 1


def test_loads_and_stores_share_a_link() -> None:
    tiers = OffloadTiers([tier(10)])
    tiers.store(chain("abcd"), now_s=0.0)
    # The load waits for the store: 0.4 s, then 40 bytes at 100 per second.
    assert tiers.load(chain("abcd"), now_s=0.1) == pytest.approx(0.8)


def test_a_far_tier_serves_what_the_near_one_lost() -> None:
    host, disk = tier(2), tier(10, bytes_per_s=20.0, name="disk")
    tiers = OffloadTiers([host, disk])
    # 4 chunks to the disk, at 20 bytes per second, and the first 2 to the host.
    assert tiers.store(chain("abcd"), now_s=0.0) == (4, 2.0)
    assert (host.hit_length(chain("abcd")), disk.hit_length(chain("abcd"))) == (2, 4)
    # 2 chunks come from the disk, 20 bytes at 20 per second; all 4 pass the host's link, 40 bytes at 100.
    assert tiers.load(chain("abcd"), now_s=10.0) == 11.0


def test_a_load_from_afar_stays_near() -> None:
    host, disk = tier(4), tier(10, bytes_per_s=20.0, name="disk")
    tiers = OffloadTiers([host, disk])
    tiers.store(chain("abcd"), now_s=0.0)
    tiers.store(chain("wxyz"), now_s=2.0)  # pushes the first sequence out of the host
    assert host.hit_length(chain("abcd")) == 0
    assert tiers.load(chain("abcd"), now_s=10.0) == 12.0  # 40 bytes at 20 per second
    assert host.hit_length(chain("abcd")) == 4
    assert tiers.load(chain("abcd"), now_s=20.0) == pytest.approx(20.4)  # the host's link alone


def test_a_tier_must_hold_a_chunk() -> None:
    with pytest.raises(ConfigError, match="tier 'host': chunks of 10 bytes do not fit 5 bytes"):
        Tier("host", capacity_bytes=5, chunk_bytes=10, link=Link(1.0))
