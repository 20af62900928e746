"""Which rank reads which board, and what all ranks saw together. Every function here is reached by all ranks."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Container, Sequence
from dataclasses import asdict
from typing import Any

from lightning_npu.errors import one_line
from lightning_npu.power.base import Board, PowerSource, Reading, SourceRecipe
from lightning_npu.power.host import host_id
from lightning_npu.power.polling import find_boards

log = logging.getLogger(__name__)


def gather(value: Any) -> list[Any]:
    """``value`` of every rank, in the order of ranks; plain values only. Without process group: this one alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def rank() -> int:
    """This process among those that train together."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class OneBoard(PowerSource):
    """One board of a source that has several."""

    name = "board"

    def __init__(self, source: PowerSource, board: Board) -> None:
        self.source, self.board = source, board

    @classmethod
    def available(cls) -> str:
        """Depends on the source."""
        return "ok: a part of another source"

    def boards(self) -> tuple[Board, ...]:
        """The one, as long as its source has it."""
        return tuple(board for board in self.source.boards() if board.key == self.board.key)

    def read(self, board: Board, *, power: bool = True) -> Reading:
        """As its source reads it."""
        return self.source.read(board, power=power)

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def recipe(self) -> SourceRecipe | None:
        """None where the source has none."""
        recipe = self.source.recipe()
        if recipe is None:
            return None
        return SourceRecipe(f"{__name__}:one_board", {"recipe": asdict(recipe), "key": self.board.key})


def make(recipe: SourceRecipe) -> PowerSource:
    """The source that a recipe describes."""
    module, _, factory = recipe.factory.partition(":")
    source: PowerSource = getattr(importlib.import_module(module), factory)(**recipe.options)
    return source


def one_board(recipe: dict[str, Any], key: str) -> OneBoard:
    """A source by the recipe of :class:`OneBoard`.

    Raises:
        PowerUnavailableError: the source or its board is not here.
    """
    source = make(SourceRecipe(**recipe))
    return OneBoard(source, next(board for board in source.boards() if board.key == key))


def boards_of(source: PowerSource) -> tuple[tuple[Board, ...], str]:
    """The boards of a source, or none and the reason."""
    try:
        return find_boards(source), "it has no boards"
    except Exception as error:  # a third party's source may fail in any way, and must not end a training
        return (), one_line(error)


def divide(sources: Sequence[PowerSource]) -> tuple[list[PowerSource], dict[str, str]]:
    """The sources that this rank is to read, so that every board that some rank uses is read by one rank of its host.

    The first rank of a host reads all boards that ranks of the host use, so that what it logs is the host's whole
    power; boards that it cannot open, such as those that a container shows to another rank only, are read by that
    rank.

    Returns:
        the sources, each with boards, and by name why others have none.
    """
    mine: list[tuple[PowerSource, tuple[Board, ...]]] = []
    problems: dict[str, str] = {}
    for source in sources:
        boards, reason = boards_of(source)
        if boards:
            mine.append((source, boards))
        else:
            problems[unused_name(source.name, problems)] = reason
    offers = [(_recipe(source), [board.key for board in boards]) for source, boards in mine]
    host, here = host_id(), rank()
    everyone = gather([host, [(recipe and asdict(recipe), keys) for recipe, keys in offers]])
    if len(everyone) == 1:
        return [source for source, _ in mine], problems
    neighbours = [number for number, (name, _) in enumerate(everyone) if name == host]
    known = {board.key for _, boards in mine for board in boards}
    if here == neighbours[0]:
        for number in neighbours[1:]:
            for recipe, keys in everyone[number][1]:
                if recipe is not None and not known.issuperset(keys):
                    mine += _others(SourceRecipe(**recipe), set(keys) - known)
                    known.update(board.key for _, boards in mine for board in boards)
    readers = gather(sorted(known))
    taken = {key for number in neighbours if number < here for key in readers[number]}
    left: list[PowerSource] = []
    for source, boards in mine:
        free = [board for board in boards if board.key not in taken]
        left += [source] if len(free) == len(boards) else [OneBoard(source, board) for board in free]
    return left, problems


def _recipe(source: PowerSource) -> SourceRecipe | None:
    try:
        return source.recipe()
    except Exception as error:
        log.debug("Other ranks cannot make the source %s: %r", source.name, error)
        return None


def unused_name(name: str, taken: Container[str]) -> str:
    """``name``, or ``name #2`` and so on where that is taken."""
    candidates = itertools.chain((name,), (f"{name} #{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _others(recipe: SourceRecipe, wanted: set[str]) -> list[tuple[PowerSource, tuple[Board, ...]]]:
    """Boards of another rank's source, where this process can read them too."""
    try:
        source = make(recipe)
        return [(OneBoard(source, board), (board,)) for board in source.boards() if board.key in wanted]
    except Exception as error:
        log.debug("pid %d cannot read what another rank reads: %r", os.getpid(), error)
        return []
