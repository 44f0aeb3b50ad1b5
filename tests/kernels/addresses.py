"""Finds addresses that 32 bits cannot hold, in the intermediate representation of a compiled kernel (TTIR).

Every integer gets a bound: a constant, the end of a range, a count, or none. Counts are those of nodes,
edges, entries and programs, of which a record has fewer than 2^31: numbers that are loaded, and those that a
launch passes. 32 bits do not hold a count times a constant, nor what is made of that, widened or not; an
address that is offset by it is found.

Three products are counts all the same: the first row of a window (16 times its number), the first row of a
program (its number times how many each has), and a feature's place in a dense layer's weight (a feature
times a stride that the launch passes).
"""

from __future__ import annotations

import re

COUNT = 2**31 - 1
NO_BOUND = 2**62
_FEATURES = 2**16
_GROUPS = 2**10  # of heads or of features: a program's number divided by a count
_LINE = re.compile(r'( *)(?:(%\w+)(?::\d+)? = )?"?([a-z]+\.[\w.]+)"?(.*)')
_NAME = re.compile(r"%\w+(?:#\d+)?")
_SAME = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"}
_SAME |= {"arith.extsi", "arith.extui", "arith.trunci"}
_LEAST = {"arith.minsi", "arith.remsi", "arith.remui", "arith.andi"}
_OF_PROGRAM = {"arith.remsi", "arith.remui", "arith.subi", "arith.divsi", "arith.divui"}


def beyond_32_bits(ttir: str) -> list[str]:
    """The lines whose address is offset by a product that 32 bits may not have held."""
    return _Reading(ttir).found


class _Reading:
    def __init__(self, ttir: str) -> None:
        self.found: list[str] = []
        self._bounds: dict[str, int] = {}
        self._programs: set[str] = set()  # numbers of programs, and what counts programs of a kind
        self._passed: set[str] = set()  # by the launch
        self._open: list[tuple[int, str | None]] = []  # loops and branches around a line: indent, result
        for line in ttir.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        if "tt.func" in line:
            self._passed = set(re.findall(r"(%\w+): i32", line))
        match = _LINE.match(line)
        if match is None or "tt.func" in line:
            return
        indent, name, op, rest = len(match[1]), match[2], match[3], match[4]
        while self._open and indent <= self._open[-1][0]:
            self._open.pop()
        if name is not None:
            self._forget(name)  # one of another branch
        given, _, kind = rest.partition(" : ")
        names = _NAME.findall(given)
        if op == "scf.yield":
            if self._open and self._open[-1][1] is not None:
                self._results(self._open[-1][1], names)
        elif op == "scf.for":
            index, *ends = _NAME.findall(given.split(" iter_args")[0])
            self._bounds[index] = max(self._bound(end) for end in ends[:2])
            for inner, first in re.findall(r"(%\w+) = (%[\w#]+)", given.partition("iter_args(")[2]):
                self._bounds[inner] = max(COUNT, self._bound(first))
            self._open.append((indent, name))
        elif op in ("scf.if", "scf.while"):
            self._open.append((indent, name))
        elif op == "tt.addptr":
            if self._bound(names[1]) >= NO_BOUND:
                self.found.append(line.strip())
        elif name is not None:
            self._bounds[name] = self._compute(op, name, names, given, kind)

    def _forget(self, name: str) -> None:
        self._programs.discard(name)
        self._passed.discard(name)
        for turn in ("", *(f"#{turn}" for turn in range(16))):
            self._bounds.pop(name + turn, None)

    def _results(self, name: str, yielded: list[str]) -> None:
        for turn, value in enumerate(yielded):
            for result in (f"{name}#{turn}", *([name] if len(yielded) == 1 else [])):
                self._bounds[result] = max(self._bounds.get(result, 0), self._bound(value))

    def _bound(self, name: str) -> int:
        return self._bounds.get(name, COUNT)

    def _compute(self, op: str, name: str, names: list[str], given: str, kind: str) -> int:
        if op == "arith.constant":
            number = re.search(r"-?\d+(?![\d.x])", given)
            return abs(int(number[0])) if number else COUNT
        if op == "tt.make_range":
            return int(re.search(r"end = (\d+)", given + kind)[1])  # type: ignore[index]
        if op == "tt.get_program_id" or (op in _OF_PROGRAM and names[0] in self._programs):
            self._programs.add(name)
        bounds = [self._bound(one) for one in names]
        if op in _SAME:
            for kinds in (self._programs, self._passed):
                kinds |= {name} if names[0] in kinds else set()
            return bounds[0]
        if op in ("arith.addi", "arith.subi"):
            total = bounds[0] + (bounds[1] if op == "arith.addi" else 0)
            return NO_BOUND if NO_BOUND in bounds else min(total, COUNT)  # an index stays one
        if op == "arith.muli":
            return self._product(names, bounds, kind)
        if op in _LEAST:
            return min(bounds)
        if op in ("arith.maxsi", "arith.select"):
            return max(bounds[-2:])
        if op in ("arith.divsi", "arith.divui", "arith.shrsi", "arith.shrui"):
            of_count = "div" in op and bounds[0] < NO_BOUND and bounds[1] == COUNT
            return _GROUPS if of_count else bounds[0]
        return COUNT

    def _product(self, names: list[str], bounds: list[int], kind: str) -> int:
        least, most = sorted(bounds)
        if most >= NO_BOUND:
            return NO_BOUND
        if "i64" in kind or least * most <= COUNT:
            return min(least * most, COUNT)
        of_window = least == 16
        of_program = not self._programs.isdisjoint(names)
        of_weight = not self._passed.isdisjoint(names) and least <= _FEATURES
        return COUNT if of_window or of_program or of_weight else NO_BOUND
