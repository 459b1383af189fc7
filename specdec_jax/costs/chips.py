"""Published figures of TPU chips.

From Google's pages https://cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e,
November 2025. Clocks are not published for all: they follow from the peak and
the multiply-adds that a chip's matrix units do in a cycle (v4 and v5p: 8 units
of 128 x 128, v5e: 4, v6e: 4 of 256 x 256).
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One chip.

  Attributes:
    name: as in a topology, `v4:2x2x1`.
    memory_bytes: of its main memory.
    memory_bandwidth: bytes a second.
    peak_flops: bfloat16 operations a second, a multiply-add being two.
    link_bandwidth: bytes a second that it can send to its neighbours together.
    clock: cycles a second.
    num_dimensions: of the torus that its slices are cut from.
  """

  name: str
  memory_bytes: float
  memory_bandwidth: float
  peak_flops: float
  link_bandwidth: float
  clock: float
  num_dimensions: int


_CHIPS = (
  Chip(
    name='v4',
    memory_bytes=32 * 2**30,
    memory_bandwidth=1.2e12,
    peak_flops=275e12,
    link_bandwidth=300e9,
    clock=275e12 / (8 * 2 * 128**2),
    num_dimensions=3,
  ),
  Chip(
    name='v5e',
    memory_bytes=16 * 2**30,
    memory_bandwidth=819e9,
    peak_flops=197e12,
    link_bandwidth=200e9,
    clock=197e12 / (4 * 2 * 128**2),
    num_dimensions=2,
  ),
  Chip(
    name='v5p',
    memory_bytes=95 * 2**30,
    memory_bandwidth=2.765e12,
    peak_flops=459e12,
    link_bandwidth=600e9,
    clock=459e12 / (8 * 2 * 128**2),
    num_dimensions=3,
  ),
  Chip(
    name='v6e',
    memory_bytes=32 * 2**30,
    memory_bandwidth=1.64e12,
    peak_flops=918e12,
    link_bandwidth=448e9,
    clock=918e12 / (4 * 2 * 256**2),
    num_dimensions=2,
  ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}
