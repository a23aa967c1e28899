"""Every message that the program can print or answer with, read from its source: no module is imported.

A message is the text given to an exception of ours that reaches a user, to a refusal of a node, or to the log
from `warning` on; or what a function returns that says why something is refused. What stands in it only when
it is printed (`{port}`, `%s`) is a hole, `<>`. A text that is nothing but holes passes on what another place
has said, and is not one of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Not `doctor`: docs/doctor.md has what it says.
PACKAGES = (
    "cli.py", "common", "transfer", "prefill_node", "decode_node", "gateway", "model_store", "conformance",
    "benchmarks", "terminal",
)  # fmt: skip
HOLE = "<>"
# Which argument is the text.
SAYS = {
    "ConfigError": 0,
    "RequestRejected": 0,
    "AskFailed": 0,
    "ChildFailed": 0,
    "ClickException": 0,
    "UsageError": 0,
    "BadParameter": 0,
    "deadline_exceeded": 0,
    "_unauthorized": 0,
    "Reject": 1,
    "GrammarRefusal": 1,
    "RefusedOut": 2,
    "FailedOut": 2,
    "Failed": 2,
    "_fail": 2,
}
# Whose ValueErrors become the text of a refusal, behind the name of the field.
VALIDATORS = ("gateway/", "common/engine/grammar_compiler.py")
# Functions that return a reason.
REASONS = {
    "mismatch", "refused", "_refusal", "unenforceable", "_wrong", "_wrong_beside", "_wrong_of_type",
    "_wrong_of_object",
}  # fmt: skip
LOGS = {"warning", "error", "exception", "critical"}
_PERCENT = re.compile(r"%(?:[-+0# ]*\d*(?:\.\d+)?[a-z])")
_NAMED = re.compile(r"<[^<>]*>")


def messages_in_code(root: Path = ROOT) -> dict[str, str]:
    """Return every message, holes and all, with the file that it is in."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            where = str(file.relative_to(root))
            says = SAYS | {"ValueError": 0} if where.startswith(VALIDATORS) else SAYS
            for text in _messages(ast.parse(file.read_text()), says):
                if re.search("[a-z]", text.replace(HOLE, "")):
                    found.setdefault(text, where)
    return found


def with_holes(text: str) -> str:
    """Return a message of the page, `port <port> is taken`, as the code has it: with its holes unnamed."""
    return _NAMED.sub(HOLE, text)


def pattern(text: str) -> re.Pattern[str]:
    """Return what finds a message, with anything in its holes, in what was printed."""
    return re.compile(".*?".join(re.escape(part) for part in with_holes(text).split(HOLE)), re.DOTALL)


def _messages(tree: ast.Module, says: Mapping[str, int]) -> Iterator[str]:
    for scope in ast.walk(tree):
        if isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _messages_of_scope(scope, says)


def _messages_of_scope(
    scope: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef, says: Mapping[str, int]
) -> Iterator[str]:
    nodes = list(_inside(scope))
    texts: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    texts.setdefault(target.id, []).append(node.value)
    gives_reasons = isinstance(scope, ast.FunctionDef) and scope.name in REASONS
    for node in nodes:
        text = node.value if gives_reasons and isinstance(node, ast.Return) else _text_of(node, says)
        for each in texts.get(text.id, [text]) if isinstance(text, ast.Name) else [text]:
            if each is not None:
                yield from _templates(each)


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, but not those of functions within it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
            yield from _inside(node)


def _text_of(node: ast.AST, says: Mapping[str, int]) -> ast.expr | None:
    if not isinstance(node, ast.Call):
        return None
    match node.func:
        case ast.Name(name):
            at = says.get(name)
        case ast.Attribute(value=ast.Name(owner), attr=name) if "log" in owner.lower():
            at = 0 if name in LOGS else None
        case ast.Attribute(attr=name):
            at = says.get(name)
        case _:
            at = None
    return node.args[at] if at is not None and len(node.args) > at else None


def _templates(text: ast.expr) -> Iterator[str]:
    """Yield what a text can be: one message, or one of each branch."""
    match text:
        case ast.Constant(str() as words):
            yield _PERCENT.sub(HOLE, words)
        case ast.JoinedStr(parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in parts)
        case ast.IfExp(_, one, other):
            yield from _templates(one)
            yield from _templates(other)
        case ast.BinOp(left, ast.Add(), right):
            yield from (a + b for a in _templates(left) for b in _templates(right))
        case _:
            yield HOLE
