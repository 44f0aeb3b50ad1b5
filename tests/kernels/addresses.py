"""Finds addresses that 32 bits cannot hold, in the intermediate representation of a compiled kernel (TTIR).

Every integer gets a bound: a constant, the end of a range, a count, or none. Counts are those of nodes,
edges, entries and programs, of which a record has fewer than 2^31: numbers that are loaded, and those that a
launch passes. 32 bits do not hold a count times a constant, nor what is made of that, widened or not; an
address that is offset by it is found.

What is taken for granted, as kernels are written:

- a sum of counts is the place of something that there is, so a count;
- 16 times a count is the first row of a window;
- a program's number times a power of two, or times what the launch passes or a share of it, is the first row
  of a program;
- the second number of a program is that of a group of heads or of a block of features;
- a feature times what the launch passes is a place in the weight of a dense layer.
"""

from __future__ import annotations

import re

COUNT = 2**31 - 1
NO_BOUND = 2**80
_FEATURES = 2**16
_GROUPS = 2**10
_LINE = re.compile(r'( *)(?:(%\w+)(?::\d+)? = )?"?([a-z]+\.[\w.]+)"?(.*)')
_NAME = re.compile(r"%\w+(?:#\d+)?")
_SAME = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"}
_SAME |= {"arith.extsi", "arith.extui", "arith.trunci"}
_OF_PROGRAM = {"arith.remsi", "arith.remui", "arith.subi", "arith.divsi", "arith.divui"}


def beyond_32_bits(ttir: str) -> list[str]:
    """The lines whose address is offset by a product that 32 bits may not have held."""
    first = _Reading(ttir, {})  # tells what loops hand from one round to the next
    return _Reading(ttir, first.carried).found


class _Reading:
    def __init__(self, ttir: str, carried: dict[tuple[int, int], int]) -> None:
        self.found: list[str] = []
        self.carried: dict[tuple[int, int], int] = {}  # line of a loop, turn of its result -> bound
        self._before = carried
        self._bounds: dict[str, int] = {}
        self._constants: set[str] = set()
        self._programs: set[str] = set()  # numbers of programs, and what counts programs of a kind
        self._passed: set[str] = set()  # by the launch
        self._open: list[tuple[int, str | None, int]] = []  # around a line: indent, result, line
        for number, line in enumerate(ttir.splitlines()):
            self._read(number, line)

    def _read(self, number: int, line: str) -> None:
        if "tt.func" in line:
            self._passed = set(re.findall(r"(%\w+): i32", line))
            return
        match = _LINE.match(line)
        if match is None:
            return
        indent, name, op, rest = len(match[1]), match[2], match[3], match[4]
        while self._open and indent <= self._open[-1][0]:
            self._open.pop()
        given, _, kind = rest.partition(" : ")
        names = _NAME.findall(given)
        if op == "scf.yield":
            self._yield(names)
        elif op == "tt.addptr":
            if self._bound(names[1]) >= NO_BOUND:
                self.found.append(line.strip())
        elif op in ("scf.for", "scf.if", "scf.while"):
            if op == "scf.for":
                self._enter(number, given)
            self._forget(name)
            self._open.append((indent, name, number))
        elif name is not None:
            bound = self._compute(op, names, given, kind)
            inherits = self._kinds_of(op, names)
            self._forget(name)  # one of another branch
            self._bounds[name] = bound
            for kinds in inherits:
                kinds.add(name)

    def _enter(self, number: int, given: str) -> None:
        # of a loop: its index and what it hands from round to round
        index, *ends = _NAME.findall(given.partition(" iter_args")[0])
        last = max(self._bound(end) for end in ends[:2])
        starts = re.findall(r"(%\w+) = (%[\w#]+)", given.partition("iter_args(")[2])
        bounds = {index: last}
        for turn, (inner, start) in enumerate(starts):
            bounds[inner] = max(COUNT, self._bound(start), self._before.get((number, turn), 0))
        for name, bound in bounds.items():
            self._forget(name)
            self._bounds[name] = bound

    def _yield(self, yielded: list[str]) -> None:
        _, name, number = self._open[-1]
        for turn, value in enumerate(yielded):
            for result in (f"{name}#{turn}", *([f"{name}"] if len(yielded) == 1 else [])):
                self._bounds[result] = max(self._bounds.get(result, 0), self._bound(value))
            self.carried[number, turn] = self._bound(f"{name}#{turn}")

    def _forget(self, name: str | None) -> None:
        for kinds in (self._constants, self._programs, self._passed):
            kinds.discard(name or "")
        for turn in ("", *(f"#{turn}" for turn in range(16))):
            self._bounds.pop(f"{name}{turn}", None)

    def _bound(self, name: str) -> int:
        return self._bounds.get(name, COUNT)

    def _kinds_of(self, op: str, names: list[str]) -> list[set[str]]:
        if op == "arith.constant":
            return [self._constants]
        if op == "tt.get_program_id":
            return [self._programs]
        if op in _SAME:
            return [kinds for kinds in (self._constants, self._programs, self._passed) if names[0] in kinds]
        if op in _OF_PROGRAM and names[0] in self._programs:
            return [self._programs]
        shares = op in ("arith.addi", *_OF_PROGRAM) and self._passed.union(self._constants).issuperset(names)
        return [self._passed] if shares and not self._passed.isdisjoint(names) else []

    def _compute(self, op: str, names: list[str], given: str, kind: str) -> int:
        bounds = [self._bound(one) for one in names]
        if op == "arith.constant":
            number = re.search(r"-?\d+(?![\d.x])", given)
            return abs(int(number[0])) if number else COUNT
        if op == "tt.get_program_id":
            return _GROUPS if given.split()[0] == "y" else COUNT
        if op == "tt.make_range":
            return int(re.search(r"end = (\d+)", given + kind)[1])  # type: ignore[index]
        if op == "tt.load" or op.startswith("arith.cmp"):
            return COUNT
        if op == "arith.andi" and min(bounds) < COUNT:
            return min(bounds)
        if NO_BOUND in bounds:  # what has once been too large for 32 bits stays wrong
            return NO_BOUND
        if op in _SAME:
            return NO_BOUND if op == "arith.trunci" and bounds[0] > COUNT else bounds[0]
        if op in ("arith.addi", "arith.subi"):
            most = NO_BOUND - 1 if "i64" in kind else COUNT
            return min(sum(bounds) if op == "arith.addi" else bounds[0], most)
        if op in ("arith.muli", "arith.shli"):
            bounds[1] = 2 ** min(bounds[1], 64) if op == "arith.shli" else bounds[1]
            return self._product(names, bounds, kind)
        if op in ("arith.minsi", "arith.remsi", "arith.remui"):
            return min(bounds)
        if op in ("arith.maxsi", "arith.select"):
            return max(bounds[-2:])
        if op in ("arith.divsi", "arith.divui", "arith.shrsi", "arith.shrui"):
            return bounds[0]
        return COUNT

    def _product(self, names: list[str], bounds: list[int], kind: str) -> int:
        least, most = sorted(bounds)
        if "i64" in kind:
            return min(least * most, NO_BOUND - 1)
        if least * most <= COUNT or least == 16:
            return min(least * most, COUNT)
        by_constant = not self._constants.isdisjoint(names)
        by_passed = not self._passed.isdisjoint(names)
        of_program = not self._programs.isdisjoint(names)
        of_program = of_program and (by_passed or (by_constant and least & (least - 1) == 0))
        of_weight = by_passed and not by_constant and least <= _FEATURES
        return COUNT if of_program or of_weight else NO_BOUND
