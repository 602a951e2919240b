"""How far a prompt runs through the turn before, from the few hashes that are kept of that one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tenuto.core.reuse import PrefixMarks


class Counted(Sequence[Hashable]):
    """Hashes that count how often one is asked for."""

    def __init__(self, hashes: Sequence[Hashable]) -> None:
        self._hashes = hashes
        self.num_asked = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def __getitem__(self, index: int) -> Hashable:  # type: ignore[override]
        self.num_asked += 1
        return self._hashes[index]


def chain(*parts: tuple[str, int]) -> list[Hashable]:
    """Chained hashes of texts of so many blocks each."""
    hashes: list[Hashable] = []
    for text, num_blocks in parts:
        for number in range(num_blocks):
            hashes.append((text, number, hash(hashes[-1]) if hashes else None))
    return hashes


def count_reusable(marks: PrefixMarks, hashes: Sequence[Hashable], num_tokens: int, block_size: int) -> int:
    return marks.count_reusable_tokens(marks.count_shared_blocks(hashes), num_tokens, block_size)


def find_difference(marks: PrefixMarks, hashes: Sequence[Hashable], num_tokens: int) -> int | None:
    return marks.find_first_difference(marks.count_shared_blocks(hashes), num_tokens)


def is_followed(marks: PrefixMarks, hashes: Sequence[Hashable]) -> bool:
    return marks.is_followed_by(marks.count_shared_blocks(hashes))


class OnlyItself:
    """A hash as the simulator's: equal to nothing else, though another may have its `hash` later."""

    def __hash__(self) -> int:
        return 1


def test_hashes_that_are_alike_are_told_apart() -> None:
    own: list[Hashable] = [OnlyItself() for _ in range(8)]
    others: list[Hashable] = [OnlyItself() for _ in range(8)]
    marks = PrefixMarks(own, 100, 128, 16)
    assert count_reusable(marks, own, 200, 16) == 128
    assert count_reusable(marks, others, 200, 16) == 0


def test_hashes_of_bytes_are_kept_short() -> None:
    own: list[Hashable] = [bytes([number]) * 32 for number in range(8)]
    marks = PrefixMarks(own, 100, 128, 16)
    assert count_reusable(marks, [*own], 200, 16) == 128
    assert count_reusable(marks, [b"other" * 7] * 8, 200, 16) == 0


TURN = chain(("prompt", 40), ("output", 10))
MARKS = PrefixMarks(TURN, 40 * 16 + 3, 50 * 16 + 5, 16)


def test_a_prompt_that_extends_the_turn_reuses_all_full_blocks() -> None:
    assert count_reusable(MARKS, [*TURN, *chain(("tool", 5))], 900, 16) == 800
    assert count_reusable(MARKS, [*TURN, *chain(("tool", 5))], 900, 64) == 768


def test_a_prompt_that_drops_the_output_reuses_the_prompt() -> None:
    assert count_reusable(MARKS, chain(("prompt", 40), ("other", 20)), 960, 16) == 640


def test_a_repeated_prompt_keeps_its_last_token_to_compute() -> None:
    assert count_reusable(MARKS, TURN[:40], 643, 16) == 640
    assert count_reusable(MARKS, TURN[:40], 640, 16) == 624


def test_a_prompt_that_leaves_in_the_middle_counts_up_to_a_mark() -> None:
    counted = count_reusable(MARKS, chain(("prompt", 30), ("summary", 20)), 900, 16)
    assert 16 * 16 <= counted <= 30 * 16


def test_another_text_or_no_hashes_reuse_nothing() -> None:
    assert count_reusable(MARKS, chain(("other", 60)), 960, 16) == 0
    assert count_reusable(MARKS, (), 960, 16) == 0
    assert count_reusable(PrefixMarks((), 100, 110, 16), TURN, 900, 16) == 0


def test_few_hashes_are_kept_and_compared() -> None:
    long = Counted(chain(("prompt", 10_000)))
    marks = PrefixMarks(long, 160_000, 160_000, 16)
    assert long.num_asked < 40
    later = Counted(chain(("other", 10_000)))
    assert count_reusable(marks, later, 160_001, 16) == 0
    assert later.num_asked < 40


def test_where_a_prompt_parts_from_the_last_one() -> None:
    def find(*runs: tuple[str, int], num_tokens: int | None = None) -> int | None:
        hashes = chain(*runs)
        return find_difference(MARKS, hashes, 16 * len(hashes) if num_tokens is None else num_tokens)

    assert find(("prompt", 40), ("out", 3), ("tool", 5)) is None
    assert find(("prompt", 40), ("other", 20)) is None, "a template may drop the output"
    assert find(("prompt", 39), ("other", 20)) is None, "and the end of the prompt"
    assert find(("head", 1), ("prompt", 50)) == 0
    assert find(("prompt", 1), ("changed", 50)) == 16
    assert 8 * 16 <= (find(("prompt", 15), ("changed", 40)) or 0) <= 15 * 16
    assert find(("summary", 10)) is None, "history was dropped"
    assert find_difference(PrefixMarks((), 10, 12, 16), TURN, 900) is None


def test_whether_a_prompt_goes_on_behind_the_last_one() -> None:
    assert is_followed(MARKS, [*TURN, *chain(("tool", 5))])
    assert is_followed(MARKS, chain(("prompt", 39), ("other", 20))), "a template may drop the end"
    assert not is_followed(MARKS, chain(("prompt", 30), ("summary", 20)))
    assert not is_followed(MARKS, chain(("other", 60)))
    assert not is_followed(MARKS, ()), "a short one does not either"
    assert is_followed(PrefixMarks((), 10, 12, 16), TURN), "too short to tell"
