"""Full KV blocks found again by the tokens that they hold and all tokens before those."""

from __future__ import annotations

from collections.abc import Sequence

from tinyvllm.memory.blocks import BlockManager


class CachedBlock:
    """The blocks, one a KV group, of `block_size` tokens that follow those of `parent`.

    `parent` is None for the root, which holds no tokens, and after the eviction.
    """

    __slots__ = ("blocks", "children", "parent", "tokens")

    def __init__(
        self, parent: CachedBlock | None, tokens: tuple[int, ...], blocks: tuple[int, ...]
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.children: dict[tuple[int, ...], CachedBlock] = {}


class PrefixCache:
    """A tree of cached blocks; each path from the root spells the first tokens of a sequence.

    A block's K and V depend on all tokens before it, so its identity is its path. Each step along
    a path is a dictionary look-up, which finds by hash and confirms by comparing the tokens: two
    prefixes with equal hashes are never taken for each other.

    Blocks are added while in use, stay when their last user leaves, and are evicted when
    `BlockManager.allocate` needs them, the longest unused first. With a block go all that follow
    it in the tree, since nothing would find them any more; those among them that are in use
    remain their users' own.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.root = CachedBlock(None, (), ())
        self.num_queried_tokens = 0  # of the sequences that began and may share
        self.num_hit_tokens = 0  # of these, not computed
        self._entries: dict[int, CachedBlock] = {}  # by block
        blocks.evict = self._evict

    def lookup(self, tokens: Sequence[int]) -> list[CachedBlock]:
        """The longest path that spells a prefix of `tokens`, in full blocks, without the root."""
        size, path, entry = self.blocks.block_size, [], self.root
        for start in range(0, len(tokens) - size + 1, size):
            found = entry.children.get(tuple(tokens[start : start + size]))
            if found is None:
                break
            path.append(found)
            entry = found
        return path

    def extend(
        self, parent: CachedBlock, tokens: tuple[int, ...], blocks: tuple[int, ...]
    ) -> CachedBlock | None:
        """The entry of `tokens` after `parent`, made of `blocks`, in use, unless there is one.

        From then on nobody may write the blocks. None when `parent` has been evicted.
        """
        if parent.parent is None and parent is not self.root:
            return None
        entry = parent.children.get(tokens)
        if entry is None:
            entry = parent.children[tokens] = CachedBlock(parent, tokens, blocks)
            self.blocks.keep(blocks)
            self._entries.update(dict.fromkeys(blocks, entry))
        return entry

    def reset(self) -> None:
        """Forgets every block; those in use remain their users' own."""
        for entry in list(self.root.children.values()):
            self._evict(entry.blocks[0])

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the tree holds each kept block once, and no other."""
        found, todo = {}, [self.root]
        while todo:
            for tokens, entry in todo.pop().children.items():
                if tokens != entry.tokens:
                    raise RuntimeError(f"entry of {entry.tokens} is filed under {tokens}")
                found.update(dict.fromkeys(entry.blocks, entry))
                todo.append(entry)
        kept = {b for b in range(self.blocks.num_blocks) if self.blocks.is_kept(b)}
        if found != self._entries or found.keys() != kept:
            raise RuntimeError(
                f"blocks in the tree {sorted(found)}, on record {sorted(self._entries)}, "
                f"kept {sorted(kept)}"
            )

    def _evict(self, block: int) -> None:
        entry = self._entries[block]
        assert entry.parent is not None
        del entry.parent.children[entry.tokens]
        todo = [entry]
        while todo:
            entry = todo.pop()
            entry.parent = None
            todo += entry.children.values()
            entry.children = {}
            self.blocks.drop(entry.blocks)
            for one in entry.blocks:
                del self._entries[one]
