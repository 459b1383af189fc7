"""Reads from optimised HLO what one run of a compiled program moves.

XLA's own `cost_analysis` counts a loop's body once, and every hop between main
memory and a TPU's on-chip memory as an access. Here bodies count as often as
they run, and bytes count where they cross into or out of main memory: a layout
names its memory space, `S(n)` being on the chip.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from specdec_jax.planning.trip_counts import trip_count

# Returns how often a loop runs, from its metadata; None if unknown.
TripCountFn = Callable[[str], float | None]

# `f32[8,4]{1,0:S(1)}`: 32 elements of 32 bits, axis 1 fastest, on the chip.
_SHAPE = re.compile(r'([a-z]+(\d*)\w*)\[([\d,]*)\](?:\{([^}:]*)([^}]*)\})?')
# `%x.1 = bf16[8,4]{1,0:T(8,128)S(1)} add(%a, %b), metadata={...}`: the root or
# not, name, shape, `(...)` for a tuple of them, opcode, operands, attributes.
_LINE = re.compile(
  r'(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$'
)
_CALLS = re.compile(
  r'(?:body|calls|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)'
)
# Instructions without work: they name, group or await results.
_FREE = (
  *('parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast'),
  *('after-all', 'partition-id', 'replica-id', 'optimization-barrier'),
)
_COLLECTIVES = (
  *('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all'),
  'collective-permute',
)
_SLICES = ('dynamic-slice', 'slice', 'gather')
# The groups of chips of a collective: a list of groups, `{{0,1},{2,3}}`; groups
# by size, `[2,2]<=[4]`; or axes of a mesh, `mesh['a'=2,'b'=4] {'b'}`, where
# `'b':(2)2` is a part of size 2 of an axis.
_GROUPS = re.compile(
  r'replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]'
  r'|mesh\[([^\]]*)\][^{]*\{([^}]*)\})'
)
# A result in the same memory as an operand.
_ALIASED = 'output_to_operand_aliasing'
# The time of instructions below this does not depend on the bytes they move.
_SMALL_BYTES = 16_384


@dataclasses.dataclass(frozen=True)
class Shape:
  """An array: its bytes, whether it lies on the chip, and the order of its axes
  in memory, the fastest first."""

  num_bytes: float
  is_on_chip: bool
  num_elements: int
  order: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a computation; `called` are the computations that it calls."""

  name: str
  opcode: str
  outputs: tuple[Shape, ...]
  operands: tuple[str, ...]
  called: tuple[str, ...]
  attributes: str
  is_root: bool

  @property
  def num_bytes(self) -> float:
    return sum(shape.num_bytes for shape in self.outputs)

  @property
  def memory_bytes(self) -> float:
    return sum(s.num_bytes for s in self.outputs if not s.is_on_chip)


class Collective(NamedTuple):
  """The cost of a collective on a ring: the bytes that each chip sends, and
  successive hops from chip to chip."""

  sent_bytes: float
  num_hops: int


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of one run of a program on a device.

  Attributes:
    memory_bytes: read from and written to main memory.
    num_instructions: executed one after the other, without scalars and
      asynchronous transfers.
    collectives: one entry for each that is run.
    cycles: the compiler's estimate; parts of a program may have none.
    small_cycles: the estimates for instructions that move few bytes.
  """

  memory_bytes: float = 0.0
  num_instructions: float = 0.0
  collectives: tuple[Collective, ...] = ()
  cycles: float = 0.0
  small_cycles: tuple[float, ...] = ()

  def __add__(self, other: 'Cost') -> 'Cost':
    names = [field.name for field in dataclasses.fields(Cost)]
    return Cost(*(getattr(self, n) + getattr(other, n) for n in names))

  def times(self, count: float) -> 'Cost':
    """Returns the cost of `count` runs, or of as many on average; collectives
    are counted whole."""
    return dataclasses.replace(
      self,
      memory_bytes=self.memory_bytes * count,
      num_instructions=self.num_instructions * count,
      collectives=self.collectives * math.ceil(count),
      cycles=self.cycles * count,
    )


class Program:
  """The computations of an HLO module, parsed from `compiled.as_text()`.

  `trip_count_fn` is asked how often a loop runs of which the module does not
  say it.
  """

  def __init__(self, text: str, trip_count_fn: TripCountFn = trip_count):
    self.trip_count_fn = trip_count_fn
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry = ''
    partitions = re.search(r'^HloModule .* num_partitions=(\d+)', text, re.M)
    self.num_partitions = int(partitions[1]) if partitions else 1
    name = ''
    # A computation is a header, `%body (p: f32[8]) -> f32[8] {`, and below it
    # an instruction per line; the one that the program begins with is ENTRY.
    for line in text.splitlines():
      header = re.match(r'(ENTRY )?%?([\w.\-]+) .*->.*\{$', line)
      if header and not line.startswith(' '):
        name = header[2]
        self.computations[name] = {}
        self.entry = name if header[1] else self.entry
      elif name and ' = ' in line:
        instruction = parse(line)
        self.computations[name][instruction.name] = instruction
    if not self.entry:
      raise ValueError('the text holds no ENTRY computation of an HLO module')

  def cost(self, name: str = '') -> Cost:
    """Returns the cost of one run, or of one of the computation `name`."""
    name = name or self.entry
    instructions = self.computations[name].values()
    total = Cost()
    for instruction in instructions:
      total += self._instruction_cost(name, instruction)
    return total

  def _instruction_cost(self, within: str, instruction: Instruction) -> Cost:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(('-done', '-update')):
      return Cost()
    if opcode in ('while', 'conditional', 'call'):
      inner = [self.cost(name) for name in instruction.called]
      # The more expensive branch counts: iterations that draft are planned for.
      if opcode == 'conditional':
        return max(inner, key=lambda cost: cost.memory_bytes)
      count = self._num_trips(instruction) if opcode == 'while' else 1
      return sum(inner, Cost()).times(count)
    # `all-reduce-start` runs in parallel with what follows, up to its `-done`.
    is_asynchronous = opcode.endswith('-start')
    memory_bytes = self._memory_bytes(within, instruction)
    estimate = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    cycles = float(estimate[1]) if estimate else 0.0
    is_scalar = all(shape.num_elements <= 1 for shape in instruction.outputs)
    is_counted = not is_asynchronous and (opcode == 'fusion' or not is_scalar)
    is_small = cycles > 0 and memory_bytes < _SMALL_BYTES
    return Cost(
      memory_bytes=memory_bytes,
      num_instructions=float(is_counted),
      collectives=self._collectives(within, instruction),
      cycles=cycles,
      small_cycles=(cycles,) * is_small,
    )

  def _num_trips(self, loop: Instruction) -> float:
    """Returns how often the body of a loop runs, on average; 1 if unknown."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
      return int(known[1])
    # Its length depends on the data.
    count = self.trip_count_fn(loop.attributes)
    if count is not None:
      return count
    # The TPU compiler writes no trip counts: the loop compares jax's counter,
    # which starts at 0, with a constant.
    [name] = re.findall(r'condition=%?([\w.\-]+)', loop.attributes)
    test = self._root(name)
    if 'direction=LT' in test.attributes:
      bound = self.computations[name][test.operands[1]]
      if bound.opcode == 'constant':
        return int(bound.operands[0])
    return 1

  def _collectives(
    self, within: str, instruction: Instruction
  ) -> tuple[Collective, ...]:
    """Returns the collectives of an instruction, or of those that it wraps."""
    if instruction.opcode in ('fusion', 'async-start'):
      collectives: list[Collective] = []
      for body in instruction.called:
        for inner in self.computations[body].values():
          collectives += self._collectives(body, inner)
      return tuple(collectives)
    opcode = instruction.opcode.removesuffix('-start')
    if opcode not in _COLLECTIVES:
      return ()
    operands = self._operands(within, instruction)
    held = sum(operand.num_bytes for operand in operands)
    if opcode == 'collective-permute':
      return (Collective(held, 1),)
    # On a ring of n chips, each sends a share, 1 / n of the bytes, n - 1 times;
    # before an all-gather a chip holds one share. With 12 bytes in all and
    # n = 4, three shares of 3 bytes are sent.
    size = self._group_size(instruction)
    shares = [held if opcode == 'all-gather' else held / size]
    # An all-reduce first reduces, and then gathers the sums, often in a
    # narrower type; `all-reduce-scatter` does not gather.
    if opcode == 'all-reduce' and not within.startswith('all-reduce-scatter'):
      shares.append(instruction.num_bytes / size)
    hops = size - 1
    return (Collective(hops * sum(shares), hops * len(shares)),)

  def _group_size(self, instruction: Instruction) -> int:
    """Returns the number of chips in a group of a collective."""
    groups = _GROUPS.search(instruction.attributes)
    if not groups:
      return self.num_partitions
    members, size, mesh, axes = groups.groups('')
    if mesh:
      sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh))
      parts = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", axes)
      return math.prod(int(part or sizes[axis]) for axis, part in parts)
    return int(size or members.count(',') + 1)

  def _operands(
    self, within: str, instruction: Instruction
  ) -> list[Instruction]:
    return [self.computations[within][name] for name in instruction.operands]

  def _memory_bytes(self, within: str, instruction: Instruction) -> float:
    """Counts the bytes that cross between main memory and the chip."""
    operands = self._operands(within, instruction)
    opcode = instruction.opcode
    if opcode == 'slice-start':  # ((source), destination, ...).
      source, moved, *_ = instruction.outputs
      num_crossings = (not source.is_on_chip) + (not moved.is_on_chip)
      return num_crossings * moved.num_bytes
    # The outputs of a `-start` include its operands.
    if opcode.endswith('-start') and opcode != 'all-reduce-start':
      return instruction.memory_bytes
    # A fusion reads only the slices that its body takes of an operand, and
    # writes only the update of a cache that is updated in place.
    if opcode == 'fusion' and instruction.called:
      body = instruction.called[0]
      read = sum(
        min(self._read(body, self._parameter(body, i)), operand.memory_bytes)
        for i, operand in enumerate(operands)
        if operand.memory_bytes
      )
      if not instruction.memory_bytes:
        return read
      written = self._written(body, self._root(body))
      return read + min(written, instruction.memory_bytes)
    # The operands of an update are the buffer, the update and its position:
    # only the update is read and written.
    written = instruction.memory_bytes
    if opcode == 'dynamic-update-slice':
      return operands[1].memory_bytes + min(operands[1].num_bytes, written)
    if opcode in _SLICES:
      return written + min(instruction.num_bytes, operands[0].memory_bytes)
    return written + sum(operand.memory_bytes for operand in operands)

  def _parameter(self, body: str, index: int) -> str:
    operands = (str(index),)
    return next(
      instruction.name
      for instruction in self.computations[body].values()
      if instruction.opcode == 'parameter' and instruction.operands == operands
    )

  def _root(self, body: str) -> Instruction:
    return next(i for i in self.computations[body].values() if i.is_root)

  def _read(self, body: str, name: str) -> float:
    """Counts the bytes that a fusion reads of a parameter, or of a bitcast of
    it; infinity for all of them."""
    if self.computations[body][name].is_root:
      return math.inf
    # Slices of an operand may overlap: the caller bounds the sum by its size.
    total = 0.0
    for user in self.computations[body].values():
      if name not in user.operands:
        continue
      position = user.operands.index(name)
      if user.opcode in _SLICES and position == 0:
        total += user.num_bytes
      elif user.opcode == 'bitcast':
        total += self._read(body, user.name)
      elif user.opcode == 'fusion':
        inner = user.called[0]
        if _ALIASED in user.attributes and self._root(inner).opcode == 'copy':
          # A view of the same memory.
          total += self._read(body, user.name)
        else:
          total += self._read(inner, self._parameter(inner, position))
      elif user.opcode != 'dynamic-update-slice' or position != 0:
        return math.inf
    return total

  def _written(self, body: str, root: Instruction) -> float:
    """Counts the bytes of its result that a fusion writes."""
    inside = self.computations[body]
    if root.opcode == 'tuple':
      return sum(self._written(body, inside[name]) for name in root.operands)
    if root.opcode == 'bitcast' and root.operands[0] in inside:
      return self._written(body, inside[root.operands[0]])
    if root.opcode == 'fusion':
      return self._written(root.called[0], self._root(root.called[0]))
    if root.opcode == 'dynamic-update-slice':
      return inside[root.operands[1]].num_bytes
    return root.num_bytes


def parse(line: str) -> Instruction:
  """Parses an instruction of one line."""
  match = _LINE.match(line.strip())
  if not match:
    raise ValueError(f'no instruction: {line.strip()[:80]}')
  root, name, shapes, opcode, arguments, attributes = match.groups('')
  # The argument of a parameter is its number, and of a constant its value.
  is_literal = opcode in ('parameter', 'constant')
  operands = (
    [arguments] if is_literal else re.findall(r'%([\w.\-]+)', arguments)
  )
  return Instruction(
    name=name,
    opcode=opcode,
    outputs=tuple(_shape(match) for match in _SHAPE.finditer(shapes)),
    operands=tuple(operands),
    called=tuple(
      name
      for group in _CALLS.findall(attributes)
      for name in re.findall(r'[\w.\-]+', group)
    ),
    attributes=attributes,
    is_root=bool(root),
  )


def _shape(match: re.Match[str]) -> Shape:
  dtype, digits, sizes, order, memory = match.groups('')
  count = math.prod(int(n) for n in sizes.split(',') if n)
  # Names of dtypes contain the number of bits, except `pred`; a `token` has
  # none.
  bits = 8 if dtype == 'pred' else int(digits or 0)
  axes = tuple(re.findall(r'\d+', order))
  return Shape(count * bits / 8, 'S(' in memory, count, axes)
