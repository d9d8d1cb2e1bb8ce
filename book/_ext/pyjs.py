"""Python modules as one JavaScript text, so that a static page computes with the library's own formulas.

A subset of Python, enough for `zerolab.predict`: functions, generators, closures, dataclasses, named tuples, comprehensions, dicts,
sets. `pyjs.js` is the other half: Python's containers and operators. What is outside the subset stops the build with file and line;
that what is inside means the same is tested in a browser (tests/test_planner.py). Differences that remain: one kind of number
(exact for integers below 2**53), no check of how many items an unpacking takes, and a default argument is made at every call.

A name that begins with a capital is a class, and calling it makes an object.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path

RUNTIME = Path(__file__).with_name("pyjs.js")
# What pyjs.js offers.
BUILTINS = set(
    "abs all any bool dict enumerate float frozenset int isinstance len list max min next range reversed round set sorted str sum "
    "tuple vars zip Exception ValueError KeyError LookupError IndexError ZeroDivisionError".split()
)
METHODS = set(
    "_replace add append args clear copy count difference_update discard endswith extend fromkeys get index isdisjoint items join keys "
    "lower pop popitem popleft replace search setdefault sort split startswith strip sub update values".split()
)
STANDARD = {
    "bisect": {"bisect_left"},
    "collections": {"Counter", "defaultdict", "deque"},
    "collections.abc": {"Mapping"},
    "dataclasses": {"asdict", "replace"},
    "itertools": {"accumulate"},
    "json": {"dumps", "loads"},
    "re": {"compile"},
}
RESERVED = set(
    "arguments await case catch class const debugger default delete do enum eval export extends function implements in instanceof "
    "interface let new null package private protected public static super switch this throw typeof undefined var void".split()
)
# Methods that JavaScript's own objects have under the same name, with another meaning.
CLASHING = {"sort", "split", "replace", "pop"}
# Functions that take all of an iterable: a generator expression in them may be a list, which is faster.
EXHAUSTING = set("dict frozenset list max min set sorted sum tuple".split())
CLASS = re.compile(r"_*[A-Z]+[a-z]\w*$")

BINARY = {
    ast.Add: "$add", ast.Sub: "$sub", ast.Mult: "$mul", ast.Div: "$div", ast.FloorDiv: "$floordiv", ast.Mod: "$mod",
    ast.Pow: "Math.pow", ast.BitOr: "$or",
}  # fmt: skip
ORDER = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
BOOLEAN = (ast.Compare, ast.Not)


class Untranslatable(SyntaxError):
    """Python that is outside the subset. The message names file and line."""


def bundle(modules: dict[str, str], leave_out: Iterable[str] = (), exports: str = "") -> str:
    """A JavaScript function expression that returns the module `exports` as an object, and with it `toPython` and `fromPython`.

    modules: {dotted name: source}, each after those that it imports. leave_out: functions and methods that the page does not need
    ("module.function", "module.Class.method"). Raises Untranslatable.
    """
    trees = {name: ast.parse(source) for name, source in modules.items()}
    methods = {f.name for tree in trees.values() for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body if _is_method(f)}
    attributes = METHODS.union(*STANDARD.values(), *map(_defined, trees.values()))
    parts = [_Module(name, tree, set(modules), methods, attributes, set(leave_out)).text() for name, tree in trees.items()]
    return f"function () {{\n{RUNTIME.read_text()}\n{''.join(parts)}return {{ ...{_flat(exports)}, toPython: $python, fromPython: $plain }};\n}}"


def _flat(module: str) -> str:
    return module.replace(".", "$")


def _name(name: str) -> str:
    return name + "$" if name in RESERVED else name


def _method(name: str) -> str:
    return "$" + name if name in CLASHING else name


class _Module:
    """known: names of all modules. methods: names of all methods, which need their object when they are passed around. attributes: what
    may follow a dot."""

    def __init__(self, name: str, tree: ast.Module, known: set[str], methods: set[str], attributes: set[str], leave_out: set[str]):
        self.name, self.tree, self.known, self.leave_out = name, tree, known, leave_out
        self.methods, self.attributes = methods, attributes
        self.imports: dict[str, str] = {}
        self.scopes: list[set[str]] = []
        self.used: set[str] = set()

    def fail(self, node: ast.AST, what: str):
        raise Untranslatable(f"{self.name}, line {getattr(node, 'lineno', '?')}: {what} is outside the subset of pyjs")

    def text(self) -> str:
        body = [node for node in self.tree.body if not (isinstance(node, ast.FunctionDef) and f"{self.name}.{node.name}" in self.leave_out)]
        for node in body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.bring(node)
        names = sorted(_assigned(body) - set(self.imports))
        self.scopes.append({*names, *self.imports})
        code = self.block([node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom))])
        brought = "".join(f"const {_name(name)} = {where};\n" for name, where in self.imports.items() if name in self.used)
        public = ", ".join(f"{name}: {_name(name)}" for name in names)
        declared = f"let {', '.join(map(_name, names))};\n" if names else ""
        return f"const {_flat(self.name)} = (() => {{\n{brought}{declared}{code}return {{{public}}};\n}})();\n"

    def bring(self, node: ast.Import | ast.ImportFrom) -> None:
        """Remember where imported names come from; they are fetched only if something uses them."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imports[alias.asname or alias.name] = f"$std.{alias.name}" if alias.name in STANDARD else ""
            return
        base = self.name.split(".")[: -node.level] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{module}.{alias.name}"
            if inner in self.known:
                where = _flat(inner)
            elif module in self.known:
                where = f"{_flat(module)}.{alias.name}"
            else:
                where = f"$std[{module!r}].{alias.name}" if alias.name in STANDARD.get(module, ()) else ""
            self.imports[alias.asname or alias.name] = where

    # --- statements ---

    def block(self, nodes: list[ast.stmt]) -> str:
        return "".join(self.statement(node) for node in nodes)

    def statement(self, node: ast.stmt) -> str:
        kind = type(node).__name__
        handler = getattr(self, f"do_{kind}", None) or self.fail(node, kind)
        return handler(node)

    def do_Expr(self, node) -> str:
        if isinstance(node.value, ast.Constant):
            return ""  # a docstring
        if isinstance(node.value, ast.Yield):
            return f"yield {self.value(node.value.value)};\n"
        if isinstance(node.value, ast.YieldFrom):
            return f"yield* {self.value(node.value.value)};\n"
        return f"{self.value(node.value)};\n"

    def do_Assign(self, node) -> str:
        value = self.value(node.value)
        code = "".join(self.store(target, value) for target in node.targets[:1])
        for target in node.targets[1:]:
            if not isinstance(node.targets[0], (ast.Name, ast.Attribute)):
                self.fail(node, "this chain of assignments")
            code += self.store(target, self.value(node.targets[0]))
        return code

    def store(self, target: ast.expr, value: str) -> str:
        if isinstance(target, ast.Subscript):
            return f"$put({self.value(target.value)}, {self.value(target.slice)}, {value});\n"
        if isinstance(target, ast.Tuple) and any(isinstance(part, ast.Subscript) for part in target.elts):
            stores = "".join(self.store(part, f"$values[{i}]") for i, part in enumerate(target.elts))
            return f"{{ const $values = [...{value}];\n{stores}}}\n"
        return f"{self.target(target)} = {value};\n"

    def target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return _name(node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.value(node.value)}.{_method(node.attr)}"
        if isinstance(node, (ast.Tuple, ast.List)):
            return f"[{', '.join('' if getattr(e, 'id', '') == '_' else self.target(e) for e in node.elts)}]"
        if isinstance(node, ast.Starred):
            return f"...{self.target(node.value)}"
        return self.fail(node, "this target")

    def do_AnnAssign(self, node) -> str:
        return self.store(node.target, self.value(node.value)) if node.value else ""

    def do_AugAssign(self, node) -> str:
        if any(isinstance(part, ast.Call) for part in ast.walk(node.target)):
            self.fail(node, "a call in the target of an augmented assignment")
        old = self.value(node.target)
        operator = "$iadd" if isinstance(node.op, ast.Add) else BINARY[type(node.op)]
        return self.store(node.target, f"{operator}({old}, {self.value(node.value)})")

    def do_For(self, node) -> str:
        if node.orelse:
            self.fail(node, "else of a loop")
        return f"for ({self.target(node.target)} of {self.value(node.iter)}) {{\n{self.block(node.body)}}}\n"

    def do_While(self, node) -> str:
        return f"while ({self.test(node.test)}) {{\n{self.block(node.body)}}}\n"

    def do_If(self, node) -> str:
        code = f"if ({self.test(node.test)}) {{\n{self.block(node.body)}}}\n"
        return code + (f"else {{\n{self.block(node.orelse)}}}\n" if node.orelse else "")

    def do_Return(self, node) -> str:
        return f"return {self.value(node.value) if node.value else 'null'};\n"

    def do_Raise(self, node) -> str:
        return f"throw {self.value(node.exc)};\n" if node.exc else self.fail(node, "raise without an exception")

    def do_Try(self, node) -> str:
        if node.orelse or node.finalbody or len(node.handlers) != 1 or not node.handlers[0].type:
            self.fail(node, "this try")
        handler = node.handlers[0]
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        caught = " || ".join(f"$error instanceof {self.value(kind)}" for kind in kinds)
        named = f"{_name(handler.name)} = $error;\n" if handler.name else ""
        return (
            f"try {{\n{self.block(node.body)}}} catch ($error) {{\nif (!({caught})) throw $error;\n{named}{self.block(handler.body)}}}\n"
        )

    def do_Continue(self, node) -> str:
        return "continue;\n"

    def do_Break(self, node) -> str:
        return "break;\n"

    def do_Pass(self, node) -> str:
        return ""

    # --- functions and classes ---

    def do_FunctionDef(self, node) -> str:
        if node.decorator_list:
            self.fail(node, "a decorated function")
        return f"{_name(node.name)} = $function({self.function(node)}, {self.signature(node.args)});\n"

    def signature(self, args: ast.arguments, skip: int = 0) -> str:
        return json.dumps([[a.arg for a in args.args[skip:] + args.kwonlyargs], bool(args.kwarg)])

    def function(self, node: ast.FunctionDef, method: bool = False) -> str:
        """Anonymous. A method's first parameter becomes a variable of its own, which closures see."""
        args = node.args
        if args.vararg or args.posonlyargs:
            self.fail(node, "*args")
        first = args.args[0].arg if method else None
        parameters = [a.arg for a in args.args[method:] + args.kwonlyargs]
        defaults = {a.arg: self.value(d) for a, d in zip(args.args[::-1], args.defaults[::-1])}
        defaults |= {a.arg: self.value(d) for a, d in zip(args.kwonlyargs, args.kw_defaults) if d}
        if args.kwarg:
            parameters.append(args.kwarg.arg)
            defaults[args.kwarg.arg] = "dict()"
        local = _assigned(node.body) - set(parameters)
        self.scopes.append({*local, *parameters, *([first] if first else [])})
        body = (f"const {_name(first)} = this;\n" if first else "") + (f"let {', '.join(map(_name, sorted(local)))};\n" if local else "")
        body += self.block(node.body)
        self.scopes.pop()
        star = "*" if _yields(node) else ""
        shown = ", ".join(_name(p) + (f" = {defaults[p]}" if p in defaults else "") for p in parameters)
        returns = "" if star or (node.body and isinstance(node.body[-1], ast.Return)) else "return null;\n"
        return f"function{star} ({shown}) {{\n{body}{returns}}}"

    def do_ClassDef(self, node) -> str:
        if len(node.bases) > 1 or node.keywords:
            self.fail(node, "this class")
        base = node.bases[0].id if node.bases else "$Object"
        name, code, fields = _name(node.name), "", []
        code += f"{name} = class {name} extends {'$NamedTuple' if base == 'NamedTuple' else self.value(node.bases[0]) if node.bases else base} {{}};\n"
        for part in node.body:
            if isinstance(part, ast.FunctionDef):
                if f"{self.name}.{node.name}.{part.name}" in self.leave_out:
                    continue
                kinds = [ast.unparse(d) for d in part.decorator_list]
                if len(kinds) > 1 or (kinds and kinds[0] not in ("property", "cached_property", "classmethod", "staticmethod")):
                    self.fail(part, "this decorator")
                kind = kinds[0] if kinds else "method"
                inner = self.function(part, method=kind != "staticmethod")
                sig = self.signature(part.args, skip=int(kind != "staticmethod"))
                code += f"${kind}({name}, {json.dumps(_method(part.name))}, {inner}, {sig});\n"
            elif isinstance(part, ast.AnnAssign):
                fields.append(f"[{json.dumps(part.target.id)}{self.field(part.value)}]")
            elif not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)):
                self.fail(part, "this in a class")
        if fields:
            code += f"$fields({name}, [{', '.join(fields)}]);\n"
        for decorator in node.decorator_list:
            if not ast.unparse(decorator).startswith("dataclass"):
                self.fail(node, "this decorator")
        return code

    def field(self, default: ast.expr | None) -> str:
        """How a field without a value gets one."""
        if default is None:
            return ""
        if isinstance(default, ast.Call) and getattr(default.func, "id", "") == "field":
            (option,) = default.keywords
            return f", () => {self.value(option.value)}{'()' if option.arg == 'default_factory' else ''}"
        return f", () => {self.value(default)}"

    # --- expressions ---

    def value(self, node: ast.expr) -> str:
        kind = type(node).__name__
        handler = getattr(self, f"of_{kind}", None) or self.fail(node, kind)
        return handler(node)

    def test(self, node: ast.expr) -> str:
        """As a condition, which JavaScript decides differently for empty containers."""
        if isinstance(node, ast.BoolOp):
            return "(" + (" && " if isinstance(node.op, ast.And) else " || ").join(map(self.test, node.values)) + ")"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        return self.value(node) if isinstance(node, ast.Compare) else f"$true({self.value(node)})"

    def of_Constant(self, node) -> str:
        if not isinstance(node.value, (str, int, float, bool, type(None))):
            self.fail(node, repr(node.value))
        return json.dumps(node.value)

    def of_Name(self, node) -> str:
        if not any(node.id in scope for scope in self.scopes):
            if node.id not in BUILTINS:
                self.fail(node, f"the name {node.id}")
        elif node.id in self.imports and not any(node.id in scope for scope in self.scopes[1:]):
            if not self.imports[node.id]:
                self.fail(node, f"the import {node.id}")
            self.used.add(node.id)
        return _name(node.id)

    def attribute(self, node: ast.Attribute) -> str:
        return _method(node.attr) if node.attr in self.attributes else self.fail(node, f"the attribute {node.attr}")

    def of_Attribute(self, node) -> str:
        owner, name = self.value(node.value), self.attribute(node)
        return f"$bound({owner}, {json.dumps(name)})" if node.attr in self.methods else f"{owner}.{name}"

    def of_Subscript(self, node) -> str:
        if isinstance(node.slice, ast.Slice):
            if node.slice.step:
                self.fail(node, "a slice with a step")
            ends = [self.value(end) if end else "null" for end in (node.slice.lower, node.slice.upper)]
            return f"$slice({self.value(node.value)}, {', '.join(ends)})"
        return f"$item({self.value(node.value)}, {self.value(node.slice)})"

    def items(self, nodes: list[ast.expr]) -> str:
        return ", ".join(f"...{self.value(n.value)}" if isinstance(n, ast.Starred) else self.value(n) for n in nodes)

    def of_Tuple(self, node) -> str:
        return f"[{self.items(node.elts)}]"

    of_List = of_Tuple

    def of_Set(self, node) -> str:
        return f"set([{self.items(node.elts)}])"

    def of_Dict(self, node) -> str:
        pairs = [
            f"[{self.value(key)}, {self.value(value)}]" if key else f"...{self.value(value)}.items()"
            for key, value in zip(node.keys, node.values)
        ]
        return f"dict([{', '.join(pairs)}])"

    def of_BinOp(self, node) -> str:
        if type(node.op) not in BINARY:
            self.fail(node, type(node.op).__name__)
        return f"{BINARY[type(node.op)]}({self.value(node.left)}, {self.value(node.right)})"

    def of_UnaryOp(self, node) -> str:
        if isinstance(node.op, ast.Not):
            return f"(!{self.test(node.operand)})"
        return f"(-{self.value(node.operand)})" if isinstance(node.op, ast.USub) else self.fail(node, "this operator")

    def of_BoolOp(self, node) -> str:
        helper = "$and" if isinstance(node.op, ast.And) else "$either"
        first, *rest = map(self.value, node.values)
        for value in rest:
            first = f"{helper}({first}, () => {value})"
        return first

    def of_Compare(self, node) -> str:
        sides = [node.left, *node.comparators]
        if len(sides) > 2 and any(isinstance(part, ast.Call) for side in sides[1:-1] for part in ast.walk(side)):
            self.fail(node, "a call inside a chain of comparisons")
        return "(" + " && ".join(self.compared(a, op, b) for a, op, b in zip(sides, node.ops, sides[1:])) + ")"

    def compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        a, b = self.value(left), self.value(right)
        if type(op) in ORDER:
            return f"{a} {ORDER[type(op)]} {b}"
        if isinstance(op, (ast.Is, ast.IsNot)):
            return f"{a} {'===' if isinstance(op, ast.Is) else '!=='} {b}"
        call = f"$equal({a}, {b})" if isinstance(op, (ast.Eq, ast.NotEq)) else f"$in({a}, {b})"
        return call if isinstance(op, (ast.Eq, ast.In)) else f"!{call}"

    def of_IfExp(self, node) -> str:
        return f"({self.test(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"

    def of_Lambda(self, node) -> str:
        names = [a.arg for a in node.args.args]
        self.scopes.append(set(names))
        code = f"(({', '.join(map(_name, names))}) => {self.value(node.body)})"
        self.scopes.pop()
        return code

    def of_Call(self, node) -> str:
        kind = _call_kind(node.func)
        if isinstance(node.func, ast.Attribute):  # a method, or a function of a module
            callee = f"{self.value(node.func.value)}.{self.attribute(node.func)}"
        else:
            callee = self.value(node.func)
        exhausting = getattr(node.func, "id", "") in EXHAUSTING
        args = ", ".join(
            self.of_ListComp(a) if exhausting and isinstance(a, ast.GeneratorExp) else self.items([a]) for a in node.args
        )
        if not node.keywords:
            return f"new {callee}({args})" if kind == "class" else f"{callee}({args})"
        pairs = [f"...{self.value(k.value)}.items()" if k.arg is None else f"[{json.dumps(k.arg)}, {self.value(k.value)}]" for k in node.keywords]
        words = f"[{', '.join(pairs)}]"
        if kind == "class":
            return f"$make({callee}, [{args}], {words})"
        if isinstance(node.func, ast.Attribute):
            return f"$send({self.value(node.func.value)}, {json.dumps(self.attribute(node.func))}, [{args}], {words})"
        return f"$call({callee}, [{args}], {words})"

    def comprehension(self, node, yielded) -> str:
        """Nested loops around a statement; yielded() makes it once the loops' names are known."""
        head = ""
        self.scopes.append(set())
        for loop in node.generators:
            source = self.value(loop.iter)
            self.scopes[-1] |= {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
            head += f"for (const {self.target(loop.target)} of {source}) "
            for condition in loop.ifs:
                head += f"if ({self.test(condition)}) "
        code = head + yielded()
        self.scopes.pop()
        return code

    def of_ListComp(self, node) -> str:
        return f"(() => {{ const $list = []; {self.comprehension(node, lambda: f'$list.push({self.value(node.elt)});')} return $list; }})()"

    def of_GeneratorExp(self, node) -> str:
        return f"(function* () {{ {self.comprehension(node, lambda: f'yield {self.value(node.elt)};')} }})()"

    def of_SetComp(self, node) -> str:
        return f"set({self.of_ListComp(node)})"

    def of_DictComp(self, node) -> str:
        pair = f"(() => {{ const $list = []; {self.comprehension(node, lambda: f'$list.push([{self.value(node.key)}, {self.value(node.value)}]);')}"
        return f"dict({pair} return $list; }})())"

    def of_JoinedStr(self, node) -> str:
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(json.dumps(part.value))
            else:
                spec = self.value(part.format_spec) if part.format_spec else '""'
                parts.append(f"$format({self.value(part.value)}, {spec}, {'true' if part.conversion == ord('r') else 'false'})")
        return f"[{', '.join(parts)}].join('')"


def _call_kind(func: ast.expr) -> str:
    name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    return "class" if CLASS.match(name) or name == "cls" else "function"


def _own(node: ast.AST):
    """The nodes of a body, without what lies in functions, classes and comprehensions of their own."""
    inner = (ast.FunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, inner):
            yield from _own(child)


def _assigned(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in _own(ast.Module(body, [])):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _defined(tree: ast.Module) -> set[str]:
    """Names that a module gives to something, at any depth: variables, functions, classes, fields, `self.` attributes."""
    found = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    found |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found | {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list)


def _yields(node: ast.FunctionDef) -> bool:
    return any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in _own(ast.Module(node.body, [])))
