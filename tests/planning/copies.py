"""Copies in the loops of a program, read from its HLO."""

from specdec_jax.planning.hlo import Instruction, Program


def in_loops(program: Program, num_elements: int) -> list[str]:
  """Names of instructions in loops that copy or transpose at least so many
  elements, on the chip too, where small caches lie.

  What a fusion does to an operand on its way to another operation is no copy,
  and neither is moving an array onto the chip and back as it lies.
  """
  bodies = program.computations
  pending = [
    name
    for body in bodies.values()
    for instruction in body.values()
    if instruction.opcode == 'while'
    for name in instruction.called
  ]
  seen, found = set(), []
  while pending:
    name = pending.pop()
    if name in seen:
      continue
    seen.add(name)
    for instruction in bodies[name].values():
      if instruction.opcode in ('while', 'conditional', 'call'):
        pending += instruction.called
      if _is_copy(program, name, instruction, num_elements):
        found.append(instruction.name)
  return found


def _is_copy(
  program: Program, within: str, instruction: Instruction, num_elements: int
) -> bool:
  if not (instruction.outputs and instruction.operands):
    return False
  moved, kind = instruction.outputs[0], instruction.opcode
  if moved.num_elements < num_elements:
    return False
  if kind == 'fusion':
    body = program.computations[instruction.called[0]]
    kind = next(each.opcode for each in body.values() if each.is_root)
  if kind not in ('copy', 'copy-start', 'transpose'):
    return False
  source = program.computations[within].get(instruction.operands[0])
  if kind == 'transpose' or not (source and source.outputs):
    return True
  before = source.outputs[0]
  is_moved = before.is_on_chip != moved.is_on_chip
  return before.order != moved.order or not is_moved
