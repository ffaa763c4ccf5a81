"""Which names a program reads, binds and declares, each in its own scope."""

from __future__ import annotations

import ast
from typing import Any


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None for anything that Python does not accept."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Scope:
    """What a module, class, function or comprehension does with names."""

    def __init__(self, node: ast.AST, parent: _Scope | None) -> None:
        self.parent, self.is_class = parent, isinstance(node, ast.ClassDef)
        self.is_comprehension = hasattr(node, "generators")
        self.bound, self.read, self.declared = set[str](), set[str](), set[str]()  # declared as global
        arguments = getattr(node, "args", None)
        for group in ("posonlyargs", "args", "kwonlyargs") if arguments else ():
            self.bound |= {argument.arg for argument in getattr(arguments, group)}
        self.bound |= {getattr(arguments, star).arg for star in ("vararg", "kwarg") if getattr(arguments, star, None)}

    def note(self, node: ast.AST) -> None:
        """Take note of the names that a node reads, binds or declares by itself, and not through its parts."""
        name = getattr(node, "rest", None) if isinstance(node, ast.MatchMapping) else getattr(node, "name", None)
        if isinstance(node, ast.Name):
            (self.read if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)
        elif isinstance(node, ast.alias):
            self.bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Global):
            self.declared.update(node.names)
        elif isinstance(name, str):  # of a function, a class, an exception, a pattern or a type parameter
            self.bound.add(name)

    def is_global(self, name: str) -> bool:
        """Whether a name that is read here is the module's or a builtin."""
        scope = self
        while scope.parent and name not in scope.declared:
            if name in scope.bound and (scope is self or not scope.is_class):  # functions do not see a class's names
                return False
            scope = scope.parent
        return True


def _own_parts(node: Any) -> list[ast.AST]:
    """The parts of a node that lie in a scope of its own; [] where it has none."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [*node.body, *getattr(node, "type_params", ())]
    if isinstance(node, ast.Lambda):
        return [node.body]
    if not (generators := getattr(node, "generators", None)):
        return []
    results = (getattr(node, name) for name in ("elt", "key", "value") if hasattr(node, name))
    return [generators[0].target, *generators[0].ifs, *generators[1:], *results]


def globals_of(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names that functions and classes of a program read as globals; and the names that it reads but never binds.
    Each scope has its own names: the parameter in `lambda eval: 0` does not bind `eval` for any other line.  symtable
    says less from Python 3.12 on: there the names of comprehensions are those of the scope around them."""
    module = _Scope(tree, None)
    scopes, todo = [module], [(part, module) for part in ast.iter_child_nodes(tree)]
    while todo:  # iterative, so long code cannot exhaust the stack
        node, scope = todo.pop()
        scope.note(node)
        parts = list(ast.iter_child_nodes(node))
        if own := _own_parts(node):
            scopes.append(inner := _Scope(node, scope))
            todo += [(part, inner) for part in own]
            kept = set(map(id, own))
            first = getattr(node, "generators", ())[:1]  # evaluated outside of the comprehension
            parts = [first[0].iter] if first else [part for part in parts if id(part) not in kept]
        if isinstance(node, ast.NamedExpr):  # binds a name outside of comprehensions
            home = scope
            while home.parent and home.is_comprehension:
                home = home.parent
            home.note(node.target)
            parts = [node.value]
        todo += [(part, scope) for part in parts]
    reads = [(scope, {name for name in scope.read if scope.is_global(name)}) for scope in scopes]
    bound = module.bound.union(*(scope.bound & scope.declared for scope in scopes))
    inside = set[str]().union(*(names for scope, names in reads if scope is not module))
    return inside, set[str]().union(*(names for _, names in reads)) - bound
