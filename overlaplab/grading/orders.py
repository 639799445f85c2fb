"""Code whose order comes from a set, an `id` or a `hash`: another order on each rank.

Hashes of texts are salted and those of most objects are addresses, so that two
processes walk over equal sets in different orders and meet in different collectives.
The ranks of the virtual cluster share a process, where nothing of it shows. `disagree`
makes a twin of a learner's function or class out of its source, in which sets, `id` and
`hash` give rank 0 one order and odd ranks the reverse. What sorts, counts or asks
`x in s` does the same in the twin.

Found where there is source: in functions and classes of a notebook's cells and of
files, with all that they call of the same namespace; not in lambdas, and not in
instances that were made before.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch.distributed as dist

from overlaplab import ours

_MADE = "__overlaplab_set__"


def _reversed_here() -> bool:
    return dist.is_initialized() and dist.get_rank() % 2 == 1


class _Order:
    """Numbers for things in the order in which they are first asked for."""

    def __init__(self, ask: Callable[[Any], int]) -> None:
        self._ask = ask
        self._numbers: dict[int, int] = {}

    def __call__(self, thing: Any) -> int:
        asked = self._ask(thing)
        if self._ask is hash and isinstance(thing, int | float | bool):
            return asked  # the same in every process
        number = self._numbers.setdefault(asked, len(self._numbers) + 1)
        return -number if _reversed_here() else number


class _Set(set[Any]):
    """A set that iterates as its elements came, and on odd ranks in reverse."""

    def __init__(self, things: Iterable[Any] = ()) -> None:
        self._came: dict[Any, None] = {}
        super().__init__()
        self.update(things)

    def __iter__(self) -> Iterator[Any]:
        here = [thing for thing in self._came if thing in self]
        return iter(here[::-1] if _reversed_here() else here)

    def add(self, thing: Any) -> None:
        self._came.setdefault(thing)
        super().add(thing)

    def update(self, *others: Iterable[Any]) -> None:
        for thing in (thing for other in others for thing in other):
            self.add(thing)

    def pop(self) -> Any:
        for thing in self:
            self.remove(thing)
            return thing
        return super().pop()  # raises

    def copy(self) -> _Set:
        return _Set(self._came_in(self))

    def _came_in(self, chosen: set[Any], *others: Any) -> list[Any]:
        every = dict.fromkeys(self._came)
        for other in others:
            every |= dict.fromkeys(getattr(other, "_came", other))
        return [thing for thing in every if set.__contains__(chosen, thing)]

    def __ior__(self, other: Any) -> _Set:  # type: ignore[misc]
        self.update(other)
        return self


def _operator(name: str) -> Callable[..., Any]:
    def method(self: _Set, *others: Any) -> Any:
        chosen = getattr(set, name)(self, *others)
        if chosen is NotImplemented:
            return chosen
        return _Set(self._came_in(chosen, *others))

    return method


for _name in ("or", "and", "sub", "xor", "ror", "rand", "rsub", "rxor"):
    setattr(_Set, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("union", "intersection", "difference", "symmetric_difference"):
    setattr(_Set, _name, _operator(_name))


class _Sets(ast.NodeTransformer):
    """`{a, b}` and `{x for ...}` become calls of `_Set`."""

    def visit_Set(self, node: ast.Set) -> ast.AST:
        self.generic_visit(node)
        return self._made(ast.List(node.elts, ast.Load()), node)

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        self.generic_visit(node)
        return self._made(ast.ListComp(node.elt, node.generators), node)

    @staticmethod
    def _made(items: ast.expr, node: ast.expr) -> ast.AST:
        call = ast.Call(ast.Name(_MADE, ast.Load()), [items], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def disagree(solution: Any) -> Any:
    """The twin of a function or class, or `solution` itself where none can be made.

    Call it on each rank: the ranks of a run share nothing.
    """
    if isinstance(solution, partial):
        func, *given = map(disagree, (solution.func, *solution.args))
        return partial(func, *given, **solution.keywords)
    space = _namespace_of(solution)
    if space is None:
        return solution
    names: dict[str, Any] = {
        **space,
        _MADE: _Set,
        **{
            name: made
            for name, made in (
                ("set", _Set),
                ("frozenset", _Set),
                ("id", _Order(id)),
                ("hash", _Order(hash)),
            )
            if name not in space
        },
    }
    return _Twins(space, names, solution).make(solution)


def _namespace_of(thing: Any) -> dict[str, Any] | None:
    """The globals of a learner's function or class, None for anything else."""
    if ours.is_our_module(str(getattr(thing, "__module__", ""))):
        return None
    if inspect.isclass(thing):
        methods = (m for m in vars(thing).values() if isinstance(m, FunctionType))
        method = next(methods, None)
        return None if method is None else method.__globals__
    thing = inspect.unwrap(thing) if callable(thing) else thing
    return thing.__globals__ if isinstance(thing, FunctionType) else None


class _Twins:
    """Twins of a solution and of what it names in its namespace, and so on from there.

    A namespace may have many more: every function of a notebook, or of a file.
    """

    def __init__(
        self, space: dict[str, Any], names: dict[str, Any], solution: Any
    ) -> None:
        self._space = space
        self._names = names  # in which the twins run
        self._seen = {name for name, thing in space.items() if thing is solution}

    def make(self, thing: Any) -> Any:
        try:
            (made,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
            if not isinstance(made, ast.FunctionDef | ast.ClassDef):
                return thing
            if made.name != thing.__name__:
                return thing  # a lambda
            self._make_named(made)
            inner = thing if inspect.isclass(thing) else inspect.unwrap(thing)
            free = inner.__code__.co_freevars if isinstance(inner, FunctionType) else ()
            cells = [
                cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()
            ]
            module = _Sets().visit(_inside(made, free))
            ast.fix_missing_locations(module)
            space: dict[str, Any] = {}
            file = inspect.getsourcefile(thing) or "<string>"
            exec(compile(module, file, "exec"), self._names, space)
            return space["make"](*cells)
        except (OSError, TypeError, ValueError, SyntaxError):
            return thing

    def _make_named(self, made: ast.AST) -> None:
        """Before it, since a base class or a decorator is used while it is made."""
        for node in ast.walk(made):
            name = node.id if isinstance(node, ast.Name) else ""
            if name in self._space and name not in self._seen:
                self._seen.add(name)
                thing = self._space[name]
                if _namespace_of(thing) is self._space:
                    self._names[name] = self.make(thing)


def _inside(made: ast.FunctionDef | ast.ClassDef, free: tuple[str, ...]) -> ast.Module:
    """`def make(a, b): <made>; return made`: what it takes from around it."""
    arguments = ast.arguments([], [ast.arg(n) for n in free], None, [], [], None, [])
    back = ast.Return(ast.Name(made.name, ast.Load()))
    maker = ast.FunctionDef("make", arguments, [made, back], [], None)
    return ast.Module([maker], [])
