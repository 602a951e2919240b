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


class OnlyItself:
    """A hash as the simulator's: equal to nothing else, though another may have its `hash` later."""

    def __hash__(self) -> int:
        return 1


def test_hashes_that_are_alike_are_told_apart() -> None:
    own: list[Hashable] = [OnlyItself() for _ in range(8)]
    others: list[Hashable] = [OnlyItself() for _ in range(8)]
    marks = PrefixMarks(own, 100, 128, 16)
    assert marks.count_reusable_tokens(own, 200, 16) == 128
    assert marks.count_reusable_tokens(others, 200, 16) == 0


def test_hashes_of_bytes_are_kept_short() -> None:
    own: list[Hashable] = [bytes([number]) * 32 for number in range(8)]
    marks = PrefixMarks(own, 100, 128, 16)
    assert marks.count_reusable_tokens([*own], 200, 16) == 128
    assert marks.count_reusable_tokens([b"other" * 7] * 8, 200, 16) == 0


TURN = chain(("prompt", 40), ("output", 10))
MARKS = PrefixMarks(TURN, 40 * 16 + 3, 50 * 16 + 5, 16)


def test_a_prompt_that_extends_the_turn_reuses_all_full_blocks() -> None:
    assert MARKS.count_reusable_tokens([*TURN, *chain(("tool", 5))], 900, 16) == 800
    assert MARKS.count_reusable_tokens([*TURN, *chain(("tool", 5))], 900, 64) == 768


def test_a_prompt_that_drops_the_output_reuses_the_prompt() -> None:
    assert MARKS.count_reusable_tokens(chain(("prompt", 40), ("other", 20)), 960, 16) == 640


def test_a_repeated_prompt_keeps_its_last_token_to_compute() -> None:
    assert MARKS.count_reusable_tokens(TURN[:40], 643, 16) == 640
    assert MARKS.count_reusable_tokens(TURN[:40], 640, 16) == 624


def test_a_prompt_that_leaves_in_the_middle_counts_up_to_a_mark() -> None:
    counted = MARKS.count_reusable_tokens(chain(("prompt", 30), ("summary", 20)), 900, 16)
    assert 16 * 16 <= counted <= 30 * 16


def test_another_text_or_no_hashes_reuse_nothing() -> None:
    assert MARKS.count_reusable_tokens(chain(("other", 60)), 960, 16) == 0
    assert MARKS.count_reusable_tokens((), 960, 16) == 0
    assert PrefixMarks((), 100, 110, 16).count_reusable_tokens(TURN, 900, 16) == 0


def test_few_hashes_are_kept_and_compared() -> None:
    long = Counted(chain(("prompt", 10_000)))
    marks = PrefixMarks(long, 160_000, 160_000, 16)
    assert long.num_asked < 40
    later = Counted(chain(("other", 10_000)))
    assert marks.count_reusable_tokens(later, 160_001, 16) == 0
    assert later.num_asked < 40


def test_where_a_prompt_parts_from_the_last_one() -> None:
    def find(*runs: tuple[str, int], num_tokens: int | None = None) -> int | None:
        hashes = chain(*runs)
        return MARKS.find_first_difference(hashes, 16 * len(hashes) if num_tokens is None else num_tokens)

    assert find(("prompt", 40), ("out", 3), ("tool", 5)) is None
    assert find(("prompt", 40), ("other", 20)) is None, "a template may drop the output"
    assert find(("prompt", 39), ("other", 20)) is None, "and the end of the prompt"
    assert find(("head", 1), ("prompt", 50)) == 0
    assert find(("prompt", 1), ("changed", 50)) == 16
    assert 8 * 16 <= (find(("prompt", 15), ("changed", 40)) or 0) <= 15 * 16
    assert find(("summary", 10)) is None, "history was dropped"
    assert PrefixMarks((), 10, 12, 16).find_first_difference(TURN, 900) is None


def test_whether_a_prompt_goes_on_behind_the_last_one() -> None:
    assert MARKS.is_followed_by([*TURN, *chain(("tool", 5))])
    assert MARKS.is_followed_by(chain(("prompt", 39), ("other", 20))), "a template may drop the end"
    assert not MARKS.is_followed_by(chain(("prompt", 30), ("summary", 20)))
    assert not MARKS.is_followed_by(chain(("other", 60)))
    assert not MARKS.is_followed_by(()), "a short one does not either"
    assert PrefixMarks((), 10, 12, 16).is_followed_by(TURN), "too short to tell"
