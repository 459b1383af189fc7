"""Figures of TPU chips, and where each of them is from.

Google's pages https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e, as of
2026, state of each chip

- the peak in bfloat16: 275, 197, 459 and 918 TFLOPs;
- the matrix units: v4 and v5p have two cores of four units, v5e has one core of
  four, v6e one core of two. The page of v6e calls its units 256 x 256; those of
  the others are 128 x 128 (/tpu/docs/system-architecture-tpu-vm);
- the memory: 32 GiB, 16 GB, 95 GiB and 32 GB at 1200, 819, 2765 and 1638 GBps;
- the links, both directions together: 400 GBps for v5e, 1200 for v5p, 800 for
  v6e. The page of v4 states none: its paper (https://arxiv.org/abs/2304.01433,
  Table 4) has six links of 50 GB/s, and a clock of 1050 MHz.

Assumed is

- that a "GB" of memory capacity is 2^30 bytes, as where the pages say GiB;
- that one direction has half of what both have together;
- how many multiply-adds a cell of a matrix unit does per cycle. It is one in
  v4, whose clock is published, and taken to be one in v5e and v5p. For v6e it
  is two: with one, its peak would need a clock of 3.5 GHz, and the TPU compiler
  itself counts 1.56 per cell and cycle for a product of two matrices of 16,384
  rows and columns (libtpu 0.0.42; 0.92 for v5e).

Clocks follow from the peak and from what the matrix units do in a cycle. They
only turn the compiler's cycles into seconds.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip.

  Attributes:
    name: as in a topology, `v4:2x2x1`.
    memory_bytes, memory_bandwidth: of its main memory, in bytes and per second.
    peak_flops: bfloat16 operations per second, a multiply-add being two.
    link_bandwidth: bytes per second that it can send to all its neighbours.
    num_matrix_units: of all its cores.
    matrix_size, cell_rate: rows and columns of a matrix unit, and multiply-adds
      of each of its cells per cycle.
    num_dimensions: of the torus that its slices are cut from.
  """

  name: str
  memory_bytes: float
  memory_bandwidth: float
  peak_flops: float
  link_bandwidth: float
  num_matrix_units: int
  matrix_size: int
  cell_rate: int
  num_dimensions: int

  @property
  def multiply_adds(self) -> int:
    """Multiply-adds per cycle of all matrix units."""
    return self.num_matrix_units * self.matrix_size**2 * self.cell_rate

  @property
  def clock(self) -> float:
    """Cycles per second."""
    return self.peak_flops / (2 * self.multiply_adds)


# In the order of the fields of `Chip`.
_CHIPS = (
  Chip('v4', 32 * 2**30, 1.2e12, 275e12, 6 * 50e9, 8, 128, 1, 3),
  Chip('v5e', 16 * 2**30, 819e9, 197e12, 400e9 / 2, 4, 128, 1, 2),
  Chip('v5p', 95 * 2**30, 2.765e12, 459e12, 1200e9 / 2, 8, 128, 1, 3),
  Chip('v6e', 32 * 2**30, 1.638e12, 918e12, 800e9 / 2, 2, 256, 2, 2),
)
CHIPS = {chip.name: chip for chip in _CHIPS}
