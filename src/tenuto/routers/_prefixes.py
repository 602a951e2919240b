"""Which prompts were sent to which engine: a tree of prompt parts, to find the known prefix of a new prompt.

A router cannot see an engine's cache. It assumes that an engine still has the prompts that it was sent last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tenuto.core.router import Part

MEAN_PART_TOKENS = 64
"""For each engine, as many parts are remembered as if they had this size on average: each takes 0.7 KB."""


class _Node:
    __slots__ = ("children", "engines", "parent", "part")

    def __init__(self, parent: _Node | None, part: Part | None) -> None:
        self.parent = parent
        self.part = part
        self.children: dict[Part, _Node] = {}
        self.engines: dict[str, None] = {}
        """The engines that were sent it. Their order is that of their first prompts: it decides ties."""


class Prefixes:
    """A tree of prompts that drops its oldest parts beyond a limit. A change takes O(parts of the prompt)."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: the limit for each engine."""
        self._max_tokens = max_tokens
        self._max_parts = max_tokens // MEAN_PART_TOKENS
        self._root = _Node(None, None)
        self._nodes: dict[str, OrderedDict[_Node, None]] = {}
        """Each engine's nodes; the one that was sent longest ago is first. A node is sent after its parent
        in every prompt, so the order is kept by moving leaves first."""
        self._num_tokens: dict[str, int] = {}

    def add(self, engine: str, parts: Sequence[Part]) -> None:
        """A prompt was sent to an engine."""
        own = self._nodes.setdefault(engine, OrderedDict())
        path, node = [], self._root
        for part in parts:
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Node(node, part)
            path.append(child)
            node = child
        # Leaves are older than what is before them, so they are forgotten first.
        for node in reversed(path):
            if engine not in node.engines:
                assert node.part is not None
                self._num_tokens[engine] = self._num_tokens.get(engine, 0) + node.part.num_tokens
            node.engines[engine] = None
            own[node] = None
            own.move_to_end(node)
        while self._num_tokens.get(engine, 0) > self._max_tokens or len(own) > self._max_parts:
            self._drop(next(iter(own)), engine)

    def find(self, parts: Sequence[Part]) -> dict[str, int]:
        """By engine: the number of the prompt's first tokens that it was sent before."""
        found: dict[str, int] = {}
        node, num_tokens = self._root, 0
        for part in parts:
            child = node.children.get(part)
            if child is None:
                break
            node = child
            num_tokens += part.num_tokens
            for engine in node.engines:
                found[engine] = num_tokens
        return found

    def get_num_tokens(self, engine: str) -> int:
        """Number of tokens that are remembered for an engine."""
        return self._num_tokens.get(engine, 0)

    def forget(self, engine: str) -> None:
        """An engine left: its cache is gone."""
        for node in list(self._nodes.pop(engine, ())):
            node.engines.pop(engine, None)
            self._prune(node)
        self._num_tokens.pop(engine, None)

    def _drop(self, node: _Node, engine: str) -> None:
        assert node.part is not None
        del self._nodes[engine][node], node.engines[engine]
        self._num_tokens[engine] -= node.part.num_tokens
        self._prune(node)

    @staticmethod
    def _prune(node: _Node) -> None:
        """Remove a node from the tree if no engine has it, and then its ancestors likewise."""
        while node.parent is not None and not node.engines and not node.children:
            assert node.part is not None
            node.parent.children.pop(node.part, None)
            node = node.parent
